"""docs/weights.md: its options exist, and its commands run one after the other."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.cli.main import main
from headrace.config.field import spellings
from headrace.config.schema import all_options
from headrace.data.sets.digits import read_digits
from headrace.weights.torch_file import write_torch_file
from tests.weights.test_convert_load import torch_resnet

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"
COMMANDS = [shlex.split(line[2:]) for line in PAGE.read_text().splitlines() if line.startswith("$ headrace")]
OWN = {"config", "last", "top-k", "out", "format", "weights", "names", "platforms", "input", "mode", "decay", "output"}
OWN |= {"with-preprocessing", "dtype", "check-images"}


def test_every_option_on_the_page_exists():
    known = {name.replace("_", "-") for name in spellings(all_options(), ())} | OWN
    named = set(re.findall(r"--([a-z][a-z0-9-]+)", PAGE.read_text()))
    assert not named - known


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    drawn = torch_resnet((2, 2, 2, 2), (64, 128, 256, 512), 1, 1000)
    arrays = {name: array * np.float32(0.03) if array.ndim == 4 else array for name, array in drawn.items()}
    Path("resnet18.pth").write_bytes(write_torch_file(arrays))
    Path("images").mkdir()
    for number, image in enumerate(read_digits()["validation"].images[:3]):
        Image.fromarray(np.asarray(image)[:, :, 0]).save(f"images/{number}.png")
    Path("images/torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut off")
    assert len(COMMANDS) == 12
    for words in COMMANDS:
        more = ["--progress", "plain"] if words[1] == "train" else []
        assert main([*words[1:], *more]) == (1 if words[1] == "predict" else 0), words
    printed = capsys.readouterr().out
    for line in ("  loaded     100 tensors    11,186,112 numbers", "mean 3: the mean of step_00000088, step_00000132"):
        assert line in PAGE.read_text()
        assert line in printed
