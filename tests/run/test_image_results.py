"""Predictions of every validation image for a report: the same accuracy as validation, images, and hostile names."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.cli.explain import explain
from headrace.cli.predict import main as predict
from headrace.cli.validate import main as validate
from headrace.core.errors import ConfigError, DataError
from headrace.data.sets.source import memory_source
from headrace.report.run_report import write_run_report
from headrace.run.fit import train
from headrace.run.image_results import image_results, write_image_results


def test_the_images_of_a_run_have_the_accuracy_of_its_best_validation(quick, tmp_path, capsys):
    result = train(quick(num_epochs=1, weight_updates_per_epoch=4, validations_per_epoch=1))
    found = json.loads(write_image_results(result.directory).read_text())
    best = max(record.top1 or 0 for record in result.validation.values())
    assert found["num_images"] == 360
    assert abs(found["top_k"]["1"] - best) < 1.5 / 360, "ties aside"
    assert found["mistakes"][0]["image"].startswith("data:image/")
    shares = [row["probability"] for row in found["mistakes"]]
    assert shares == sorted(shares, reverse=True)
    text = write_run_report(result.directory).read_text()
    assert text.count("<figure>") == len(found["mistakes"]) + len(found["hardest"]) <= 48
    assert found["mosaic"] in text
    _explain_a_file(str(result.directory), tmp_path)
    assert "explained: 7" in capsys.readouterr().out
    _evaluate_folders(str(result.directory), tmp_path, capsys)
    _evaluate_validation(result.directory, capsys)


def _evaluate_folders(run: str, place: Path, capsys) -> None:
    """A folder for each class: accuracy by hand, the page, and a page without classes refused."""
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4)
    for name in ("3", "7"):
        (place / "sorted" / name).mkdir(parents=True)
        for k in range(3 if name == "3" else 1):
            image.save(place / "sorted" / name / f"{k} <i>.png")
    page = place / "page.html"
    assert predict([run, str(place / "sorted"), "--page", str(page)]) == 0
    out = capsys.readouterr().out
    # all images are alike, so that they get one class: at most those of one folder are right
    share = re.search(r"accuracy (\S+) %", out)
    assert share is not None
    assert float(share[1]) in (0.0, 25.0, 75.0)
    assert "worst classes (recall): " in out
    assert "most confident mistakes:" in out
    text = page.read_text()
    assert "<h1>" in text
    assert "&lt;i&gt;.png" in text
    assert "<i>.png" not in text
    assert text.count("<figure>") >= 4
    with pytest.raises(ConfigError, match="classes of the images"):
        predict([run, str(place / "seven.png"), "--page", str(page)])


def _evaluate_validation(run: Path, capsys) -> None:
    assert validate([str(run), "--best", "--images"]) == 0
    out = capsys.readouterr().out
    page = next((run / "reports" / "validate").glob("*.html"))
    assert f"page: {page}" in out
    reports = json.loads(page.with_suffix(".json").read_text())
    top1 = max(reports[weights]["top1"] for weights in ("raw", "ema"))
    assert f"top-1 {100 * top1:.2f} %" in page.read_text(), "the report's and the page's accuracy are of one pass each"
    first = re.search(r"most confident mistakes:\n  (image \d+): ", out)
    assert first is not None
    assert first[1] in page.read_text()


def _explain_a_file(run: str, place: Path) -> None:
    image, file = place / "seven.png", place / "out.png"
    Image.fromarray(np.arange(1024, dtype=np.uint8).reshape(32, 32)).save(image)
    assert explain([run, str(image), "-o", str(file), "--class", "7"]) == 0
    with Image.open(file) as drawn:
        assert drawn.height == 380
    with pytest.raises(ConfigError, match="no class"):
        explain([run, str(image), "--class", "seven"])
    with pytest.raises(DataError, match="Cannot read"):
        explain([run, str(place / "none.png")])


def test_two_classes_have_thresholds_and_no_address_but_of_an_image_is_used(tmp_path):
    images = np.full((4, 60, 60, 3), 200, np.uint8)
    source = memory_source(images, np.array([0, 1, 1, 0], np.int32))
    shares = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    found = image_results(shares, source, ("ant", "<i>bee"))
    assert found["auc"] == 0.75, "three of the four pairs are in order"
    assert [row["file"] for row in found["mistakes"]] == ["image 1"]
    found["mistakes"][0]["image"] = 'https://example.org/x"onerror="alert(1)'
    (tmp_path / "config.json").write_text(json.dumps({"values": {"seed": 0}, "origins": {}}))
    facts = {"weights": "raw", "checkpoint": "step_1", "mosaic": "javascript:x"}
    (tmp_path / "images.json").write_text(json.dumps(found | facts))
    text = write_run_report(tmp_path).read_text()
    assert "example.org" not in text
    assert "javascript:" not in text
    assert "&lt;i&gt;bee" in text
    assert "Area under the ROC curve: 0.7500" in text
