"""The reference's two applications: their option names, meanings and defaults, by the numbers of their formulas."""

import json
import math
import shlex
from typing import Any

import pytest

from headrace.config.command_line import build_parser, take_options
from headrace.config.field import COMMAND_LINE
from headrace.config.layers import Given
from headrace.config.load import Resolved, from_saved, override, resolve, to_saved
from headrace.config.params import complete
from headrace.config.schema import all_options
from headrace.config.section_model import norm_choice
from headrace.config.translations import known_options
from headrace.core.errors import ConfigError
from headrace_reference.applications import detect_application, with_application
from headrace_reference.tables import BY_OPTION
from headrace_reference.translate import OTHERWISE_IN_TF1, THEIRS

IMAGENET = "--dataset imagenet --data-dir /data/imagenet-data"
RESNEXT = f"""--application tf1 --model resnext --model-size 101 {IMAGENET} --shards 2 --replicas 8 --batch-size 6
    --gradient-accumulation-count 16 --epoch 120 --pipeline --pipeline-splits b3/3/relu --pipeline-schedule Grouped
    --enable-recomputation --optimiser momentum --momentum 0.9 --ckpts-per-epoch 1 --no-validation
    --internal-exchange-optimisation-target balanced --disable-variable-offloading --normalise-input --stable-norm
    --base-learning-rate -11 --enable-half-partials --lr-schedule cosine --label-smoothing 0.1 --eight-bit-io"""


def read(line: str, config: str | None = None) -> Resolved:
    """Read a command line as the commands do."""
    options, left = take_options(shlex.split(line), build_parser("test"), known_options())
    assert not left, left
    return resolve(options, config, environ={})


def refused(line: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(line)
    return caught.value


def peak(resolved: Resolved) -> float:
    batch, params = resolved.config.batch, resolved.config.learning.lr_schedule_params
    if "absolute_learning_rate" in params:
        return params["absolute_learning_rate"]
    assert batch.micro_batch_size is not None
    assert batch.num_replicas is not None
    images = batch.micro_batch_size * batch.num_replicas * (batch.gradient_accumulation_count or 1)
    return params["initial_learning_rate"] * images


def test_a_command_of_the_first_application():
    resolved = read(RESNEXT)
    config, learning = resolved.config, resolved.config.learning
    application = resolved.source["application"]
    assert application.value == "tf1"
    assert str(application.origin) == "command line"
    assert peak(resolved) == 2.0**-11 * 768
    assert (learning.optimizer, learning.optimizer_params) == ("momentum", {"momentum": 0.9})
    assert learning.lr_warmup_params == {"warmup_mode": "mask", "warmup_epochs": 5.0, "from_zero": True}
    assert (learning.l2_regularization, learning.weight_decay) == (1e-4, 0.0)
    assert learning.weight_decay_exclude == ("(beta|gamma)$",)
    assert learning.label_smoothing_classes == "others"
    assert (config.numerics.precision, config.numerics.loss_scaling) == ("16.16", 128.0)
    assert norm_choice(config.model) == {"name": "group_norm", "num_groups": 32}
    assert config.pipeline.pipeline_schedule == "Grouped"
    assert config.pipeline.num_stages == 2
    assert config.compiler.half_partials
    assert config.compiler.internal_exchange_optimization_target == "balanced"
    assert (config.batch.num_epochs, config.validation.validation) == (120, False)


# CIFAR ResNet-20, micro batch 32, exponent -6: first rate 0.5; ResNeXt with 8: 0.125 (anchors of the reference's tests)
@pytest.mark.parametrize(
    ("line", "rate"),
    [
        ("--dataset cifar-10", 0.5),
        ("--dataset cifar-10 --model resnext", 0.125),
        (f"{IMAGENET}", 2.0**-8 * 4),
        (f"{IMAGENET} --optimiser momentum", 2.0**-11 * 4),
        (f"{IMAGENET} --optimiser momentum --batch-size 8 --replicas 16 --gradient-accumulation-count 8", 0.5),
        (
            f"{IMAGENET} --model efficientnet --optimiser RMSprop --batch-size 3 --gradient-accumulation-count 256",
            768 / 2**14,
        ),
        ("--dataset cifar-10 --batch-size 16 --base-learning-rate -4", 1.0),
        ("--dataset cifar-10 --abs-learning-rate 4.588 --replicas 16 --batch-size 16", 4.588),
    ],
)
def test_the_first_rate(line, rate):
    assert peak(read(f"--application tf1 {line}")) == pytest.approx(rate, rel=1e-12)


def test_rates_of_each_curve():
    line = f"--application tf1 {IMAGENET} --epochs 350"
    assert read(line).config.learning.lr_schedule_params == {
        "initial_learning_rate": 2.0**-8,
        "drops": (0.3, 0.6, 0.8, 0.9),
        "factor": 0.1,
    }
    stepped = read(f"{line} --lr-schedule stepped --learning-rate-schedule 0.5,0.75 --learning-rate-decay 0.2").config
    assert stepped.learning.lr_schedule == "drops"
    assert stepped.learning.lr_schedule_params["drops"] == (0.5, 0.75)
    assert stepped.learning.lr_schedule_params["factor"] == 0.2
    exponential = read(f"{line} --lr-schedule exponential").config.learning.lr_schedule_params
    assert exponential["decay_rate"] == 0.97
    assert exponential["epochs_per_drop"] == pytest.approx(350 / 146)
    polynomial = read(
        f"{line} --lr-schedule polynomial_decay_lr --abs-learning-rate 4.588 --abs-end-learning-rate 1e-4"
    )
    learning = polynomial.config.learning
    assert learning.lr_schedule == "polynomial"
    assert learning.lr_schedule_params["end_learning_rate_ratio"] == pytest.approx(1e-4 / 4.588)
    assert learning.lr_schedule_params["power"] == 2
    assert learning.lr_warmup_params is not None
    assert learning.lr_warmup_params["warmup_mode"] == "shift"
    assert read(f"{line} --warmup-epochs 0").config.learning.lr_warmup_params is None


def test_the_optimizers():
    line = f"--application tf1 --model efficientnet {IMAGENET}"
    assert read(line).config.learning.optimizer_params == {"momentum": 0}
    assert (
        read(f"{line} --optimiser SGD --momentum 0.5").notes[0].startswith("momentum 0.5 (command line) has no effect")
    )
    rmsprop = read(f"{line} --optimiser RMSprop").config.learning
    assert rmsprop.optimizer_params == {
        "momentum": 0.9,
        "epsilon": 1e-3,
        "initial_accumulator": 1.0,
        "base_decay_exponent": -14.0,
    }
    decay = read(f"{line} --optimiser RMSprop --rmsprop-decay 0.95").config.learning.optimizer_params
    assert decay["decay"] == 0.95
    assert "base_decay_exponent" not in decay
    lars = read(f"{line} --optimiser LARS --lars-weight-decay 2.5e-6 --momentum 0.885").config.learning
    assert lars.l2_regularization == 0
    assert lars.optimizer_params == {"momentum": 0.885, "weight_decay": 2.5e-6, "eeta": 0.001, "epsilon": 0.0}


def test_weight_decay_means_two_things():
    first = read("--application tf1 --dataset cifar-10 --weight-decay 0.01").config.learning
    assert (first.l2_regularization, first.weight_decay) == (0.01, 0.0)
    assert first.weight_decay_exclude == ()  # CIFAR decays the parameters of norms, too
    off = read("--application tf1 --dataset cifar-10 --weight-decay 0").config.learning
    assert (off.l2_regularization, off.weight_decay) == (0.0, 0.0)
    second = read("--application tf2 --weight-decay 0.01").config.learning
    assert (second.l2_regularization, second.weight_decay) == (0.0, 0.01)


def test_the_second_application_has_its_own_defaults():
    config = read("--application tf2").config
    assert (config.model.model_name, config.data.dataset) == ("toy_model", "cifar10")
    assert (config.numerics.precision, config.pipeline.pipeline_schedule) == ("16.16", "Grouped")
    assert (config.numerics.loss_scaling, config.learning.lr_warmup_params) == (0.0, None)
    assert config.learning.lr_schedule_params == {"initial_learning_rate": 0.0001}
    assert read("--application tf1 --dataset cifar-10").config.pipeline.pipeline_schedule == "Grouped"


def test_events_divide_an_epoch_in_the_second_application_alone(tmp_path):
    assert read("--application tf2").config.batch.events_divide_epoch
    assert not read("--application tf1 --dataset cifar-10").config.batch.events_divide_epoch
    assert not read("--num-epochs 5 --logs-per-epoch 0.5").config.batch.events_divide_epoch
    path = tmp_path / "mine.yml"
    path.write_text("a: {dialect: tf2, validations_per_epoch: 1/10, ckpts_per_epoch: 1/5, num_epochs: 20}\n")
    shorter = resolve({"num-epochs": "15"}, "a", str(path), environ={})
    assert (shorter.config.batch.validations_per_epoch, shorter.config.batch.ckpts_per_epoch) == (None, 1 / 5)
    assert "validations_per_epoch 0.1" in shorter.notes[0]
    free = resolve({"num-epochs": "15", "no-events-divide-epoch": "true"}, "a", str(path), environ={})
    assert free.config.batch.validations_per_epoch == 0.1


def test_without_names_of_the_reference_nothing_changes():
    resolved = read("--batch-size 16 --epochs 2 --optimiser adamw")
    assert resolved.source == {}
    assert resolved.config.data.dataset == "digits"
    momentum = read("--momentum 0.5")
    assert momentum.source == {"momentum": Given(value=0.5, origin=COMMAND_LINE)}, "as it was said"
    assert momentum.config.learning.optimizer_params == {"momentum": 0.5, "nesterov": True}


@pytest.mark.parametrize(
    ("line", "dataset", "family", "norm"),
    [
        ("--data-dir /sets/imagenet-data", "imagenet", "resnet18", True),
        ("--data-dir /sets/cifar-100-binary", "cifar100", "cifar_resnet20", False),
        ("--data-dir /sets/cifar-10-batches-bin", "cifar10", "cifar_resnet20", False),
        ("--data-dir /sets/cifar-10-batches-bin --model efficientnet", "cifar10", "efficientnet_cifar", True),
        ("--data-dir /sets/mine", "auto", "resnet18", True),
    ],
)
def test_the_data_set_and_the_norm_follow_from_the_place(line, dataset, family, norm):
    config = read(f"--application tf1 {line}").config
    grouped = norm_choice(config.model)["name"] == "group_norm"
    assert (config.data.dataset, config.model.model_name, grouped) == (dataset, family, norm)
    for words in ("--batch-norm", "--no-group-norm"):
        chosen = read(f"--application tf1 {line} {words}").config.model
        assert norm_choice(chosen) == {"name": "batch_norm"}


def test_shards():
    automatic = read(f"--application tf1 {IMAGENET} --shards 4").config
    assert (automatic.pipeline.num_stages, automatic.pipeline.pipeline_schedule) == (4, "Sequential")
    line = (
        f"--application tf1 {IMAGENET} --pipeline --shards 1 --enable-recompute --pipeline-splits b1/2/relu b3/0/relu"
    )
    one = read(f"{line} --pipeline-schedule Sequential").config.pipeline
    assert (one.device_mapping, one.pipeline_schedule, one.one_program) == ((0, 0, 0), "Sequential", True)
    recipe = read("--shards 1", "mk2_resnet50_bn_16ipus").config.pipeline  # as it is validated
    assert (recipe.device_mapping, recipe.one_program) == ((0, 0, 0, 0), True)


def test_images_normalised_on_the_host_are_not_sent_as_bytes():
    """The first application switches eight_bit_io off there; ours refuses the pair."""
    config = read("--application tf1 --dataset cifar-10 --hostside-norm --eight-bit-io").config
    assert (config.data.accelerator_side_preprocess, config.data.eight_bit_transfer) == (False, None)
    assert "8 bits" in str(refused("--accelerator-side-preprocess off --eight-bit-io"))


def test_iterations_are_one_epoch_without_warm_up():
    config = read("--application tf1 --dataset cifar-10 --iterations 1000").config
    assert (config.batch.weight_updates_per_epoch, config.batch.num_epochs) == (1000, 1)
    assert config.batch.logs_per_epoch == 2.0
    assert config.learning.lr_warmup_params is None


def test_other_conversions():
    config = read("--hostside-norm --disable-variable-offloading --epochs-per-ckpt 4 --epochs 8 --gc-profile").config
    assert config.data.accelerator_side_preprocess is False
    assert config.pipeline.optimizer_state_offloading is False
    assert config.batch.ckpts_per_epoch == 0.25
    assert config.run.profile
    assert not config.pipeline.trace_schedule
    assert read("--gc-profile TILE_PROFILE --num-pipeline-stages 2").config.pipeline.trace_schedule
    assert read("--no-hostside-norm").config.data.accelerator_side_preprocess is True
    assert read("--gc-profile NO_PROFILE").config.run.profile is False
    assert read("--batches-per-step 10").config.batch.max_steps_per_call == 10
    assert read("--weight-avg-exp 0.97 0.99 --weight-avg-N 5").config.checkpoint.max_ckpts_to_keep == 1_000_000
    for word, on in (("True", True), ("OFF", False), ("RI", True), ("ON_prng_stable", True), ("RI_prng_stable", True)):
        assert read(f"--stochastic-rounding {word}").config.numerics.stochastic_rounding is on
    assert read("--no-stochastic-rounding").config.numerics.stochastic_rounding is False
    assert read("--dataset gc-imagenet --dataset-path x").config.data.dataset == "imagenet"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            """--application tf1 --base-learning-rate -11 --lr-schedule-params '{"initial_learning_rate": 1}'""",
            ["two applications are mixed", "base_learning_rate -11 (command line)", "lr_schedule_params"],
        ),
        (
            """--warmup-epochs 3 --lr-warmup-params '{"warmup_mode": "mask", "warmup_epochs": 2}'""",
            ["Both are given", "warmup_epochs 3", "lr_warmup_params"],
        ),
        (
            "--base-learning-rate -11 --application tf2",
            ["base_learning_rate -11", "application tf2", "of application tf1 only"],
        ),
        ("--shards 2 --application headrace", ["shards 2", "application headrace"]),
        (
            "--application tf1 --shards 2 --num-pipeline-stages 3",
            ["two applications", "shards 2", "num_pipeline_stages 3"],
        ),
        ("--application tf1 --weight-decay 1e-4 --l2-regularization 1e-4", ["weight_decay", "l2_regularization"]),
        ("--momentum 0.9 --optimizer-params '{\"momentum\": 0.5}'", ["momentum 0.9", "optimizer_params"]),
        (
            "--application tf1 --base-learning-rate -8 --abs-learning-rate 1",
            ["Both", "base_learning_rate", "abs_learning_rate"],
        ),
        ("--iterations 10 --epochs 2", ["Both", "iterations 10", "num_epochs 2"]),
        ("--epochs-per-ckpt 2 --ckpts-per-epoch 1", ["Both", "epochs_per_ckpt", "ckpts_per_epoch"]),
    ],
)
def test_mixing_applications_names_the_two_options(line, parts):
    error = refused(line)
    for part in parts:
        assert part in str(error)
    assert error.rule
    assert error.remedy


def test_a_recipe_of_one_application_and_a_name_of_the_other():
    with pytest.raises(ConfigError, match=r"base_learning_rate -9 \(command line\) and lr_schedule_params .*\(recipe"):
        read("--application tf1 --base-learning-rate -9", "cifar10_resnet20")
    with pytest.raises(
        ConfigError, match=r"base_learning_rate -9 \(command line\) is an option of the reference's first"
    ):
        read("--base-learning-rate -9", "cifar10_resnet20")


@pytest.mark.parametrize("row", [row for row in BY_OPTION.values() if row.tf1_only], ids=lambda row: row.option)
def test_an_option_of_the_first_application_never_changes_the_recipe_by_its_name(row):
    value = "" if row.option == "pipeline" else "0.5,0.75" if row.option == "learning_rate_schedule" else "2"
    error = refused(f"--{row.option} {value}")
    assert error.problem.startswith(f"{row.option} ")
    assert "reference's first application only" in error.problem
    assert "train.py" in error.remedy
    assert "--application tf1" in error.remedy
    assert read("--warmup-epochs 1 --momentum 0.5").config.data.dataset == "digits"


def test_saved_configurations_come_back_and_may_be_changed():
    resolved = read(RESNEXT)
    saved = from_saved(json.loads(json.dumps(to_saved(resolved))))
    assert (saved.config, saved.source) == (resolved.config, resolved.source)
    changed = override(saved, {"replicas": "4", "base_learning_rate": "-10"})
    assert changed.config.learning.lr_schedule_params == {"initial_learning_rate": 2.0**-10}
    assert peak(changed) == 2.0**-10 * 384
    assert changed.source["application"].value == "tf1"
    again = override(saved, {})
    assert again.config == resolved.config
    assert again.config.learning.weight_decay == 0


def test_every_option_has_a_row_and_every_row_a_reason():
    assert {*BY_OPTION, "application"} == {*THEIRS, *OTHERWISE_IN_TF1}
    for row in BY_OPTION.values():
        assert row.convert or row.description or row.no_effect, row.option
        for setting in row.sets:
            assert setting.partition(".")[0] in all_options()


@pytest.mark.parametrize(
    ("line", "application"),
    [
        ("", "tf2"),
        ("--model cifar_resnet8 --num-epochs 6 --gradient-accumulation 8 --validation False", "tf2"),
        ("--config_path x --accelerator-side-preprocess True --eight-bit-transfer True", "tf2"),
        ("--dataset imagenet --data-dir x", "tf1"),
        ("--model resnet --model-size 50 --batch-size 1 --synthetic-data --repeat 10", "tf1"),
        ("--model=efficientnet --batch-size=5", "tf1"),
        ("--epoch 2", "tf1"),
        ("--pipeline-splits a", "tf2"),
        ("--pipeline", "tf1"),
    ],
)
def test_the_names_of_a_command_line_tell_its_application(line, application):
    assert detect_application(line.split()) == application
    assert with_application(line.split())[-2:] == ["--application", application]


def test_a_named_configuration_or_the_option_says_the_application():
    for line in ("--config x --batch-size 3", "--batch-size 3 --dialect=tf2", "--application tf1"):
        assert with_application(line.split()) == line.split()


def label_targets(smoothing: float, num_classes: int) -> tuple[float, float]:
    from headrace.run.training import smoothing_over_all

    learning: Any = read(f"--application tf1 --dataset cifar-10 --label-smoothing {smoothing}").config.learning
    spread = smoothing_over_all(learning, num_classes)
    return 1 - spread + spread / num_classes, spread / num_classes


def test_label_smoothing_of_the_first_application():
    own, other = label_targets(0.1, 10)
    assert math.isclose(own, 0.9)
    assert math.isclose(other, 0.1 / 9)


def test_of_two_ways_to_say_one_thing_the_stronger_source_counts(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(
        "one:\n  dialect: tf1\n  dataset: cifar-10\n  base_learning_rate: -6\n  epochs: 160\n  ckpts_per_epoch: 1\n"
    )

    def learn(**options: Any) -> Resolved:
        return resolve(options, "one", str(file), environ={})

    assert learn().config.learning.lr_schedule_params["initial_learning_rate"] == 2.0**-6
    absolute = learn(abs_learning_rate="0.3").config.learning.lr_schedule_params
    assert absolute["absolute_learning_rate"] == 0.3
    assert "initial_learning_rate" not in absolute
    assert learn(iterations="70").config.batch.weight_updates_per_epoch == 70
    assert learn(epochs_per_ckpt="4").config.batch.ckpts_per_epoch == 0.25


def test_the_cache_of_programs_from_the_environment():
    environ = {"TF_POPLAR_FLAGS": "--max_compilation_threads=40 --executable_cache_path=/scratch/cache"}
    resolved = resolve({}, environ=environ)
    assert resolved.config.run.compilation_cache_dir == "/scratch/cache"
    assert str(resolved.origins["compilation_cache_dir"]) == "environment $TF_POPLAR_FLAGS"
    said = resolve({"executable_cache_path": "/mine"}, environ=environ)
    assert said.config.run.compilation_cache_dir == "/mine"


def test_a_fraction_of_memory_becomes_a_percentage_once():
    resolved = read("--application tf1 --dataset cifar-10 --available-memory-proportion 0.15")
    assert resolved.config.compiler.available_memory_proportion == (15.0,)
    saved = from_saved(json.loads(json.dumps(to_saved(resolved))))
    assert override(saved, {}).config.compiler.available_memory_proportion == (15.0,)


def test_the_name_dialect_is_still_accepted():
    assert read("--dialect tf2").config == read("--application tf2").config
    assert read("--dialect tf2").source["application"].value == "tf2"


def test_runs_of_earlier_versions_can_be_read_and_changed():
    """They have the reference's options among the values, `dialect` as an option, and origins of that kind."""
    resolved = read(f"{RESNEXT} --select-ipus 3 --weight-avg-N 5 --available-memory-proportion 0.1 0.1 0.2 0.2")
    old = json.loads(json.dumps(to_saved(resolved)))
    source = old.pop("source")
    application = source.pop("application")
    old["values"]["dialect"] = application["value"]
    old["origins"]["dialect"] = {
        "kind": "dialect",
        "where": "of base_learning_rate -11 (command line)",
    }
    old["values"].pop("first_device")
    old["origins"].pop("first_device")
    old["values"] |= {"restore_path": None, "warmup_epochs": None, "conv_dithering": False}
    for new, name in (("average_last_epochs", "weight_avg_n"), ("average_decays", "weight_avg_exp")):
        old["values"][name] = old["values"].pop(new)
        if new in old["origins"]:
            old["origins"][name] = old["origins"].pop(new)
    for name, row in source.items():
        old["values"][name] = row.pop("value")
        old["origins"][name] = row
    for row in old["origins"].values():
        row["kind"] = "dialect" if row["kind"] == "translated" else row["kind"]
    read_back = override(from_saved(old), {}, environ={})
    assert read_back.config == resolved.config
    assert {**read_back.source, "application": None} == {**resolved.source, "application": None}
    assert read_back.source["application"].value == "tf1"
    assert read_back.config.run.first_device == 3
    assert read_back.config.checkpoint.average_last_epochs == (5.0,)
    assert read_back.config.compiler.available_memory_proportion == (10.0, 10.0, 20.0, 20.0)


@pytest.mark.parametrize(
    "line",
    [
        "--gather-conv-output",
        "--enable-conv-dithering",
        "--on-demand off",
        "--standard-imagenet",
        "--nanoo",
        "--num-io-tiles 32",
    ],
)
def test_an_option_without_effect_is_said_to_be(line):
    notes = [note for note in read(line).notes if note.startswith("without effect: ")]
    assert len(notes) == 1
    assert line.split()[0][2:].removeprefix("enable-").replace("-", "_") in notes[0]


def test_the_first_device():
    assert read("--select-ipus 3 0").config.run.first_device == 3
    assert read("--select-ipus AUTO").config.run.first_device is None


def test_options_without_effect_are_listed_with_their_reasons():
    notes = read("--standard-imagenet --on-demand --gather-conv-output").notes
    (text,) = [note for note in notes if note.startswith("without effect: ")]
    for option in ("standard_imagenet (", "on_demand (", "gather_conv_output ("):
        assert option in text
    assert not any("without effect" in note for note in read("--momentum 0.5").notes)


def test_the_choices_of_document_000_have_settings_that_work():
    """LARS and polynomial are named there without their settings; document 001 states those of its application."""
    lars = read("--application tf2 --optimizer lars").config.learning
    assert lars.optimizer_params == {"momentum": 0, "weight_decay": 0.0, "eeta": 0.001, "epsilon": 0.0}
    more = read("--application tf2 --optimizer lars --optimizer-params momentum=0.9,eeta=0.01").config.learning
    assert more.optimizer_params == {"momentum": 0.9, "weight_decay": 0.0, "eeta": 0.01, "epsilon": 0.0}
    curve = read("--application tf2 --lr-schedule polynomial").config.learning
    wanted = {"initial_learning_rate": 0.0001, "power": 2.0, "end_learning_rate_ratio": 1e-5}
    assert curve.lr_schedule_params == wanted
    assert complete("lr_schedule", "polynomial", curve.lr_schedule_params)["power"] == 2
    assert complete("optimizer", "lars", lars.optimizer_params)["eeta"] == 0.001
    saved = from_saved(json.loads(json.dumps(to_saved(read("--application tf2 --optimizer lars")))))
    assert override(saved, {"optimizer": "sgd"}).config.learning.optimizer_params == {"momentum": 0}
    with pytest.raises(ConfigError, match="lacks weight_decay"):  # ours says what it needs
        resolve({"optimizer": "lars"}, "none", environ={})


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("--no-hostside-norm", "hostside_norm off (command line) changes nothing"),
        ("--eight-bit-io", "eight_bit_transfer on (command line) changes nothing"),
        (
            "--pipeline-schedule Grouped",
            "pipeline_schedule Grouped (command line) has no effect without pipeline stages",
        ),
    ],
)
def test_what_changes_nothing_is_noted(line, note):
    first = "--application tf1 --dataset cifar-10"
    resolved = read(f"{first} {line}")
    on_device = [one.config.data.accelerator_side_preprocess for one in (resolved, read(first))]
    assert on_device == [True, True]
    assert any(text.startswith(note) for text in resolved.notes), resolved.notes
    acting = read(f"{first} --hostside-norm --eight-bit-io").notes
    assert not any("changes nothing" in text for text in acting)


def test_synthetic_images_of_the_second_application_may_be_made_by_the_cpu():
    assert read("--application tf2 --model cifar_resnet8 --synthetic-data cpu").config.data.synthetic_on == "host"
    assert read("--application tf2 --model cifar_resnet8 --synthetic-data ipu").config.data.synthetic_on == "device"
