"""The name tables: a row for each kind of layer of each family, with its name in torchvision, timm or Keras.

Our name is on the left, theirs on the right; what a row means stands above. A network is exported under the first
scheme that covers it.
"""

from headrace.model.families.vgg import places
from headrace.rows.networks.vgg import VGGS, VggRow
from headrace.weights.name_schemes import KERAS_TENSORS, NameScheme, layer_rows

Rows = tuple[tuple[str, str, str], ...]  # our layer, theirs, kind

_UNIT = r"conv(?P<group>\d+)_block(?P<unit>\d+)"
_NORM = "[bgl]n"  # batch, group or layer norm


def _conv_norm(ours: str, conv: str, norm: str) -> Rows:
    """Return the rows of a convolution and of its norm, whose names here begin alike."""
    return (f"{ours}conv", conv, "conv"), (f"{ours}{_NORM}", norm, "norm")


def _squeeze_excite(ours: str, reduce: str, expand: str) -> Rows:
    """Return the rows of the two layers of squeeze-excite, which are convolutions in the libraries."""
    return (f"{ours}se/reduce", reduce, "dense_as_conv"), (f"{ours}se/expand", expand, "dense_as_conv")


_SHORTCUT = _conv_norm(_UNIT + "/0_", "layer{group-1}.{unit-1}.downsample.0", "layer{group-1}.{unit-1}.downsample.1")
_RESNET = layer_rows(
    *_conv_norm("conv1/", "conv1", "bn1"),
    *_SHORTCUT,
    *_conv_norm(
        _UNIT + r"/(?P<place>[123])_", "layer{group-1}.{unit-1}.conv{place}", "layer{group-1}.{unit-1}.bn{place}"
    ),
    (r"predictions", "fc", "dense"),
)
# timm's: with squeeze-excite, and with deep stems and pools on the shortcuts
_SE_RESNET = (
    *_RESNET,
    *layer_rows(
        *_squeeze_excite(_UNIT + "/", "layer{group-1}.{unit-1}.se.fc1", "layer{group-1}.{unit-1}.se.fc2"),
    ),
)
_RESNET_D = (
    *layer_rows(
        *_conv_norm("conv1/1_", "conv1.0", "conv1.1"),
        *_conv_norm("conv1/2_", "conv1.3", "conv1.4"),
        *_conv_norm("conv1/3_", "conv1.6", "bn1"),
        *_conv_norm(_UNIT + "/0_", "layer{group-1}.{unit-1}.downsample.1", "layer{group-1}.{unit-1}.downsample.2"),
    ),
    *_RESNET,
)
_CIFAR_RESNET = layer_rows(
    *_conv_norm("conv1/", "conv1", "bn1"),
    (_UNIT + r"/layer(?P<place>[123])_conv(?:_ds)?", "layer{group-1}.{unit-1}.conv{place}", "conv"),
    (_UNIT + rf"/layer(?P<place>[123])_{_NORM}", "layer{group-1}.{unit-1}.bn{place}", "norm"),
    *_SHORTCUT,
    *_conv_norm(_UNIT + "/shortcut_", "layer{group-1}.{unit-1}.downsample.0", "layer{group-1}.{unit-1}.downsample.1"),
)
_KERAS_RESNET = layer_rows(
    *_conv_norm("conv1/", "conv1_conv", "conv1_bn"),
    *_conv_norm(
        _UNIT + r"/(?P<place>[0123])_", "conv{group}_block{unit}_{place}_conv", "conv{group}_block{unit}_{place}_bn"
    ),
    (r"predictions", "predictions", "dense"),
)

# EfficientNets number groups of units (`block2a`), MobileNets all units in sequence (`block2`).
_NAMED = r"block(?P<group>\d+)(?P<unit>[a-z])"
_COUNTED = r"block(?P<group>\d+)"


def _inverted(block: str, at: str, rows: Rows) -> Rows:
    """Return the rows of an inverted bottleneck's layers, under our name and theirs."""
    return tuple((f"{block}/{ours}", at + theirs, kind) for ours, theirs, kind in rows)


_TORCHVISION_BLOCK = (
    *_conv_norm("expand_", "block.0.0", "block.0.1"),
    (r"dwconv", "block.{e}.0", "conv"),
    (r"bn", "block.{e}.1", "norm"),
    *_squeeze_excite("", "block.{e+1}.fc1", "block.{e+1}.fc2"),
    *_conv_norm("project_", "block.{k}.0", "block.{k}.1"),
)
_TORCHVISION_V2_BLOCK = (
    *_conv_norm("expand_", "conv.0.0", "conv.0.1"),
    (r"dwconv", "conv.{e}.0", "conv"),
    (r"bn", "conv.{e}.1", "norm"),
    *_conv_norm("project_", "conv.{e+1}", "conv.{e+2}"),
)
_TIMM_BLOCK = (
    *_conv_norm("expand_", "{first}", "bn1"),
    (r"dwconv", "conv_dw", "conv"),
    (r"bn", "bn{e+1}", "norm"),
    *_squeeze_excite("", "se.conv_reduce", "se.conv_expand"),
    *_conv_norm("project_", "{pw}", "bn{d+1}"),
)
_KERAS_BLOCK = (
    *_conv_norm("(?P<which>expand|project)_", "_{which}_conv", "_{which}_bn"),
    (r"dwconv", "_{dwconv}", "depthwise"),
    (r"bn", "_bn", "norm"),
    (r"se/(?P<which>reduce|expand)", "_se_{which}", "dense_as_conv"),
)
_KERAS_V2_BLOCK = (
    *_conv_norm("(?P<which>expand|project)_", "_{which}", "_{which}_BN"),
    (r"dwconv", "_depthwise", "depthwise"),
    (r"bn", "_depthwise_BN", "norm"),
)
_TORCHVISION_ENDS = (
    *_conv_norm("stem/", "features.0.0", "features.0.1"),
    *_conv_norm("top/", "features.{last+1}.0", "features.{last+1}.1"),
)
_TIMM_STEM = _conv_norm("stem/", "conv_stem", "bn1")
_TIMM_HEAD = ((r"predictions", "classifier", "dense"),)
_TIMM_ENDS = (*_TIMM_STEM, *_conv_norm("top/", "conv_head", "bn2"), *_TIMM_HEAD)
_KERAS_HEAD = ((r"predictions", "predictions", "dense"),)
_KERAS_ENDS = (*_conv_norm("(?P<end>stem|top)/", "{end}_conv", "{end}_bn"), *_KERAS_HEAD)
_KERAS_V2_ENDS = (
    *_conv_norm("stem/", "Conv1", "bn_Conv1"),
    *_conv_norm("top/", "Conv_1", "Conv_1_bn"),
    *_KERAS_HEAD,
)
_LAST_DENSE = ((r"predictions", "classifier.1", "dense"),)
_V3_DENSE = ((r"hidden/dense", "classifier.0", "dense"), (r"predictions", "classifier.3", "dense"))


def _timm_groups(units: tuple[int, ...]) -> Rows:
    """Return the rows of a MobileNet's blocks, numbered in sequence by us and in groups by the library."""
    places = [(group, unit) for group, count in enumerate(units) for unit in range(count)]
    rows = ()
    for number, (group, unit) in enumerate(places, start=1):
        rows += _inverted(f"block{number}", f"blocks.{group}.{unit}.", _TIMM_BLOCK)
    return rows


def _timm_v3(units: tuple[int, ...]) -> Rows:
    """Return the rows of timm's V3: its last convolution is a separate group, its hidden layer part of the head."""
    last = len(units)
    top = _conv_norm("top/", f"blocks.{last}.0.conv", f"blocks.{last}.0.bn1")
    hidden = ((r"hidden/dense", "conv_head", "dense_as_conv"),)
    return *_TIMM_STEM, *top, *hidden, *_TIMM_HEAD, *_timm_groups(units)


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
    *_TORCHVISION_ENDS,
    *_LAST_DENSE,
    *_inverted(_NAMED, "features.{group}.{unit}.", _TORCHVISION_BLOCK),
)
# the package efficientnet_pytorch, which counts all blocks in one sequence
_EFFICIENTNET_PYTORCH = (
    *_conv_norm("stem/", "_conv_stem", "_bn0"),
    *_conv_norm("top/", "_conv_head", "_bn1"),
    (r"predictions", "_fc", "dense"),
    *_inverted(
        _NAMED,
        "_blocks.{place}.",
        (
            *_conv_norm("expand_", "_expand_conv", "_bn0"),
            (r"dwconv", "_depthwise_conv", "conv"),
            (r"bn", "_bn1", "norm"),
            *_squeeze_excite("", "_se_reduce", "_se_expand"),
            *_conv_norm("project_", "_project_conv", "_bn2"),
        ),
    ),
)
_EFFICIENTNET_TIMM = (*_TIMM_ENDS, *_inverted(_NAMED, "blocks.{group-1}.{unit}.", _TIMM_BLOCK))


def _efficientnet_keras(dwconv: str) -> Rows:
    """Return the rows of Keras' EfficientNets, whose depthwise convolutions have another name in V2."""
    rows = tuple((ours, theirs.replace("{dwconv}", dwconv), kind) for ours, theirs, kind in _KERAS_BLOCK)
    return *_KERAS_ENDS, *_inverted(r"(?P<block>block\d+[a-z])", "{block}", rows)


_V2_KERAS = (
    *_KERAS_V2_ENDS,
    *_inverted("block1", "expanded_conv", _KERAS_V2_BLOCK),
    *_inverted(_COUNTED, "block_{group-1}", _KERAS_V2_BLOCK),
)
_V2_TV = (
    *_TORCHVISION_ENDS,
    *_LAST_DENSE,
    *_inverted(_COUNTED, "features.{group}.", _TORCHVISION_V2_BLOCK),
)
_V3_TV = (
    *_TORCHVISION_ENDS,
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
    *_conv_norm("stem/", "features.0.0", "features.0.1"),
    *(
        row
        for group in range(1, 5)
        for row in (
            *_conv_norm(f"group{group}/", f"features.{2 * group - 2}.1", f"features.{2 * group - 2}.0"),
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
    *_conv_norm("stem/", "stem.0", "stem.1"),
    *_conv_norm(r"group(?P<group>\d)/", "stages.{group-1}.downsample.1", "stages.{group-1}.downsample.0"),
    *(
        (rf"group(?P<group>\d)_block(?P<unit>\d+)/{ours}", f"stages.{{group-1}}.blocks.{{unit-1}}.{theirs}", kind)
        for ours, _, theirs, kind in (*_CONVNEXT_PARTS, ("scale", "", "gamma", "scale"))
    ),
    (r"top/ln", "head.norm", "norm"),
    (r"predictions", "head.fc", "dense"),
)

_GROUP_UNIT = r"group(?P<group>\d)_block(?P<unit>\d+)"
_REGNET_TV_UNIT = "trunk_output.block{group}.block{group}-{unit-1}."
_REGNET_TV = (
    *_conv_norm("stem/", "stem.0", "stem.1"),
    *(
        row
        for place, name in (("0", "proj"), ("1", "f.a"), ("2", "f.b"), ("3", "f.c"))
        for row in _conv_norm(f"{_GROUP_UNIT}/{place}_", f"{_REGNET_TV_UNIT}{name}.0", f"{_REGNET_TV_UNIT}{name}.1")
    ),
    *_squeeze_excite(f"{_GROUP_UNIT}/", f"{_REGNET_TV_UNIT}f.se.fc1", f"{_REGNET_TV_UNIT}f.se.fc2"),
    (r"predictions", "fc", "dense"),
)
_REGNET_TIMM = (
    *_conv_norm("stem/", "stem.conv", "stem.bn"),
    *_conv_norm(_GROUP_UNIT + "/0_", "s{group}.b{unit}.downsample.conv", "s{group}.b{unit}.downsample.bn"),
    *_conv_norm(
        _GROUP_UNIT + r"/(?P<place>[123])_", "s{group}.b{unit}.conv{place}.conv", "s{group}.b{unit}.conv{place}.bn"
    ),
    *_squeeze_excite(_GROUP_UNIT + "/", "s{group}.b{unit}.se.fc1", "s{group}.b{unit}.se.fc2"),
    (r"predictions", "head.fc", "dense"),
)
_DENSE_LAYER = "features.denseblock{group}.denselayer{unit}."
_DENSENET = (
    *_conv_norm("stem/", "features.conv0", "features.norm0"),
    *_conv_norm(_GROUP_UNIT + r"/new/(?P<place>[12])_", _DENSE_LAYER + "conv{place}", _DENSE_LAYER + "norm{place}"),
    *_conv_norm(r"group(?P<group>\d)/", "features.transition{group-1}.conv", "features.transition{group-1}.norm"),
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


def _vgg(row: VggRow, library: str) -> Rows:
    units = (_conv_norm(f"{name}/", f"features.{at}", f"features.{at + 1}") for name, at in places(row).items())
    return *(row for unit in units for row in unit), *_VGG_HEADS[library]


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
    *((library, _vgg(row, library)) for row in VGGS for library in _VGG_HEADS),
    ("timm", _EFFICIENTNET_TIMM),
    ("efficientnet_pytorch", _EFFICIENTNET_PYTORCH),
    ("timm", (*_TIMM_ENDS, *_timm_groups((1, 2, 3, 4, 3, 3, 1)))),
    ("timm", _timm_v3((1, 2, 3, 2, 3))),  # before the large one, whose rows would match this network too
    ("timm", _timm_v3((1, 2, 3, 4, 2, 3))),
)

SCHEMES: tuple[NameScheme, ...] = (
    NameScheme(name="torchvision", rows=_RESNET),
    NameScheme(name="common", rows=(*_CIFAR_RESNET, *layer_rows((r"fc_layer", "linear", "dense")))),
    NameScheme(name="common-fc", rows=(*_CIFAR_RESNET, *layer_rows((r"fc_layer", "fc", "dense")))),
    *(NameScheme(name=name, rows=layer_rows(*rows)) for name, rows in _TORCH_SCHEMES),
    NameScheme(name="timm", rows=_SE_RESNET),
    NameScheme(name="timm", rows=_RESNET_D),
    NameScheme(name="keras", rows=_KERAS_RESNET, tensors=KERAS_TENSORS),
    NameScheme(name="keras", rows=layer_rows(*_efficientnet_keras("dwconv")), tensors=KERAS_TENSORS),
    NameScheme(name="keras", rows=layer_rows(*_efficientnet_keras("dwconv2")), tensors=KERAS_TENSORS),
    NameScheme(name="keras", rows=layer_rows(*_V2_KERAS), tensors=KERAS_TENSORS),
)
