"""Read pickles from elsewhere without running them: one restricted reader for datasets and weights.

A pickle is a program for a small stack machine. This machine knows the instructions that plain containers need. A table
for each kind of file names the only globals it may use, and replaces each by one of our own functions, which checks its
arguments. Nothing else is imported, called or assigned to: neither the standard unpickler nor a `__setstate__` runs.
"""

import codecs
import pickle
import reprlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Times a pickle's bytes: the memory that reading it may take. State dicts of torch need 29 to 65 by these estimates.
MAX_EXPANSION = 100
_FREE_BYTES = 1 << 20
# Bytes that an instruction leaves in memory, with a place on the stack: 1.1 to 3 times what was measured.
_SLOT = 16  # in a list or tuple, which grow by more than they need
_KEY = 104  # of a dict that has just grown
_NUMBER = 32
_TEXT = 72  # without its letters
_LETTER = 4  # of a text, whose letters have the size of the largest
_CONTAINER = 160  # with the note that it was visited at the end
_CALL = 128
MAX_INSTRUCTIONS = 4_000_000  # CIFAR-100's training batch needs 350,000; a network of 10,000 tensors about as many
# Converting a decimal number takes the square of its length, and no dataset or network counts beyond 2^128.
_MAX_INT_BYTES = 16
_MAX_KEY_ITEMS = 16
_SCALARS = (str, bytes, int, float, type(None))
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


class RefusedPickle(ValueError):
    """The pickle asks for something that its kind of file does not need."""


def shorten(value: object) -> str:
    """Return a short text for a value of a pickle: the repr of nested tuples that share parts could be endless."""
    return _SHORT.repr(value)


@dataclass(frozen=True, kw_only=True)
class PickleKind:
    """What the pickles of one kind of file may contain."""

    content: str  # for messages: what such a file holds
    names: Mapping[tuple[str, str], Any]  # (module, name): a function that may be called, or a constant
    objects: tuple[type, ...]  # what the functions and constants give, beside plain values
    build: Mapping[type, Callable[[Any, Any], None]]  # how a state is set; no other type accepts one
    encoding: str | None = None  # of Python 2's strings; None leaves them bytes
    load_persistent: Callable[[Any], Any] | None = None  # resolves references to what is stored outside the pickle


def read_pickle(data: bytes, kind: PickleKind, start: int = 0) -> tuple[Any, int]:
    """Return (value, first byte after it) of the pickle at `start`.

    Dict keys that were bytes become text. Whatever is wrong is a ValueError that names the byte. Time and memory are
    bounded by MAX_EXPANSION times the pickle's length and by MAX_INSTRUCTIONS, whatever the pickle says.
    """
    machine = _Machine(data, kind, start)
    try:
        value = machine.run()
        _refuse_other_values(value, kind)
    except RefusedPickle as error:
        raise RefusedPickle(f"{error} (byte {machine.at:,})") from None
    # Whatever a damaged pickle makes the machine's own code raise.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise ValueError(f"not a whole pickle ({type(error).__name__}: {error}; byte {machine.at:,})") from error
    return value, machine.position


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of the table on the machine's stack. Only these can be called."""

    name: str
    call: Callable[..., Any]


class _Mark:
    """What the instruction MARK puts on the stack."""

    __slots__ = ()


_MARK = _Mark()


@dataclass
class _Machine:
    data: bytes
    kind: PickleKind
    start: int
    position: int = field(init=False)  # of the next byte
    at: int = 0  # where the current instruction starts
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    spent: int = 0  # bytes that were made, by estimate

    def __post_init__(self) -> None:
        self.position = self.start

    def spend(self, num_bytes: int) -> None:
        """Count memory before it is taken; refuse more than MAX_EXPANSION times the bytes read so far."""
        # Of the bytes so far, not of the file: others may follow a pickle, such as the tensors in old files of torch.
        self.spent += num_bytes
        if self.spent > _FREE_BYTES + MAX_EXPANSION * (self.position - self.start):
            raise RefusedPickle(f"it would take more than {MAX_EXPANSION} times its length in memory")

    def run(self) -> Any:
        """Execute instructions up to STOP; return what is left on the stack."""
        for _ in range(MAX_INSTRUCTIONS):
            self.at = self.position
            code = self.data[self.position]
            self.position += 1
            if code == _STOP:
                if len(self.stack) != 1:
                    raise ValueError(f"{len(self.stack)} values at its end")
                return self.stack[0]
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise RefusedPickle(f"it uses the instruction {bytes([code])!r}, which {self.kind.content} never need")
            self.spend(_COSTS.get(code, _SLOT))
            instruction(self)
        raise RefusedPickle(f"it has more than {MAX_INSTRUCTIONS:,} instructions")

    def take(self, count: int) -> bytes:
        """Return the next bytes of the pickle."""
        end = self.position + count
        if count < 0 or end > len(self.data):
            raise ValueError(f"{count:,} bytes announced, {len(self.data) - self.position:,} left")
        self.position = end
        self.spend(_LETTER * count)  # read as text, some letters may take four bytes and the others then do too
        return self.data[end - count : end]

    def number(self, form: str) -> int:
        """Return the next binary number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> bytes:
        """Return the text up to the next line end."""
        end = self.data.index(b"\n", self.position)
        return self.take(end + 1 - self.position)[:-1]

    def pop(self) -> Any:
        """Take a value from the stack."""
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value belongs")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Take the values above the last mark."""
        found = []
        while (value := self.stack.pop()) is not _MARK:
            found.append(value)
        self.spend(_SLOT * len(found))
        return found[::-1]

    def top(self, wanted: type) -> Any:
        """Return the value on top, which must be of a type."""
        if not isinstance(self.stack[-1], wanted):
            raise ValueError(f"a {type(self.stack[-1]).__name__} where a {wanted.__name__} belongs")
        return self.stack[-1]

    def text(self, raw: bytes) -> str | bytes:
        """Return a string of Python 2 as the kind wants it."""
        return raw.decode(self.kind.encoding) if self.kind.encoding else raw

    def set_items(self, pairs: list[Any]) -> None:
        """Put keys and values into the dict on top."""
        target = self.top(dict)
        if len(pairs) % 2:
            raise ValueError("a key without a value")
        self.spend(_KEY * len(pairs) // 2)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[dict_key(key)] = value

    def find(self, module: object, name: object) -> None:
        """Put a name of the table on the stack."""
        try:
            found = self.kind.names[module, name]  # pyright: ignore[reportArgumentType]; others are not found
        except (KeyError, TypeError):
            wanted = f"{str(module)[:80]}.{str(name)[:80]}" if isinstance(module, str) else "something without a name"
            raise RefusedPickle(f"it asks for {wanted}, which {self.kind.content} never need") from None
        self.stack.append(_Function(f"{module}.{name}", found) if callable(found) else found)

    def reduce(self) -> None:
        """Call a function of the table."""
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, _Function) or not isinstance(arguments, tuple):
            raise RefusedPickle("it calls something that is not a function of the table")
        # All of them before the call: one on something that was memorised may be repeated at no cost to the file.
        self.spend(sum(_cost(argument) for argument in arguments))
        self.stack.append(function.call(*arguments))

    def build(self) -> None:
        """Set an object's state, where its kind has a way to."""
        state, target = self.pop(), self.stack[-1]
        setter = self.kind.build.get(type(target))
        if setter is None:
            raise RefusedPickle(f"it sets the state of a {type(target).__name__}, which {self.kind.content} never need")
        setter(target, state)

    def persistent(self, reference: object) -> None:
        """Resolve a reference to what is stored outside."""
        if self.kind.load_persistent is None:
            raise RefusedPickle("it asks for an outside object")
        self.stack.append(self.kind.load_persistent(reference))


def _cost(argument: object) -> int:
    """Return what a function makes of an argument at most: bytes of a text, a dict or a tuple of a list."""
    if isinstance(argument, list | tuple):
        return _KEY * len(argument)
    return _LETTER * len(argument) if isinstance(argument, str | bytes | bytearray) else 0


def dict_key(key: object) -> Any:
    """Return a key that is quick to hash; bytes as text.

    A tuple's hash visits all that is in it: nested tuples that share their parts would take exponential time.
    """
    if isinstance(key, bytes):
        return key.decode("latin1")
    flat = isinstance(key, tuple) and len(key) <= _MAX_KEY_ITEMS and all(isinstance(each, _SCALARS) for each in key)
    if not flat and not isinstance(key, _SCALARS):
        raise RefusedPickle(f"a dict key that is a {type(key).__name__}")
    return key


def _long(raw: bytes) -> int:
    if len(raw) > _MAX_INT_BYTES:
        raise RefusedPickle(f"a whole number of {len(raw):,} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _decimal(line: bytes) -> int | bool:
    """Return the number of a text instruction; protocol 0 writes booleans as 00 and 01."""
    if len(line) > 3 * _MAX_INT_BYTES:
        raise RefusedPickle(f"a whole number of {len(line):,} digits")
    return {b"00": False, b"01": True}.get(line, int(line.rstrip(b"L")))


def _quoted(line: bytes) -> bytes:
    if len(line) < 2 or line[:1] not in b"'\"" or line[-1:] != line[:1]:
        raise ValueError("a string without its quotes")
    return codecs.escape_decode(line[1:-1])[0]  # pyright: ignore[reportAttributeAccessIssue]


def _unicode(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _refuse_other_values(value: object, kind: PickleKind) -> None:
    """Refuse what is neither a plain value nor an object of the kind. Shared parts are visited once."""
    # A list instead of recursion: the nesting of a hostile pickle has no limit.
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list | tuple):
            if id(each) not in seen:
                seen.add(id(each))
                waiting += each.values() if isinstance(each, dict) else each
        elif not isinstance(each, (*_SCALARS, bytearray, *kind.objects)):
            raise RefusedPickle(f"a value of type {type(each).__name__}")


# The instructions. Missing, and therefore refused: those that make instances (INST, OBJ, NEWOBJ), sets,
# registered extensions and buffers out of band.
_STOP = pickle.STOP[0]
_Instruction = Callable[[_Machine], Any]


def _push(make: Callable[[_Machine], Any]) -> _Instruction:
    return lambda m: m.stack.append(make(m))


def _sized(form: str, convert: Callable[[_Machine, bytes], Any]) -> _Instruction:
    """Return an instruction that pushes what a length and so many bytes say."""
    return lambda m: m.stack.append(convert(m, m.take(m.number(form))))


def _tuple_of(count: int) -> _Instruction:
    return _push(lambda m: tuple([m.pop() for _ in range(count)][::-1]))


def _put(index: Callable[[_Machine], int]) -> _Instruction:
    def put(m: _Machine) -> None:
        number = index(m)
        m.memo[number] = m.top(object)

    return put


def _dict_from_mark(m: _Machine) -> None:
    pairs = m.pop_to_mark()
    m.stack.append({})
    m.set_items(pairs)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items([key, value])


def _append(m: _Machine) -> None:
    value = m.pop()
    m.top(list).append(value)


def _append_all(m: _Machine) -> None:
    values = m.pop_to_mark()
    m.top(list).extend(values)


def _global(m: _Machine) -> None:
    module, name = m.line().decode(), m.line().decode()
    m.find(module, name)


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    m.find(module, name)


_BY_OPCODE: dict[bytes, _Instruction] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: _push(lambda m: _MARK),
    pickle.POP: lambda m: m.stack.pop(),
    pickle.POP_MARK: lambda m: m.pop_to_mark(),
    pickle.DUP: _push(lambda m: m.top(object)),
    pickle.NONE: _push(lambda m: None),
    pickle.NEWTRUE: _push(lambda m: True),
    pickle.NEWFALSE: _push(lambda m: False),
    pickle.INT: _push(lambda m: _decimal(m.line())),
    pickle.LONG: _push(lambda m: _decimal(m.line())),
    pickle.BININT: _push(lambda m: m.number("<i")),
    pickle.BININT1: _push(lambda m: m.number("<B")),
    pickle.BININT2: _push(lambda m: m.number("<H")),
    pickle.LONG1: _sized("<B", lambda m, raw: _long(raw)),
    pickle.LONG4: _sized("<i", lambda m, raw: _long(raw)),
    pickle.FLOAT: _push(lambda m: float(m.line())),
    pickle.BINFLOAT: _push(lambda m: m.number(">d")),
    pickle.STRING: _push(lambda m: m.text(_quoted(m.line()))),
    pickle.BINSTRING: _sized("<i", lambda m, raw: m.text(raw)),
    pickle.SHORT_BINSTRING: _sized("<B", lambda m, raw: m.text(raw)),
    pickle.UNICODE: _push(lambda m: m.line().decode("raw-unicode-escape")),
    pickle.BINUNICODE: _sized("<I", lambda m, raw: _unicode(raw)),
    pickle.SHORT_BINUNICODE: _sized("<B", lambda m, raw: _unicode(raw)),
    pickle.BINUNICODE8: _sized("<Q", lambda m, raw: _unicode(raw)),
    pickle.BINBYTES: _sized("<I", lambda m, raw: raw),
    pickle.SHORT_BINBYTES: _sized("<B", lambda m, raw: raw),
    pickle.BINBYTES8: _sized("<Q", lambda m, raw: raw),
    pickle.BYTEARRAY8: _sized("<Q", lambda m, raw: bytearray(raw)),
    pickle.EMPTY_TUPLE: _push(lambda m: ()),
    pickle.TUPLE: _push(lambda m: tuple(m.pop_to_mark())),
    pickle.TUPLE1: _tuple_of(1),
    pickle.TUPLE2: _tuple_of(2),
    pickle.TUPLE3: _tuple_of(3),
    pickle.EMPTY_LIST: _push(lambda m: []),
    pickle.LIST: _push(lambda m: m.pop_to_mark()),
    pickle.APPEND: _append,
    pickle.APPENDS: _append_all,
    pickle.EMPTY_DICT: _push(lambda m: {}),
    pickle.DICT: _dict_from_mark,
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: lambda m: m.set_items(m.pop_to_mark()),
    pickle.PUT: _put(lambda m: int(m.line()[:20])),
    pickle.BINPUT: _put(lambda m: m.number("<B")),
    pickle.LONG_BINPUT: _put(lambda m: m.number("<I")),
    pickle.MEMOIZE: _put(lambda m: len(m.memo)),
    pickle.GET: _push(lambda m: m.memo[int(m.line()[:20])]),
    pickle.BINGET: _push(lambda m: m.memo[m.number("<B")]),
    pickle.LONG_BINGET: _push(lambda m: m.memo[m.number("<I")]),
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.REDUCE: lambda m: m.reduce(),
    pickle.BUILD: lambda m: m.build(),
    pickle.PERSID: lambda m: m.persistent(m.line().decode()),
    pickle.BINPERSID: lambda m: m.persistent(m.pop()),
}
_INSTRUCTIONS = {opcode[0]: instruction for opcode, instruction in _BY_OPCODE.items()}
# What instructions make beyond a place on the stack; those of text and of containers count the rest as they go.
_NUMBERS = (
    pickle.INT,
    pickle.LONG,
    pickle.BININT,
    pickle.BININT2,
    pickle.LONG1,
    pickle.LONG4,
    pickle.FLOAT,
    pickle.BINFLOAT,
)
_TEXTS = (
    *(pickle.STRING, pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.UNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.SHORT_BINUNICODE, pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8, pickle.BYTEARRAY8),
)
_CONTAINERS = (
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.LIST),
    *(pickle.EMPTY_DICT, pickle.DICT),
)
_MEMO = (pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE)
_CALLS = (pickle.REDUCE, pickle.BUILD, pickle.PERSID, pickle.BINPERSID, pickle.GLOBAL, pickle.STACK_GLOBAL)
_COSTS = {
    opcode[0]: cost
    for cost, opcodes in (
        (_SLOT + _NUMBER, _NUMBERS),
        (_SLOT + _TEXT, _TEXTS),
        (_CONTAINER, _CONTAINERS),
        (_KEY + _NUMBER, _MEMO),
        (_CALL, _CALLS),
    )
    for opcode in opcodes
}
