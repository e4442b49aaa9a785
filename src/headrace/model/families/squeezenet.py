"""SqueezeNet 1.0: fire modules that squeeze channels by 1x1 and expand them by 1x1 and 3x3 in parallel; no norms."""

from headrace.model.build_options import BuildOptions
from headrace.model.composite import Chain, Concat, Named, Residual
from headrace.model.gates import Dropout
from headrace.model.initial import FAN_IN_HE, GLOROT_UNIFORM
from headrace.model.layers import Conv, GlobalAveragePool, Layer, MaxPool, Relu
from headrace.rows.network import NetworkRow

_POOL = "pool"
# squeezed channels of each fire module; each branch of its expansion has four times as many
_PLAN = (16, 16, 32, _POOL, 32, 48, 48, 64, _POOL, 64)
# The paper's simple bypass: fire modules whose input and output have as many channels (numbered from 2 on).
_BYPASSED = (3, 5, 7, 9)


def blocks(row: NetworkRow, build: BuildOptions) -> tuple[Named, ...]:
    """Return the named blocks, numbered as in the paper: `fire2` follows `conv1`."""
    rate = build.dropout(0.5)
    stem = Conv(channels=96, kernel=7, stride=2, padding="VALID", bias=True, initial=FAN_IN_HE)
    blocks: list[Named] = [("conv1", Chain((("conv", stem), ("relu", Relu())))), ("pool1", _pool())]
    number = 2
    for entry in _PLAN:
        if isinstance(entry, str):
            blocks.append((f"pool{number - 1}", _pool()))
        else:
            bypass = build.options.use_bypass and number in _BYPASSED
            blocks.append((f"fire{number}", _fire(entry, bypass)))
            number += 1
    blocks += [("drop9", Dropout(rate))] if rate else []
    last = Conv(channels=build.num_classes, kernel=1, bias=True, initial=GLOROT_UNIFORM)
    return *blocks, ("conv10", Chain((("conv", last), ("relu", Relu())))), ("avg_pool", GlobalAveragePool())


def _fire(squeezed: int, bypass: bool) -> Layer:
    squeeze = Conv(channels=squeezed, kernel=1, bias=True, initial=FAN_IN_HE)
    branches = Concat(
        layers=tuple(
            (f"{kernel}x{kernel}", Conv(channels=4 * squeezed, kernel=kernel, bias=True, initial=FAN_IN_HE))
            for kernel in (1, 3)
        )
    )
    layers = (("squeeze", squeeze), ("squeeze_relu", Relu()), ("expand", branches), ("expand_relu", Relu()))
    return Residual(body=Chain(layers)) if bypass else Chain(layers)


def _pool() -> MaxPool:
    """Return a 3x3/2 pool that includes the last pixel where an even size leaves one over."""
    return MaxPool(window=3, stride=2, padding=((0, 1), (0, 1)))
