"""A pushed network in timm: loaded by its config.json, it prepares an image as we do and sees the same in it."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import headrace as hr
from headrace.cli.main import main
from tests.data.image_files import write_classes

HAS_TIMM = all(importlib.util.find_spec(name) for name in ("torch", "torchvision", "timm"))


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.skipif(not HAS_TIMM, reason="torch, torchvision and timm are not all installed")
@pytest.mark.filterwarnings("ignore")  # what torch and its libraries warn of on import is their matter
@pytest.mark.parametrize("resized", [32, 37])
def test_timm_sees_the_same_in_an_image(tmp_path: Path, resized: int) -> None:
    photos = tmp_path / "photos"
    write_classes(photos / "train", {"ant": 8, "bee": 8})
    write_classes(photos / "val", {"ant": 4, "bee": 4}, first_seed=100)
    options = {"model_dialect": "timm", "image_size": 32, "eval_resize_size": resized, "eval_interpolation": "bicubic"}
    model = hr.Model("resnet18", log_dir=str(tmp_path), batch_size=8, **options)
    run = model.fit(photos, epochs=1, progress="none", train_crop="valid").directory
    assert main(["push", str(run), "me/bugs", "--out", str(tmp_path / "files")]) == 0
    torch: Any = importlib.import_module("torch")
    timm: Any = importlib.import_module("timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'files'}", pretrained=True).eval()
    views = timm.data.create_transform(**timm.data.resolve_data_config(theirs.pretrained_cfg))
    for file in sorted((photos / "val").rglob("*.jpg"))[::3]:
        with torch.no_grad():
            found = theirs(views(Image.open(file).convert("RGB"))[None]).softmax(1).numpy()[0]
        np.testing.assert_allclose(found, hr.Model.load(run).predict(file).probabilities[0], atol=1e-4)
