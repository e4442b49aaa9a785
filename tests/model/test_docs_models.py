"""docs/reference/models.md shows what the commands print, and its own network works."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from headrace.cli.models import models as main
from headrace.model.context import Ctx

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


@pytest.mark.parametrize("argv", [[], ["show", "cifar_resnet8"]])
def test_the_page_shows_what_the_command_prints(argv, capsys):
    shown = re.search(re.escape("$ " + " ".join(["headrace models", *argv])) + r"\n(.*?)```", PAGE.read_text(), re.S)
    assert shown
    main(argv)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown[1].splitlines() == printed


def test_the_pages_own_network_computes():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert code
    names = {}
    exec(code[1], names)
    network, images = names["network"], np.ones((2, 32, 32, 3), np.float32)
    logits, batch_stats = jax.jit(lambda p, s, x: network.apply(p, s, x, Ctx(train=True)))(
        names["params"], names["stats"], images
    )
    assert logits.shape == (2, 10)
    assert set(batch_stats) == {"stem", "unit"}
    assert network.total_cost().params == 9 * 3 * 32 + 9 * 32 * 32 + 4 * 32 + 330
