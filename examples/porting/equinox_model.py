"""The same small EfficientNet in Equinox, with group norm, which has no state: a block is a function of `key`.

An Equinox module computes one image, channels first; Headrace maps it over the batch.
"""

import equinox as eqx
import jax

# expansion, channels before and after, stride of each MBConv block
BLOCKS = [(1, 16, 16, 1), (4, 16, 24, 2), (4, 24, 40, 2), (4, 40, 80, 2)]


class ConvNorm(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm

    def __init__(self, before, after, kernel, stride=1, groups=1, *, key):
        padding = kernel // 2
        self.conv = eqx.nn.Conv2d(before, after, kernel, stride, padding, groups=groups, use_bias=False, key=key)
        self.norm = eqx.nn.GroupNorm(8, after)

    def __call__(self, x):
        return self.norm(self.conv(x))


class MBConv(eqx.Module):
    expand: ConvNorm | None
    depthwise: ConvNorm
    squeeze: eqx.nn.Linear
    excite: eqx.nn.Linear
    project: ConvNorm

    def __init__(self, expansion, before, after, stride, *, key):
        keys, inside = jax.random.split(key, 5), before * expansion
        self.expand = ConvNorm(before, inside, 1, key=keys[0]) if expansion > 1 else None
        self.depthwise = ConvNorm(inside, inside, 3, stride, inside, key=keys[1])
        self.squeeze = eqx.nn.Linear(inside, before // 4, key=keys[2])
        self.excite = eqx.nn.Linear(before // 4, inside, key=keys[3])
        self.project = ConvNorm(inside, after, 1, key=keys[4])

    def __call__(self, x):
        y = jax.nn.swish(self.expand(x)) if self.expand else x
        y = jax.nn.swish(self.depthwise(y))
        gate = jax.nn.sigmoid(self.excite(jax.nn.swish(self.squeeze(y.mean((1, 2))))))
        y = self.project(y * gate[:, None, None])
        return x + y if y.shape == x.shape else y


class Stem(eqx.Module):
    conv: ConvNorm

    def __init__(self, *, key):
        self.conv = ConvNorm(3, 16, 3, 2, key=key)

    def __call__(self, x):
        return jax.nn.swish(self.conv(x.transpose(2, 0, 1)))  # images come with channels last


class Head(eqx.Module):
    conv: ConvNorm
    dropout: eqx.nn.Dropout
    linear: eqx.nn.Linear

    def __init__(self, num_classes, *, key):
        keys = jax.random.split(key)
        self.conv = ConvNorm(80, 160, 1, key=keys[0])
        self.dropout = eqx.nn.Dropout(0.2)
        self.linear = eqx.nn.Linear(160, num_classes, key=keys[1])

    def __call__(self, x, key):
        return self.linear(self.dropout(jax.nn.swish(self.conv(x)).mean((1, 2)), key=key))


def blocks(num_classes):
    """The network as a list of functions of `key`."""
    middle = [(f"block{n}", lambda key, row=row: MBConv(*row, key=key)) for n, row in enumerate(BLOCKS, 1)]
    return [("stem", Stem), *middle, ("head", lambda key: Head(num_classes, key=key))]
