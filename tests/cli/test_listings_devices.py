"""`headrace devices`: what is here, and what is said of devices that are not."""

import json
from pathlib import Path

import jax
import pytest

from headrace.cli.devices import devices as main
from headrace.cli.main import main as program
from headrace.core.errors import ConfigError
from headrace.engine.machine import _bfloat16, describe_machine
from headrace.native import library


def test_the_devices_here(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    heading, row, *rest = out.splitlines()
    assert heading.split()[:3] == ["platform", "device", "count"]
    assert row.split()[:3] == ["cpu", "cpu", str(len(jax.devices()))]
    assert f"jax {jax.__version__}" in "\n".join(rest)
    assert main(["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["default_platform"] == "cpu"
    assert facts["versions"]["jax"] == jax.__version__
    assert 0 < facts["memory_bytes"] < 1 << 50
    with pytest.raises(ConfigError, match="quantum"):
        main(["--platform", "quantum"])


@pytest.mark.parametrize(
    ("platform", "capability", "said"),
    [
        ("gpu", "9.0", "in hardware"),
        ("gpu", "8.0", "in hardware"),
        ("gpu", "7.5", "emulated: use --precision 16.32 --half-type float16 --loss-scaling dynamic"),
        ("gpu", "gfx90a", ""),
        ("gpu", "", ""),
        ("tpu", "", "in hardware"),
    ],
)
def test_bfloat16(platform, capability, said):
    assert _bfloat16(platform, capability) == said


def test_the_kernels_for_cpus_are_named_or_how_to_get_them(monkeypatch, capsys, tmp_path):
    found, _ = library.kernels_library()
    assert found
    assert main([]) == 0
    assert f"kernels   {found.path.name.partition('.')[0]}" in capsys.readouterr().out.splitlines()
    monkeypatch.setattr(library, "kernels_library", lambda: library.find_kernels(tmp_path))
    for command in ([], ["--version"]):
        assert (program(command) if command else main([])) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "none: the kernels were not compiled when Headrace was installed" in out
        assert "pip install --force-reinstall --no-deps --no-cache-dir" in out


def test_a_driver_without_its_jax_is_named(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/proc/driver/nvidia/version")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert "pip install 'headrace[cuda]'" in describe_machine().notes[0]
