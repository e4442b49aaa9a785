"""Layers, origins, saved configurations: who wins, what is recorded, what is let go."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.field import DEFAULT, Option, Origin
from headrace.config.load import config_from, from_saved, override, resolve, to_flat, to_saved
from headrace.config.schema import Config, config_options
from headrace.core.errors import ConfigError
from headrace.rows import values

FILE = """\
_base: &base
  batch-size: 8
  seed: 1
mine:
  <<: *base
  micro_batch_size: 16
  optimizer: sgd
  optimizer_params: {momentum: 0.9, nesterov: true}
  no-validation: true
  model: resnet18
  eight-bit: off
typo:
  micro_bach_size: 8
wrong:

  seed: yes please
twice:
  epochs: 8
  num-epochs: 8
keys:
  optimizer_params: {momentum: 0.9, nestrov: true}
cut:
  gradient: 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.yml"
    path.write_text(FILE)
    return str(path)


def test_without_a_name_the_default_recipe_applies():
    resolved = resolve({}, environ={})
    assert resolved.name == "default"
    assert resolved.config.data.dataset == "digits"
    assert resolved.config.model.model_name == "cifar_resnet8"
    assert resolved.config.batch.batch_size is None, "chosen for the dataset"
    assert resolved.origins["dataset"].kind == "recipe"
    assert resolved.origins["dataset"].where.startswith("default.yml:")
    assert resolved.origins["seed"] == DEFAULT


def test_none_means_the_defaults_of_the_schema():
    assert resolve({}, "none", environ={}).config == Config()


def test_a_file_and_the_command_line(file):
    resolved = resolve({"seed": "7", "no_shuffle": True}, "mine", file, environ={})
    config = resolved.config
    assert (config.run.seed, config.batch.micro_batch_size, config.model.model_name) == (7, 16, "resnet18")
    assert config.validation.validation is False
    assert config.data.shuffle is False
    assert config.data.eight_bit_transfer is False
    assert resolved.origins["seed"] == Origin(kind="command line")
    assert resolved.origins["micro_batch_size"] == Origin(kind="file", where=f"{file}:6")
    assert resolved.origins["validation"] == Origin(kind="file", where=f"{file}:9")
    assert config.data.dataset == "digits"
    assert resolved.origins["dataset"] == DEFAULT


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("typo", 13, ["there is no option micro_bach_size", "Did you mean micro_batch_size?"]),
        ("wrong", 16, ["seed is 'yes please': not a whole number", "all randomness"]),
        ("twice", 19, ["num-epochs is given twice", "mine.yml:18"]),
        ("keys", 21, ["'nestrov'", "Did you mean nesterov?"]),
        ("cut", 23, ["could be several options", "gradient_clipping"]),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_line(file, name, line, told):
    with pytest.raises(ConfigError) as caught:
        resolve({}, name, file, environ={})
    assert caught.value.problem.startswith(f"{file}:{line}: ")
    for part in told:
        assert part in str(caught.value)


def test_an_unknown_name_is_refused_with_the_nearest(file):
    with pytest.raises(ConfigError) as caught:
        resolve({}, "cifar10_resnet21", environ={})
    assert caught.value.remedy == "Did you mean cifar10_resnet20? `headrace configs` lists them."
    assert caught.value.rule == ""
    with pytest.raises(ConfigError) as caught:
        resolve({}, "zzz", file, environ={})
    assert "mine, typo" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        resolve({}, None, file, environ={})
    assert "--config NAME" in caught.value.remedy
    assert "mine, typo" in caught.value.rule
    assert "_base" not in caught.value.rule


def test_the_data_directory_may_come_from_the_environment():
    both = {"DATASETS_DIR": "/a", "DATA_DIR": "/b"}
    assert resolve({}, environ=both).config.data.dataset_path == "/a"
    second = resolve({}, environ={"DATASETS_DIR": "", "DATA_DIR": "/b"})
    assert second.config.data.dataset_path == "/b"
    assert second.origins["dataset_path"] == Origin(kind="environment", where="$DATA_DIR")
    given = resolve({"data-dir": "/c"}, environ=both)
    assert given.config.data.dataset_path == "/c"


def test_another_optimizer_keeps_the_settings_it_knows():
    resolved = resolve({"optimizer": "adamw"}, environ={})
    assert resolved.config.learning.optimizer_params == {}
    (note,) = resolved.notes
    assert "optimizer_params" in note
    assert "adamw (command line)" in note
    assert config_from({"optimizer": "adamw"}).learning.optimizer_params == {}
    with pytest.raises(ConfigError, match="found momentum"):
        resolve({"optimizer": "lars"}, environ={})


def test_another_curve_keeps_the_settings_it_knows(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text(
        "a: {lr_schedule: cosine, lr_schedule_params: {initial_learning_rate: 0.5, epochs_to_total_decay: 3}}\n"
    )
    resolved = resolve({"lr-schedule": "const"}, "a", str(path), environ={})
    assert resolved.config.learning.lr_schedule_params == {"initial_learning_rate": 0.5}
    assert resolved.origins["lr_schedule_params"].where == f"{path}:1"


@pytest.mark.reference
def test_a_stronger_layer_lets_go_of_what_does_not_fit():
    real = resolve({"dataset": "cifar10"}, "synthetic_resnet8", environ={})
    assert real.config.data.num_samples is None
    sized = resolve({"global-batch-size": "64"}, "resnet8_test", environ={})
    assert (sized.config.batch.global_batch_size, sized.config.batch.gradient_accumulation_count) == (64, None)
    host = config_from({"accelerator_side_preprocess": False})
    assert host.data.eight_bit_transfer is None


def test_the_batch_of_a_step_and_the_options_that_it_replaces():
    def batch(config: str, **options: str):
        resolved = resolve({name.replace("_", "-"): value for name, value in options.items()}, config, environ={})
        assert resolved.notes == ()
        wanted = resolved.config.batch
        return wanted.batch_size, wanted.micro_batch_size, wanted.global_batch_size

    assert batch("default", batch_size="64") == (64, None, None)
    assert batch("default", micro_batch_size="64") == (None, 64, None)
    assert batch("default", global_batch_size="64") == (None, None, 64)
    assert batch("imagenet_resnet50_one_gpu", batch_size="512") == (512, 256, None)  # 256 fit its memory
    with pytest.raises(ConfigError, match=r"Both are given: batch_size 8 .* and global_batch_size 16"):
        config_from({"batch_size": 8, "global_batch_size": 16})


def test_the_directory_of_a_run_in_one_option():
    logging = resolve({"output": "results/first"}, environ={}).config.logging
    assert (logging.log_dir, logging.run_name) == ("results", "first")
    with pytest.raises(ConfigError, match=r"Both are given: output a/b .* and run_name c"):
        resolve({"output": "a/b", "run-name": "c"}, environ={})
    with pytest.raises(ConfigError, match="must end in the name of a directory"):
        resolve({"output": ".."}, environ={})


def test_within_one_layer_nothing_is_let_go():
    with pytest.raises(ConfigError, match="Both are given"):
        config_from({"global_batch_size": 8, "gradient_accumulation_count": 2})
    with pytest.raises(ConfigError, match="nesterov"):
        config_from({"optimizer": "adamw", "optimizer_params": {"nesterov": True}})


def test_code_may_use_aliases_and_is_checked():
    assert config_from({"model": "toy_model", "epochs": 4}).batch.num_epochs == 4
    with pytest.raises(ConfigError, match="no option modl_name"):
        config_from({"modl_name": "x"})


def test_a_saved_run_reads_back_and_can_be_overridden():
    first = resolve({"num-epochs": "7", "optimizer": "adamw"}, "default", environ={"DATA_DIR": "/d"})
    saved = from_saved(json.loads(json.dumps(to_saved(first))))
    config = saved.config
    assert config == first.config
    assert saved.origins == first.origins
    again = override(saved, {"num_epochs": "9"})
    assert again.config == dataclasses.replace(config, batch=dataclasses.replace(config.batch, num_epochs=9))
    assert again.origins["num_epochs"] == Origin(kind="command line")
    assert again.origins["dataset"] == first.origins["dataset"]
    assert again.origins["seed"] == DEFAULT


def from_flat(flat: dict[str, Any]) -> Config:
    return from_saved({"name": "", "values": flat, "origins": {}}).config


def test_a_saved_run_of_another_version():
    flat = to_flat(Config())
    del flat["prefetch_depth"]
    assert from_flat(flat) == Config()
    with pytest.raises(ConfigError, match="which this version does not know"):
        from_flat({**flat, "new_option": 1})
    with pytest.raises(ConfigError, match="seed is 'x'"):
        from_flat({**flat, "seed": "x"})


def test_configurations_do_not_share_mappings():
    config = config_from({})
    config.learning.optimizer_params["momentum"] = 0.5
    to_flat(config)["norm_layer"]["name"] = "none"
    assert Config().learning.optimizer_params == {"momentum": 0}
    assert config.model.norm_layer == {"name": "batch_norm"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
OF_KIND: dict[Any, st.SearchStrategy[Any]] = {
    values.BOOL: st.booleans(),
    values.INT: st.integers(-5, 2**33) | st.integers(0, 3),
    values.FLOAT: st.floats(allow_nan=False, allow_infinity=False) | st.floats(0, 1),
    values.FRACTION: st.floats(0, 20) | st.integers(1, 500).map(lambda n: 1 / n),
    values.TEXT: st.text(),
    values.PLACE: st.text().filter(lambda text: ":" not in text),
    values.ANYWHERE: st.text().filter(lambda text: ":" not in text),
    values.PATH: st.text().filter(lambda text: ":" not in text),
    values.WORDS: st.lists(st.sampled_from(["gamma", "beta$", "a.b", "x|y"]), max_size=3).map(tuple),
    values.NUMBERS: st.lists(st.integers(0, 9), max_size=3).map(tuple),
    values.FLOATS: st.lists(st.floats(0, 2), max_size=3).map(tuple),
    values.MAPPING: st.dictionaries(st.text(), JSON, max_size=3),
    values.BYTES: st.integers(0, 2**40).map(str) | st.just("1.5 GiB"),
    values.DURATION: st.integers(1, 10**6).map(float),
    values.CLASS_WEIGHTS: st.just(("balanced",)) | st.lists(st.floats(0, 9), max_size=3).map(tuple),
    values.LOSS_SCALE: st.just("dynamic") | st.floats(0, 1e6),
    values.REPLICAS: st.integers(-5, 64),
}


def value_of(option: Option) -> st.SearchStrategy[Any]:
    """Return a strategy for the legal values of an option."""
    base = st.sampled_from(option.choices) if option.choices else OF_KIND[option.kind]
    legal = base.filter(lambda value: not (option.check and option.check(value)))
    return st.none() | legal if option.optional else legal


@given(st.fixed_dictionaries({}, optional={name: value_of(option) for name, option in config_options().items()}))
def test_every_configuration_survives_json_exactly(chosen):
    config = from_flat(chosen)
    flat = to_flat(config)
    again = from_flat(json.loads(json.dumps(flat)))
    assert again == config
    assert to_flat(again) == flat
    for name, value in chosen.items():
        got = getattr(getattr(config, config_options()[name].section), name)
        assert got == (
            pytest.approx(value, rel=1e-6) if config_options()[name].kind is values.FRACTION and value else value
        )


def test_a_path_that_is_given_decides_the_dataset() -> None:
    """Training on the embedded digits would ignore it in silence."""
    assert resolve({}, "none", environ={}).config.data.dataset == "digits"
    assert resolve({}, "none", environ={"DATASETS_DIR": "/data"}).config.data.dataset == "digits"
    assert resolve({"dataset_path": "photos"}, "none", environ={}).config.data.dataset == "auto"
    assert resolve({"dataset_path": "x", "dataset": "cifar10"}, "none", environ={}).config.data.dataset == "cifar10"
