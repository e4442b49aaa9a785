"""What a run chooses where nobody gives batch, rate, epochs, warm-up and precision."""

import json
import re
import shutil
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.cli.main import main
from headrace.config.load import from_saved, override, resolve, to_saved
from headrace.engine.visible import Visible
from headrace.run import choices
from headrace.run.choice_rules import (
    choose_batch,
    choose_epochs,
    choose_muon_rate,
    choose_ranger_rate,
    choose_rate,
    choose_short_batch,
    choose_short_rate,
    choose_statistics_momentum,
)
from headrace.run.choices import settle
from headrace.run.design import design_run
from headrace.run.fit import resume, train

GIB = 1 << 30
CPU = Visible(platform="cpu", count=1, memory_bytes=16 * GIB)
GPU = Visible(platform="gpu", count=1, memory_bytes=80 * GIB, bfloat16=True)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that settles a configuration on these devices."""

    def settled(devices: Visible, name: str | None = None, **options: Any) -> Any:
        monkeypatch.setattr(choices, "visible_devices", lambda wanted, **_: devices)
        return settle(resolve(options, name, environ={}))

    return settled


@pytest.mark.parametrize(
    ("images", "batch"), [(1, 1), (20, 5), (244, 16), (1_437, 32), (50_000, 256), (1_281_167, 1024), (10**8, 1024)]
)
def test_batch(images, batch):
    assert choose_batch(images, 1, 1) == batch
    assert images // batch >= 10 or images < 100


def test_batch_of_several_replicas():
    assert choose_batch(1_437, 8, 1) == 64, "8 images for each"
    assert choose_batch(50_000, 6, 1) % 6 == 0
    assert choose_batch(40, 8, 4) == 32, "whole micro batches, however few images there are"


def test_epochs_grow_only_where_few_steps_make_one():
    assert [choose_epochs(steps) for steps in (1, 15, 45, 195, 1250)] == [100, 40, 30, 30, 30]
    tuned = [choose_epochs(steps, fine_tuning=True) for steps in (1, 12, 15, 45, 195, 1250)]
    assert tuned == [50, 25, 20, 10, 10, 10]


def test_rates():
    assert choose_rate("sgd", 0.9, 1024) == 0.4
    assert choose_rate("sgd", 0.9, 256) == 0.2
    assert choose_rate("sgd", 0.5, 256) == 1.0
    assert choose_rate("adamw", None, 256) == 0.001
    assert [choose_short_rate(0.05, steps) for steps in (2, 50, 200, 9000)] == [0.015, 0.025, 0.05, 0.05]


def test_statistics_follow_faster_in_short_runs(on):
    found = {steps: choose_statistics_momentum(steps) for steps in (1, 60, 100, 240, 600, 2000)}
    assert found == {1: 0.5, 60: 0.5, 100: 0.7, 240: 0.9, 600: 0.9, 2000: 0.97}
    short = {"batch_size": 64, "learning_rate": 0.05, "num_epochs": 4}  # 88 steps
    given = on(CPU, "none", **short)
    assert given.config.model.bn_momentum == 0.97, "without a recipe, what is all given is all there is"
    assert given.notes == ()
    assert on(CPU, "none", batch_size=64, num_epochs=4).config.model.bn_momentum == 0.7
    assert on(CPU, "none", learning_rate=0.05, num_epochs=4).config.model.bn_momentum == 0.8, "176 steps of 32"
    assert on(CPU, "images", dataset="digits", **short).notes == ("chosen: warm-up 0.4 epochs, bn-momentum 0.7",)
    for norm in ({"bn_momentum": 0.8}, {"groups": 4}, {"norm_layer": {"name": "batch_norm", "momentum": 0.8}}):
        assert "bn-momentum" not in on(CPU, "none", num_epochs=4, **norm).notes[0]


def test_a_short_run_from_nothing_has_a_lower_rate(on):
    short, tuned = (on(CPU, None, batch_size=128, epochs=3, **more) for more in ({}, {"weights": "weights.pth"}))
    assert short.notes == ("chosen: learning rate 0.057, warm-up 0.3 epochs",)  # 33 of 200 steps
    assert str(short.origin("learning_rate")) == "chosen for a batch of 128 and 33 steps"
    assert tuned.config.learning.lr_schedule_params["absolute_learning_rate"] == 0.14, "a new last layer has to learn"


def test_the_default_on_a_processor(on):
    found = on(CPU)
    assert found.notes == (
        "chosen: batch size 32 (1,437 images), learning rate 0.071, warm-up 1.2 epochs, precision 32.32 (CPU)",
    )
    assert found.config.learning.lr_schedule_params == {"absolute_learning_rate": 0.071}
    assert found.config.learning.lr_warmup_params == {"warmup_mode": "shift", "warmup_epochs": 1.2}
    assert str(found.origins["batch_size"]) == "chosen for 1,437 images"
    made = design_run(found.config)
    end_of_warmup = round(1.2 * made.plan.steps.updates_per_epoch)
    assert float(made.lr_curve(end_of_warmup)) == pytest.approx(0.071, rel=0.01)


def test_without_a_recipe_the_same_is_chosen_and_momentum(on):
    found = on(GPU, "none")
    assert "SGD with momentum 0.9, cosine schedule, learning rate 0.071, 30 epochs, warm-up 3 epochs" in found.notes[0]
    assert found.notes[0].endswith("precision 16.32 (GPU, bfloat16)")
    assert found.config.learning.optimizer_params == {"momentum": 0.9, "nesterov": True}


def test_what_is_given_stays(on):
    found = on(GPU, "none", micro_batch_size=8, learning_rate=0.05, num_epochs=3, precision="32.32")
    assert found.notes == ()
    assert (
        found.config
        == resolve(
            {"micro_batch_size": 8, "learning_rate": 0.05, "num_epochs": 3, "precision": "32.32"}, "none", environ={}
        ).config
    )
    mixed = on(CPU, None, epochs=20, batch_size=128)
    assert mixed.notes == ("chosen: learning rate 0.14, warm-up 2 epochs",)
    recipe = on(CPU, "cifar10_resnet8_cpu", generated_data=True)
    assert recipe.notes == ()


@pytest.mark.reference
def test_the_reference_keeps_its_defaults(on):
    for options in ({"application": "tf1", "dataset": "cifar10"}, {"application": "tf2", "generated_data": True}):
        options |= {"seed": 1, "checkpoint_dir": "here"}  # the applications draw one, and name the other by the time
        assert on(GPU, None, **options).config == resolve(options, environ={}).config


def test_a_batch_beyond_the_memory_is_accumulated(on):
    options = {"dataset": "imagenet", "generated_data": True}
    small = on(Visible(platform="gpu", count=1, memory_bytes=16 * GIB, bfloat16=True), "images", **options)
    batch = small.config.batch
    assert batch.batch_size == 1024
    assert "micro batch" in small.notes[0]
    plan = design_run(small.config).plan
    assert plan.memory.total_bytes <= 0.6 * 16 * GIB
    twice = override(small, {"micro_batch_size": 2 * batch.micro_batch_size})
    assert design_run(twice.config).plan.memory.total_bytes > 0.6 * 16 * GIB, "it is the largest that fits"
    assert on(GPU, "images", **options).config.batch.micro_batch_size is None, "80 GiB are enough"


def test_trained_weights_are_trained_gently(on):
    """The last layer at the usual rate, the others at a tenth, for fewer epochs; not where the parts are given."""
    fresh, tuned = (on(CPU, "none", **given) for given in ({}, {"weights": "weights.pth"}))
    for each in (tuned, fresh):
        assert each.config.learning.lr_schedule_params["absolute_learning_rate"] == 0.071
    assert tuned.config.weights.layer_lr == {"backbone": 0.1}
    assert "learning rate 0.071 for the last layer and 0.0071 for the others (trained weights)" in tuned.notes[0]
    assert tuned.config.batch.num_epochs == 10
    made = design_run(tuned.config)
    assert made.trainable.rate_factor("conv1/conv/kernel") == 0.1
    assert made.trainable.rate_factor("fc_layer/bias") == 1
    for parts in ({"freeze": "backbone"}, {"layer_lr": {"^conv1": 0.5}}, {"layer_decay": 0.8}):
        given = on(CPU, "none", weights="weights.pth", **parts).config
        assert given.learning.lr_schedule_params["absolute_learning_rate"] == 0.071
        assert given.weights.layer_lr == parts.get("layer_lr", {})
    slow = on(CPU, "none", weights="weights.pth", learning_rate=0.02).config
    assert slow.learning.lr_schedule_params["absolute_learning_rate"] == 0.02
    assert slow.weights.layer_lr == {}, "who gives a rate gets it for all layers"


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a folder of so many photographs in two classes, which are links to one."""
    place = tmp_path_factory.mktemp("photographs")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (120, 140, 3), np.uint8)).save(place / "one.jpg")

    def made(count: int) -> str:
        for number in range(count):
            target = place / str(count) / "train" / "ab"[number % 2] / f"{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_symlink():
                target.symlink_to(place / "one.jpg")
        for name in "ab":
            (place / str(count) / "val" / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(place / "one.jpg", place / str(count) / "val" / name)
        return str(place / str(count))

    return made


def test_photographs_are_learned_from_nothing_by_ranger(on, photographs):
    settled = on(CPU, dataset_path=photographs(1_200), image_size=96, num_epochs=5)
    learning, model = settled.config.learning, settled.config.model
    assert (learning.optimizer, learning.lookahead, learning.lr_schedule) == ("radam", 6, "flat_cosine")
    assert (learning.weight_decay, learning.l2_regularization) == (0.01, 0.0)
    assert learning.lr_warmup_params is None
    assert (model.stem, model.downsample, model.activation) == ("deep", "max-blur", "mish")
    assert settled.config.data.crop_area == (0.35, 1.0)
    assert settled.config.batch.batch_size == 32
    assert learning.lr_schedule_params["absolute_learning_rate"] == pytest.approx(0.001 * 32**0.5, rel=0.05)
    assert "RAdam with lookahead" in settled.notes[-1]
    assert design_run(settled.config).plan.batch.micro_batch_size == 32


def test_an_accelerator_learns_photographs_by_muon(on, photographs):
    settled = on(GPU, dataset_path=photographs(1_200), image_size=96, num_epochs=5)
    learning, model = settled.config.learning, settled.config.model
    assert (learning.optimizer, learning.lookahead, learning.lr_schedule) == ("muon", 0, "linear")
    assert learning.optimizer_params["momentum"] == 0.9
    assert (learning.weight_decay, learning.l2_regularization, learning.lr_warmup_params) == (0.0, 0.0, None)
    assert (model.stem, model.activation) == ("deep", "mish")
    assert settled.config.data.crop_area == (0.5, 1.0), "in few epochs"
    assert settled.config.batch.batch_size == 32
    assert learning.lr_schedule_params == {"absolute_learning_rate": pytest.approx(0.025 * 0.5**0.5, rel=0.05)}
    assert "Muon" in settled.notes[-1]
    assert "crops of at least 50%" in settled.notes[-1]
    longer = on(GPU, dataset_path=photographs(4_200), image_size=96, num_epochs=40).config
    assert longer.data.crop_area == (0.35, 1.0)
    assert (longer.batch.batch_size, longer.learning.lr_schedule_params["absolute_learning_rate"]) == (64, 0.025)
    assert on(GPU, dataset_path=photographs(1_200), image_size=96).config.data.crop_area == (0.35, 1.0)


@pytest.mark.parametrize(
    ("options", "quick_parts"),
    [
        ({"model_name": "resnet18"}, False),
        ({"stem": "cifar"}, False),
        ({"image_size": 64}, True),  # too small to be cropped
    ],
)
def test_a_network_that_is_given_is_learned_by_ranger_as_it_is(on, photographs, options, quick_parts):
    settled = on(CPU, dataset_path=photographs(1_200), **{"image_size": 96, **options})
    assert settled.config.learning.optimizer == "radam"
    assert (settled.config.model.activation == "mish") == quick_parts
    assert settled.config.data.crop_area == (None if "image_size" in options else (0.35, 1.0))


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.05},
        {"optimizer": "adamw"},
        {"lr_schedule": "stepped", "lr_schedule_params": {"boundaries": [1], "values": [0.1, 0.01]}},
        {"weight_decay": 1e-4},
        {"model_name": "efficientnet_b0"},
        {"model_name": "cifar_resnet20"},
        {"few": True},
    ],
)
def test_whoever_says_how_to_learn_photographs_is_left_alone(on, photographs, options):
    few = options.pop("few", False)
    settled = on(CPU, dataset_path=photographs(400 if few else 1_200), image_size=96, **options)
    assert settled.config.learning.optimizer == options.get("optimizer", "sgd")
    assert (settled.config.learning.lookahead, settled.config.model.activation) == (0, None)
    assert settled.config.data.crop_area is None


def test_few_epochs_of_photographs_get_small_batches():
    assert [choose_short_batch(128, 9_469, epochs) for epochs in (1, 5, 9)] == [32, 64, 128]
    assert choose_short_batch(16, 245, 2) == 16, "never fewer than 32"
    assert [choose_ranger_rate(batch) for batch in (16, 64, 1024)] == [0.004, 0.008, 0.008]
    assert [choose_muon_rate(batch) for batch in (16, 64)] == [0.012, 0.025]


def test_a_run_that_only_validates_gets_a_batch(on):
    found = on(GPU, None, training=False)
    assert found.notes == ("chosen: batch size 32",)
    assert found.config.numerics.precision == "32.32"


def test_a_resumed_run_has_what_was_chosen(tmp_path):
    options = {
        "model_name": "toy_model_bn",
        "weight_updates_per_epoch": 2,
        "log_dir": str(tmp_path),
        "progress": "none",
    }
    first = train(resolve(options | {"num_epochs": 1}, environ={}))
    saved = json.loads((first.directory / "config.json").read_text())
    assert saved["source"]["learning_rate"]["value"] == 0.021
    assert "learning_rate" not in saved["values"], "which the mapping has"
    assert saved["origins"]["batch_size"] == {"kind": "chosen", "where": "for 1,437 images"}
    second = resume(first.directory, {"num_epochs": 2})
    assert second.step == 4
    values = json.loads((first.directory / "config.json").read_text())["values"]
    assert (values["batch_size"], values["lr_schedule_params"]) == (32, {"absolute_learning_rate": 0.021})


def test_the_plan_says_it(capsys):
    assert main(["plan", "--config", "none"]) == 0
    assert "note: chosen: batch size 32 (1,437 images), SGD with momentum 0.9" in capsys.readouterr().err


@pytest.mark.reference
def test_a_seed_is_drawn_and_a_path_gets_the_time_once():
    asked = resolve({"application": "tf2", "generated_data": True}, environ={})
    first, second = settle(asked), settle(asked)
    assert first.config.run.seed != second.config.run.seed
    assert 0 <= first.config.run.seed < 2**32
    place = first.config.checkpoint.checkpoint_dir
    assert re.fullmatch(r"/tmp/checkpoints_\d\d_\d\d_\d{4}_\d\d_\d\d_\d\d_\d{6}", place or "")
    kept = settle(from_saved(json.loads(json.dumps(to_saved(first)))))  # as a resumed run does
    assert (kept.config.run.seed, kept.config.checkpoint.checkpoint_dir) == (first.config.run.seed, place)
