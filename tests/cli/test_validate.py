"""`headrace validate`: the best of several checkpoints is described further; a folder of images of the same classes."""

import json
import shutil
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.validate import _show
from headrace.run.validation import Validated
from tests.data.image_files import write_classes


def validated(step: int, problem: str = "", **top1: float) -> Validated:
    numbers = {"top5": None, "loss": 1.0 if step else float("nan"), "balanced_accuracy": 0.5}
    numbers |= {"macro_f1": 0.5, "num_samples": 8, "classes": []}
    reports = {weights: {"top1": share, **numbers} for weights, share in top1.items()}
    path = Path(f"step_{step:08d}")
    return Validated(checkpoint=path, step=step, reports=reports, seconds=dict.fromkeys(reports, 0.1), problem=problem)


def test_the_best_checkpoint_is_chosen_not_the_last(capsys):
    found = [validated(1, raw=0.5), validated(2, raw=0.6, ema=0.8), validated(3, raw=0.8), validated(4, "damaged")]
    best = _show(found, as_json=False)
    assert best is found[1]
    assert "best: step_00000002 (ema), top-1 80.00 %" in capsys.readouterr().out
    assert _show([validated(1, "damaged")], as_json=True) is None


def test_lines_of_json_have_no_nan(capsys):
    _show([validated(0, raw=0.1)], as_json=True)
    line = json.loads(capsys.readouterr().out, parse_constant=lambda name: f"not JSON: {name}")
    assert line["raw"]["loss"] is None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run on photos of cats and dogs."""
    path = tmp_path_factory.mktemp("place")
    write_classes(path / "photos", {"cat": 12, "dog": 12})
    options = "--config none --model toy_model_bn --image-size 32 --batch-size 4 --epochs 1 --progress none --no-report"
    words = ["--dataset-path", str(path / "photos"), "--output", str(path / "run")]
    assert main(["train", *options.split(), *words]) == 0
    return path


def test_a_run_is_validated_on_the_images_of_a_folder(place, capsys):
    write_classes(place / "more", {"cat": 3, "dog": 4}, first_seed=100)
    capsys.readouterr()
    run, more, lines = str(place / "run"), str(place / "more"), []
    for words in ([more], ["--validation-path", more]):
        assert main(["validate", run, *words, "--json"]) == 0
        lines.append(json.loads(capsys.readouterr().out))
        del lines[-1]["raw"]["seconds"]
    assert lines[0] == lines[1]
    assert lines[0]["raw"]["num_samples"] == 7
    # A dataset's directory: its validation part; and a part of the classes.
    shutil.copytree(place / "more", place / "set" / "val")
    write_classes(place / "set" / "train", {"cat": 1, "dog": 1}, first_seed=200)
    write_classes(place / "dogs", {"dog": 2}, first_seed=300)
    for name, count in (("set", 7), ("dogs", 2)):
        assert main(["validate", run, str(place / name), "--best", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["raw"]["num_samples"] == count


def test_folders_that_cannot_be_validated_are_refused(place, capsys):
    write_classes(place / "others", {"cow": 6, "dog": 6}, first_seed=400)
    (place / "file").touch()

    def refused(*words: str) -> str:
        assert main(["validate", str(place / "run"), *words]) == 2
        return capsys.readouterr().err.replace(str(place), "PLACE")

    both = refused(str(place / "others"), "--validation-path", str(place / "photos"))
    assert "Both the folder PLACE/others and --validation-path PLACE/photos are given" in both
    missing = refused(str(place / "photo"))
    assert "There is no folder PLACE/photo." in missing
    assert "Did you mean PLACE/photos?" in missing
    assert "PLACE/file is a file" in refused(str(place / "file"))
    classes = refused(str(place / "others"))
    assert "PLACE/others has 1 class folder(s) that training has not: cow." in classes
    assert "classes that were trained: cat, dog" in classes
    # Before, the wrong classes were counted as those of the same number.
    assert "The classes cow, dog (PLACE/others" in (moved := refused("--dataset-path", str(place / "others")))
    assert "trained on: cat, dog." in moved
