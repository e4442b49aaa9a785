"""The C decoder under the sanitizers: a fixed seed finds nothing, and planted faults are found."""

import shutil
import subprocess

import pytest

from tests.fuzz.native import NATIVE, main


def run(seconds, seed, **options):
    """Return the exit code; skip where the sanitizers cannot be had."""
    try:
        code = main(seconds, seed, **options)
    except (subprocess.CalledProcessError, FileNotFoundError):
        code = 2
    if code == 2:
        pytest.skip("no compiler with AddressSanitizer")
    return code


def test_damaged_images_of_a_fixed_seed_are_no_finding(tmp_path):
    assert run(120, 0, cases=1500, corpus=tmp_path) == 0


FAULTS = {
    "one coefficient too many": ("jpeg_bits.h", "if (one > 63) return -1;", "if (one > 64) return -1;"),
    "a marker at the end": ("jpeg_view.c", "mark + 1 >= end", "mark >= end"),
    "a segment too many": ("jpeg_view.c", "if (segments->count == most) return 0;", ""),
    "more symbols than bytes": ("jpeg_frame.c", "symbols > 256 || ", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_that_is_left_out_is_found_within_a_minute(tmp_path, fault):
    file, check, instead = FAULTS[fault]
    folder = shutil.copytree(NATIVE, tmp_path / "native", ignore=shutil.ignore_patterns("*.so*", "*.cc", "__pycache__"))
    text = (folder / file).read_text()
    assert text.count(check) == 1
    (folder / file).write_text(text.replace(check, instead))
    assert run(60, 0, folder=folder, corpus=tmp_path) == 1
    assert list(tmp_path.glob("image-*"))
