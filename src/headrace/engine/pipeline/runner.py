"""Launch the programs of a pipeline's steps: each device by a thread of its own, in its own order.

A `Launch` calls a program on values in numbered slots and stores its results there. The launches of one device (of all
replicas of it) are a *lane*. A lane owns its slots; what another lane needs is put on that lane's devices and handed to
it through its inbox, so that threads share nothing but queues. Launching waits for no result of a device, only for
another lane to have launched what is needed.

The order of the launches on a device is fixed and programs are pure, so threads cannot change the results.
"""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax

from headrace.core.process import tuned_interpreter
from headrace.core.tree import PyTree
from headrace.engine.multiprocess_arrays import in_turn
from headrace.plan.schedule import Action, Work, needs
from headrace.plan.timeline import Cell, Timetable

HOST = -1  # stands for the calling thread where a lane's number is asked for
STEP, EMPTY = 0, 1  # slots that every lane has: the number of the step in the call, and `()`
# A thread that wants the interpreter lock back waits this long for a busy Python thread, instead of 5 ms: with one such
# thread in the process a program was launched 375 times a second instead of 17.
SWITCH_SECONDS = 0.0002
# Launches of a lane between two waits, where a program is on several CPU devices of this process. XLA lets 32 programs
# be under way on a CPU device. The launch of one more blocks a thread of the pool in which programs run, and that pool
# has one thread for each processor or device: with two replicas on two processors one replica's exchange waited in the
# other thread, and its partner for a thread, for ever. Half of the 32 are left for what is launched elsewhere.
_LAUNCHES_BETWEEN_WAITS = 8

Key = Hashable
Values = dict[Key, PyTree]
Observer = Callable[[Action, PyTree], None]  # (action, its first result, still in flight)


class Send(NamedTuple):
    """A value that another lane needs: from which slot, to which lane and slot, and how it gets to its devices."""

    slot: int
    lane: int
    target: int
    put: Callable[[PyTree], PyTree] | None


class Launch(NamedTuple):
    """One call of a program, and where its arguments come from and its results go."""

    lane: int
    call: Any  # a program; once it is compiled, it returns a sequence of as many values as `writes` has slots
    reads: list[int]
    writes: list[int]
    awaits: list[int]  # slots that another lane or the host fills
    frees: list[int]  # slots that nothing reads later in the step
    sends: list[Send]
    action: Action | None
    exchanges: bool  # whether the program exchanges values between replicas while the step is under way


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledSteps:
    """The launches of a step, in an order in which what is needed comes first."""

    launches: tuple[Launch, ...]
    num_slots: tuple[int, ...]  # of each lane
    kept: dict[Key, tuple[int, int]]  # values that are given at the start and stay -> (lane, slot)
    fed: dict[Key, tuple[int, int]]  # values that the calling thread posts in every step
    results: dict[Key, int]  # values that it can have of every step
    one_order: bool  # launch all of them in that order, from the calling thread

    def __call__(
        self,
        start: Values,
        num_steps: int,
        before: "Callable[[PipelineRun, int], None] | None" = None,
        observe: Observer | None = None,
    ) -> Values:
        """Run steps from these values; return those that stay, as they are then.

        `before(run, step)` is called before each step, to post what it needs.
        """
        values: list[list[Any]] = []
        for size in self.num_slots:
            values.append([None] * size)
            values[-1][EMPTY] = ()
        for key, (lane, slot) in self.kept.items():
            values[lane][slot] = start[key]
        PipelineRun(self, values, observe).steps(num_steps, before or (lambda *_: None))
        return {key: values[lane][slot] for key, (lane, slot) in self.kept.items()}


class Messages:
    """What has reached a lane from others, until it is used; waits for what has not."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[tuple[tuple[int, int] | None, Any]] = SimpleQueue()
        self._early: dict[tuple[int, int], Any] = {}

    def post(self, step: int, slot: int, value: PyTree) -> None:
        """Hand over a value; called by any thread."""
        self._inbox.put(((step, slot), value))

    def stop(self) -> None:
        """Wake the lane up to end."""
        self._inbox.put((None, None))

    def take(self, step: int, slot: int) -> PyTree:
        """Return the value for a slot; waits until it has been posted."""
        # By step as well: a lane that needs nothing from another may be a step ahead of it.
        wanted = (step, slot)
        while wanted not in self._early:
            key, value = self._inbox.get()
            if key is None:
                raise _Stopped
            self._early[key] = value
        return self._early.pop(wanted)


class _Stopped(Exception):
    """Another thread failed and has reported it; this one just ends."""


class PipelineRun:
    """Some steps under way: the values of all lanes, and the messages between them and to the host."""

    def __init__(self, compiled: CompiledSteps, values: Sequence[list[PyTree]], observe: Observer | None) -> None:
        self._compiled, self._values, self._observe = compiled, values, observe
        self._messages = {lane: Messages() for lane in (HOST, *range(len(values)))}
        self._errors: list[BaseException] = []
        self._num_launches = [0] * len(values)

    def result(self, step: int, key: Key) -> PyTree:
        """Return a value of a step that comes to the host; waits until it has been launched."""
        return self._messages[HOST].take(step, self._compiled.results[key])

    def post(self, step: int, key: Key, value: PyTree) -> None:
        """Give a step one of its fed values."""
        lane, slot = self._compiled.fed[key]
        self._messages[lane].post(step, slot, value)

    def steps(self, num_steps: int, before: "Callable[[PipelineRun, int], None]") -> None:
        """Run the steps; `before(run, step)` is called by this thread before each, to post what the step needs."""
        # One lane needs no thread, and without threads errors and interrupts come up where they happen.
        if self._compiled.one_order or len(self._values) == 1:
            for step in range(num_steps):
                before(self, step)
                self._begin(step)
                for launch in self._compiled.launches:
                    self._launch(step, launch)
            return
        threads = [
            # Daemons, so that a launch that never returns cannot keep the interpreter from exiting.
            threading.Thread(target=self._guard, args=(lane, num_steps), name=f"launch device {lane}", daemon=True)
            for lane in range(len(self._values))
        ]
        with tuned_interpreter(SWITCH_SECONDS):
            for thread in threads:
                thread.start()
            try:
                for step in range(num_steps):
                    before(self, step)
            except BaseException as error:
                self._fail(error)
            finally:
                for thread in threads:
                    self._join(thread)
        if self._errors:
            # The first is the cause; others may follow from it.
            raise self._errors[0]

    def _join(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # an interrupt while waiting: the lanes end before it is passed on
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, _Stopped):
            self._errors.append(error)
        for messages in self._messages.values():
            messages.stop()

    def _guard(self, lane: int, num_steps: int) -> None:
        try:
            row = [launch for launch in self._compiled.launches if launch.lane == lane]
            for step in range(num_steps):
                self._values[lane][STEP] = step
                for launch in row:
                    # A lane that waits for nobody would otherwise launch the rest of the call.
                    if self._errors:
                        return
                    self._launch(step, launch)
        except BaseException as error:
            self._fail(error)

    def _begin(self, step: int) -> None:
        for values in self._values:
            values[STEP] = step

    def _launch(self, step: int, launch: Launch) -> None:
        lane = launch.lane
        values = self._values[lane]
        for slot in launch.awaits:
            values[slot] = self._messages[lane].take(step, slot)
        # The list is built inline and slots are numbers: this line runs for every action, and what it costs in Python
        # is time in which no other lane can launch.
        results = launch.call(*[values[slot] for slot in launch.reads])
        for slot, result in zip(launch.writes, results, strict=True):
            values[slot] = result
        self._num_launches[lane] += 1
        if launch.exchanges or (self._compiled.one_order and not self._num_launches[lane] % _LAUNCHES_BETWEEN_WAITS):
            in_turn(results)
        for send in launch.sends:
            value = values[send.slot]
            self._messages[send.lane].post(step, send.target, value if send.put is None else send.put(value))
        # References are dropped as soon as nothing will read them: XLA frees the memory when the last program that
        # uses it is done, so the host need not wait for that.
        for slot in launch.frees:
            values[slot] = None
        if self._observe is not None and launch.action is not None:
            self._observe(launch.action, results[0])


class Tracer:
    """Measures when the actions of a step ran, without holding up their launches.

    A thread for each device waits for the results and notes the time. An action ends when its result is there. It
    starts when it has been launched, what it needs has ended and its device is free: so the time in which values travel
    between devices counts as the action's.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._begin = time.perf_counter()
        self._launched: dict[Action, float] = {}
        self._ends: dict[Action, float] = {}
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(work.num_devices)]
        self._threads = [threading.Thread(target=self._wait, args=(queue,), daemon=True) for queue in self._queues]
        for thread in self._threads:
            thread.start()

    def observe(self, action: Action, result: PyTree) -> None:
        """Take note of an action that has just been launched."""
        self._launched[action] = time.perf_counter() - self._begin
        self._queues[self._work.device_of[action.node]].put((action, result))

    def table(self, planned: Timetable) -> Timetable:
        """Wait for all results; return the measured table, in seconds, of the actions of a planned one."""
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            thread.join()
        free = dict.fromkeys(range(self._work.num_devices), 0.0)
        cells = []
        for cell in planned.cells:
            device, action = cell.device, cell.action
            end = self._ends[action]
            ready = max((self._ends[need] for need in needs(action, self._work)), default=0.0)
            # Each thread notes an end a little late: that of a need may seem to come after this action's.
            start = min(max(self._launched[action], ready, free[device]), end)
            free[device] = end
            cells.append(Cell(start, end, device, action))
        return Timetable(cells=tuple(sorted(cells)), work=self._work, unit="seconds")

    def _wait(self, queue: SimpleQueue[Any]) -> None:
        while (item := queue.get()) is not None:
            action, result = item
            jax.block_until_ready(result)
            self._ends[action] = time.perf_counter() - self._begin
