"""Models on the hub: pushed by the real client to a server on the loopback address, and loaded from it again."""

import hashlib
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import headrace as hr
from headrace.cli.main import main
from headrace.core import store as stores
from headrace.core import stored_copy
from headrace.core.errors import ConfigError
from headrace.report.model_card import MARK
from headrace.report.run_summary import wilson_interval
from headrace.run import stored_run
from headrace.run.fit import train
from headrace.telemetry.records import ValidationRecord
from headrace.weights.hub_upload import refuse_unable
from headrace.weights.repository import crop_share
from headrace.weights.weight_file import read_file
from tests.core.file_server import serving, without_proxies
from tests.data.image_files import encode, smooth, write_classes
from tests.weights.hub_server import Hub

needs_client = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed"
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub()) as server:
        without_proxies(monkeypatch)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", server.writer)
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        # The client reads its settings when it is imported, which an earlier test may have done.
        if importlib.util.find_spec("huggingface_hub") is not None:
            from huggingface_hub import constants

            monkeypatch.setattr(constants, "ENDPOINT", server.url)
            monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
            template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            # The server speaks Git LFS, which the client uses without the real hub's other store.
            monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits: grey images, whose input is zero-one."""
    model = hr.Model("toy_model_bn", micro_batch_size=32, log_dir=str(tmp_path_factory.mktemp("secret_place")))
    return model.fit("digits", epochs=2, steps_per_epoch=10, progress="none").directory


@needs_client
def test_a_run_is_pushed_and_loaded_again(hub, run, tmp_path, capsys):
    images = hr.read_digits()["validation"].images[:8]
    expected = hr.Model.load(run).predict(images).probabilities
    assert main(["push", str(run), "me/digits", "--license", "mit", "--private"]) == 0
    said = capsys.readouterr().out
    assert f"pushed: {hub.url}/me/digits, commit {hub.commit[:12]}" in said
    assert "headrace predict --weights hf:me/digits IMAGES" in said
    (made,) = hub.created
    assert (made["organization"], made["name"]) == ("me", "digits")
    assert made.get("visibility") == "private" or made.get("private") is True, "as older clients say it"
    assert {row["key"] for row in hub.commits[0]} == {"header", "file", "lfsFile"}
    (stored,) = (row["value"] for row in hub.commits[0] if row["key"] == "lfsFile")
    weights = hub.repositories["me/digits/model.safetensors"]
    assert (stored["oid"], stored["size"]) == (hashlib.sha256(weights).hexdigest(), len(weights))
    everything = b"".join(hub.repositories.values())
    assert b"secret_place" not in everything, "nothing of this machine is published"

    # Read by plain HTTP, without the client: by Model.load, by weights= and by the command.
    for model in (hr.Model.load("hf:me/digits"), hr.Model(weights="hf:me/digits")):
        np.testing.assert_allclose(model.predict(images).probabilities, expected, atol=1e-6)
    assert model.class_names == tuple("0123456789")
    Image.fromarray(images[0, :, :, 0]).save(tmp_path / "one.png")
    assert (
        main(["predict", "--weights", "hf:me/digits", str(tmp_path / "one.png"), "--format", "json", "--top-k", "10"])
        == 0
    )
    (row,) = json.loads(capsys.readouterr().out)
    found = {entry["class"]: entry["probability"] for entry in row["predictions"]}
    np.testing.assert_allclose([found[name] for name in "0123456789"], expected[0], atol=1e-5)


@needs_client
def test_the_second_push_is_read_and_a_card_of_ones_own_is_kept(hub, run, capsys):
    assert main(["push", str(run), "me/digits"]) == 0
    first = hr.Model.load("hf:me/digits").params
    card = hub.repositories["me/digits/README.md"].decode()
    hub.repositories["me/digits/README.md"] = card.replace(MARK, "My own words.").encode()
    other = hr.Model.load(run)
    assert other.params is not None
    block = list(other.params)[-1]
    other.params[block]["bias"] = other.params[block]["bias"] + 1
    saved = other.save(run.parent / "other")
    capsys.readouterr()
    assert main(["push", str(saved), "me/digits"]) == 0
    assert "left as it is there: README.md" in capsys.readouterr().out
    assert "My own words." in hub.repositories["me/digits/README.md"].decode()
    second = hr.Model.load("hf:me/digits").params
    assert first is not None
    assert second is not None
    np.testing.assert_allclose(second[block]["bias"], first[block]["bias"] + 1)


@needs_client
def test_what_the_hub_refuses_is_said(hub, run, monkeypatch, capsys):
    hub.writer = "another"
    assert main(["push", str(run), "me/digits"]) == 2
    error = capsys.readouterr().err
    assert "The hub refused to take hf:me/digits: 403" in error
    assert "hf auth whoami" in error
    assert not hub.repositories
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main(["push", str(run), "me/digits"]) == 2
    assert "There is no token of the Hugging Face hub" in capsys.readouterr().err
    assert main(["push", str(run), "digits"]) == 2
    assert "hf:digits names no repository" in capsys.readouterr().err


def test_without_the_client_the_files_are_written(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[hub\]'"):
        refuse_unable()
    assert main(["push", str(run), "me/digits", "--out", str(tmp_path / "files")]) == 0
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert main(["push", str(run), "me/digits", "--out", str(tmp_path / "files")]) == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_the_card_has_the_numbers_of_the_run(run, tmp_path, capsys):
    assert main(["push", str(run), "me/digits", "--out", str(tmp_path / "files"), "--license", "mit"]) == 0
    text = (tmp_path / "files" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    records = [record for record in hr.read_records(run) if isinstance(record, ValidationRecord)]
    said = json.loads((tmp_path / "files" / "config.json").read_text())["headrace"]
    (record,) = [each for each in records if (each.step, each.weights) == (said["step"], said["weights"])]
    metrics = {row["type"]: row["value"] for row in head["model-index"][0]["results"][0]["metrics"]}
    assert metrics == {"accuracy": record.top1, "loss": record.loss}
    assert (head["license"], head["library_name"]) == ("mit", "headrace")
    assert record.top1 is not None
    low, high = wilson_interval(record.top1, 360)
    assert f"{100 * low:.1f} to {100 * high:.1f} %" in text
    assert f"{round(record.top1 * 360)} of 360 images" in text
    assert "digits: 1,437 images to train on, 360 to validate with." in text
    assert "| `micro_batch_size` | `32` | given |" in text
    assert str(run) not in text


def test_names_from_files_are_no_markup(tmp_path, quick):
    for name in ("<img src=x>", "a|b", "_c_"):
        for part in ("train", "val"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for number in range(8):
                pixels = np.full((32, 32, 3), 30 * number, np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / part / name / f"{part}{number}{len(name)}.png")
    result = train(quick(dataset="folder", dataset_path=str(tmp_path / "photos"), num_epochs=1, micro_batch_size=4))
    assert main(["push", str(result.directory), "me/photos", "--out", str(tmp_path / "files")]) == 0
    text = (tmp_path / "files" / "README.md").read_text()
    assert "<img" not in text.replace("\\<img", "")
    assert "| a\\|b | 8 |" in text
    assert f"photos: {3 * 8:,} images to train on" in text


def test_a_network_of_timms_gets_its_names_and_its_description(tmp_path, capsys):
    photos = tmp_path / "photos"
    write_classes(photos / "train", {"ant": 8, "bee": 8})
    write_classes(photos / "val", {"ant": 4, "bee": 4}, first_seed=100)
    options = {"model_dialect": "timm", "image_size": 32, "eval_resize_size": 37, "eval_interpolation": "bicubic"}
    model = hr.Model("resnet18", log_dir=str(tmp_path), batch_size=8, **options)
    run = model.fit(photos, epochs=1, progress="none", train_crop="valid").directory
    assert main(["push", str(run), "me/bugs", "--out", str(tmp_path / "files")]) == 0
    assert "under the names of timm" in capsys.readouterr().out
    config = json.loads((tmp_path / "files/config.json").read_text())
    form = config["pretrained_cfg"]
    assert (config["architecture"], config["num_classes"], config["label_names"]) == ("resnet18", 2, ["ant", "bee"])
    assert (form["input_size"], form["interpolation"]) == ([3, 32, 32], "bicubic")
    assert math.floor(32 / form["crop_pct"]) == 37
    assert form["mean"] == [0.485, 0.456, 0.406]
    assert "fc.weight" in read_file(tmp_path / "files/model.safetensors").arrays
    assert 'timm.create_model("hf_hub:me/bugs", pretrained=True)' in (tmp_path / "files/README.md").read_text()


def test_timm_gets_the_shorter_side_from_the_share():
    """Its formula: floor(size / crop_pct)."""
    for size in range(32, 400):
        for shorter in range(size, size + 80, 7):
            form: Any = SimpleNamespace(image_hwc=(size, size, 3), resized_side=shorter)
            assert math.floor(size / crop_share(form)) == shorter


@needs_client
def test_from_a_bucket_to_a_pushed_model(hub, tmp_path, monkeypatch, capsys):
    """Shards in a bucket, the run in a bucket, the model on the hub, and a prediction on a machine that has nothing."""
    pytest.importorskip("s3fs")
    from tests.core.s3_server import running
    from tests.data.test_named_places import write_shards

    for module in (stored_run, stored_copy):
        monkeypatch.setattr(module, "cache_directory", lambda: tmp_path / "runs")
    monkeypatch.setattr(stores, "_FIRST_WAIT_SECONDS", 0.01)
    write_shards(tmp_path / "shards", ["train-0.tar", "train-1.tar", "train-2.tar", "train-3.tar", "val-0.tar"])
    (tmp_path / "shards/classes.txt").write_text("ant\nbee\n")
    with running(monkeypatch) as bucket:
        for file in (tmp_path / "shards").iterdir():
            bucket.buckets["data"][f"bugs/{file.name}"] = file.read_bytes()
        words = ["--model", "toy_model_bn", "--image-size", "32", "--batch-size", "8", "--epochs", "2"]
        assert main(["train", "s3://data/bugs", *words, "--output", "s3://data/runs/one", "--progress", "plain"]) == 0
        assert any(name.startswith("runs/one/checkpoints/") for name in bucket.buckets["data"])
        assert main(["push", "s3://data/runs/one", "me/bugs"]) == 0
    said = capsys.readouterr().out
    assert f"pushed: {hub.url}/me/bugs" in said
    card = hub.repositories["me/bugs/README.md"].decode()
    assert "bugs: 16 images to train on, 4 to validate with." in card
    assert "of 4 images" in card
    assert "s3://" not in card, "a bucket is nobody else's business"
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "new.jpg").write_bytes(encode(smooth(50, 40, seed=77)))
    assert main(["predict", "--weights", "hf:me/bugs", str(tmp_path / "new.jpg"), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert {entry["class"] for entry in row["predictions"]} == {"ant", "bee"}
