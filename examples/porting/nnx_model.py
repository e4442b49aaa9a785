"""The same small EfficientNet in Flax NNX. A block is a function of `rngs`; training draws its weights at the start."""

from flax import nnx

# expansion, channels before and after, stride of each MBConv block
BLOCKS = [(1, 16, 16, 1), (4, 16, 24, 2), (4, 24, 40, 2), (4, 40, 80, 2)]


class ConvNorm(nnx.Module):
    def __init__(self, before, after, kernel, stride=1, groups=1, *, rngs):
        self.conv = nnx.Conv(
            before, after, (kernel, kernel), stride, feature_group_count=groups, use_bias=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(after, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x))


class MBConv(nnx.Module):
    def __init__(self, expansion, before, after, stride, *, rngs):
        inside = before * expansion
        self.expand = ConvNorm(before, inside, 1, rngs=rngs) if expansion > 1 else None
        self.depthwise = ConvNorm(inside, inside, 3, stride, inside, rngs=rngs)
        self.squeeze = nnx.Linear(inside, before // 4, rngs=rngs)
        self.excite = nnx.Linear(before // 4, inside, rngs=rngs)
        self.project = ConvNorm(inside, after, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, broadcast_dims=(1, 2, 3), rngs=rngs)

    def __call__(self, x):
        y = nnx.swish(self.expand(x)) if self.expand else x
        y = nnx.swish(self.depthwise(y))
        y = y * nnx.sigmoid(self.excite(nnx.swish(self.squeeze(y.mean((1, 2), keepdims=True)))))
        y = self.project(y)
        return x + self.dropout(y) if y.shape == x.shape else y


class Stem(nnx.Module):
    def __init__(self, rngs):
        self.conv = ConvNorm(3, 16, 3, 2, rngs=rngs)

    def __call__(self, x):
        return nnx.swish(self.conv(x))


class Head(nnx.Module):
    def __init__(self, num_classes, *, rngs):
        self.conv = ConvNorm(80, 160, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear = nnx.Linear(160, num_classes, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(nnx.swish(self.conv(x)).mean((1, 2))))


def blocks(num_classes):
    """The network as a list of functions of `rngs`."""
    middle = [(f"block{n}", lambda rngs, row=row: MBConv(*row, rngs=rngs)) for n, row in enumerate(BLOCKS, 1)]
    return [("stem", Stem), *middle, ("head", lambda rngs: Head(num_classes, rngs=rngs))]
