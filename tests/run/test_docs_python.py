"""docs/python.md: its programs run as they stand, and print what it says."""

import re
from pathlib import Path

import headrace

from .test_docs_custom_models import run

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
FILES = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))


def test_the_programs_run(tmp_path):
    assert list(FILES) == ["train.py", "arrays.py", "callbacks.py", "focal.py"]
    printed = run("\n".join(FILES.values()), tmp_path)  # one process: they share the time to start
    assert re.search(r"RunResult\(finished at step 20, top-1 .* %, runs/cifar_resnet8-digits-", printed)
    assert re.search(r"Report\(num_samples=360, loss=\d", printed)
    assert "\n360\n" in printed
    assert re.search(r"^image 1: .* \d+\.\d\d %", printed, re.M)
    assert re.search(r"^total +194 ", printed, re.M)
    assert "epoch 1: loss 2." in printed
    assert "\nstopped the loss is low enough\n" in printed
    assert re.search(r"^\{'confidence': 0\.\d+\}$", printed, re.M)


def test_the_first_lines_name_what_there_is():
    assert set(re.findall(r"hr\.(\w+)", PAGE)) <= set(headrace.__all__)
