"""A network that a user writes is exported like the shipped ones, from the program that has it."""

import jax
import numpy as np
import pytest

from headrace.core.errors import CheckpointError, ConfigError
from headrace.model.composite import Chain, Residual
from headrace.model.layers import Conv, Dense, GlobalAveragePool, Relu
from headrace.model.network import Network
from headrace.model.norm import Norm
from headrace.run.exports.values import ExportOptions
from headrace.run.exports.write import export_model
from headrace.run.model import Model
from headrace.run.read_weights import read_weights

UNIT = Residual(body=Chain((("conv", Conv(channels=8)), ("bn", Norm()), ("relu", Relu()))))
BLOCKS = (
    ("stem", Chain((("conv", Conv(channels=8)), ("bn", Norm()), ("relu", Relu())))),
    ("unit", UNIT),
    ("pool", GlobalAveragePool()),
    ("head", Dense(features=3, logits=True)),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    network = Network(name="mine", blocks=BLOCKS, input_hwc=(8, 8, 3), num_classes=3)
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(32, 8, 8, 3)).astype(np.float32), rng.integers(0, 3, 32)
    folder = tmp_path_factory.mktemp("own")
    model = Model(network, config="none", micro_batch_size=8, progress="none", log_dir=str(folder), run_name="r")
    model.fit(images, labels, num_epochs=1)
    return network, folder / "r", images, model.logits(images)


def test_an_own_network_is_exported_and_computes_the_same(trained, tmp_path):
    network, run, images, _ = trained
    model = read_weights(run, network).only()
    made = export_model(model, tmp_path / "mine.stablehlo", ExportOptions(format="stablehlo", input="float"))
    found = jax.export.deserialize(bytearray(made.path.read_bytes())).call(images)
    runtime = pytest.importorskip("onnxruntime")
    export_model(model, tmp_path / "mine.onnx", ExportOptions(format="onnx", input="float"))
    session = runtime.InferenceSession(str(tmp_path / "mine.onnx"), providers=["CPUExecutionProvider"])
    logits = session.run(["logits"], {"images": images})[0]
    np.testing.assert_allclose(np.asarray(found["logits"]), logits, atol=1e-4)
    with pytest.raises(ConfigError, match="No torch library"):
        export_model(model, tmp_path / "mine.pth", ExportOptions(format="torch-names"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.onnx",
        "mine.onnx.json",
        "mine.stablehlo",
        "mine.stablehlo.json",
    ]


def test_a_command_cannot_know_an_own_network(trained):
    with pytest.raises(CheckpointError, match="given by code"):
        read_weights(trained[1]).only()
