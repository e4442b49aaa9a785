"""A small EfficientNet in Flax Linen: as one network, and as the blocks that Headrace takes."""

from flax import linen as nn

# expansion, channels, stride of each MBConv block
BLOCKS = [(1, 16, 1), (4, 24, 2), (4, 40, 2), (4, 80, 2)]


def conv_bn(x, channels, kernel, train, stride=1, groups=1):
    x = nn.Conv(channels, (kernel, kernel), stride, feature_group_count=groups, use_bias=False)(x)
    return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)


class Stem(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x, train):
        return nn.swish(conv_bn(x, self.channels, 3, train, stride=2))


class MBConv(nn.Module):
    expansion: int
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        inside = x.shape[-1] * self.expansion
        y = nn.swish(conv_bn(x, inside, 1, train)) if self.expansion > 1 else x
        y = nn.swish(conv_bn(y, inside, 3, train, self.stride, groups=inside))
        gate = nn.swish(nn.Dense(x.shape[-1] // 4)(y.mean((1, 2), keepdims=True)))
        y = y * nn.sigmoid(nn.Dense(inside)(gate))
        y = conv_bn(y, self.channels, 1, train)
        if y.shape != x.shape:
            return y
        return x + nn.Dropout(0.1, broadcast_dims=(1, 2, 3), deterministic=not train)(y)


class Head(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.swish(conv_bn(x, 160, 1, train)).mean((1, 2))
        return nn.Dense(self.num_classes)(nn.Dropout(0.2, deterministic=not train)(x))


class EfficientNet(nn.Module):
    """The whole network, for the script that trains it on one device."""

    num_classes: int

    @nn.compact
    def __call__(self, x, train):
        x = Stem(16)(x, train)
        for row in BLOCKS:
            x = MBConv(*row)(x, train)
        return Head(self.num_classes)(x, train)


def blocks(num_classes):
    """The same network as a list: a pipeline is cut between its entries."""
    middle = [(f"block{number}", MBConv(*row)) for number, row in enumerate(BLOCKS, 1)]
    return [("stem", Stem(16)), *middle, ("head", Head(num_classes))]
