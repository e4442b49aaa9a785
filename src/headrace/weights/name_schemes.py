"""Translate weight names by the rows of the name tables: (our layer, their layer, kind), in both directions.

A scheme is how some library names a family's weights. `pair_names` applies it to the tensors of a network and returns
pairs of names with the library's order of dims; import translates theirs to ours, export ours to theirs.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

_BLOCK = re.compile(r"block(\d+)([a-z]*)")  # counted, then a, b, ... z, aa
_FIELD = re.compile(r"\{(\w+?)([+-]\d+)?\}")


@dataclass(frozen=True, kw_only=True)
class DimOrder:
    """A library's order of dims: their number, and the permutations to ours and back."""

    dims: int
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


AS_IS = DimOrder(dims=1, read=lambda a: a, write=lambda a: a)
OIHW = DimOrder(dims=4, read=lambda a: a.transpose(2, 3, 1, 0), write=lambda a: a.transpose(3, 2, 0, 1))
OI = DimOrder(dims=2, read=lambda a: a.T, write=lambda a: a.T)
# Our dense layers that are 1x1 convolutions in the library (squeeze and excite, some heads)
OI11 = DimOrder(dims=4, read=lambda a: a[:, :, 0, 0].T, write=lambda a: a.T[:, :, None, None])
# Our 1x1 convolutions that are dense layers in the library (ConvNeXt)
OI_OF_1X1 = DimOrder(dims=2, read=lambda a: a.T[None, None], write=lambda a: a[0, 0].T)
# VGG's first dense layer: the flattened 7x7 pixels have their channels first there and last here
O_C77 = DimOrder(
    dims=2,
    read=lambda a: a.reshape(len(a), -1, 7, 7).transpose(2, 3, 1, 0).reshape(-1, len(a)),
    write=lambda a: a.reshape(7, 7, -1, a.shape[1]).transpose(3, 2, 0, 1).reshape(a.shape[1], -1),
)
OC77 = DimOrder(
    dims=4,
    read=lambda a: a.transpose(2, 3, 1, 0).reshape(-1, len(a)),
    write=lambda a: a.reshape(7, 7, -1, a.shape[1]).transpose(3, 2, 0, 1),
)
C11 = DimOrder(dims=3, read=lambda a: a[:, 0, 0], write=lambda a: a[:, None, None])
HWIO = DimOrder(dims=4, read=lambda a: a, write=lambda a: a)
IO = DimOrder(dims=2, read=lambda a: a, write=lambda a: a)
HWC1 = DimOrder(dims=4, read=lambda a: a.swapaxes(2, 3), write=lambda a: a.swapaxes(2, 3))
IO11 = DimOrder(dims=4, read=lambda a: a[0, 0], write=lambda a: a[None, None])


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor of a kind of layer: its name here, the library's suffix after the layer's name, and its dim order."""

    ours: str  # such as `params kernel`
    theirs: str
    dim_order: DimOrder = AS_IS


def _tensors(*rows: tuple[str, str, DimOrder]) -> tuple[TensorRow, ...]:
    return tuple(TensorRow(ours=ours, theirs=theirs, dim_order=dim_order) for ours, theirs, dim_order in rows)


_BIAS = ("params bias", ".bias", AS_IS)
TORCH_TENSORS: dict[str, tuple[TensorRow, ...]] = {
    "conv": _tensors(("params kernel", ".weight", OIHW), _BIAS),
    "dense": _tensors(("params kernel", ".weight", OI), _BIAS),
    "dense_as_conv": _tensors(("params kernel", ".weight", OI11), _BIAS),
    "conv_as_dense": _tensors(("params kernel", ".weight", OI_OF_1X1), _BIAS),
    "dense_of_7x7": _tensors(("params kernel", ".weight", O_C77), _BIAS),
    "dense_as_conv_7x7": _tensors(("params kernel", ".weight", OC77), _BIAS),
    "scale": _tensors(("params gamma", "", AS_IS)),
    "scale_C11": _tensors(("params gamma", "", C11)),
    "norm": _tensors(
        ("params gamma", ".weight", AS_IS),
        ("params beta", ".bias", AS_IS),
        ("stats mean", ".running_mean", AS_IS),
        ("stats variance", ".running_var", AS_IS),
    ),
}
_KERAS_BIAS = ("params bias", "/bias", AS_IS)
KERAS_TENSORS: dict[str, tuple[TensorRow, ...]] = {
    "conv": _tensors(("params kernel", "/kernel", HWIO), _KERAS_BIAS),
    "depthwise": _tensors(("params kernel", "/depthwise_kernel", HWC1), _KERAS_BIAS),
    "dense": _tensors(("params kernel", "/kernel", IO), _KERAS_BIAS),
    "dense_as_conv": _tensors(("params kernel", "/kernel", IO11), _KERAS_BIAS),
    "norm": _tensors(
        ("params gamma", "/gamma", AS_IS),
        ("params beta", "/beta", AS_IS),
        ("stats mean", "/moving_mean", AS_IS),
        ("stats variance", "/moving_variance", AS_IS),
    ),
}


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Our name of a layer (a regular expression with named groups) and theirs (`{group-1}` shifts the number).

    A letter in a group counts from 0: `block2a` is unit 0. Besides its groups a row may use facts about the
    network: `{last}`, the largest number of a `block`; `{place}`, how many blocks are before it; `{e}`, 1 where this
    inverted bottleneck expands its input and 0 where not; `{d}`, the same and 1 more with a depthwise convolution;
    `{k}`, `{d}` and 1 more with squeeze-excite; `{first}` and `{pw}`, timm's names of the first and the last
    convolution, which depend on these.
    """

    ours: str
    theirs: str
    kind: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return the regular expression of our name."""
        return re.compile(self.ours)


@dataclass(frozen=True, kw_only=True)
class NameScheme:
    """How a library names the weights of one family."""

    name: str
    rows: tuple[LayerRow, ...]
    tensors: Mapping[str, tuple[TensorRow, ...]] = field(default_factory=lambda: TORCH_TENSORS)


@dataclass(frozen=True, kw_only=True)
class NamePair:
    """The two names of one tensor, and the library's order of dims."""

    ours: str
    theirs: str
    dim_order: DimOrder


def layer_rows(*rows: tuple[str, str, str]) -> tuple[LayerRow, ...]:
    """Return rows from (ours, theirs, kind)."""
    return tuple(LayerRow(ours=ours, theirs=theirs, kind=kind) for ours, theirs, kind in rows)


def pair_names(scheme: NameScheme, names: Iterable[str]) -> dict[str, NamePair]:
    """Return {our name: pair} of the tensors (`params/conv1/conv/kernel`) that the scheme has a name for."""
    names = list(names)
    facts = _facts(names)
    layers: dict[str, tuple[str, str] | None] = {}
    pairs = {}
    for name in names:
        tree, _, rest = name.partition("/")
        layer, _, tensor = rest.rpartition("/")
        if layer not in layers:  # once for all tensors of a layer: most of the time goes into regular expressions
            layers[layer] = _layer_name(scheme, layer, facts.get(layer.split("/")[0], {}))
        found = layers[layer]
        rows = scheme.tensors[found[1]] if found else ()
        row = next((row for row in rows if row.ours == f"{tree} {tensor}"), None)
        if found and row:
            pairs[name] = NamePair(ours=name, theirs=found[0] + row.theirs, dim_order=row.dim_order)
    return pairs


def _facts(names: list[str]) -> dict[str, dict[str, int | str]]:
    """Return, for each block, the values that rows may use."""
    layers: dict[str, set[str]] = {}
    for name in names:
        _, block, *rest = name.split("/")
        layers.setdefault(block, set()).add(rest[0] if rest else "")
    blocks = {block: (int(match[1]), len(match[2]), match[2]) for block in layers if (match := _BLOCK.fullmatch(block))}
    order = sorted(blocks, key=lambda block: blocks[block])
    found: dict[str, dict[str, int | str]] = {}
    for block, inside in layers.items():
        expands, deep, squeezes = (int(part in inside) for part in ("expand_conv", "dwconv", "se"))
        found[block] = {
            "last": max((number for number, *_ in blocks.values()), default=0),
            "place": order.index(block) if block in blocks else 0,
            "e": expands,
            "d": expands + deep,
            "k": expands + deep + squeezes,
            "first": "conv_pw" if deep else "conv_exp",
            "pw": "conv_pwl" if expands else "conv_pw" if deep else "conv",
        }
    return found


def _layer_name(scheme: NameScheme, layer: str, facts: dict[str, int | str]) -> tuple[str, str] | None:
    """Return (the layer's name in the library, its kind), or None."""
    for row in scheme.rows:
        match = row.pattern.fullmatch(layer)
        if match:
            values = facts | {key: _number(text) for key, text in match.groupdict().items() if text is not None}
            return _FIELD.sub(lambda m, v=values: str(_shifted(v[m[1]], m[2])), row.theirs), row.kind
    return None


def _number(text: str) -> int | str:
    if text.isdecimal():
        return int(text)
    return ord(text) - ord("a") if len(text) == 1 and text.isalpha() else text


def _shifted(value: int | str, shift: str | None) -> int | str:
    return value + int(shift) if shift and isinstance(value, int) else value
