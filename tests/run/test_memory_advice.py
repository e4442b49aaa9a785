"""Out of memory: the estimate, its largest parts, and settings with the same global batch that would fit."""

import re
import resource
import shlex
from pathlib import Path

import jax
import pytest

from headrace.cli.main import main
from headrace.config.load import resolve
from headrace.core.errors import RunStopped
from headrace.run.design import design_run
from headrace.run.memory_advice import advise_on_memory, measured_memory, out_of_memory, process_memory_bytes

GIB = 1 << 30
OPTIONS = {
    "model_name": "resnet50",
    "dataset": "synthetic",
    "image_size": 224,
    "micro_batch_size": 256,
    "precision": "32.32",
    "validation": False,
}
MESSAGE = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB."


def design(**more):
    return design_run(resolve(OPTIONS | more, "none").config)


def exhausted(*_args, **_options):
    raise jax.errors.JaxRuntimeError(MESSAGE)


@pytest.mark.parametrize("given", [{}, {"global_batch_size": 512}, {"batch_size": 512}])
def test_every_suggestion_keeps_the_batch_and_fits_the_device(given):
    """Also where the command line it is added to has a global batch."""
    before = design(**given)
    limit = before.plan.memory.total_bytes // 3
    error = out_of_memory(before, MESSAGE, limit, validates=False)
    assert "an allocation of 12.50 GiB failed" in error.problem
    assert re.search(r"256 images at once takes about [\d.]+ GiB of its [\d.]+ GiB", error.problem)
    assert error.rule.startswith("Its largest parts: activations ")
    found = re.findall(r"(--[^();]+) \(about", error.remedy)
    assert [each.split()[0] for each in found] == ["--micro-batch-size", "--recomputation", "--precision"]
    for options in found:
        words = shlex.split(options)
        changed, k = {}, 0
        while k < len(words):
            name = words[k].removeprefix("--").replace("-", "_")
            has_value = k + 1 < len(words) and not words[k + 1].startswith("--")
            changed[name] = words[k + 1] if has_value else True
            k += 1 + has_value
        typed = {name: int(value) if str(value).isdigit() else value for name, value in changed.items()}
        after = design(**given | typed).plan
        assert after.batch.global_batch_size == before.plan.batch.global_batch_size
        assert after.memory.total_bytes <= 0.85 * limit


def test_an_estimate_that_should_have_fitted_is_undercut():
    before = design()
    error = out_of_memory(before, MESSAGE, 10 * before.plan.memory.total_bytes, validates=False)
    (first, *_) = re.findall(r"--micro-batch-size (\d+) --gradient-accumulation-count (\d+)", error.remedy)
    assert first == ("128", "2")


def test_a_cpu_saves_nothing_with_16_bits():
    error = out_of_memory(
        design(), "RESOURCE_EXHAUSTED: allocating 1073741824 bytes.", None, validates=False, on_cpu=True
    )
    assert "an allocation of 1.0 GiB failed" in error.problem
    assert "--precision" not in error.remedy


def test_a_limit_of_the_address_space_is_a_cpus_memory(monkeypatch):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr("resource.getrlimit", lambda _kind: (used + 4 * GIB, resource.RLIM_INFINITY))
    assert process_memory_bytes() == pytest.approx(4 * GIB, abs=GIB), "others allocate meanwhile"
    with pytest.raises(RunStopped, match=r"of its [\d.]+ GiB, by the estimate"), advise_on_memory(design()):
        exhausted()
    monkeypatch.setattr("resource.getrlimit", lambda _kind: (resource.RLIM_INFINITY,) * 2)
    assert process_memory_bytes() is None


def test_nothing_fits_a_device_without_memory():
    error = out_of_memory(design(), "RESOURCE_EXHAUSTED", 1 << 20, validates=False)
    assert "No single change is enough" in error.remedy


def test_validation_has_its_own_options():
    error = out_of_memory(design(validation=True), MESSAGE, GIB, validates=True)
    assert "validation with" in error.problem
    assert "--validation-micro-batch-size" in error.remedy


def test_other_errors_pass_through():
    with pytest.raises(ValueError, match="mine"), advise_on_memory(design()):
        raise ValueError("mine")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), advise_on_memory(design()):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


@pytest.mark.parametrize("place", ["headrace.run.benchmarks._measure", "headrace.run.inference_bench._InferenceBench"])
def test_bench_says_what_was_too_large(monkeypatch, capsys, place):
    monkeypatch.setattr(place, exhausted)
    line = "bench --config none --model-name toy_model --dataset digits --micro-batch-size 32 --num-calls 1"
    assert main([*line.split(), *(["--mode", "inference"] if "Inference" in place else [])]) == RunStopped.exit_code
    err = capsys.readouterr().err
    assert "ran out of memory" in err
    assert "Its largest parts:" in err
    assert "Traceback" not in err


def test_a_run_that_runs_out_of_memory_says_so_and_keeps_its_record(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("headrace.run.training.TracedCall.compile", exhausted)
    line = "train --config none --model-name toy_model --dataset digits --micro-batch-size 32 --no-validation"
    assert main([*line.split(), "--log-dir", str(tmp_path), "--run-name", "r", "--progress", "none"]) == 3
    assert "one of these should fit: --micro-batch-size" in capsys.readouterr().err
    assert '"outcome": "failed"' in (tmp_path / "r" / "metrics.jsonl").read_text()


class Fake:
    """A device that counts its memory."""

    platform = "gpu"

    def memory_stats(self):
        return {"peak_bytes_in_use": 3 * GIB, "bytes_limit": 4 * GIB}


def test_memory_is_measured_on_devices_that_count_it_else_of_the_process():
    assert measured_memory([Fake()]) == {"device_peak_bytes": 3 * GIB, "device_limit_bytes": 4 * GIB}
    found = measured_memory(jax.local_devices())
    assert 50 << 20 < found["process_peak_bytes"] < 1 << 42
