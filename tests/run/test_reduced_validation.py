"""Validation with reduced decoding: asked for, said and recorded; what is computed later sees the exact pixels."""

from pathlib import Path

import numpy as np
import pytest

from headrace import Model
from headrace.run.directory import read_run
from headrace.run.fit import train
from headrace.run.validation import validate
from headrace.telemetry.records import read_records

from ..data.image_files import encode


def test_a_run_says_it_and_validating_it_later_is_exact(quick, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in "ab":
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(8):  # noise of single pixels: a fraction of the size is far from the mean of all
                noise = np.where(rng.random((130, 150, 1)) < 0.5, 0, 255).astype(np.uint8).repeat(3, 2)
                (tmp_path / split / label / f"{number}.jpg").write_bytes(encode(noise))
    options = {"dataset": "folder", "dataset_path": str(tmp_path), "image_size": 32, "num_channels": 1}
    result = train(quick(**options, num_epochs=1, validations_per_epoch=1, eval_reduced_decoding=True))
    run = result.directory
    assert read_run(run)[1].config.data.eval_reduced_decoding
    notes = [record for record in read_records(run) if "fraction of their size" in str(record)]
    assert len(notes) == 1
    reduced = result.validation["raw"]
    again, exact = (
        next(iter(validate(run, asked))).reports["raw"]["loss"] for asked in ({"eval_reduced_decoding": True}, {})
    )
    assert again == pytest.approx(reduced.loss, rel=1e-5)
    assert abs(exact - reduced.loss) > 1e-4
    model = Model.load(run)
    assert model.evaluate(tmp_path, weights="raw")["loss"] == pytest.approx(exact, rel=1e-5)
    assert model.evaluate(tmp_path, weights="raw", eval_reduced_decoding=True)["loss"] == pytest.approx(
        reduced.loss, rel=1e-5
    )
