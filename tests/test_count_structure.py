"""tools/count_structure.py: what it counts, on packages small enough to count by hand, and its limits on this one."""

import importlib.util
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


count = load(Path(__file__).parents[1] / "tools" / "count_structure.py", "count_structure")


@cache
def counts_here() -> dict[str, Any]:
    return count.static_counts()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    files = {
        "__init__.py": "",
        "data/__init__.py": "",
        "data/read.py": "def open_dataset(work):\n    return work()\n\nclass TrainFeed:\n    def make(self, work):\n"
        "        return work()\n",
        "plan/__init__.py": "",
        "plan/read.py": "def table():\n    return [each for each in ().in_order()]\n",
        "engine/run.py": "LATER = [n for n in range(2)]\n\ndef run(table):\n    return table.in_order()\n",
        "engine/step.py": "from __future__ import annotations\ndef step() -> list[Any]:\n    return 1\n# why\nstep()\n",
        "telemetry/log.py": "from __future__ import annotations\ndef log(work: Any = lambda: 0):\n    return work()\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_files_names_and_executors_are_counted(package):
    counts = count.static_counts(package)
    assert counts["files"] == 8
    assert counts["lines"] == 20
    assert counts["comment lines"] == 1
    assert counts["small files"] == [
        "data/read.py",
        "engine/run.py",
        "engine/step.py",
        "plan/read.py",
        "telemetry/log.py",
    ]
    assert counts["signatures with Any"] == 2  # one parameter, one result
    assert counts["repeated names"] == ["read.py"]
    assert counts["pipeline executors"] == ["engine/run.py"]  # what plan/ does with a table is not execution


def test_the_recorder_sees_functions_of_all_threads_and_what_is_below_the_path(package):
    recorder = count.Recorder(package)

    def use() -> None:
        read, log, step = (load(package / f"{name}.py", "x") for name in ("data/read", "telemetry/log", "engine/step"))
        load(package / "engine" / "run.py", "y")  # imported, and no function of it called
        log.log()
        assert recorder.called == {"telemetry/log.py"}  # the call of step() at import does not count
        assert not recorder.on_path
        read.open_dataset(lambda: log.log(step.step))

    threading.setprofile(recorder.profile)
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    threading.setprofile(None)
    assert recorder.called == {"data/read.py", "engine/step.py", "telemetry/log.py"}
    assert recorder.on_path == {("data/read.py", "open_dataset"), ("engine/step.py", "step")}
    assert sys.getprofile() is None


def test_a_walk_names_each_file_once_and_refuses_what_was_not_called():
    on_path = [("a.py", "f"), ("b.py", "C.g"), ("b.py", "h"), ("c.py", "fg")]
    assert count.walked_files(on_path, ("f", "C.", "h")) == ["a.py", "b.py"]
    with pytest.raises(AssertionError, match="gone was called in no file"):
        count.walked_files(on_path, ("gone",))


def test_few_base_names_occur_twice():
    assert len(counts_here()["repeated names"]) <= 3


def test_a_file_is_a_subject():
    """Subjects may be added; cutting one into many files, or a line into a file of its own, is what this refuses."""
    counts = counts_here()
    assert counts["files"] <= 200
    assert counts["lines"] / counts["files"] >= 250
    assert counts["small files"] == []


def test_reasons_stand_beside_the_code():
    counts = counts_here()
    assert counts["comment lines"] / counts["lines"] >= 0.028


def test_signatures_name_their_types():
    assert counts_here()["signatures with Any"] <= 520


def test_a_package_is_one_subject():
    """A folder with more files than this wants sub-packages, as data has, or merges."""
    folders = Counter(path.parent.relative_to(count.SRC).as_posix() for path in count.source_files())
    assert {folder: number for folder, number in folders.items() if number > 23} == {}


@pytest.mark.slow
def test_one_training_run_executes_few_files():
    found = count.run_counts()
    assert len(found["called"]) <= 100
    assert len(count.walked_files([(file, name) for file, name in found["on_path"]])) <= 20


def test_there_is_one_pipeline_executor():
    counts = counts_here()
    assert counts["pipeline executors"] == ["engine/pipeline/nodes.py"]
