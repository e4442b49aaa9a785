"""Every reader of files from elsewhere: good files are read, damaged ones are clear errors or are accepted."""

import os
from types import SimpleNamespace

import pytest

from headrace.data.sets import npz_file, pack, tfrecord_file
from tests.fuzz import readers
from tests.fuzz.harness import CORPUS, damaged, fuzz, mutate, outcome
from tests.fuzz.readers import READERS

CASES = int(os.environ.get("HEADRACE_FUZZ_CASES", "20000"))


@pytest.mark.parametrize("name", READERS)
def test_good_files_are_read(tmp_path, name):
    assert [outcome(name, data, tmp_path) for data in READERS[name].good] == ["accepted"] * len(READERS[name].good)


@pytest.mark.parametrize("file", sorted(CORPUS.glob("[a-z]*")), ids=lambda file: file.name)
def test_what_was_once_a_finding_is_none(tmp_path, file):
    assert outcome(file.name.partition("-")[0], file.read_bytes(), tmp_path) in ("error", "accepted")


def test_damaged_files_are_errors_or_accepted(tmp_path):
    counts, findings = fuzz(tmp_path, seed=0, cases=CASES)
    assert not findings
    assert all(counts[name, "error"] for name in READERS if READERS[name].clear), "the damage reaches every reader"


def test_the_cases_follow_from_the_seed():
    import random

    data = READERS["torch"].good[0]
    assert mutate(data, random.Random(5)) == mutate(data, random.Random(5)) != mutate(data, random.Random(6))
    assert (
        damaged("index", random.Random(5)) == damaged("index", random.Random(5)) != damaged("index", random.Random(6))
    )


class _AnyNumber(int):
    """A checksum that is equal to every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


FAULTS = {
    "the size that a header claims, in an index": ("index", npz_file.StoredArray, "fits", True),
    "the size that a header claims, in a set": ("npz", npz_file.StoredArray, "fits", True),
    "the bounds of rows": ("index", readers, "check_rows", lambda *_: None),
    "the bounds of rows of a packed file": ("packed", pack, "check_rows", lambda *_: None),
    "checksums of a packed file": ("packed", pack, "zlib", SimpleNamespace(crc32=lambda data: _AnyNumber())),
    "checksums of records": ("records", tfrecord_file, "masked_crc32c", lambda data: _AnyNumber()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_that_is_left_out_is_found(tmp_path, monkeypatch, fault):
    """Plant what the harness is for: it must find it within a thousand cases."""
    name, place, attribute, instead = FAULTS[fault]
    assert not fuzz(tmp_path, 0, cases=100, names=[name], corpus=tmp_path)[1]
    monkeypatch.setattr(place, attribute, instead)
    assert fuzz(tmp_path, 0, cases=1000, names=[name], corpus=tmp_path)[1]
