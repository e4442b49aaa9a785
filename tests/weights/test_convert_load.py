"""Weights of others in a network: what is loaded, replaced, left fresh; what is refused."""

import re

import numpy as np
import pytest

from headrace.core.errors import CheckpointError
from headrace.core.tensor_file import write_safetensors
from headrace.model.network import weights_like
from headrace.weights.convert import flat_weights, load_into, table_lines
from headrace.weights.name_schemes import O_C77, OC77
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import ForeignWeights, read_file
from tests.model.build import network


def torch_resnet(units, widths, expansion, classes, stem=7, seed=0, head="fc"):
    """Return a state dict as torch's ResNets have it, written down from their definition: {name: array}."""
    rng = np.random.default_rng(seed)
    found = {}

    def conv(name, out, inside, kernel):
        found[f"{name}.weight"] = rng.normal(size=(out, inside, kernel, kernel)).astype(np.float32)

    def norm(name, channels):
        for tensor in ("weight", "bias", "running_mean", "running_var"):
            found[f"{name}.{tensor}"] = rng.uniform(0.5, 1.5, channels).astype(np.float32)
        found[f"{name}.num_batches_tracked"] = np.array(3)

    conv("conv1", widths[0], 3, stem)
    norm("bn1", widths[0])
    inside = widths[0]
    for group, (count, width) in enumerate(zip(units, widths, strict=True), start=1):
        for unit in range(count):
            at, out = f"layer{group}.{unit}", width * expansion
            kernels = (1, 3, 1) if expansion > 1 else (3, 3)
            channels = (width, width, out) if expansion > 1 else (width, width)
            before = inside
            for place, (kernel, to) in enumerate(zip(kernels, channels, strict=True), start=1):
                conv(f"{at}.conv{place}", to, before, kernel)
                norm(f"{at}.bn{place}", to)
                before = to
            if unit == 0 and (expansion > 1 or group > 1) and stem == 7:
                conv(f"{at}.downsample.0", out, inside, 1)
                norm(f"{at}.downsample.1", out)
            inside = out
    found[f"{head}.weight"] = rng.normal(size=(classes, inside)).astype(np.float32)
    found[f"{head}.bias"] = rng.normal(size=classes).astype(np.float32)
    return found


def cifar8(classes=10, **options):
    return torch_resnet((1, 1, 1), (16, 32, 64), 1, classes, stem=3, **options)


@pytest.mark.parametrize("form", ["pth", "safetensors"])
@pytest.mark.parametrize("head", ["linear", "fc"])
def test_a_cifar_resnet_in_the_common_names_is_loaded_whole_and_turned(tmp_path, form, head):
    arrays = cifar8(head=head)
    file = tmp_path / f"w.{form}"
    file.write_bytes(write_torch_file(arrays) if form == "pth" else write_safetensors(arrays, {}))
    net = network("cifar_resnet8")
    found = load_into(net, net.init(0), read_file(file))
    assert found.loading.share == found.loading.used_share == 1.0
    assert found.loading.unused == ()
    assert found.loading.count("loaded")[1] == net.total_cost().params + 2 * (16 + 4 * 16 // 2 + 2 * 32 + 2 * 64)
    kernel, theirs = found.params["conv3_block1"]["layer1_conv_ds"]["kernel"], arrays["layer2.0.conv1.weight"]
    assert kernel[2, 1, 5, 7] == theirs[7, 5, 2, 1]
    np.testing.assert_array_equal(found.params["fc_layer"]["kernel"][:, 3], arrays[f"{head}.weight"][3])
    np.testing.assert_array_equal(
        found.stats["conv4_block1"]["layer2_bn"]["variance"], arrays["layer3.0.bn2.running_var"]
    )


def test_resnet50_has_the_names_of_torchvision():
    arrays = torch_resnet((3, 4, 6, 3), (64, 128, 256, 512), 4, 1000)
    assert len(arrays) == 320  # as torchvision's resnet50().state_dict() has
    net = network("resnet50")
    found = load_into(net, weights_like(net), ForeignWeights(source="it", arrays=arrays))
    assert (found.loading.scheme, found.loading.share, found.loading.used_share, found.loading.unused) == (
        "torchvision",
        1.0,
        1.0,
        (),
    )
    assert found.loading.count("loaded") == (
        267,
        25_557_032 + 2 * 26_560,
    )  # parameters, and mean and variance of each norm
    same = found.params["conv5_block3"]["3_conv"]["kernel"][0, 0]
    np.testing.assert_array_equal(same, arrays["layer4.2.conv3.weight"][:, :, 0, 0].T)
    theirs = arrays["layer2.0.downsample.1.running_mean"]
    np.testing.assert_array_equal(found.stats["conv3_block1"]["0_bn"]["mean"], theirs)


def test_another_number_of_classes_replaces_the_head_and_says_so():
    net = network("cifar_resnet8", num_classes=10)
    initial = net.init(7)
    found = load_into(net, initial, ForeignWeights(source="it", arrays=cifar8(100, head="linear")))
    assert found.loading.share == 1.0, "a head for other classes does not count against the file"
    assert [tensor.name for tensor in found.loading.statuses if tensor.status == "replaced"] == [
        "params/fc_layer/bias",
        "params/fc_layer/kernel",
    ]
    np.testing.assert_array_equal(found.params["fc_layer"]["kernel"], initial[0]["fc_layer"]["kernel"])
    told = "\n".join(table_lines(found))
    assert "100x64 there, 64x10 here (another number of classes)" in told
    assert re.search(r"loaded +35 tensors", told)
    assert re.search(r"fresh +0 tensors", told)


def test_a_missing_head_is_left_fresh():
    arrays = {name: array for name, array in cifar8().items() if not name.startswith("fc")}
    net = network("cifar_resnet8")
    found = load_into(net, net.init(0), ForeignWeights(source="it", arrays=arrays))
    assert found.loading.count("fresh") == (2, 650)
    assert 0.98 < found.loading.share < 1


def test_grey_images_replace_the_stem_alone():
    net = network("cifar_resnet8", image=(32, 32, 1))
    found = load_into(net, net.init(0), ForeignWeights(source="it", arrays=cifar8()))
    assert [tensor.note for tensor in found.loading.statuses if tensor.status == "replaced"] == [
        "16x3x3x3 there, 3x3x1x16 here"
    ]


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        (torch_resnet((3, 3, 3), (16, 32, 64), 1, 10, stem=3), "takes only"),  # a deeper one: all names are there
        (torch_resnet((1, 1, 1), (32, 64, 128), 1, 10, stem=3), "Only 0.0 %"),  # a wider one: no shape fits
        ({"encoder.weight": np.zeros((3, 3), np.float32)}, "Only 0.0 %"),
        ({}, "Only 0.0 %"),
    ],
    ids=["deeper", "wider", "another network", "nothing"],
)
def test_another_network_is_refused_unless_allowed(arrays, told):
    net = network("cifar_resnet8")
    with pytest.raises(CheckpointError, match=told) as caught:
        load_into(net, net.init(0), ForeignWeights(source="it", arrays=arrays))
    assert "90 %" in caught.value.rule
    assert "--init-min-loaded" in caught.value.remedy
    allowed = load_into(net, net.init(0), ForeignWeights(source="it", arrays=arrays), min_share=0.0)
    assert allowed.params.keys() == net.init(0)[0].keys()


def test_own_names_are_read_as_they_are():
    net = network("toy_model_bn")
    weights = flat_weights(*net.init(5))
    found = load_into(net, net.init(0), ForeignWeights(source="it", arrays=weights | {"opt/velocity/x": np.zeros(99)}))
    assert (found.loading.scheme, found.loading.share, found.loading.unused) == ("headrace", 1.0, ())
    again = flat_weights(found.params, found.stats)
    assert all((again[name] == array).all() for name, array in weights.items())


def test_biases_of_keras_go_into_the_means():
    net = network("resnet18", num_classes=10, image=(32, 32, 3))
    rng = np.random.default_rng(0)
    arrays, keras = {}, {"gamma": "gamma", "beta": "beta", "mean": "moving_mean", "variance": "moving_variance"}
    initial = weights_like(net)
    for name, array in flat_weights(*initial).items():
        _, *layer, tensor = name.split("/")
        arrays[f"{'_'.join(layer)}/{keras.get(tensor, tensor)}"] = rng.uniform(0.5, 1, array.shape).astype(np.float32)
        if tensor == "kernel" and array.ndim == 4:
            arrays[f"{'_'.join(layer)}/bias"] = np.full(array.shape[-1], 0.25, np.float32)
    found = load_into(net, initial, ForeignWeights(source="it", arrays=arrays))
    assert (found.loading.scheme, found.loading.share, found.loading.unused) == ("keras", 1.0, ())
    np.testing.assert_array_equal(found.params["conv1"]["conv"]["kernel"], arrays["conv1_conv/kernel"])
    np.testing.assert_allclose(found.stats["conv1"]["bn"]["mean"], arrays["conv1_bn/moving_mean"] - 0.25)
    arrays["conv1_conv/bias"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match="conv1_conv/bias has 3 numbers, but conv1_bn/moving_mean 64"):
        load_into(net, initial, ForeignWeights(source="it", arrays=arrays))


def test_keras_files_are_read(tmp_path):
    h5py = pytest.importorskip("h5py")
    file = tmp_path / "w.h5"
    with h5py.File(file, "w") as out:  # the layout of Keras 2's save_weights
        out.attrs["layer_names"] = [b"conv1_conv", b"relu"]
        layer = out.create_group("conv1_conv")
        layer.attrs["weight_names"] = [b"conv1_conv/kernel:0"]
        layer["conv1_conv/kernel:0"] = np.arange(4.0).reshape(2, 2)
        out.create_group("relu").attrs["weight_names"] = np.array([], dtype="S1")
    np.testing.assert_array_equal(read_file(file).arrays["conv1_conv/kernel"], [[0, 1], [2, 3]])
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"w\.h5"):
        read_file(file)


@pytest.mark.parametrize("order", [O_C77, OC77])
def test_vggs_first_dense_layer_takes_the_same_pixels(order):
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(7, 7, 5))
    theirs = rng.normal(size=(3, 5, 7, 7) if order.dims == 4 else (3, 5 * 7 * 7))
    wanted = theirs.reshape(3, -1) @ pixels.transpose(2, 0, 1).ravel()
    np.testing.assert_allclose(pixels.ravel() @ order.read(theirs), wanted)
    np.testing.assert_array_equal(order.write(order.read(theirs)), theirs)
