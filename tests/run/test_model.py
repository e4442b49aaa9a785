"""Model with shipped networks: the five lines on real JPEGs and arrays, what they leave behind, and refusals."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from PIL import Image

import headrace
from headrace import Model, read_digits
from headrace.core.errors import CheckpointError, ConfigError, DataError, HeadraceError
from headrace.run.fit import resume, train
from headrace.run.image_results import write_image_results
from headrace.run.prediction import predict
from headrace.run.read_weights import read_weights
from headrace.run.validation import validate
from headrace.telemetry.records import best_validation

SMALL: dict[str, Any] = {"micro_batch_size": 8, "progress": "none", "ema_decay": 0}


def anything(value: Any) -> Any:
    """Hide a wrong type from the checker."""
    return value


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Two classes of JPEGs, dark and bright, in train and val."""
    root, rng = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 5)):
        for label, name in enumerate(("dark", "light")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 100, (40, 40, 3)) + 150 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.jpg", quality=95)
    return root


@pytest.fixture(scope="module")
def fitted(photos, tmp_path_factory):
    """A model and its run on the photos."""
    place = tmp_path_factory.mktemp("runs")
    model = Model("toy_model_bn", num_classes=2, image_size=32, log_dir=str(place), bn_momentum=0.5, **SMALL)
    return model, model.fit(str(photos), epochs=3, learning_rate=0.05, train_crop="valid")


def test_a_folder_is_fitted_evaluated_predicted_and_exported(fitted, photos, tmp_path):
    model, run = fitted
    assert (
        repr(run)
        == f"RunResult(finished at step 12, top-1 {100 * run.validation['raw'].top1:.2f} % at the end, {run.directory})"
    )
    assert run.state is None, "a run that is kept must not keep the devices' memory"
    assert model.class_names == ("dark", "light")
    # the folder of both splits, the validation folder alone, and `headrace validate` count the same ten images
    whole, alone = model.evaluate(photos), model.evaluate(photos / "val")
    (validated,) = (row for row in validate(run.directory, which="best"))
    assert whole == alone == validated.reports["raw"]
    assert whole["num_samples"] == 10
    best = np.lexsort((-run.metrics["val_loss"], run.metrics["val_accuracy"]))[-1]  # of equal ones the lower loss
    assert whole["loss"] == pytest.approx(run.metrics["val_loss"][best], rel=1e-5)
    assert model.evaluate(photos / "val", steps=1)["num_samples"] == 8
    # the same probabilities as `headrace predict`, from the same weights
    files = sorted((photos / "val").rglob("*.jpg"))
    found = model.predict(photos / "val")
    trained = read_weights(run.directory).only()
    for mine, theirs in zip(found, predict(trained, files), strict=True):
        assert mine.source == str(theirs.file)
        np.testing.assert_allclose(mine.probabilities, [share for _, share in theirs.best], rtol=1e-5, atol=1e-6)
    assert np.mean(found.labels == [0] * 5 + [1] * 5) == whole["top1"]
    one = model.predict(files[0])
    assert repr(one).startswith(f"{files[0]}: {one[0].name} {100 * one[0].probability:.2f} %, ")
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    both = model.predict([files[0], broken])
    assert both.labels[1] == -1
    assert both[1].problem
    assert model.export(tmp_path / "model.onnx").stat().st_size > 500
    with pytest.raises(ConfigError, match=r"format of model\.bin is not known.*\.onnx"):
        model.export(tmp_path / "model.bin")


def test_the_images_of_a_report_have_the_names_of_their_files(fitted, photos):
    _, run = fitted
    found = json.loads(write_image_results(run.directory).read_text())
    for row in found["mistakes"] + found["hardest"]:
        assert Path(row["file"]).is_file()
        assert Path(row["file"]).parent == photos / "val" / row["true"]


def test_a_run_is_read_as_arrays_plot_and_time(fitted):
    _, run = fitted
    metrics = run.metrics
    assert metrics["step"].tolist() == metrics["val_step"].tolist() == [4, 8, 12]
    assert metrics["loss"].dtype == np.float64
    assert metrics["val_accuracy"][-1] == run.validation["raw"].top1
    assert len(repr(metrics)) < 400
    assert run.best_checkpoint.parent == run.directory / "checkpoints"
    assert run.last_checkpoint.name == "step_00000012"
    assert sum(run.seconds.values()) > run.seconds["compile"] > 0
    html = run._repr_html_()
    assert html.startswith("<svg")
    assert "finished at step 12" in html


def test_a_run_by_code_is_an_ordinary_run_and_loads_at_its_best(fitted, photos):
    _, run = fitted
    loaded = Model.load(run.directory)
    assert f"{run.best_checkpoint.name})" in repr(loaded)
    best = max(range(3), key=lambda i: (run.metrics["val_accuracy"][i], -run.metrics["val_loss"][i]))
    assert loaded.evaluate(photos)["top1"] == run.metrics["val_accuracy"][best]
    more = resume(run.directory, {"num_epochs": 4})  # as the command does
    assert (more.outcome, more.step) == ("finished", 16)


def test_arrays_train_a_shipped_network_and_a_second_fit_continues(tmp_path):
    digits = read_digits()["train"]
    images, labels = digits.images[:96], digits.labels[:96]
    still = {"learning_rate": 1e-9, "bn_momentum": 1}
    model = Model("toy_model_bn", log_dir=str(tmp_path / "runs"), **SMALL)
    first = model.fit((images, labels), epochs=1, validation_split=0.25)
    assert model.network.input_hwc == (32, 32, 1)
    assert model.network.num_classes == 10
    held_out = first.validation["raw"].num_samples
    assert 15 <= held_out <= 33, "a quarter of each class"
    before = model.evaluate(images, labels)
    model.fit(images, labels, steps_per_epoch=2, **still)
    after = model.evaluate(images, labels)
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-5), "it continued from the weights it had"
    # commands can use what code trained on arrays, except where they would need the arrays
    probabilities = model.predict(images[:4]).probabilities
    trained = read_weights(model.save(tmp_path / "kept")).only()
    assert trained.network.name == "toy_model_bn"
    np.testing.assert_allclose(
        Model.load(tmp_path / "kept").predict(images[:4]).probabilities, probabilities, rtol=1e-5
    )
    with pytest.raises(CheckpointError, match="dataset was given by code"):
        resume(first.directory)


def test_weights_of_a_file_serve_without_a_fit(fitted, photos, tmp_path):
    model, _ = fitted
    file = model.export(tmp_path / "weights.safetensors")
    again = Model("toy_model_bn", weights=file, num_classes=2, input_shape=(32, 32, 3), **SMALL)
    assert "weights from" in repr(again)
    files = sorted((photos / "val").rglob("*.jpg"))[:3]
    np.testing.assert_allclose(again.predict(files).probabilities, model.predict(files).probabilities, rtol=1e-4)
    assert again.evaluate(photos / "val")["top1"] == model.evaluate(photos / "val")["top1"]


def test_what_cannot_work_is_refused_with_a_remedy(fitted, photos, tmp_path):
    model, _ = fitted
    fresh = Model("toy_model_bn", log_dir=str(tmp_path / "runs"), **SMALL)
    digits = read_digits()["validation"]
    calls = [
        (lambda: Model("resnet5"), "no model named 'resnet5'"),
        (lambda: Model("resnet50", **anything({"num_clases": 2})), "no option num_clases.*num_classes"),
        (lambda: Model("resnet50", **anything({"learning_rate": "fast"})), "learning_rate"),
        (lambda: Model(anything(3)), "The network is a int"),
        (lambda: Model("resnet50", num_classes=1), "num_classes is 1"),
        (lambda: Model("resnet50", input_shape=(32, 32)), "input_shape is"),
        (lambda: Model("resnet50", **anything({"init_from": "x"})), "init_from has no meaning here.*weights"),
        (lambda: fresh.network, "classes of toy_model_bn is not known yet"),
        (lambda: fresh.fit("nowhere/at/all"), "There is no nowhere/at/all"),
        (lambda: fresh.fit("digit"), "Did you mean digits"),
        (lambda: fresh.fit(3), "The data is a int"),
        (lambda: fresh.fit(str(photos), validation_data=(1, 2)), "both parts"),
        (lambda: fresh.fit(digits.images, digits.labels, image_size=32), "image_size has no meaning"),
        (lambda: fresh.fit(digits.images, digits.labels, callbacks=anything([7])), "A callback is a int"),
        (lambda: fresh.fit(digits.images, digits.labels, validation_split=2), "validation_split is 2"),
        (lambda: fresh.fit(digits.images, np.eye(10)[digits.labels]), "argmax"),
        (lambda: fresh.fit(digits.images, digits.labels.astype(str)), "np.unique"),
        (lambda: fresh.fit(digits.images.transpose(0, 3, 1, 2), digits.labels), "Put the channels last"),
        (lambda: fresh.predict("x.jpg"), "nothing to predict with yet|not known yet"),
        (lambda: Model("toy_model_bn", num_classes=3, **SMALL).fit(str(photos)), "has 3 classes.*has 2"),
        (lambda: model.evaluate("digits"), "10 classes, the network 2|the network takes"),
        (lambda: model.evaluate(photos, steps=0), "steps is 0"),
        (lambda: model.evaluate(photos, weights="ema"), "weights is 'ema'"),
        (lambda: model.predict(7), "The images are a int"),
        (lambda: model.save(tmp_path / "m.keras"), "m.keras, the name of a file.*writes a directory.*export"),
        (lambda: model.predict(photos / "val", batch_size=0), "batch_size is 0"),
        (lambda: train(anything({"num_epochs": 3})), r"train was given a dict.*headrace\.Model"),
    ]
    for call, told in calls:
        with pytest.raises(HeadraceError, match=told):
            call()
    assert not Path(tmp_path / "runs").exists()
    assert issubclass(DataError, HeadraceError)


def test_summary_plan_and_representations_are_short(fitted):
    model, run = fitted
    text = str(model.summary())
    assert f"{model.network.total_cost().params:,}" in text
    assert max(map(len, text.splitlines()[:-1])) < 80
    assert "steps per epoch" in str(model.plan(num_samples=64))
    unseen = headrace.Model("toy_model_bn", input_shape=(32, 32, 3), num_classes=2)
    assert "64 images of 8 bits" in str(unseen.plan(num_samples=64))
    assert "64 images of 32 bits" in str(
        headrace.Model("toy_model_bn", input_shape=(32, 32, 3), num_classes=2, normalization="none").plan(64)
    )
    # Of this fit alone: another test may have resumed the run by now.
    best = best_validation([record for record in run.records if record.step <= run.step])
    step = best.step if best else None
    assert repr(model) == f"Model(toy_model_bn: 32x32x3 images, 2 classes, step {step} of {run.directory.name})"
    assert repr(model.config).startswith("Config(")
    assert len(repr(model.config)) < 500
    digits = headrace.open_dataset(headrace.Config().data, 0)
    assert repr(digits) == "DataSet(digits: 1,437 training and 360 validation images, 32x32x1, 10 classes)"


def test_help_prints_no_environment(monkeypatch):
    import pydoc

    from headrace.config.load import resolve

    monkeypatch.setenv("SECRET_KEY_OF_THIS_TEST", "hunter2")
    text = pydoc.render_doc(resolve)
    assert "hunter2" not in text
    assert "environ" in text


@pytest.mark.slow
def test_twenty_fits_in_one_process_do_not_grow(tmp_path):
    digits = read_digits()["train"]
    resident = []
    for number in range(20):
        model = Model("toy_model_bn", log_dir=str(tmp_path), run_name=f"run{number}", **SMALL)
        model.fit(digits.images, digits.labels, epochs=1, steps_per_epoch=4)
        gc.collect()
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    assert resident[-1] - resident[4] < 25, resident


class OneModule(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.dense(x.mean((1, 2)))


@pytest.mark.parametrize("module", [OneModule, OneModule(nnx.Rngs(0))])
def test_a_module_alone_is_a_network_of_one_block(module: Any) -> None:
    model = Model(module, input_shape=(4, 4, 3), num_classes=2)
    assert [name for name, _ in model.network.blocks] == ["network"]
    assert model.network.total_cost().params == 3 * 2 + 2


def test_a_fit_that_names_its_directory_needs_none_of_the_model(tmp_path: Path) -> None:
    digits = read_digits()["validation"]
    model = Model("toy_model_bn", log_dir=str(tmp_path / "runs"), **SMALL)
    place = tmp_path / "elsewhere"
    assert model.fit(digits.images, digits.labels, epochs=1, steps_per_epoch=1, output=place).directory == place


def test_a_prediction_is_explained_alike_in_each_form_of_the_image(fitted, photos):
    model, _ = fitted
    file = sorted((photos / "val").rglob("*.jpg"))[0]
    found = model.explain(file)
    assert (found.name, found.probability) == (
        model.predict(file)[0].name,
        pytest.approx(model.predict(file)[0].probability, rel=1e-4),
    )
    forms = [model.explain(file.read_bytes()), model.explain(found.pixels)]
    forms.append(model.explain(Image.fromarray(found.pixels)) if found.pixels.shape[0] == 32 else forms[0])
    for other in forms:
        assert other.maps.keys() == found.maps.keys()
        for name, heat in found.maps.items():
            np.testing.assert_array_equal(other.maps[name], heat)
    assert found._repr_png_()[:4] == b"\x89PNG"
    last = model.class_names[-1]
    assert model.explain(file, last).name == last
    for wrong, message in ((found.pixels.astype(np.float32), "float32"), (found.pixels[1:], r"uint8 \["), (3, "int")):
        with pytest.raises(HeadraceError, match=message):
            model.explain(wrong)
    with pytest.raises(ConfigError, match="There is no class"):
        model.explain(found.pixels, "nothing")
    with pytest.raises(DataError, match="cannot be read"):
        model.explain(b"no image")


def test_labels_that_begin_at_1_are_remarked_on(tmp_path):
    digits = read_digits()["train"]
    images, labels = digits.images[:64], digits.labels[:64] % 2 + 1
    model = Model("toy_model_bn", log_dir=str(tmp_path), **SMALL)
    run = model.fit(images, labels, epochs=1, steps_per_epoch=1)
    told = "0 (label 0) has no training images, and every other class has: labels count from 0, so 3 classes"
    assert told in (run.directory / "log.txt").read_text()
    other = model.fit(images, 2 * (labels - 1), epochs=1, steps_per_epoch=1)
    assert "labels count from 0" not in (other.directory / "log.txt").read_text()
