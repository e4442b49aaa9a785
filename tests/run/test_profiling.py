"""A run that is profiled: where its time went adds up, by kind and by block, on the screen and in the report."""

import json
import resource
import shutil

import jax
import jax.numpy as jnp
import pytest

from headrace.cli.main import main
from headrace.report.profile import draw_profile
from headrace.report.run_files import read_files
from headrace.run import profiling
from headrace.run.profiling import CallProfile, measure_ceilings, read_profile


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    line = "train --config none --model-name toy_model_bn --dataset digits --micro-batch-size 32 --num-epochs 1"
    line += " --weight-updates-per-epoch 40 --no-validation --call-seconds 0.01 --profile --progress none --run-name r"
    assert main([*line.split(), "--log-dir", str(folder)]) == 0
    return folder / "r"


def test_kinds_and_blocks_add_up(run):
    found = read_profile(run / "profile")
    assert found is not None
    assert found.workload.num_steps >= 10
    assert found.workload.num_images == 32 * found.workload.num_steps
    assert sum(found.kinds.values()) == pytest.approx(found.seconds, rel=1e-6)
    busy = found.seconds - found.kinds.get("idle", 0.0)
    assert sum(block.seconds for block in found.blocks) == pytest.approx(busy, rel=1e-6)
    blocks = {block.name: block for block in found.blocks}
    assert {"conv2d_0", "conv2d_1", "bn_0", "dense", "input", "update"} <= set(blocks)
    assert blocks["conv2d_1"].forward > 0
    assert blocks["conv2d_1"].backward > 0
    assert found.kinds["convolution"] > 0
    assert found.num_bytes > 0
    assert len(found.kernels) == 10
    # Every kernel of a step ran once in each of the recorded steps.
    assert {kernel.count for kernel in found.kernels} == {found.workload.num_steps}


def test_stages_are_told_apart(tmp_path):
    """Programs of several stages have instructions of the same names, and are still charged to their blocks."""
    line = "train --config none --model-name toy_model_bn --dataset digits --micro-batch-size 16 --num-epochs 1"
    line += " --num-pipeline-stages 2 --gradient-accumulation-count 2 --weight-updates-per-epoch 30 --no-validation"
    line += " --call-seconds 0.01 --profile --progress none --trace-schedule --run-name r"
    assert main([*line.split(), "--log-dir", str(tmp_path)]) == 0
    found = read_profile(tmp_path / "r" / "profile")
    assert found is not None
    assert found.workload.num_devices == 2
    assert sum(found.kinds.values()) == pytest.approx(found.seconds, rel=1e-6)
    blocks = {block.name: block for block in found.blocks}
    for name in ("conv2d_0", "conv2d_1", "bn_0", "dense"):
        assert blocks[name].forward > 0, name
        assert blocks[name].backward > 0, name
    # A pass runs once for each of the two micro batches of a step, the update once.
    passes = {kernel.count for kernel in found.kernels if kernel.block in blocks.keys() - {"update", "rest"}}
    assert passes == {2 * found.workload.num_steps}
    assert "Schedule of one step" in (tmp_path / "r" / "report.html").read_text()


def test_the_command_prints_what_a_run_recorded(run, capsys):
    assert main(["profile", str(run)]) == 0
    out = capsys.readouterr().out
    for text in ("where the time went", "by block", "slowest kernels", "model FLOPs", "of the", "conv2d_0"):
        assert text in out
    assert max(map(len, out.splitlines()[:-1])) <= 100
    assert main(["profile", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["model"] == "toy_model_bn"
    notes = [json.loads(line).get("text", "") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("where the time went" in text for text in notes)


def test_the_run_may_stand_behind_options_and_another_folder_is_profiled_anew(run, tmp_path, capsys):
    assert main(["profile", "--json", str(run)]) == 0
    recorded = json.loads(capsys.readouterr().out)
    other = shutil.copytree(run / "profile", tmp_path / "other")  # another run's, for all that is known
    assert main(["profile", str(run), "--output", str(other), "--json", "--steps-per-call", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] != recorded["seconds"]
    assert main(["profile", str(run), "--config", "default"]) == 2
    assert "A run has its own options" in capsys.readouterr().err


def test_the_report_has_the_profile(run, tmp_path):
    assert "slowest kernels" in (run / "report.html").read_text().lower()
    run = shutil.copytree(run, tmp_path / "r")
    values = json.loads((run / "profile" / "profile.json").read_text())
    values["kernels"][0]["name"] = "<script>alert(1)</script>"
    (run / "profile" / "profile.json").write_text(json.dumps(values))
    text = draw_profile(read_files(run)).text
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    (run / "profile" / "profile.json").write_text('{"workload": {"odd": 1}}')
    assert read_profile(run / "profile") is None


def test_what_is_measured_of_the_memory_is_not_new_pages(monkeypatch):
    """The system fills them with zeros, which once made 3.4 GiB/s of the 40 that a machine has."""
    filled = []

    def run_once(program, arguments):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready(program(*arguments))
        filled.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
        return 1.0

    monkeypatch.setattr(profiling, "_seconds", run_once)
    _, moved = measure_ceilings(jax.devices()[0], jnp.float32)
    assert filled[-1] < 0.1 * moved


def test_a_run_is_too_short_to_profile(tmp_path):
    profile = CallProfile(tmp_path)
    for _ in range(2):
        profile.launching()
        profile.called(None, 1)
    profile.close()
    assert not profile.found
    assert list(tmp_path.iterdir()) == []


def test_bad_requests_are_refused(tmp_path, capsys):
    for words, told in (
        (["profile", str(tmp_path / "none")], "no run"),
        (["profile", str(tmp_path)], "not a run directory"),
        (["profile", "--config", "none", "--steps-per-call", "0"], "1 or more"),
        (["bench", "--config", "none", "--profile"], "headrace profile"),
    ):
        assert main(words) == 2, words
        assert told in capsys.readouterr().err, words


def test_the_only_call_of_a_run_is_recorded(tmp_path):
    profile = CallProfile(tmp_path)
    profile.launching(is_last=True)
    profile.called(jax.jit(lambda x: x + 1)(1.0), 1)
    profile.close()
    assert profile.found
    assert list(tmp_path.rglob("*.xplane.pb"))
