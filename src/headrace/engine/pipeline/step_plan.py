"""A step of a pipeline as a plan: which program is launched when, on what, and where its results go.

`StepBuilder` takes launches in an order in which what is needed comes first, with names for the values. It gives each
value a slot on its lane, adds a transfer where a launch reads what another lane made, and finds out when a value can be
dropped. The plan is compiled ahead for the shapes of the values it starts from, all programs in parallel, and then run
any number of times.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.core.tree import PyTree
from headrace.engine.compiler import OptionItems, compile_program
from headrace.engine.devices import REPLICA
from headrace.engine.multiprocess_arrays import spans_cpus, transfer
from headrace.engine.pipeline.runner import EMPTY, HOST, STEP, CompiledSteps, Key, Launch, Send, Values
from headrace.engine.placement import HOST_MEMORY
from headrace.ops.tracing import lowered
from headrace.plan.schedule import Action

# How a value is placed on the devices of a lane: cut over the replicas along its first dim, or whole on each.
EACH, ALL = P(REPLICA), P()
NOTHING: Key = "nothing"  # stands for `()` among the values that a launch reads
STEP_NUMBER: Key = "step number"  # in the call, as an int; for `HostCall`s


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A jitted function that returns a tuple, and how each of its results is placed."""

    jitted: jax.stages.Wrapped
    mesh: Mesh
    outs: tuple[PyTree, ...]  # for each result a partition, or a tree of shardings
    name: str = ""
    exchanges: bool = False  # between replicas, in the middle of a step
    compiler_options: OptionItems = ()

    def shapes(self, traced: jax.stages.Traced) -> tuple[PyTree, ...]:
        """Return the shapes of the results with their shardings."""
        return tuple(
            jax.tree.map(partial(_shaped, where=NamedSharding(self.mesh, place)), part)
            if isinstance(place, P)
            else jax.tree.map(_shaped, part, place)
            for part, place in zip(traced.out_info, self.outs, strict=True)
        )


@dataclass(frozen=True, eq=False)
class HostCall:
    """A Python function among the launches, which returns a tuple; `shapes` says of which shapes, if a program asks."""

    call: Callable[..., tuple[PyTree, ...]]
    shapes: Callable[..., tuple[PyTree, ...]] = lambda *_: ()
    outs: tuple[P | None, ...] = ()  # None: goes to other lanes as it is


MOVE = HostCall(lambda value: (value,), lambda value: (value,), (ALL,))  # gives a value another name
HAND_ON = HostCall(lambda value: (value,), outs=(None,))  # the same, for what no program of another lane reads


def on_mesh(
    mesh: Mesh,
    function: Callable[..., tuple[PyTree, ...]],
    in_specs: tuple[PyTree, ...],
    outs: tuple[P, ...],
    donate: tuple[int, ...] = (),
    name: str = "",
    **options: Any,
) -> Program:
    """Return the function as a program in which every replica computes on its own part; a profile has its name."""
    # check_vma=False: with True JAX would sum the gradients over replicas in every backward pass, by itself; and it has
    # no collectives over groups of replicas, which shared batch norms need.
    mapped = jax.shard_map(_named(function, name), mesh=mesh, in_specs=in_specs, out_specs=outs, check_vma=False)
    return Program(jitted=jax.jit(mapped, donate_argnums=donate), mesh=mesh, outs=outs, name=name, **options)


def _named(function: Callable[..., tuple[PyTree, ...]], name: str) -> Callable[..., tuple[PyTree, ...]]:
    def run(*given: PyTree) -> tuple[PyTree, ...]:
        return function(*given)

    run.__name__ = name
    return run if name else function


def _shaped(leaf: Any, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _device_bytes(leaf: Any) -> int:
    """Return the bytes of an array on one device; none of what is in host memory."""
    where = getattr(leaf, "sharding", None)
    if where is None or where.memory_kind == HOST_MEMORY:
        return 0
    return math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return _shaped(leaf, leaf.sharding)


@dataclass
class _Value:
    """Where the latest version of a named value is: on the lane that made it, and on others that have read it."""

    lane: int
    slots: dict[int, int]  # lane -> slot
    maker: Launch | None  # None: there from the start
    place: PyTree = None  # its partition, if a program made it


class StepBuilder:
    """Takes the launches of a step one by one; `build()` returns the plan."""

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self.meshes = tuple(meshes)  # the devices of each lane
        self._values: dict[Key, _Value] = {}
        self._names: list[list[Key]] = [[STEP_NUMBER, NOTHING] for _ in meshes]  # by slot
        self._launches: list[Launch] = []
        self._kept: dict[Key, tuple[int, int]] = {}
        self._fed: dict[Key, tuple[int, int]] = {}
        self._results: dict[Key, int] = {}

    def keep(self, lane: int, *keys: Key) -> None:
        """Name values that are given at the start of a call and stay from step to step."""
        for key in keys:
            self._kept[key] = (lane, self._define(lane, key, None))

    def feed(self, lane: int, key: Key) -> None:
        """Name a value that the host posts in every step."""
        self._fed[key] = (lane, self._define(lane, key, None))

    def has(self, key: Key) -> bool:
        """Say whether there is a value of this name by now."""
        return key in self._values

    def add(
        self,
        lane: int,
        program: Program | HostCall,
        reads: Sequence[Key],
        writes: Sequence[Key] = (),
        action: Action | None = None,
    ) -> None:
        """Launch a program on a lane; its results become the latest versions of the values in `writes`."""
        exchanges = isinstance(program, Program) and program.exchanges
        launch = Launch(lane, program, [], [], [], [], [], action, exchanges)
        launch.reads.extend([self._read(lane, key, launch) for key in reads])
        self._launches.append(launch)
        for key, place in zip(writes, program.outs, strict=True):
            launch.writes.append(self._define(lane, key, launch, place))

    def to_host(self, key: Key) -> None:
        """Let the host have a value of every step as soon as it has been launched."""
        value = self._values[key]
        assert value.maker is not None
        self._results[key] = len(self._results)
        value.maker.sends.append(Send(value.slots[value.lane], HOST, self._results[key], None))

    def build(self) -> "LaunchPlan":
        last: dict[tuple[int, int], Launch] = {}
        for launch in self._launches:
            for slot in (*launch.reads, *launch.writes, *(send.slot for send in launch.sends)):
                last[launch.lane, slot] = launch
        stay = {(lane, slot) for lane in range(len(self.meshes)) for slot in (STEP, EMPTY)} | set(self._kept.values())
        for (lane, slot), launch in last.items():
            if (lane, slot) not in stay:
                launch.frees.append(slot)
        return LaunchPlan(
            launches=tuple(self._launches),
            meshes=self.meshes,
            names=tuple(map(tuple, self._names)),
            kept=dict(self._kept),
            fed=dict(self._fed),
            results=dict(self._results),
        )

    def _define(self, lane: int, key: Key, maker: Launch | None, place: PyTree = None) -> int:
        """Give a value its slot; a new version on the same lane takes the slot of the one before."""
        found = self._values.get(key)
        # Reusing the slot drops the reference to the old version, which is donated or no longer needed.
        slot = found.slots[lane] if found is not None and found.lane == lane else self._new_slot(lane, key)
        self._values[key] = _Value(lane, {lane: slot}, maker, place)
        return slot

    def _new_slot(self, lane: int, key: Key) -> int:
        self._names[lane].append(key)
        return len(self._names[lane]) - 1

    def _read(self, lane: int, key: Key, reader: Launch) -> int:
        if key in (NOTHING, STEP_NUMBER):
            return EMPTY if key == NOTHING else STEP
        value = self._values[key]
        if lane not in value.slots:
            # A value that is only given at the start has no launch that could send it on.
            assert value.maker is not None, f"{key} is there from the start, on lane {value.lane} alone"
            # Remembered, so that a value is sent to a lane once, however many launches there read it.
            value.slots[lane] = slot = self._new_slot(lane, key)
            put = None
            if isinstance(value.place, P):
                put = partial(transfer, where=NamedSharding(self.meshes[lane], value.place))
            value.maker.sends.append(Send(value.slots[value.lane], lane, slot, put))
            reader.awaits.append(slot)
        elif key in self._fed and value.maker is None and not self._is_awaited(lane, value.slots[lane]):
            reader.awaits.append(value.slots[lane])
        return value.slots[lane]

    def _is_awaited(self, lane: int, slot: int) -> bool:
        return any(launch.lane == lane and slot in launch.awaits for launch in self._launches)


@dataclass(frozen=True)
class LoweredSteps:
    """The programs of a step as XLA's input, and the shapes of the values in each lane's slots."""

    programs: dict[Program, jax.stages.Lowered]
    shapes: tuple[dict[int, PyTree], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class LaunchPlan:
    """The launches of a step in one possible order, of programs that are still to be compiled."""

    launches: tuple[Launch, ...]
    meshes: tuple[Mesh, ...]
    names: tuple[tuple[Key, ...], ...]
    kept: dict[Key, tuple[int, int]]  # value -> (lane, slot)
    fed: dict[Key, tuple[int, int]]
    results: dict[Key, int]
    _compiled: dict[Any, CompiledSteps] = field(default_factory=dict)  # by the shapes that they start from

    def peaks(self, kind: str) -> dict[Any, int]:
        """Return how many values named (kind, what, ...) are held at once at most, for each `what`."""
        held: Counter[Any] = Counter()
        most: dict[Any, int] = {}
        for launch in self.launches:
            names = self.names[launch.lane]
            for slots, change in ((launch.writes, 1), (launch.frees, -1)):
                for name in (names[slot] for slot in slots):
                    if isinstance(name, tuple) and name[0] == kind:
                        held[name[1]] += change
                        most[name[1]] = max(most.get(name[1], 0), held[name[1]])
        return most

    def bytes_by_lane(self, steps: LoweredSteps, extra: Mapping[Program, int]) -> list[int]:
        """Return the most bytes that a device of each lane holds in a step: the values in its slots, launch by launch.

        `extra` is what a program takes beside what it reads: temporaries, and results that are not written in place of
        what is donated.
        """
        sizes = [
            {slot: sum(map(_device_bytes, jax.tree.leaves(value))) for slot, value in lane.items()}
            for lane in steps.shapes
        ]
        held = [{STEP, EMPTY} for _ in self.meshes]
        for lane, slot in (*self.kept.values(), *self.fed.values()):
            held[lane].add(slot)
        most = [0] * len(self.meshes)
        for launch in self.launches:
            lane = launch.lane
            now = sum(sizes[lane].get(slot, 0) for slot in held[lane])
            more = extra[launch.call] if isinstance(launch.call, Program) else 0
            most[lane] = max(most[lane], now + more)
            held[lane].update(launch.writes)
            for send in launch.sends:
                if send.lane != HOST:
                    held[send.lane].add(send.target)
            held[lane].difference_update(launch.frees)
        return most

    def compile(self, start: Values, differing: Collection[Key] | None = None) -> CompiledSteps:
        """Compile every program for values like these (arrays or shapes, fed ones too), once for equal shapes.

        `differing` names the values whose shapes may differ from call to call; without it all may.
        """
        given = {key: start[key] for key in (*self.kept, *self.fed)}
        # Compiled programs accept only the shapes that they were compiled for: the last block of a dataset may be
        # shorter.
        compared = [given[key] for key in (given if differing is None else differing)]
        wanted = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(compared))
        if wanted not in self._compiled:
            self._compiled[wanted] = self._compile(given)
        return self._compiled[wanted]

    def lower(self, start: Values) -> "LoweredSteps":
        """Return every program as XLA's input, for values like these (arrays or shapes)."""
        shapes: list[dict[int, Any]] = [{STEP: 0, EMPTY: ()} for _ in self.meshes]
        for key, (lane, slot) in {**self.kept, **self.fed}.items():
            shapes[lane][slot] = jax.tree.map(_shape_of, start[key])
        found: dict[Program, tuple[jax.stages.Lowered, tuple[PyTree, ...]]] = {}
        for launch in self.launches:
            program, mine = launch.call, shapes[launch.lane]
            arguments = [mine.get(slot) for slot in launch.reads]  # a host call's need not have a shape
            if isinstance(program, HostCall):
                results = program.shapes(*arguments)
            else:
                # Programs compare by identity (eq=False): a node's is lowered once and launched for every micro-batch.
                if program not in found:
                    traced = program.jitted.trace(*arguments)
                    found[program] = lowered(traced), program.shapes(traced)
                results = found[program][1]
            # Not strict: of a host call whose results no program reads, the shapes are not known.
            mine.update(zip(launch.writes, results, strict=False))
            for send in launch.sends:
                if send.lane == HOST or send.slot not in mine:
                    continue
                moved = mine[send.slot]
                if send.put is not None:
                    # The receiving program is compiled for values that are already on its devices: XLA's programs do
                    # not move their arguments.
                    moved = jax.tree.map(partial(_shaped, where=send.put.keywords["where"]), moved)  # pyright: ignore[reportFunctionMemberAccess]
                shapes[send.lane][send.target] = moved
        return LoweredSteps({program: each for program, (each, _) in found.items()}, tuple(shapes))

    def _compile(self, start: Values) -> CompiledSteps:
        programs = self.lower(start).programs

        def build(program: Program) -> jax.stages.Compiled:
            return compile_program(programs[program], dict(program.compiler_options))

        # XLA compiles without the interpreter lock, so the programs of all stages compile at once; each in a copy
        # of the context, which counts them.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            building = {program: pool.submit(copy_context().run, build, program) for program in programs}
            compiled = {program: future.result() for program, future in building.items()}
        return CompiledSteps(
            launches=tuple(
                launch._replace(call=launch.call.call if isinstance(launch.call, HostCall) else compiled[launch.call])
                for launch in self.launches
            ),
            num_slots=tuple(map(len, self.names)),
            kept=self.kept,
            fed=self.fed,
            results=self.results,
            # XLA starts the parts of a program on several CPU devices one after the other. Two threads that launch two
            # such programs may start them in different orders on different devices, or in different processes, and
            # what exchanges values then waits forever (seen with two stages x two replicas on two cores). XLA does
            # not run such programs side by side anyway, so that one thread for all loses nothing.
            one_order=any(map(spans_cpus, self.meshes)),
        )
