"""The name tables: a row for each kind of layer of each family, with its name in torchvision, timm or Keras.

Left the name here, right the name there; `naming.py` says how a row is read. The first scheme that covers a network is
the one that it is exported under.
"""

from headrace.weights.naming import KERAS_TENSORS, Scheme, layer_rows

_UNIT = r"conv(?P<group>\d+)_block(?P<unit>\d+)"

_RESNET = layer_rows(
    (r"conv1/conv", "conv1", "conv"),
    (r"conv1/[bg]n", "bn1", "norm"),
    (_UNIT + r"/0_conv", "layer{group-1}.{unit-1}.downsample.0", "conv"),
    (_UNIT + r"/0_[bg]n", "layer{group-1}.{unit-1}.downsample.1", "norm"),
    (_UNIT + r"/(?P<place>[123])_conv", "layer{group-1}.{unit-1}.conv{place}", "conv"),
    (_UNIT + r"/(?P<place>[123])_[bg]n", "layer{group-1}.{unit-1}.bn{place}", "norm"),
    (r"predictions", "fc", "dense"),
)
_CIFAR_RESNET = layer_rows(
    (r"conv1/conv", "conv1", "conv"),
    (r"conv1/[bg]n", "bn1", "norm"),
    (_UNIT + r"/layer(?P<place>[123])_conv(?:_ds)?", "layer{group-1}.{unit-1}.conv{place}", "conv"),
    (_UNIT + r"/layer(?P<place>[123])_[bg]n", "layer{group-1}.{unit-1}.bn{place}", "norm"),
    (_UNIT + r"/(?:shortcut|layer0)_conv", "layer{group-1}.{unit-1}.downsample.0", "conv"),
    (_UNIT + r"/(?:shortcut|layer0)_[bg]n", "layer{group-1}.{unit-1}.downsample.1", "norm"),
)
_KERAS_RESNET = layer_rows(
    (r"conv1/conv", "conv1_conv", "conv"),
    (r"conv1/bn", "conv1_bn", "norm"),
    (_UNIT + r"/(?P<place>[0123])_conv", "conv{group}_block{unit}_{place}_conv", "conv"),
    (_UNIT + r"/(?P<place>[0123])_bn", "conv{group}_block{unit}_{place}_bn", "norm"),
    (r"predictions", "predictions", "dense"),
)

SCHEMES: tuple[Scheme, ...] = (
    Scheme(name="torchvision", rows=_RESNET),
    Scheme(name="common", rows=(*_CIFAR_RESNET, *layer_rows((r"fc_layer", "linear", "dense")))),
    Scheme(name="common-fc", rows=(*_CIFAR_RESNET, *layer_rows((r"fc_layer", "fc", "dense")))),
    Scheme(name="keras", rows=_KERAS_RESNET, tensors=KERAS_TENSORS),
)
