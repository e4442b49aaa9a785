"""Weights under the names of torch's libraries, and the way there and back."""

import jax
import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.weights.convert import export_names, flat_weights, load_into
from headrace.weights.weight_file import ForeignWeights
from tests.model.build import network

# Tensors of the state dict as torchvision 0.28 and timm 1.0 have it, and some of its names with their shapes.
_EFFICIENT = {
    "features.1.0.block.1.fc1.weight": (8, 32, 1, 1),
    "features.2.0.block.1.0.weight": (96, 1, 3, 3),
    "features.7.0.block.3.1.running_var": (320,),
    "features.8.1.num_batches_tracked": (),
    "classifier.1.bias": (1000,),
}
_EFFICIENT_TIMM = {"blocks.0.0.conv_pw.weight": (16, 32, 1, 1), "blocks.6.0.bn3.weight": (320,)}
_V2 = {"features.1.conv.1.weight": (16, 32, 1, 1), "features.18.0.weight": (1280, 320, 1, 1)}
_V3 = {"features.1.block.1.fc2.bias": (16,), "classifier.3.weight": (1000, 1024)}
_V3_TIMM = {"conv_head.weight": (1024, 576, 1, 1), "blocks.5.0.conv.weight": (576, 96, 1, 1)}
_SQUEEZE = {"features.12.expand3x3.weight": (256, 64, 3, 3), "classifier.1.weight": (1000, 512, 1, 1)}
_RESNET = {"layer2.0.downsample.0.weight": (128, 64, 1, 1), "fc.weight": (1000, 512)}
_RESNEXT = {"layer1.0.conv2.weight": (128, 4, 3, 3)}
KNOWN = [
    ("resnet18", "torchvision", 122, _RESNET),
    pytest.param("resnext50", "torchvision", 320, _RESNEXT, marks=pytest.mark.slow),
    ("efficientnet_b0", "torchvision", 360, _EFFICIENT),
    ("efficientnet_b0", "timm", 360, _EFFICIENT_TIMM),
    ("mobilenet_v2", "torchvision", 314, _V2),
    ("mobilenet_v3_small", "torchvision", 244, _V3),
    ("mobilenet_v3_small", "timm", 244, _V3_TIMM),
    ("squeezenet", "torchvision", 52, _SQUEEZE),
]


@pytest.mark.parametrize(("name", "library", "count", "shapes"), KNOWN, ids=lambda value: str(value)[:20])
def test_names_and_shapes_are_those_of_the_library_and_lead_back(name, library, count, shapes):
    dialect = {} if name == "squeezenet" else {"model_dialect": library}
    net = network(name, num_classes=1000, image=(64, 64, 3), **dialect)
    weights = net.init(1)
    scheme, arrays = export_names(*weights, library)
    assert (scheme, len(arrays)) == (library, count)
    assert {key: arrays[key].shape for key in shapes} == shapes
    zeros = jax.tree.map(np.zeros_like, weights)
    again = load_into(net, zeros, ForeignWeights(source="it", arrays=arrays), min_share=1.0)
    assert again.loading.unused == ()
    wanted = flat_weights(*weights)
    for key, array in flat_weights(again.params, again.stats).items():
        np.testing.assert_array_equal(array, wanted[key], err_msg=key)


def test_a_network_that_no_library_names_is_refused():
    with pytest.raises(ConfigError, match="No torch library"):
        export_names(*network("toy_model_bn").init(0))
    with pytest.raises(ConfigError, match="no names of timm") as caught:
        export_names(*network("cifar_resnet8").init(0), "timm")
    for dialect in ("torchvision", "timm", "keras"):  # what the dialect has no names for has the usual ones
        assert export_names(*network("cifar_resnet8").init(0), dialect=dialect)[0] == "common"
    assert export_names(*network("squeezenet").init(0), dialect="timm")[0] == "torchvision"
    assert "common, common-fc" in caught.value.remedy
