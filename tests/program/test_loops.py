"""Loops on the device: results as NumPy computes them, replicas, streaming results, and errors before anything runs."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import HeadraceError, Infeed, Outfeed, loops


def counted(count=1000):
    return lambda: (np.float32(i) for i in range(count))


def test_repeat_runs_the_body_n_times():
    (x,) = loops.repeat(10, lambda x: 2 * x + 1, [np.float32(0)])
    assert x == 2**10 - 1
    a, b = loops.repeat(12, lambda a, b: (b, a + b), [0, 1])
    assert (int(a), int(b)) == (144, 233)  # Fibonacci
    assert loops.repeat(0, lambda x: x + 1, [3]) == (3,)
    assert loops.repeat(3, lambda: None) == ()


def test_the_body_is_traced_a_few_times_and_compiled_once():
    calls = []

    def body(x):
        calls.append(1)
        return x + 1

    assert loops.repeat(1000, body, [0]) == (1000,)
    traced = len(calls)
    assert traced < 10
    assert loops.repeat(500, body, [7]) == (507,)
    assert len(calls) == traced


def test_loop_variables_are_trees_and_stay_the_callers():
    start = {"w": jnp.arange(3.0), "n": jnp.int32(0)}

    def body(tree, x):
        return {"w": tree["w"] * x, "n": tree["n"] + 1}, x + 1

    tree, x = loops.repeat(4, body, [start, 1.0])
    assert tree["n"] == 4
    assert x == 5
    assert np.array_equal(tree["w"], np.arange(3.0) * 24)
    assert np.array_equal(start["w"], np.arange(3.0))  # nothing was donated


def test_infeed_elements_come_after_the_loop_variables():
    def dataset():
        return ((np.full(2, i, np.float32), np.float32(10 * i)) for i in range(20))

    (total,) = loops.repeat(5, lambda total, x, y: total + x + y, [np.zeros(2, np.float32)], Infeed(dataset))
    assert np.array_equal(total, np.full(2, 11 * sum(range(5))))


def test_an_infeed_goes_on_where_the_last_loop_stopped():
    infeed = Infeed(counted())
    assert [float(loops.repeat(3, lambda t, x: t + x, [0.0], infeed)[0]) for _ in range(3)] == [3, 12, 21]


@pytest.mark.parametrize("block_size", [None, 1, 4])
def test_dicts_come_by_name_and_blocks_change_nothing(block_size):
    out = Outfeed()
    dataset = [{"x1": np.array([i, 1], np.float32), "x2": np.array([2, i * i], np.float32)} for i in range(10)]

    def body(x2, x1):
        return out.enqueue({"d1": x1 + x2, "d2": x1 - x2})

    assert loops.repeat(10, body, [], Infeed(dataset, block_size=block_size)) == ()
    results = out.dequeue()
    assert set(results) == {"d1", "d2"}
    x1, x2 = (np.stack([element[name] for element in dataset]) for name in ("x1", "x2"))
    assert np.array_equal(results["d1"], x1 + x2)
    assert np.array_equal(results["d2"], x1 - x2)
    assert results["d1"].dtype == np.float32


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 3, 10])
@pytest.mark.parametrize("size", [2, 20_000])  # sent from inside the program; sent at the end of launches
def test_every_replica_takes_and_gives_its_own(replicas, depth, size):
    out = Outfeed(buffer_depth=depth)

    def body(total, x):
        total = total + x
        return total, out.enqueue((jnp.full(size, total), x))

    (total,) = loops.repeat(7, body, [0.0], Infeed(counted(), prefetch_depth=4), replicas=replicas)
    given = np.arange(7 * replicas, dtype=np.float32).reshape(7, replicas)
    totals = np.cumsum(given, 0)
    sums, xs = out.dequeue()
    if replicas == 1:
        given, totals = given[:, 0], totals[:, 0]
    assert np.array_equal(xs, given)
    assert np.array_equal(sums, np.broadcast_to(totals[..., None], (*totals.shape, size)))
    assert total == totals.reshape(7, -1)[-1, 0]  # the first replica's
    assert out.dequeue()[0].shape == (0, *sums.shape[1:])


def test_values_that_change_in_place_arrive_as_they_were():
    """What is sent from inside must be copied before the program writes over it."""
    out = Outfeed()
    (x,) = loops.repeat(50, lambda x: (x + 1, out.enqueue(x)), [np.zeros(8000, np.float32)])
    assert np.array_equal(out.dequeue(), np.repeat(np.arange(50, dtype=np.float32)[:, None], 8000, 1))
    assert np.array_equal(x, np.full(8000, 50))


def test_auto_makes_a_replica_for_each_device():
    out = Outfeed()
    loops.repeat(2, out.enqueue, [], Infeed(counted(), prefetch_depth=4), replicas="auto")
    assert np.array_equal(out.dequeue(), np.arange(2 * jax.device_count()).reshape(2, -1))
    with pytest.raises(HeadraceError, match=r"replicas is 'all'.*\"auto\" takes all devices"):
        loops.repeat(2, lambda x: x, [0.0], replicas="all")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("replicas", [1, 2])
def test_last_keeps_the_last(replicas):
    out = Outfeed(mode="LAST")
    loops.repeat(6, lambda x: out.enqueue({"x": x}), [], Infeed(counted(), block_size=4), replicas=replicas)
    assert np.array_equal(out.dequeue()["x"], np.arange(12)[-2:] if replicas == 2 else 5)
    assert np.array_equal(out.dequeue()["x"], np.arange(12)[-2:] if replicas == 2 else 5)


def test_results_are_read_while_the_program_runs():
    """Hold the dataset back until the results so far were seen: they cannot have waited for the end."""
    out, seen = Outfeed(), []
    go_on = threading.Semaphore(2)  # an element ahead

    def dataset():
        for i in range(20):
            assert go_on.acquire(timeout=30)
            yield np.float32(i)

    def watch():
        for value in out:
            seen.append(float(value))
            go_on.release()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    infeed = Infeed(dataset, block_size=1)
    go_on.release()
    loops.repeat(20, lambda x: out.enqueue(x * x), [], infeed)
    watcher.join(30)
    assert seen == [i * i for i in range(20)]


def test_one_launch_streams_too():
    """One launch without an infeed: a thread sees results before the loop has ended."""
    out, sizes, early, ended = Outfeed(), [], [], threading.Event()

    def slow(x):
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y), x + 1), out.enqueue(x[0, 0])

    def poll():
        out.started.wait(30)
        while sum(sizes) < 40:
            sizes.append(len(out.dequeue()))
            if not ended.is_set():
                early.append(sizes[-1])
            time.sleep(0.001)  # or it takes the time of the loop

    poller = threading.Thread(target=poll, daemon=True)
    poller.start()
    loops.repeat(40, slow, [np.zeros((100, 100), np.float32)])
    ended.set()
    poller.join(30)
    assert sum(sizes) == 40
    assert sum(early) > 0
    assert max(sizes) < 40
    assert len(out.dequeue(wait_for_completion=True)) == 0


def test_iterating_twice_reads_two_runs():
    out, rows = Outfeed(), []
    for start in (0.0, 10.0):
        loops.repeat(3, lambda x: (x + 1, out.enqueue(x)), [start])
        rows.append([float(x) for x in out])
    assert rows == [[0, 1, 2], [10, 11, 12]]


def test_while_loop_stops_where_its_condition_fails_and_uses_no_more_elements():
    infeed = Infeed(counted())
    out = Outfeed()
    (total,) = loops.while_loop(lambda t: t < 50, lambda t, x: (t + x, out.enqueue(x)), [0.0], infeed)
    assert total == sum(range(11))  # 55
    assert np.array_equal(out.dequeue(), np.arange(11))
    assert infeed.take(1)[0] == 11
    (again,) = loops.while_loop(lambda t: t < 1000, lambda t, x: t + x, [0.0], infeed, max_iterations=20)
    assert again == sum(range(12, 32))
    assert infeed.take(1)[0] == 32


def test_while_loop_without_an_infeed_and_with_replicas():
    (x,) = loops.while_loop(lambda x: x < 100, lambda x: 3 * x, [1])
    assert x == 243
    # The second replica reaches 100 first, and all stop with it.
    (x,) = loops.while_loop(lambda x: x < 100, lambda x, d: x + d, [0.0], Infeed(counted()), replicas=2)
    steps = next(n for n in range(100) if n * n >= 100)
    assert x == steps * (steps - 1)
    assert loops.while_loop(lambda x: x < 0, lambda x: x + 1, [5]) == (5,)


def test_a_loop_in_a_loop_and_in_a_jit():
    def outer(total, x):
        (power,) = loops.repeat(3, lambda p: p * x, [jnp.float32(1)])
        (small,) = loops.while_loop(lambda s: s > 1, lambda s: s / 2, [power])
        return total + power + 0 * small

    (total,) = loops.repeat(5, outer, [0.0], Infeed(counted()))
    assert total == sum(i**3 for i in range(5))
    assert jax.jit(lambda x: loops.repeat(4, lambda y: y * x, [x])[0])(3) == 3**5


def test_replicas_can_exchange():
    def body(x, element):
        return (jax.lax.psum(element, "replica") + x,)

    (x,) = loops.repeat(3, body, [0.0], Infeed(counted()), replicas=4)
    assert x == sum(range(12))


OUT = Outfeed()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: loops.repeat(-1, lambda x: x, [0]), "repetitions is -1"),
        (lambda: loops.repeat(2.5, lambda x: x, [0]), "2.5"),  # pyright: ignore[reportArgumentType]
        (lambda: loops.repeat(2, "body", [0]), "body of a loop is 'body'"),  # pyright: ignore[reportArgumentType]
        (lambda: loops.repeat(2, lambda x: x, {"w": 0}), r"of type dict.*Write \[inputs\]"),  # pyright: ignore[reportArgumentType]
        (lambda: loops.repeat(2, lambda x: x, [0], [1, 2]), "infeed of a loop is of type list"),  # pyright: ignore[reportArgumentType]
        (lambda: loops.repeat(2, lambda x, y: x, [0]), "cannot be called with 1 argument.*no infeed"),
        (lambda: loops.repeat(2, lambda x: x, [0], Infeed(counted())), "takes no element"),
        (lambda: loops.repeat(2, lambda x, y, z: x, [0], Infeed(counted())), "cannot be called with 2 arguments"),
        (lambda: loops.repeat(2, lambda x, b: x, [0], Infeed([{"a": 1.0}])), "1 argument and the names a"),
        (lambda: loops.repeat(2, lambda x, y: x, [0, 1]), "returns 1 loop variables, but there are 2"),
        (lambda: loops.repeat(2, lambda x: None, [0]), "returns 0 loop variables, but there are 1"),
        (lambda: loops.repeat(2, lambda x: x * 1.5, [0]), r"variable 0.*float32\[\] instead of int32\[\].*Cast"),
        (lambda: loops.repeat(2, lambda x: jnp.stack([x, x]), [0]), r"int32\[2\] instead of int32\[\]"),
        (lambda: loops.repeat(2, lambda x: (OUT.enqueue(x), x), [0]), "loop variable after an operation"),
        (lambda: loops.repeat(2, lambda x: (x, OUT.enqueue(x), OUT.enqueue(x)), [0]), "enqueues 2 times"),
        (lambda: loops.repeat(2, lambda x: (x, OUT.enqueue(())), [0]), "nothing to enqueue"),
        (lambda: loops.repeat(2, lambda x: (OUT.enqueue(x), x)[1], [0]), "enqueue.. that it does not return"),
        (lambda: loops.repeat(3, lambda x, y: x, [0], Infeed(counted(2))), "2 elements are left.*3 more iterations"),
        (lambda: loops.repeat(2, lambda x: x, [0], replicas=0), "replicas is 0"),
        (lambda: loops.repeat(2, lambda x: x, [0], replicas=99), "99 devices are needed"),
        (lambda: loops.while_loop(lambda x, y: True, lambda x: x, [0]), "condition .* 1 argument"),
        (lambda: loops.while_loop(lambda x: x, lambda x: x, [0]), r"condition .* returns int32\[\]"),
        (lambda: loops.while_loop(3, lambda x: x, [0]), "condition of a loop is 3"),  # pyright: ignore[reportArgumentType]
        (lambda: loops.while_loop(lambda x: x > -1, lambda x, y: x, [0], Infeed(counted(2))), "ended: 0 elements"),
        (jax.jit(lambda: loops.repeat(2, lambda x, y: x, [0], Infeed(counted()))), "outermost loop"),
        (jax.jit(lambda: loops.repeat(2, lambda x: (x, OUT.enqueue(x)), [0])), "Enqueue in the outer"),
        (lambda: Outfeed(mode="SOME"), "mode of an outfeed is 'SOME'"),
        (lambda: Outfeed(buffer_depth=0), "buffer_depth is 0"),
        (lambda: Outfeed().dequeue(), "Nothing was ever enqueued"),
        (lambda: next(iter(Outfeed(mode="LAST"))), "LAST cannot be iterated"),
    ],
)
def test_what_cannot_work_is_refused(run, message):
    with pytest.raises(HeadraceError, match=message):
        run()


def test_an_outfeed_serves_one_program_at_a_time():
    out = Outfeed()
    loops.repeat(2, lambda x: (x + 1, out.enqueue(x)), [0])
    with pytest.raises(HeadraceError, match="still holds results"):
        loops.repeat(2, lambda x: (x + 1, out.enqueue({"x": x})), [0.0])
    out.dequeue()
    loops.repeat(2, lambda x: (x + 1, out.enqueue({"x": x})), [0.0])
    assert np.array_equal(out.dequeue()["x"], [0, 1])
