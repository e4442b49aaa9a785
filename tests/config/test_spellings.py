"""Second names of options: what they say of each curve, norm and recipe, and what wins over what."""

import json

import pytest

from headrace.config.field import DEFAULT
from headrace.config.load import Resolved, config_from, from_saved, override, resolve, resolve_code, to_saved
from headrace.config.schema import all_options, config_options
from headrace.config.spellings import SPELLINGS, shown
from headrace.core.errors import ConfigError
from headrace.engine.lr_curve import make_lr_curve

CURVES = {
    "const": {},
    "cosine": {"epochs_to_total_decay": 5},
    "stepped": {"boundaries": [1, 2], "values": [3.0, 6.0, 1.5]},
    "drops": {"drops": [0.5], "factor": 0.5},
    "polynomial": {"end_learning_rate_ratio": 0.1, "power": 2},
    "exponential": {},
}


def rates(config, batch: int = 8) -> list[float]:
    """Return the learning rate of every step of ten epochs of ten steps."""
    curve = make_lr_curve(config.learning, global_batch_size=batch, updates_per_epoch=10, num_epochs=10)
    return [float(curve(step)) for step in range(100)]


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("rate", [{}, {"initial_learning_rate": 0.01}, {"absolute_learning_rate": 7.0}])
def test_it_is_the_peak_of_every_curve_whatever_the_recipe_says(name, rate, tmp_path):
    params = CURVES[name] if name == "stepped" else CURVES[name] | rate
    file = tmp_path / "mine.yml"
    file.write_text(json.dumps({"one": {"lr_schedule": name, "lr_schedule_params": params}}))
    resolved = resolve({"learning_rate": "0.25"}, "one", str(file), environ={})
    assert max(rates(resolved.config)) == pytest.approx(0.25, rel=1e-6)
    assert str(resolved.origin("learning_rate")) == "command line"
    assert str(resolved.origins["lr_schedule_params"]).endswith("mine.yml:1, with learning_rate")
    warmed = resolve({"lr": "0.25", "warmup_epochs": "2"}, "one", str(file), environ={}).config
    assert warmed.learning.lr_warmup_params == {"warmup_mode": "shift", "warmup_epochs": 2.0}
    assert rates(warmed)[0] < 0.05
    assert max(rates(warmed)) == pytest.approx(0.25, rel=1e-6)


def test_the_steps_of_a_stepped_curve_keep_their_proportions():
    config = config_from({"lr_schedule": "stepped", "lr_schedule_params": CURVES["stepped"], "momentum": 0.5})
    assert config.learning.lr_schedule_params["values"] == [3.0, 6.0, 1.5]
    with pytest.raises(ConfigError, match=r"Both are given: learning_rate 0\.1 "):
        config_from({"lr_schedule": "stepped", "lr_schedule_params": CURVES["stepped"], "learning_rate": 0.1})
    saved = resolve({"lr_schedule": "stepped", "lr_schedule_params": CURVES["stepped"]}, "none", environ={})
    assert override(saved, {"lr": "0.1"}, {}).config.learning.lr_schedule_params["values"] == pytest.approx(
        [0.05, 0.1, 0.025]
    )


def test_the_same_names_in_code_in_files_and_on_the_command_line(tmp_path):
    given = {"learning_rate": 0.1, "momentum": 0.9, "warmup_epochs": 3}
    file = tmp_path / "mine.yml"
    file.write_text(json.dumps({"one": given}))
    code = config_from(given).learning
    assert resolve({}, "one", str(file), environ={}).config.learning == code
    typed = {name: str(value) for name, value in given.items()}
    assert resolve(typed, "none", environ={}).config.learning == code
    assert code.lr_schedule_params == {"absolute_learning_rate": 0.1}
    assert code.optimizer_params == {"momentum": 0.9}
    assert code.lr_warmup_params == {"warmup_mode": "shift", "warmup_epochs": 3.0}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"learning_rate": "0.1", "lr_schedule_params": '{"absolute_learning_rate": 0.2}'},
            ["learning_rate 0.1 (command line)", "absolute_learning_rate 0.2"],
        ),
        (
            {"learning_rate": "0.1", "lr_schedule_params": '{"initial_learning_rate": 0.1}'},
            ["learning_rate 0.1 (command line)", "initial_learning_rate 0.1"],
        ),
        ({"momentum": "0.9", "optimizer_params": '{"momentum": 0.5}'}, ["momentum 0.9", "momentum 0.5"]),
        (
            {"warmup_epochs": "1", "lr_warmup_params": '{"warmup_mode": "mask", "warmup_epochs": 2}'},
            ["warmup_epochs 1", "warmup_epochs 2"],
        ),
        ({"momentum": "0.9", "optimizer": "adamw"}, ["momentum 0.9 with optimizer adamw", "beta1"]),
    ],
)
def test_two_values_of_one_source_are_refused(options, parts):
    with pytest.raises(ConfigError) as caught:
        resolve(options, environ={})
    for part in parts:
        assert part in caught.value.problem + caught.value.rule
    assert caught.value.rule
    assert caught.value.remedy


def test_the_same_value_twice_is_accepted():
    options = {"learning_rate": "0.1", "lr_schedule_params": '{"absolute_learning_rate": 0.1}'}
    assert resolve(options, environ={}).config.learning.lr_schedule_params == {"absolute_learning_rate": 0.1}


def test_the_stronger_source_wins(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("one:\n  learning_rate: 0.1\n  momentum: 0.9\ntwo:\n  optimizer_params: {momentum: 0.9}\n")

    def learn(name: str, **options: str) -> Resolved:
        return resolve(options, name, str(file), environ={})

    assert learn("one", learning_rate="0.2").config.learning.lr_schedule_params == {"absolute_learning_rate": 0.2}
    mapping = learn("one", lr_schedule_params='{"absolute_learning_rate": 0.3}')
    assert "learning_rate" not in mapping.source
    assert mapping.config.learning.lr_schedule_params == {"absolute_learning_rate": 0.3}
    assert any("learning_rate 0.1 (file" in note for note in mapping.notes)
    assert learn("two", momentum="0.5").config.learning.optimizer_params == {"momentum": 0.5}
    adamw = learn("one", optimizer="adamw")
    assert "momentum" not in adamw.source
    assert any("momentum 0.9 (file" in note for note in adamw.notes)


def test_a_block_overrides_what_it_merges_in(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(
        "base: &base\n  learning_rate: 0.1\n  lr_schedule: cosine\n"
        "mapping:\n  <<: *base\n  lr_schedule_params: {absolute_learning_rate: 0.2}\n"
        "rate:\n  <<: *base\n  learning_rate: 0.3\n"
    )
    found = {name: resolve({}, name, str(file), environ={}).config.learning for name in ("base", "mapping", "rate")}
    peaks = {name: learning.lr_schedule_params["absolute_learning_rate"] for name, learning in found.items()}
    assert peaks == {"base": 0.1, "mapping": 0.2, "rate": 0.3}


def test_no_warm_up():
    name = "cifar10_resnet8_cpu"
    assert resolve({}, name, environ={}).config.learning.lr_warmup_params is not None
    assert resolve({"warmup_epochs": "0"}, name, environ={}).config.learning.lr_warmup_params is None


def test_a_saved_run_comes_back_and_may_be_changed():
    resolved = resolve({"learning_rate": "0.1", "momentum": "0.5"}, environ={})
    assert resolved.config.learning.optimizer_params == {"momentum": 0.5, "nesterov": True}
    saved = from_saved(json.loads(json.dumps(to_saved(resolved))))
    assert override(saved, {}, {}).config == saved.config == resolved.config
    assert override(saved, {}, {}).origins == resolved.origins
    changed = override(saved, {"learning_rate": "0.2"}, {}).config.learning
    assert changed.lr_schedule_params == {"absolute_learning_rate": 0.2}
    mapping = override(saved, {"lr_schedule_params": '{"initial_learning_rate": 0.01}'}, {})
    assert mapping.source.keys() == {"momentum"}
    assert mapping.config.learning.lr_schedule_params == {"initial_learning_rate": 0.01}


@pytest.mark.reference
def test_a_recipe_of_the_reference_takes_it_too():
    for name in ("mk2_resnet50_bn_16ipus", "efficientnet_b4_g16_large_batch_size_high_throughput"):
        config = resolve({"learning_rate": "3"}, name, environ={"DATA_DIR": "x"}).config
        assert config.learning.lr_schedule_params["absolute_learning_rate"] == 3
        assert "initial_learning_rate" not in config.learning.lr_schedule_params
    with pytest.raises(ConfigError, match=r"Both are given: learning_rate 3.* and abs_learning_rate 2"):
        resolve({"application": "tf1", "dataset": "cifar10", "learning_rate": "3", "abs_learning_rate": "2"})


@pytest.mark.parametrize(("word", "platform"), [("cpu", "cpu"), ("gpu", "cuda"), ("TPU", "tpu"), ("rocm", "rocm")])
def test_the_device(word, platform):
    assert resolve({"device": word}, environ={}).config.run.platform == platform


def test_a_second_name_is_no_field_of_the_configuration():
    assert not SPELLINGS.keys() & config_options().keys()
    names = list(all_options())
    for row in SPELLINGS.values():
        assert all_options()[row.of[0]].section == row.option.section
        assert names.index(row.of[0]) < names.index(row.name), "help lists it behind the option that it says"


def test_what_says_all_of_an_option_is_that_option_in_every_source(tmp_path):
    file = tmp_path / "mine.yml"
    given = {"groups": 4, "normalise_input": True, "output": "a/b"}
    file.write_text(json.dumps({"one": given}))
    for resolved in (
        resolve({}, "one", str(file), environ={}),
        resolve({name: str(value) for name, value in given.items()}, "none", environ={}),
        resolve_code(given),
    ):
        config = resolved.config
        assert config.model.norm_layer == {"name": "group_norm", "num_groups": 4}
        logging = resolved.config.logging
        assert (config.data.normalization, logging.log_dir, logging.run_name) == ("per-channel", "a", "b")
        assert resolved.source == {}
        assert resolved.origins["norm_layer"] == resolved.origins["run_name"] != DEFAULT


@pytest.mark.parametrize(
    ("weaker", "stronger", "norm"),
    [
        ("group_norm: true", {"batch_norm": "true"}, {"name": "batch_norm"}),
        ("group_norm: true", {"no_group_norm": "true"}, {"name": "batch_norm"}),
        ("groups: 4", {"norm_layer": "name=layer_norm"}, {"name": "layer_norm"}),
        ("groups: 4", {"group_norm": "true"}, {"name": "group_norm"}),
        ("norm_layer: {name: layer_norm}", {"groups": "8"}, {"name": "group_norm", "num_groups": 8}),
        ("groups: 4\n  group_norm: true", {}, {"name": "group_norm", "num_groups": 4}),
    ],
)
def test_the_stronger_source_says_the_norm_whatever_its_words(weaker, stronger, norm, tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(f"one:\n  {weaker}\n")
    assert resolve(stronger, "one", str(file), environ={}).config.model.norm_layer == norm


def test_a_run_of_an_earlier_version_had_second_names_among_its_options():
    saved = to_saved(resolve({"dataset": "cifar10", "lr_schedule": "cosine"}, "none", environ={}))
    said = {"kind": "command line", "where": ""}
    saved["values"] |= {
        "learning_rate": 0.1,
        "lr_schedule_params": {"absolute_learning_rate": 0.1},
        "momentum": None,
        "group_norm": True,
        "groups": None,
        "batch_norm": False,
        "normalise_input": False,
        "output": None,
        "model_name": "cifar_resnet20",
        "model_size": "20",
    }
    saved["origins"] |= dict.fromkeys(("learning_rate", "group_norm", "normalise_input", "model_size"), said)
    saved["origins"]["lr_schedule_params"] = {"kind": "default", "where": "with learning_rate"}
    run = from_saved(json.loads(json.dumps(saved)))
    assert (run.config.model.norm_layer, run.config.data.normalization) == ({"name": "group_norm"}, "centred")
    assert run.config.learning.lr_schedule_params == {"absolute_learning_rate": 0.1}
    assert {name: given.value for name, given in run.source.items()} == {"learning_rate": 0.1}
    more = override(run, {"epochs": "3"}, {})
    assert (more.config.model, more.config.learning, more.config.data) == (
        run.config.model,
        run.config.learning,
        run.config.data,
    )
    stepped = '{"boundaries": [1], "values": [1, 0.1]}'
    other = override(run, {"lr_schedule": "stepped", "lr_schedule_params": stepped}, {})
    assert other.config.learning.lr_schedule_params["values"] == [1, 0.1]
    assert shown(saved["values"])["norm_layer"] == {"name": "group_norm"}
    assert shown(saved["values"])["learning_rate"] == 0.1
    assert "group_norm" not in shown(saved["values"])


def test_writing_a_rate_again_changes_no_bit_of_a_stepped_curve():
    params = '{"boundaries": [1, 2], "values": [0.3, 0.7, 0.1]}'
    saved = resolve({"lr_schedule": "stepped", "lr_schedule_params": params}, "none", environ={})
    for rate in ("0.11", "0.3", "0.013"):
        once = override(saved, {"lr": rate}, {})
        assert override(once, {"epochs": "9"}, {}).config.learning == once.config.learning


def test_people_see_the_parts_of_any_mapping():
    assert shown({"optimizer_params": {"momentum": 0.9}, "lr_schedule_params": {"values": [1, 3]}}) == {
        "optimizer_params": {"momentum": 0.9},
        "lr_schedule_params": {"values": [1, 3]},
        "learning_rate": 3,
        "momentum": 0.9,
        "warmup_epochs": None,
    }
