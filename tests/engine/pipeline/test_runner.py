"""The runner: devices overlap, a failure in any thread reaches the caller, and no thread outlives a call."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from headrace import Infeed, OptimizerOutput, Outfeed, Stage, pipeline

SLEEP, STAGES, MICROS = 0.05, 4, 8
seconds = 0.0  # that a pass takes, in all tests but the one that measures


def sleeping(x):
    time.sleep(seconds)
    return np.asarray(x)


@jax.custom_vjp
def slow(x):
    """Return x after a while, forward and backward."""
    return jax.pure_callback(sleeping, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


slow.defvjp(
    lambda x: (slow(x), ()),
    lambda _, g: (jax.pure_callback(sleeping, jax.ShapeDtypeStruct(g.shape, g.dtype), g),),
)


def make(**options):
    def finish(y):
        return OptimizerOutput(optax.sgd(0.0), jnp.mean(y))

    stages = [Stage(lambda p, x: slow(p * x), np.ones(2, np.float32)) for _ in range(STAGES)]
    options = {"infeed": Infeed([np.ones(2, np.float32)], repeat=True), "outfeed": Outfeed()} | options
    return pipeline(stages, MICROS, optimizer_function=finish, pipeline_schedule="Interleaved", **options)


def test_stages_that_sleep_overlap_as_the_schedule_says(monkeypatch):
    """The programs are small, and XLA runs small ones in the thread that launches them: it must not be one thread."""
    pipe = make()
    state = pipe.init()
    jax.block_until_ready(pipe(state).weights)  # compiles
    monkeypatch.setattr(f"{__name__}.seconds", SLEEP)
    ideal = pipe.table.total_time * SLEEP
    assert pipe.table.num_ticks == 2 * (MICROS + STAGES - 1)
    took = []
    for _ in range(5):  # other processes may hold the cores up
        begin = time.perf_counter()
        jax.block_until_ready(pipe(state).weights)
        took.append(time.perf_counter() - begin)
        if took[-1] < 1.15 * ideal:
            break
    assert ideal <= min(took) < 1.15 * ideal


class Fails(Outfeed):
    """An outfeed that fails at the second row, in the thread of the last device."""

    def add_one(self, number, leaves):
        if number == 1:
            raise RuntimeError("no more room")


def test_a_failure_in_a_launching_thread_reaches_the_caller_and_ends_all_threads():
    pipe = make(outfeed=Fails(), repeat_count=3)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no more room"):
        pipe(pipe.init())
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"infeed"}


def test_a_failure_of_the_host_ends_the_launching_threads():
    def dataset():
        for number in range(MICROS + 1):
            if number == MICROS:
                raise OSError("the disk is gone")
            yield np.ones(2, np.float32)

    pipe = make(infeed=Infeed(dataset), repeat_count=2)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="the disk is gone"):
        pipe(pipe.init())
    assert {thread.name for thread in set(threading.enumerate()) - before} <= {"infeed"}


def test_no_thread_is_left_by_calls():
    pipe = make()
    state = pipe(pipe.init())
    before = threading.active_count()
    for _ in range(2):
        state = pipe(state)
    jax.block_until_ready(state.weights)
    assert threading.active_count() == before
