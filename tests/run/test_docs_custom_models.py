"""docs/tutorials/own_network.md: its programs run as they stand."""

import os
import re
import sys
from pathlib import Path

import headrace
from headrace.model.custom import OPTIONAL
from tests import fork_server

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "own_network.md").read_text()
FILES = dict(re.findall(r"`(\w+\.py)`[^\n]*\n\n```python\n(.*?)```", PAGE, re.DOTALL))


def run(code: str, place: Path) -> str:
    """Run a program in a process of its own, where it may make its virtual devices."""
    environ = {**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = fork_server.run(command, cwd=place, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_network_of_30_lines_trains_pipelined_and_is_exported(tmp_path):
    code = FILES["my_net.py"]
    network = code[code.index("def conv") : code.index("model =")]
    assert network.count("\n") <= 30
    more = "model.export('my_net.stablehlo'); model.save('kept')\n"
    again = "import numpy as np; one = Model.load('kept', network, num_replicas=1, num_pipeline_stages=1)\n"
    same = "assert np.allclose(one.logits(test.images), model.logits(test.images), rtol=1e-4, atol=1e-5)\n"
    told = run(code + more + again + same, tmp_path)
    assert re.search(r"stages +2  on 2 devices of a replica", told)
    assert re.search(r"parameters +17,234", told)
    top1 = re.search(r"360 images, top-1 (\d\.\d+)", told)
    assert top1
    assert float(top1[1]) > 0.9, "the page says 95 %"
    assert (tmp_path / "my_net.stablehlo").stat().st_size > 1000


def test_the_functions_make_a_network(tmp_path):
    told = run(FILES["functions.py"], tmp_path)
    assert "params=33" in told  # 3 scales, 3 x 10 weights
    assert f"flops={2 * 3 * 10}," in told
    arguments = PAGE.split("may have further parameters")[1]
    assert re.findall(r"^\| `(\w+)` \| ", arguments, re.M)[:3] == ["train", "rng", "stats"]
    assert set(OPTIONAL) == {"train", "rng", "stats"}
