"""What each instruction of a compiled program is: its kind of work, its block and the memory it touches.

Read from the text of the optimised HLO, whose instruction names are those in a profile. A fusion is what it contains,
its most expensive part first. Bytes are what a kernel must read and write at least, from shapes: of an operand that a
fusion only slices or gathers from, the slices.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

CONVOLUTION, PRODUCT, NORM, POOL, ELEMENTWISE = "convolution", "matrix product", "norm", "pool", "element-wise"
COLLECTIVE, TRANSFER, COPY, OTHER, IDLE = "collective", "transfer", "copy", "other", "idle"
KINDS = (CONVOLUTION, PRODUCT, NORM, POOL, ELEMENTWISE, COLLECTIVE, TRANSFER, COPY, OTHER, IDLE)

NORM_SCOPE = "norm"  # the named scope of norms: no instruction is typical of them
PHASES = ("input", "loss", "exchange", "update")  # named scopes of a step outside of the network's blocks

# All other types have their bits in their names: f32, bf16, s8.
_WIDTHS = {"pred": 1, "token": 0, "opaque": 0, "c64": 8, "c128": 16}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-")
_TRANSFERS = ("infeed", "outfeed", "send", "recv", "copy-start", "copy-done")
_COPIES = ("copy", "transpose", "bitcast-convert", "reshape")
_POOLS = ("reduce-window", "select-and-scatter")
_CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")
# Calls of ops/native_units.py and native_inference.py beside `convolve`, and their `_half`; a gate is mostly its
# multiplication.
_NATIVE = {"gradients": CONVOLUTION, "activate": NORM, "sums": NORM, "max_pool": POOL, "gate": ELEMENTWISE}
_NATIVE |= {"bottleneck": CONVOLUTION, "pack": COPY}
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_NAMED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Names, and where an instruction comes from: equal instructions differ in these.
_UNESSENTIAL = re.compile(r",? (?:metadata|backend_config)=\{.*$|,? (?:calls|to_apply)=%?[\w.\-]+")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """A line of HLO."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    called: str = ""  # the computation of a fusion
    target: str = ""  # of a custom call
    detail: str = ""  # the rest of the line that decides what is computed
    op_name: str = ""  # where in the Python program it comes from: scopes and primitives


@dataclass(frozen=True, kw_only=True)
class HloProgram:
    """The instructions of a module by name, and the names of those in each computation."""

    name: str
    instructions: Mapping[str, Instruction]
    computations: Mapping[str, tuple[str, ...]]

    @cached_property
    def containers(self) -> frozenset[str]:
        """Instructions whose time is that of others: loops, branches and calls."""
        return frozenset(name for name, each in self.instructions.items() if each.opcode in _CONTAINERS)

    def inside(self, name: str) -> tuple[Instruction, ...]:
        """Return an instruction and, of a fusion, what it contains."""
        found = self.instructions[name]
        return (found, *(self.instructions[each] for each in self.computations.get(found.called, ())))

    @cached_property
    def by_kernel(self) -> Mapping[str, tuple[str, ...]]:
        """The instructions that a kernel's name stands for, in the order of the schedule.

        XLA names kernels after instructions, and uses one kernel for all equal fusions.
        """
        equal: dict[object, list[str]] = {}
        fused = {each.called for each in self.instructions.values()}
        for computation, names in self.computations.items():
            # What is inside a fusion has no kernel of its own.
            for name in names if computation not in fused else ():
                if self.instructions[name].opcode == "fusion":
                    equal.setdefault(self._signature(name), []).append(name)
        return {kernel_name(name): tuple(names) for names in equal.values() for name in names}

    def _signature(self, name: str) -> object:
        """Return a value that equal fusions have in common."""
        found, body = self.instructions[name], self.computations.get(self.instructions[name].called, ())
        # Operands are compared by their place in the body, since equal fusions name their instructions differently.
        places = {inner: place for place, inner in enumerate(body)}
        inside = tuple(
            (each.opcode, each.shape, tuple(places.get(operand, operand) for operand in each.operands), each.detail)
            for each in map(self.instructions.__getitem__, body)
        )
        return found.shape, found.detail, inside

    def kind(self, name: str) -> str:
        """Return what kind of work an instruction is."""
        return kind_of(self.inside(name))

    def num_bytes(self, name: str) -> int:
        """Return how many bytes an instruction reads and writes at least."""
        found = self.instructions[name]
        if found.opcode in (*_FREE, *_CONTAINERS):
            return 0
        body = [self.instructions[each] for each in self.computations.get(found.called, ())]
        read = sum(self._read_bytes(found, place, body) for place in range(len(found.operands)))
        updates = [each for each in (body or [found]) if each.opcode == "dynamic-update-slice"]
        if updates and (not body or updates[-1].name == body[-1].name):
            # In place: the old array is neither read nor written, but for the slice.
            slice_bytes = shape_bytes(self.instructions[updates[-1].operands[1]].shape)
            return max(read - shape_bytes(found.shape), 0) + slice_bytes
        # Beside its result, a library's call returns the memory that it may work in.
        shape = found.shape.split("]")[0] + "]" if found.opcode == "custom-call" else found.shape
        return read + shape_bytes(shape)

    def _read_bytes(self, found: Instruction, place: int, body: list[Instruction]) -> int:
        operand = self.instructions.get(found.operands[place])
        whole = shape_bytes(operand.shape) if operand else 0
        if not body:
            sliced = found.opcode in ("dynamic-slice", "gather", "slice") and place == 0
            return min(whole, shape_bytes(found.shape)) if sliced else whole
        parameters = [each for each in body if each.opcode == "parameter"]
        if place >= len(parameters):
            return whole
        return min(whole, round(whole * _share_read(_parameter(parameters, place), body)))


def _share_read(name: str, body: list[Instruction]) -> float:
    """Return which share of an array the body of a fusion reads: slices of it, also once it is converted."""
    own = _num_elements(next(each for each in body if each.name == name).shape)
    users, share = [each for each in body if name in each.operands], 0.0
    for user in users:
        if user.opcode in ("dynamic-slice", "gather", "slice") and user.operands[0] == name:
            share += _num_elements(user.shape) / max(own, 1)
        elif user.opcode in ("convert", "bitcast", "reshape"):
            share += _share_read(user.name, body)
        else:
            return 1.0
    return share if users else 1.0


def _parameter(parameters: list[Instruction], place: int) -> str:
    """Return the name of the parameter with this number; it is the operand in `parameter(3)`."""
    return next((each.name for each in parameters if each.operands == (str(place),)), parameters[place].name)


def kernel_name(instruction: str) -> str:
    """Return the name of the kernel that XLA makes for an instruction."""
    return re.sub(r"[.\-]", "_", instruction)


def kind_of(inside: Iterable[Instruction]) -> str:
    """Return the kind of work of an instruction with what it contains."""
    found = tuple(inside)
    codes = {each.opcode for each in found}
    targets = " ".join(each.target.lower() for each in found)
    names = [each.op_name for each in found if each.op_name]
    # A fusion may contain several kinds of work. The order of these tests decides: its most expensive part names it.
    if any(code.startswith(_COLLECTIVES) for code in codes):
        return COLLECTIVE
    if (
        "convolution" in codes
        or "conv" in targets
        # XLA turns 1x1 convolutions into matrix products; only the op_name still says what they were.
        or any("conv_general" in name for name in names if _is_product(found))
        or ("triton" in targets and any("depthwise" in name for name in names))
    ):
        return CONVOLUTION
    if _is_product(found):
        return PRODUCT
    if native := [kind for call, kind in _NATIVE.items() if f"headrace_{call}_" in targets]:
        return native[0]
    if found[0].opcode in _TRANSFERS:
        return TRANSFER
    if codes & {*_POOLS}:
        return POOL
    if any(f"/{NORM_SCOPE}/" in _plain(name) for name in names):
        return NORM
    if codes <= {*_COPIES, *_FREE, "fusion"}:
        return COPY
    return ELEMENTWISE if found[0].opcode != "custom-call" else OTHER


def _is_product(found: tuple[Instruction, ...]) -> bool:
    targets = " ".join(each.target.lower() for each in found)
    return any(each.opcode in ("dot", "convolution") for each in found) or any(
        word in targets for word in ("gemm", "matmul", "cublas", "dot")
    )


def _plain(op_name: str) -> str:
    """Return an op_name without the marks of transformations: transpose(jvp(stem))/norm -> /stem/norm/."""
    parts = re.split(r"[/()]+", re.sub(r"jit\([^/]*\)", "", op_name))  # a function's name is no scope
    return "/" + "/".join(part for part in parts if part) + "/"


def block_of(op_names: Iterable[str], blocks: Collection[str]) -> str:
    """Return the block, or the phase of a step, that these scopes name; '' for none of them.

    A block's name may have slashes. The first op_name that has one decides: it is the instruction's own.
    """
    for op_name in op_names:
        plain = _plain(op_name)
        for names in (blocks, PHASES):
            # The outermost scope is the block; of two names that start at the same place (b1 and b1/2), the longer
            # one.
            places = [(plain.find(f"/{name}/"), -len(name), name) for name in names]
            if found := min((each for each in places if each[0] >= 0), default=None):
                return found[2]
    return ""


def is_backward(op_name: str) -> bool:
    """Say whether an operation is part of the backward pass."""
    return "transpose(" in op_name


def shape_bytes(shape: str) -> int:
    """Return the bytes of a shape such as f32[8,3]{1,0}, or of a tuple of them."""
    total = 0
    for dtype, dims in _SHAPE.findall(shape):
        bits = re.search(r"\d+", dtype)
        total += _size(dims) * _WIDTHS.get(dtype, int(bits.group()) // 8 if bits else 4)
    return total


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Exchanges of one kind in a program: how many, and the bytes of one device's results."""

    kind: str
    count: int
    num_bytes: int


def collectives(text: str) -> list[Collective]:
    """Return the exchanges in a module's text; those inside loops are counted once."""
    found: dict[str, list[int]] = {}
    for each in parse_program(text).instructions.values():
        kind = each.opcode.removesuffix("-start")
        if kind.startswith(_COLLECTIVES) and not kind.endswith("-done"):
            # A start returns its operands beside the results, except that of an all-reduce.
            halved = each.opcode.endswith("-start") and kind != "all-reduce"
            found.setdefault(kind, []).append(shape_bytes(each.shape) // (2 if halved else 1))
    return [Collective(kind=kind, count=len(sizes), num_bytes=sum(sizes)) for kind, sizes in found.items()]


def share_beside_work(text: str) -> float | None:
    """Return the share of the bytes of sums that a scheduled module sends while convolutions or products run.

    None where it has none. Instructions of a scheduled computation are in the order in which they start.
    """
    program, sent, beside = parse_program(text), 0, 0
    for names in program.computations.values():
        own = [program.instructions[name] for name in names]
        work = [place for place, name in enumerate(names) if program.kind(name) in (CONVOLUTION, PRODUCT)]
        ends = {each.operands[0]: place for place, each in enumerate(own) if each.opcode == "all-reduce-done"}
        for place, each in enumerate(own):
            if each.opcode not in ("all-reduce", "all-reduce-start"):
                continue
            size = shape_bytes(each.shape)
            sent += size
            beside += size * any(place < at < ends.get(each.name, place) for at in work)
    return beside / sent if sent else None


def _num_elements(shape: str) -> int:
    return sum(_size(dims) for _, dims in _SHAPE.findall(shape))


def _size(dims: str) -> int:
    return math.prod(int(dim) for dim in filter(None, dims.split(",")))


def parse_program(text: str) -> HloProgram:
    """Return the instructions of an HLO module's text."""
    first = re.match(r"HloModule ([\w.\-]+)", text)
    instructions: dict[str, Instruction] = {}
    computations: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        named = _NAMED.match(line)
        if named is None:
            if header := _HEADER.match(line):
                current = computations.setdefault(header.group(1), [])
            continue
        instruction = _instruction(named.group(1), line[named.end() :])
        if instruction is not None:
            instructions[instruction.name] = instruction
            current.append(instruction.name)
    plain = {name: tuple(each) for name, each in computations.items()}
    return HloProgram(name=first.group(1) if first else "", instructions=instructions, computations=plain)


def _instruction(name: str, rest: str) -> Instruction | None:
    """Return the instruction of `shape opcode(operands), attributes`."""
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    opened = rest.find("(", end)
    if end <= 0 or opened < 0:
        return None
    closed = opened + _closing(rest[opened:])
    opcode, inner, attributes = rest[end:opened].strip(), rest[opened + 1 : closed], rest[closed:]
    # `parameter(3)` has a number in place of operands, by which a fusion's operands find their parameters.
    operands = tuple(re.findall(r"%([\w.\-]+)", inner)) or ((inner.strip(),) if opcode == "parameter" else ())
    found = [pattern.search(attributes) for pattern in (_CALLED, _TARGET, _OP_NAME)]
    called, target, op_name = (each.group(1) if each else "" for each in found)
    return Instruction(
        name=name,
        opcode=opcode,
        shape=rest[:end],
        operands=operands,
        called=called if opcode == "fusion" else "",
        target=target,
        detail=_UNESSENTIAL.sub("", attributes),
        op_name=op_name,
    )


def _closing(text: str) -> int:
    """Return the place of the bracket that closes the first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place
    return len(text) - 1
