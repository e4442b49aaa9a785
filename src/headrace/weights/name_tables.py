"""The name tables: a row for each kind of layer of each family, with its name in torchvision, timm or Keras.

Our name is on the left, theirs on the right; `name_rules.py` explains the rows. A network is exported under the first
scheme that covers it.
"""

from headrace.model.densenet_vgg import VGGS, Vgg
from headrace.weights.name_rules import KERAS_TENSORS, Scheme, layer_rows

_UNIT = r"conv(?P<group>\d+)_block(?P<unit>\d+)"

_RESNET = layer_rows(
    (r"conv1/conv", "conv1", "conv"),
    (r"conv1/[bgl]n", "bn1", "norm"),
    (_UNIT + r"/0_conv", "layer{group-1}.{unit-1}.downsample.0", "conv"),
    (_UNIT + r"/0_[bgl]n", "layer{group-1}.{unit-1}.downsample.1", "norm"),
    (_UNIT + r"/(?P<place>[123])_conv", "layer{group-1}.{unit-1}.conv{place}", "conv"),
    (_UNIT + r"/(?P<place>[123])_[bgl]n", "layer{group-1}.{unit-1}.bn{place}", "norm"),
    (r"predictions", "fc", "dense"),
)
# timm's: with squeeze-excite, and with deep stems and pools on the shortcuts
_SE_RESNET = (
    *_RESNET,
    *layer_rows(
        (_UNIT + r"/se/reduce", "layer{group-1}.{unit-1}.se.fc1", "dense_as_conv"),
        (_UNIT + r"/se/expand", "layer{group-1}.{unit-1}.se.fc2", "dense_as_conv"),
    ),
)
_RESNET_D = (
    *layer_rows(
        *((rf"conv1/{i}_conv", f"conv1.{3 * i - 3}", "conv") for i in (1, 2, 3)),
        *((rf"conv1/{i}_[bgl]n", f"conv1.{3 * i - 2}", "norm") for i in (1, 2)),
        (r"conv1/3_[bgl]n", "bn1", "norm"),
        (_UNIT + r"/0_conv", "layer{group-1}.{unit-1}.downsample.1", "conv"),
        (_UNIT + r"/0_[bgl]n", "layer{group-1}.{unit-1}.downsample.2", "norm"),
    ),
    *_RESNET,
)
_CIFAR_RESNET = layer_rows(
    (r"conv1/conv", "conv1", "conv"),
    (r"conv1/[bgl]n", "bn1", "norm"),
    (_UNIT + r"/layer(?P<place>[123])_conv(?:_ds)?", "layer{group-1}.{unit-1}.conv{place}", "conv"),
    (_UNIT + r"/layer(?P<place>[123])_[bgl]n", "layer{group-1}.{unit-1}.bn{place}", "norm"),
    (_UNIT + r"/0_conv", "layer{group-1}.{unit-1}.downsample.0", "conv"),
    (_UNIT + r"/0_[bgl]n", "layer{group-1}.{unit-1}.downsample.1", "norm"),
)
_KERAS_RESNET = layer_rows(
    (r"conv1/conv", "conv1_conv", "conv"),
    (r"conv1/bn", "conv1_bn", "norm"),
    (_UNIT + r"/(?P<place>[0123])_conv", "conv{group}_block{unit}_{place}_conv", "conv"),
    (_UNIT + r"/(?P<place>[0123])_bn", "conv{group}_block{unit}_{place}_bn", "norm"),
    (r"predictions", "predictions", "dense"),
)

# EfficientNets number groups of units (`block2a`), MobileNets all units in sequence (`block2`).
_NAMED = r"block(?P<group>\d+)(?P<unit>[a-z])"
_COUNTED = r"block(?P<group>\d+)"


def _inverted(block: str, at: str, rows: tuple[tuple[str, str, str], ...]) -> tuple[tuple[str, str, str], ...]:
    """Return the rows of an inverted bottleneck's layers, under our name and theirs."""
    return tuple((f"{block}/{ours}", at + theirs, kind) for ours, theirs, kind in rows)


_TORCHVISION_BLOCK = (
    (r"expand_conv", "block.0.0", "conv"),
    (r"expand_bn", "block.0.1", "norm"),
    (r"dwconv", "block.{e}.0", "conv"),
    (r"bn", "block.{e}.1", "norm"),
    (r"se/reduce", "block.{e+1}.fc1", "dense_as_conv"),
    (r"se/expand", "block.{e+1}.fc2", "dense_as_conv"),
    (r"project_conv", "block.{k}.0", "conv"),
    (r"project_bn", "block.{k}.1", "norm"),
)
_TORCHVISION_V2_BLOCK = (
    (r"expand_conv", "conv.0.0", "conv"),
    (r"expand_bn", "conv.0.1", "norm"),
    (r"dwconv", "conv.{e}.0", "conv"),
    (r"bn", "conv.{e}.1", "norm"),
    (r"project_conv", "conv.{e+1}", "conv"),
    (r"project_bn", "conv.{e+2}", "norm"),
)
_TIMM_BLOCK = (
    (r"expand_conv", "{first}", "conv"),
    (r"expand_bn", "bn1", "norm"),
    (r"dwconv", "conv_dw", "conv"),
    (r"bn", "bn{e+1}", "norm"),
    (r"se/reduce", "se.conv_reduce", "dense_as_conv"),
    (r"se/expand", "se.conv_expand", "dense_as_conv"),
    (r"project_conv", "{pw}", "conv"),
    (r"project_bn", "bn{d+1}", "norm"),
)
_KERAS_BLOCK = (
    (r"(?P<which>expand|project)_conv", "_{which}_conv", "conv"),
    (r"(?P<which>expand|project)_bn", "_{which}_bn", "norm"),
    (r"dwconv", "_{dwconv}", "depthwise"),
    (r"bn", "_bn", "norm"),
    (r"se/(?P<which>reduce|expand)", "_se_{which}", "dense_as_conv"),
)
_KERAS_V2_BLOCK = (
    (r"(?P<which>expand|project)_conv", "_{which}", "conv"),
    (r"(?P<which>expand|project)_bn", "_{which}_BN", "norm"),
    (r"dwconv", "_depthwise", "depthwise"),
    (r"bn", "_depthwise_BN", "norm"),
)
_TORCHVISION_ENDS = (
    (r"stem/conv", "features.0.0", "conv"),
    (r"stem/bn", "features.0.1", "norm"),
    (r"top/conv", "features.{top}.0", "conv"),
    (r"top/bn", "features.{top}.1", "norm"),
)
_TIMM_ENDS = (
    (r"stem/conv", "conv_stem", "conv"),
    (r"stem/bn", "bn1", "norm"),
    (r"top/conv", "conv_head", "conv"),
    (r"top/bn", "bn2", "norm"),
    (r"predictions", "classifier", "dense"),
)
_KERAS_ENDS = (
    (r"(?P<end>stem|top)/conv", "{end}_conv", "conv"),
    (r"(?P<end>stem|top)/bn", "{end}_bn", "norm"),
    (r"predictions", "predictions", "dense"),
)
_KERAS_V2_ENDS = (
    (r"stem/conv", "Conv1", "conv"),
    (r"stem/bn", "bn_Conv1", "norm"),
    (r"top/conv", "Conv_1", "conv"),
    (r"top/bn", "Conv_1_bn", "norm"),
    (r"predictions", "predictions", "dense"),
)
_LAST_DENSE = ((r"predictions", "classifier.1", "dense"),)
_V3_DENSE = ((r"hidden/dense", "classifier.0", "dense"), (r"predictions", "classifier.3", "dense"))


def _torchvision_ends(top: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((ours, theirs.replace("{top}", top), kind) for ours, theirs, kind in _TORCHVISION_ENDS)


def _timm_groups(units: tuple[int, ...]) -> tuple[tuple[str, str, str], ...]:
    """Return the rows of a MobileNet's blocks, numbered in sequence by us and in groups by the library."""
    places = [(group, unit) for group, count in enumerate(units) for unit in range(count)]
    rows = ()
    for number, (group, unit) in enumerate(places, start=1):
        rows += _inverted(f"block{number}", f"blocks.{group}.{unit}.", _TIMM_BLOCK)
    return rows


def _timm_v3(units: tuple[int, ...]) -> tuple[tuple[str, str, str], ...]:
    """Return the rows of timm's V3: its last convolution is a separate group, its hidden layer part of the head."""
    last = len(units)
    ends = (
        *_TIMM_ENDS[:2],
        (r"top/conv", f"blocks.{last}.0.conv", "conv"),
        (r"top/bn", f"blocks.{last}.0.bn1", "norm"),
        (r"hidden/dense", "conv_head", "dense_as_conv"),
        _TIMM_ENDS[-1],
    )
    return *ends, *_timm_groups(units)


# positions of SqueezeNet 1.0's fire modules in torchvision's sequence
_FIRES = {2: 3, 3: 4, 4: 5, 5: 7, 6: 8, 7: 9, 8: 10, 9: 12}
_SQUEEZENET = (
    (r"conv1/conv", "features.0", "conv"),
    *((rf"fire{here}/squeeze", f"features.{there}.squeeze", "conv") for here, there in _FIRES.items()),
    *(
        (rf"fire{here}/expand/{size}", f"features.{there}.expand{size}", "conv")
        for here, there in _FIRES.items()
        for size in ("1x1", "3x3")
    ),
    (r"conv10/conv", "classifier.1", "conv"),
)

_EFFICIENTNET_TV = (
    *_torchvision_ends("{last+1}"),
    *_LAST_DENSE,
    *_inverted(_NAMED, "features.{group}.{unit}.", _TORCHVISION_BLOCK),
)
_EFFICIENTNET_TIMM = (*_TIMM_ENDS, *_inverted(_NAMED, "blocks.{group-1}.{unit}.", _TIMM_BLOCK))


def _efficientnet_keras(dwconv: str) -> tuple[tuple[str, str, str], ...]:
    """Return the rows of Keras' EfficientNets, whose depthwise convolutions have another name in V2."""
    rows = tuple((ours, theirs.replace("{dwconv}", dwconv), kind) for ours, theirs, kind in _KERAS_BLOCK)
    return *_KERAS_ENDS, *_inverted(r"(?P<block>block\d+[a-z])", "{block}", rows)


_V2_KERAS = (
    *_KERAS_V2_ENDS,
    *_inverted("block1", "expanded_conv", _KERAS_V2_BLOCK),
    *_inverted(_COUNTED, "block_{group-1}", _KERAS_V2_BLOCK),
)
_V2_TV = (
    *_torchvision_ends("{last+1}"),
    *_LAST_DENSE,
    *_inverted(_COUNTED, "features.{group}.", _TORCHVISION_V2_BLOCK),
)
_V3_TV = (
    *_torchvision_ends("{last+1}"),
    *_V3_DENSE,
    *_inverted(_COUNTED, "features.{group}.", _TORCHVISION_BLOCK),
)

# torchvision numbers everything in one sequence: stem 0, units of a group 1, 3, 5, 7, reductions 2, 4, 6.
_CONVNEXT_PARTS = (
    # our layer, torchvision's and timm's name, kind
    ("dwconv", "block.0", "conv_dw", "conv"),
    ("ln", "block.2", "norm", "norm"),
    ("expand_conv", "block.3", "mlp.fc1", "conv_as_dense"),
    ("project_conv", "block.5", "mlp.fc2", "conv_as_dense"),
)
_CONVNEXT_TV = (
    (r"stem/conv", "features.0.0", "conv"),
    (r"stem/ln", "features.0.1", "norm"),
    *(
        row
        for group in range(1, 5)
        for row in (
            (rf"group{group}/ln", f"features.{2 * group - 2}.0", "norm"),
            (rf"group{group}/conv", f"features.{2 * group - 2}.1", "conv"),
            *(
                (rf"group{group}_block(?P<unit>\d+)/{ours}", f"features.{2 * group - 1}.{{unit-1}}.{theirs}", kind)
                for ours, theirs, _, kind in (*_CONVNEXT_PARTS, ("scale", "layer_scale", "", "scale_C11"))
            ),
        )
    ),
    (r"top/ln", "classifier.0", "norm"),
    (r"predictions", "classifier.2", "dense"),
)
_CONVNEXT_TIMM = (
    (r"stem/conv", "stem.0", "conv"),
    (r"stem/ln", "stem.1", "norm"),
    (r"group(?P<group>\d)/ln", "stages.{group-1}.downsample.0", "norm"),
    (r"group(?P<group>\d)/conv", "stages.{group-1}.downsample.1", "conv"),
    *(
        (rf"group(?P<group>\d)_block(?P<unit>\d+)/{ours}", f"stages.{{group-1}}.blocks.{{unit-1}}.{theirs}", kind)
        for ours, _, theirs, kind in (*_CONVNEXT_PARTS, ("scale", "", "gamma", "scale"))
    ),
    (r"top/ln", "head.norm", "norm"),
    (r"predictions", "head.fc", "dense"),
)

_GROUP_UNIT = r"group(?P<group>\d)_block(?P<unit>\d+)"
_REGNET_TV = (
    (r"stem/conv", "stem.0", "conv"),
    (r"stem/bn", "stem.1", "norm"),
    *(
        (f"{_GROUP_UNIT}/{ours}", f"trunk_output.block{{group}}.block{{group}}-{{unit-1}}.{theirs}", kind)
        for place, name in (("0", "proj"), ("1", "f.a"), ("2", "f.b"), ("3", "f.c"))
        for ours, theirs, kind in ((f"{place}_conv", f"{name}.0", "conv"), (f"{place}_bn", f"{name}.1", "norm"))
    ),
    *(
        (
            f"{_GROUP_UNIT}/se/{ours}",
            f"trunk_output.block{{group}}.block{{group}}-{{unit-1}}.f.se.{fc}",
            "dense_as_conv",
        )
        for ours, fc in (("reduce", "fc1"), ("expand", "fc2"))
    ),
    (r"predictions", "fc", "dense"),
)
_REGNET_TIMM = (
    (r"stem/conv", "stem.conv", "conv"),
    (r"stem/bn", "stem.bn", "norm"),
    (_GROUP_UNIT + r"/0_conv", "s{group}.b{unit}.downsample.conv", "conv"),
    (_GROUP_UNIT + r"/0_bn", "s{group}.b{unit}.downsample.bn", "norm"),
    (_GROUP_UNIT + r"/(?P<place>[123])_conv", "s{group}.b{unit}.conv{place}.conv", "conv"),
    (_GROUP_UNIT + r"/(?P<place>[123])_bn", "s{group}.b{unit}.conv{place}.bn", "norm"),
    (_GROUP_UNIT + r"/se/reduce", "s{group}.b{unit}.se.fc1", "dense_as_conv"),
    (_GROUP_UNIT + r"/se/expand", "s{group}.b{unit}.se.fc2", "dense_as_conv"),
    (r"predictions", "head.fc", "dense"),
)
_DENSENET = (
    (r"stem/conv", "features.conv0", "conv"),
    (r"stem/bn", "features.norm0", "norm"),
    (_GROUP_UNIT + r"/new/(?P<place>[12])_conv", "features.denseblock{group}.denselayer{unit}.conv{place}", "conv"),
    (_GROUP_UNIT + r"/new/(?P<place>[12])_bn", "features.denseblock{group}.denselayer{unit}.norm{place}", "norm"),
    (r"group(?P<group>\d)/conv", "features.transition{group-1}.conv", "conv"),
    (r"group(?P<group>\d)/bn", "features.transition{group-1}.norm", "norm"),
    (r"top/bn", "features.norm5", "norm"),
    (r"predictions", "classifier", "dense"),
)
_VGG_HEADS = {
    "torchvision": (
        (r"fc1/dense", "classifier.0", "dense_of_7x7"),
        (r"fc2/dense", "classifier.3", "dense"),
        (r"predictions", "classifier.6", "dense"),
    ),
    "timm": (
        (r"fc1/dense", "pre_logits.fc1", "dense_as_conv_7x7"),
        (r"fc2/dense", "pre_logits.fc2", "dense_as_conv"),
        (r"predictions", "head.fc", "dense"),
    ),
}


def _vgg(row: Vgg, library: str) -> tuple[tuple[str, str, str], ...]:
    places = row.places().items()
    convs = ((f"{name}/conv", f"features.{place}", "conv") for name, place in places)
    norms = ((f"{name}/bn", f"features.{place + 1}", "norm") for name, place in places)
    return *convs, *norms, *_VGG_HEADS[library]


# (library, rows). Schemes of one library differ in the layers that they cover, so at most one fits a whole network.
_TORCH_SCHEMES = (
    ("torchvision", _EFFICIENTNET_TV),
    ("torchvision", _V2_TV),
    ("torchvision", _V3_TV),
    ("torchvision", _SQUEEZENET),
    ("torchvision", _CONVNEXT_TV),
    ("timm", _CONVNEXT_TIMM),
    ("torchvision", _REGNET_TV),
    ("timm", _REGNET_TIMM),
    ("torchvision", _DENSENET),
    ("timm", _DENSENET),
    # by depth: the names of a shallower VGG are all in the rows of a deeper one, at other places
    *((library, _vgg(row, library)) for row in VGGS.values() for library in _VGG_HEADS),
    ("timm", _EFFICIENTNET_TIMM),
    ("timm", (*_TIMM_ENDS, *_timm_groups((1, 2, 3, 4, 3, 3, 1)))),
    ("timm", _timm_v3((1, 2, 3, 2, 3))),  # before the large one, whose rows would match this network too
    ("timm", _timm_v3((1, 2, 3, 4, 2, 3))),
)

SCHEMES: tuple[Scheme, ...] = (
    Scheme(name="torchvision", rows=_RESNET),
    Scheme(name="common", rows=(*_CIFAR_RESNET, *layer_rows((r"fc_layer", "linear", "dense")))),
    Scheme(name="common-fc", rows=(*_CIFAR_RESNET, *layer_rows((r"fc_layer", "fc", "dense")))),
    *(Scheme(name=name, rows=layer_rows(*rows)) for name, rows in _TORCH_SCHEMES),
    Scheme(name="timm", rows=_SE_RESNET),
    Scheme(name="timm", rows=_RESNET_D),
    Scheme(name="keras", rows=_KERAS_RESNET, tensors=KERAS_TENSORS),
    Scheme(name="keras", rows=layer_rows(*_efficientnet_keras("dwconv")), tensors=KERAS_TENSORS),
    Scheme(name="keras", rows=layer_rows(*_efficientnet_keras("dwconv2")), tensors=KERAS_TENSORS),
    Scheme(name="keras", rows=layer_rows(*_V2_KERAS), tensors=KERAS_TENSORS),
)
