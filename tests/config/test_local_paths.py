"""Paths with a scheme are refused everywhere, before anything is made of them."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.cli.main import main
from headrace.config.load import config_from, resolve
from headrace.config.schema import all_options
from headrace.core import store
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_path, scheme_of
from headrace.rows.values import ANYWHERE, PATH

ONLY = "Only paths of this machine work"
SCHEMES = ("s3://bucket/x", "gs://bucket/x", "hf://datasets/a/b", "az://c/x", "https://host/x", "hf:owner/name")


@pytest.fixture(autouse=True)
def nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not [path.name for path in tmp_path.iterdir() if ":" in path.name], "no local folder `s3:`"


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("s3://bucket", "s3"),
        (str(Path("s3://bucket/x")), "s3"),  # which a Path makes s3:/bucket/x
        ("FILE:///tmp/x", "file"),
        ("hf:a/b", "hf"),
        ("hf-hub:a/b", "hf-hub"),
        ("C:/images", ""),
        ("./s3://bucket", ""),
        ("/data/run:1/x", ""),
        ("time_12:30", ""),
        ("~/a", ""),
        ("", ""),
    ],
)
def test_what_a_scheme_is(text: str, scheme: str) -> None:
    assert scheme_of(text) == scheme


def test_every_option_that_takes_a_path_refuses(tmp_path: Path) -> None:
    paths = [name for name, option in all_options().items() if option.kind in (PATH, ANYWHERE)]
    assert set(paths) == {
        *("dataset_path", "validation_path", "labels", "output", "log_dir", "checkpoint_dir", "compilation_cache_dir"),
    }
    for name in paths:
        anywhere = all_options()[name].kind is ANYWHERE
        names = () if name == "dataset_path" else ("hf:owner/name",)  # of a dataset
        for path in ("ftp://host/x", *names) if anywhere else SCHEMES:
            what = rf"--{name.replace('_', '-')} is {path}\. "
            words = r"Paths of this machine work, and addresses of stores.*s3://" if anywhere else ONLY + ".*mount"
            with pytest.raises(ConfigError, match=what + words):
                resolve({name: path}, "none", environ={})
        with pytest.raises(ConfigError, match=f"{name} is s3:/bucket/x"):
            config_from({name: Path("s3://bucket/x")})
        (tmp_path / "runs.yml").write_text(f"mine:\n  {name}: ftp://bucket/x\n")
        with pytest.raises(ConfigError, match=rf"runs\.yml:2: {name} is ftp://bucket/x"):
            resolve({}, "mine", str(tmp_path / "runs.yml"), environ={})
        assert all_options()[name].read(str(tmp_path / "x")) == str(tmp_path / "x")
        if anywhere:
            assert all_options()[name].read("s3://bucket/x") == "s3://bucket/x"


def test_a_dataset_is_named_with_either_option() -> None:
    for options in ({"dataset": "hf:owner/name"}, {"dataset_path": "hf:owner/name"}):
        data = resolve(options, "none", environ={}).config.data
        assert (data.dataset, data.dataset_path) == ("auto", "hf:owner/name")


def test_a_file_address_is_refused_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"file: is none\. Give /data/x\."):
        resolve({"dataset_path": "file:///data/x"}, "none", environ={})
    with pytest.raises(ConfigError, match=r"file: is not supported\. Give /data/x\."):
        resolve({"labels": "file:///data/x"}, "none", environ={})


@pytest.mark.reference
def test_the_environment_is_refused_where_it_is_used() -> None:
    """The variables may be there for other programs."""
    environ = {"DATASETS_DIR": "ftp://bucket"}
    resolve({"dataset": "digits"}, "none", environ=environ)
    with pytest.raises(ConfigError, match=r"dataset_path ftp://bucket \(environment \$DATASETS_DIR\)"):
        resolve({"dataset": "cifar10"}, "none", environ=environ)
    resolve({"dataset": "cifar10", "dataset_path": "/data"}, "none", environ=environ)
    with pytest.raises(ConfigError, match=r"\$TF_POPLAR_FLAGS is s3://cache"):
        resolve({}, "none", environ={"TF_POPLAR_FLAGS": "--executable_cache_path=s3://cache"})


LOCAL = (
    *("export run --format onnx --out gs://b/x.onnx", "report s3://a", "board s3://a", "explain run s3://b/x.jpg"),
    *("average s3://b/run", "convert x.pth --model resnet18 --out s3://b/here", "profile s3://b/run"),
    *("data get cifar10 --dataset-path s3://b", "data pack --output s3://b/x.hrp", "data verify --labels s3://b/x"),
    *("data build --output-dir s3://b", "configs show --config-path s3://b/x.yml q", "lr-find --plot s3://b/x.svg"),
    *("plan --config-path s3://b/x.yml", "plan --schedule-file s3://b/x.svg", "train --checkpoint-dir s3://b/run"),
    *("bench --output s3://b/x", "launch --compilation-cache-dir s3://b train"),
)
ANY = (
    *("predict {}/run x.jpg", "predict --weights {}/x.pth a.jpg", "explain {}/run x.jpg", "validate {}/run"),
    *("export {}/run --format onnx", "resume {}/run", "runs {}", "compare {}/a {}/b", "train {}/photos"),
    *("train --log-dir {}", "train --restore-path {}/run", "train --output {}/run", "train --weights {}/x.pth"),
    *("train --dataset-path {}/photos", "plan --dataset auto --dataset-path {}/photos"),
)


@pytest.mark.parametrize("line", [*LOCAL, *(line.format("ftp://b", "ftp://b") for line in ANY)])
def test_every_command_refuses(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    error = capsys.readouterr().err
    assert ONLY in error or "rule: Paths of this machine work" in error or "ftp" in error


@pytest.mark.parametrize("line", ANY)
def test_every_command_that_takes_addresses_names_what_to_install(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(store, "importlib", SimpleNamespace(import_module=refuse))
    assert main(shlex.split(line.format("gs://b", "gs://b"))) == 2
    assert "pip install 'headrace[gs]'" in capsys.readouterr().err


def test_code_refuses() -> None:
    model = headrace.Model("toy_model", input_shape=(32, 32, 3), num_classes=2)
    for call in (
        lambda: model.fit(Path("s3://b/photos")),
        lambda: model.fit(np.zeros((4, 32, 32, 3), np.uint8), np.arange(4) % 2, checkpoint_dir="s3://b"),
        lambda: model.evaluate("ftp://b/photos"),
        lambda: headrace.Model.load("ftp://b/run"),
        lambda: headrace.Model("resnet18", weights="ftp://b/x.pth"),
        lambda: model.load_weights("ftp://b/run"),
    ):
        with pytest.raises(ConfigError, match=r"Only paths of this machine work|Paths of this machine work"):
            call()


def test_weights_keep_their_names_and_addresses() -> None:
    for name in ("hf:owner/name", "hf-hub:owner/name", "https://host/x.pth", "timm/resnet50.a1_in1k", "/x/y.pth"):
        assert all_options()["weights"].read(name) == name


def test_other_paths_are_kept_as_they_are() -> None:
    assert local_path("./s3:/x") == Path("./s3:/x")
