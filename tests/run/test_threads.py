"""The threads of a plain run: few, and each with a name that says what it does."""

import threading
from collections import Counter
from typing import Any

import pytest

from headrace import Callback
from headrace.core.process import num_processors
from headrace.run.design import CustomParts
from headrace.run.fit import train

NAMES = {"MainThread", "signals", "start", "init", "compile", "feed", "look-at-calls", "read-calls", "checkpoint"}


def kinds(names: list[str]) -> Counter[str]:
    """Count threads by name, without the numbers within a pool."""
    return Counter(name.rstrip("0123456789").rstrip("_") for name in names)


class Look(Callback):
    """Looks at the threads after every call."""

    def __init__(self) -> None:
        self.seen: list[Counter[str]] = []

    def on_call_end(self, event: Any) -> None:
        self.seen.append(kinds([thread.name for thread in threading.enumerate()]))


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_plain_run_has_few_threads_and_each_has_a_name(quick, monkeypatch, where: str) -> None:
    """There were 24, of which 17 lived at once; those of a set on the device waited for nothing until the end."""
    before, started, start, look = kinds([t.name for t in threading.enumerate()]), [], threading.Thread.start, Look()

    def counting(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counting)
    options = {"num_epochs": 3, "dataset_cache": where, "validation_cache": "none" if where == "host" else "auto"}
    assert train(quick(**options), CustomParts(callbacks=(look,))).outcome == "finished"
    reading = {"feed-send", "read"} if where == "host" else set()
    assert kinds(started).keys() <= NAMES | reading
    most = {"start": 2, "init": num_processors(), "compile": 2, "feed": 2, "checkpoint": 3, "signals": 1}
    most |= {"look-at-calls": 1, "read-calls": 1}
    most |= {"feed": 2, "feed-send": 2, "read": num_processors()} if where == "host" else {"feed": 4}
    assert kinds(started) <= Counter(most)
    assert len(look.seen) >= 3
    # Beside the program: signals, the feeds of training and validation, results, their ends, and a checkpoint.
    steady = {"signals": 1, "feed": 2, "look-at-calls": 1, "read-calls": 1, "checkpoint": 1}
    steady |= {"feed-send": 2, "read": num_processors()} if where == "host" else {}
    assert look.seen[-1] - before <= Counter(steady)
    assert kinds([t.name for t in threading.enumerate()]) <= before, "none is left"
