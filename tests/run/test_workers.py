"""Worker processes: the same run as without them, their errors, and their end."""

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.core.errors import ConfigError, DataError
from tests.run.conftest import final_state
from tests.run.slow_items import Failing, OnlyHere, Pictures, Pixels

OPTIONS: dict[str, Any] = {"batch_size": 4, "image_size": 32, "train_crop": "torchvision", "progress": "none"}
OPTIONS |= {"learning_rate": 0.1}


@pytest.mark.timeout(200)
def test_a_run_is_the_same_with_processes(tmp_path):
    states = []
    with hr.Workers(Pictures(), 2) as workers:
        assert len(workers) == 16
        for data in (Pictures(), workers):
            model = hr.Model("toy_model_bn", log_dir=str(tmp_path), **OPTIONS)
            run = model.fit(data, epochs=2, validation_split=0.25)
            states.append(final_state(run.directory))
            shares = model.predict(data).probabilities
            assert shares.shape == (16, 2)
            assert model.class_names == ("ant", "bee")
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], err_msg=name)


@pytest.mark.timeout(200)
def test_items_are_made_elsewhere_and_the_processes_end():
    workers = hr.Workers(Pixels(), 2)
    makers = {int(workers[number]["image"][0]) for number in range(8)}
    assert os.getpid() not in makers
    assert len(makers) <= 2
    assert [item["label"] for item in workers] == list(range(8)), "a loop over the items ends"
    workers.close()
    for pid in makers:
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


@pytest.mark.timeout(200)
def test_errors_of_an_item_and_of_a_process():
    with hr.Workers(Failing(), 1) as workers:
        with pytest.raises(KeyError, match="no such row"):
            workers[5]
        with pytest.raises(DataError, match="A worker process ended while item 6 was read"):
            workers[6]
        assert workers[1][1] == 1, "started again"
    with hr.Workers(OnlyHere(), 1) as workers:
        with pytest.raises(
            ConfigError, match="cannot be made again in a worker process: the disk is not mounted"
        ) as found:
            workers[0]
        assert "top level of a module" in found.value.rule


def test_what_cannot_be_sent_is_refused_before_anything_starts():
    class Local(Pictures):
        pass

    locked = Pictures()
    vars(locked)["lock"] = threading.Lock()
    for data, message in (
        (Local(), "The dataset, a Local, cannot be sent to worker processes: "),
        (locked, "cannot pickle '_thread.lock' object"),
    ):
        with pytest.raises(ConfigError, match=message) as found:
            hr.Workers(data, 2)
        assert "open files in __getitem__ when they are first needed" in found.value.remedy
    with pytest.raises(ConfigError, match="Worker processes are asked for a generator"):
        hr.Workers(each for each in range(3))
    with pytest.raises(ConfigError, match="method is 'fork'"):
        hr.Workers(Pictures(), method="fork")
    assert not multiprocessing.active_children()


@pytest.mark.timeout(200)
def test_a_class_of_a_script_without_a_file_is_refused():
    """As in a notebook: another process cannot import what was typed."""
    script = """
import headrace as hr
class Typed:
    def __len__(self): return 2
    def __getitem__(self, number): return number
hr.Workers(Typed(), 1)[0]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("headrace.core.errors.ConfigError: The dataset cannot be made again in a worker process")
    assert "Put the class into a file of its own and import it" in last
