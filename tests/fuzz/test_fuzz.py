"""Every reader of files from elsewhere: good files are read, damaged ones are clear errors or are accepted."""

import os

import pytest

from tests.fuzz.harness import CORPUS, fuzz, mutate, outcome
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
