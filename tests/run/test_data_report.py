"""`headrace data report`: counts and sizes, images nearly equal, and labels that networks disagree with."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.cli.main import main
from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.data.survey import near_duplicates, survey
from headrace.run.doubtful_labels import doubtful_labels
from headrace.run.prediction import Prediction
from tests.report.test_run_report import Parsed


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four smooth images of each class, in both splits."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("<ants>", "bees"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for k in range(4):
                rough = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8))
                rough.resize((64, 48), Image.Resampling.BICUBIC).save(folder / f"{k}.png")
    return tmp_path / "photos"


def test_counts_sizes_and_channels(photos: Path):
    Image.new("RGB", (10, 20), (255, 0, 51)).save(photos / "train" / "bees" / "tall.png")
    (photos / "train" / "bees" / "broken.png").write_bytes(b"nothing")
    found = survey(config_from({"dataset_path": str(photos)}).data)
    assert found.images.class_names == ("<ants>", "bees")
    assert found.counts().tolist() == [[4, 6], [4, 4]]
    assert [each.name.rpartition("/")[2] for each in found.found if each.problem] == ["broken.png"]
    tall = next(each for each in found.readable if each.name.endswith("tall.png"))
    assert (tall.hw, tall.kind) == ((20, 10), "png")
    pixels = [np.asarray(Image.open(file)) / 255 for file in sorted((photos / "train").rglob("[0-9t]*.png"))]
    mean = np.mean([each.mean((0, 1)) for each in pixels], 0)
    deviation = np.sqrt(np.mean([(each**2).mean((0, 1)) for each in pixels], 0) - mean**2)
    np.testing.assert_allclose(found.channel_statistics(), (mean, deviation), atol=1e-6)


def test_the_same_photograph_at_another_quality_and_size_is_found(photos: Path):
    assert near_duplicates(survey(config_from({"dataset_path": str(photos)}).data).found) == []
    with Image.open(photos / "train" / "<ants>" / "1.png") as image:
        image.save(photos / "val" / "bees" / "again.jpg", quality=60)
        image.resize((32, 24)).save(photos / "train" / "<ants>" / "small.png")
    pairs = near_duplicates(survey(config_from({"dataset_path": str(photos)}).data).found)
    names = [{each.name.rpartition("/")[2] for each in (pair.first, pair.second)} for pair in pairs]
    assert names == [{"1.png", "again.jpg"}, {"small.png", "again.jpg"}, {"1.png", "small.png"}] or names == [
        {"small.png", "again.jpg"},
        {"1.png", "again.jpg"},
        {"1.png", "small.png"},
    ], "two classes come first"


class _Judge:
    class_names: tuple[str, ...] = ("bees", "<ants>")  # in another order than the folders


def judge(monkeypatch, wrong: str) -> list[str]:
    """Replace networks by one that knows the folders, but for images whose name ends so; return what it is asked."""
    asked: list[str] = []

    def predict(_weights, files, _top_k, *, keep_shares: bool):
        assert keep_shares
        for file in files:
            asked.append(str(file))
            is_bee = (file.parent.name == "bees") != file.name.endswith(wrong)
            yield Prediction(file=file, shares=(0.9, 0.1) if is_bee else (0.2, 0.8))

    monkeypatch.setattr("headrace.run.doubtful_labels.find_weights", lambda *_: _Judge())
    monkeypatch.setattr("headrace.run.doubtful_labels.predict", predict)
    return asked


def test_a_run_judges_images_that_it_was_not_trained_on(photos: Path, monkeypatch):
    found = survey(config_from({"dataset_path": str(photos)}).data)
    asked = judge(monkeypatch, "3.png")
    doubts = doubtful_labels(found, "runs/x")
    assert len(asked) == doubts.judged == 8
    assert all("/val/" in name for name in asked)
    rows = [
        (doubt.image.name.rpartition("/val/")[2], doubt.predicted, doubt.probability, doubt.own)
        for doubt in doubts.found
    ]
    assert rows == [("<ants>/3.png", "bees", 0.9, 0.1), ("bees/3.png", "<ants>", 0.8, 0.2)]
    _Judge.class_names = ("bees", "wasps")
    with pytest.raises(ConfigError, match="does not know the class <ants>"):
        doubtful_labels(found, "runs/x")
    _Judge.class_names = ("bees", "<ants>")


def test_runs_of_folds_judge_every_image_once(photos: Path, tmp_path: Path, monkeypatch, capsys):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    names = [str(file) for file in sorted((photos / "train").rglob("*.png"))]
    runs = []
    for fold in (1, 2):
        with (sweep / f"fold_{fold}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("path", "label", "split"))
            for k, name in enumerate(names):
                writer.writerow((name, Path(name).parent.name, "val" if k % 2 == fold - 1 else "train"))
        (sweep / f"{fold}").mkdir()
        runs.append({"name": f"{fold}", "values": {"fold": f"{fold}"}, "argv": []})
    saved = {"format": 1, "started_in": str(tmp_path), "jobs": 1, "runs": runs}
    (sweep / "sweep.json").write_text(json.dumps(saved))
    line = ["data", "report", str(photos), "--run", str(sweep), "-o", str(tmp_path / "data.html")]
    assert main(line) == 2
    assert "has no finished run of a fold" in capsys.readouterr().err
    monkeypatch.setattr("headrace.run.sweep.Sweep.is_done", lambda *_: True)
    asked = judge(monkeypatch, "2.png")
    assert main(line) == 0
    assert sorted(asked) == names
    assert "doubtful labels: 2 of 8 images" in capsys.readouterr().out
    page = Parsed((tmp_path / "data.html").read_text())
    assert "Of 8 images judged, 2 are taken for another class." in page.text
    assert "<ants>?" in page.text, "as text"
    sources = [attrs["src"] or "" for tag, attrs in page.tags if tag == "img"]
    assert len(sources) == 8 + 2
    assert all(source.startswith("data:image/") for source in sources)


def test_what_has_no_report_is_refused(tmp_path: Path, capsys):
    for line in (["--dataset", "digits"], ["--dataset", "synthetic"]):
        assert main(["data", "report", *line, "-o", str(tmp_path / "x.html")]) == 2
        assert "There is no report on the dataset" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
