"""Pruning and the list of the best: what stays, what goes, and that the only good one never goes."""

from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.best import BestCheckpoints, ScoredCheckpoint, prune, rank
from headrace.checkpoint.store import checkpoint_name, newest_good, save, step_of
from headrace.core.errors import CheckpointError


def make(directory: Path, *steps: int) -> list[Path]:
    return [save(directory, checkpoint_name(step), {"w": np.full(3, step)}, {"step": step}) for step in steps]


def damage(path: Path) -> None:
    (path / "state.safetensors").write_bytes(b"")


def steps_in(directory: Path) -> list[int]:
    return sorted(step for path in directory.iterdir() if (step := step_of(path)) is not None)


def test_the_last_and_the_chosen_stay(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5, 6)
    gone = prune(tmp_path, 2, {checkpoint_name(2)})
    assert steps_in(tmp_path) == [2, 5, 6]
    assert [step_of(path) for path in gone] == [1, 3, 4]
    assert prune(tmp_path, 2, {checkpoint_name(2)}) == []


def test_a_chosen_one_among_the_last_counts_as_one_of_them(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    prune(tmp_path, 2, {checkpoint_name(3)})
    assert steps_in(tmp_path) == [2, 3]


def test_the_only_good_one_is_never_deleted(tmp_path: Path) -> None:
    paths = make(tmp_path, 1, 2, 3, 4, 5)
    for path in paths[2:]:
        damage(path)
    prune(tmp_path, 2)
    assert steps_in(tmp_path) == [2, 4, 5]
    assert newest_good(tmp_path)[0] == paths[1]


def test_what_was_written_just_now_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that stays nowhere vouches for nothing: then one that stays is read."""
    read = []
    monkeypatch.setattr("headrace.checkpoint.best.verify", lambda path: read.append(step_of(path)))
    make(tmp_path, 1, 2, 3)
    prune(tmp_path, 2, written=checkpoint_name(3))
    assert (steps_in(tmp_path), read) == ([2, 3], [])
    prune(tmp_path, 1, written=checkpoint_name(2))
    assert (steps_in(tmp_path), read) == ([3], [3])


def test_one_that_is_being_written_is_not_touched(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    writing = tmp_path / ".tmp-step_00000004-1"
    writing.mkdir()
    prune(tmp_path, 1)
    assert writing.exists()
    assert steps_in(tmp_path) == [3]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        prune(tmp_path, 0)


def test_rank_orders_by_score_and_the_earlier_wins_a_tie() -> None:
    entries: tuple[ScoredCheckpoint, ...] = ()
    for score, name in ((0.5, "a"), (0.9, "b"), (0.9, "c"), (float("nan"), "d"), (0.7, "e")):
        entries = rank(entries, ScoredCheckpoint(score=score, name=name), 3)
    assert [(entry.score, entry.name) for entry in entries] == [(0.9, "b"), (0.9, "c"), (0.7, "e")]
    assert rank((), ScoredCheckpoint(score=float("nan"), name="x"), 1) == ()
    assert rank((), ScoredCheckpoint(score=0.1, name="x"), 0) == ()


def test_a_checkpoint_counts_once_with_its_better_weights() -> None:
    entries = rank((ScoredCheckpoint(score=0.8, name="a"),), ScoredCheckpoint(score=0.85, name="a", weights="ema"), 2)
    assert entries == (ScoredCheckpoint(score=0.85, name="a", weights="ema"),)
    assert rank(entries, ScoredCheckpoint(score=0.81, name="a"), 2) == entries


@pytest.mark.parametrize(("first", "second"), [("raw", "ema"), ("ema", "raw")])
def test_of_equal_weights_those_that_were_scored_first_stay(first: str, second: str) -> None:
    entries = (ScoredCheckpoint(score=0.8, name="a", weights=first),)
    assert rank(entries, ScoredCheckpoint(score=0.8, name="a", weights=second), 2) == entries


def test_of_equal_scores_the_lower_loss_is_better_then_the_earlier():
    entries: tuple[ScoredCheckpoint, ...] = ()
    for name, loss in (("a", 0.43), ("b", 0.19), ("c", 0.19), ("d", None)):
        entries = rank(entries, ScoredCheckpoint(score=0.9, name=name, loss=loss), 4)
    assert [entry.name for entry in entries] == ["b", "c", "a", "d"]


def test_a_list_of_an_earlier_version_has_no_losses(tmp_path):
    (tmp_path / "best.json").write_text('{"best": [{"score": 0.9, "name": "step_00000001", "weights": "raw"}]}')
    best = BestCheckpoints(tmp_path, 1)
    assert not best.add(0.8, "step_00000002", loss=0.1)
    assert best.add(0.9, "step_00000003", loss=0.1)


def test_best_says_when_there_is_a_new_best_and_survives_a_new_process(tmp_path: Path) -> None:
    best = BestCheckpoints(tmp_path / "checkpoints", 2)
    assert best.add(0.5, "step_00000001")
    assert not best.add(0.4, "step_00000002", "ema")
    assert not best.add(0.5, "step_00000003")
    assert best.add(0.75, "step_00000004", "ema")
    again = BestCheckpoints(tmp_path / "checkpoints", 2)
    assert again.entries() == (
        ScoredCheckpoint(score=0.75, name="step_00000004", weights="ema"),
        ScoredCheckpoint(score=0.5, name="step_00000001")
    )  # fmt: skip
    assert again.names() == {"step_00000001", "step_00000004"}


def test_first_good_passes_over_the_missing_and_the_damaged(tmp_path: Path) -> None:
    best = BestCheckpoints(tmp_path, 3)
    paths = make(tmp_path, 1, 2)
    damage(paths[1])
    for score, step in ((0.9, 3), (0.8, 2), (0.7, 1)):
        best.add(score, checkpoint_name(step))
    found = best.read_first_good()
    assert found is not None
    assert found[0].name == found[1].path.name == checkpoint_name(1)


def test_reset_makes_the_list_anew_from_scores_whose_checkpoints_are_there(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    best = BestCheckpoints(tmp_path, 2)
    (tmp_path / "best.json").write_text("damaged")
    scores = ((0.6, 0), (0.7, 1), (0.8, 2), (0.7, 3), (0.9, 4))
    best.reset(ScoredCheckpoint(score=score, name=checkpoint_name(step)) for score, step in scores)
    assert [entry.name for entry in best.entries()] == [checkpoint_name(2), checkpoint_name(1)], "0 and 4 are gone"
    best.reset(())
    assert best.entries() == ()


def test_a_damaged_list_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"best": [{"score"')
    with pytest.raises(CheckpointError, match=r"best\.json is damaged.*Delete it"):
        BestCheckpoints(tmp_path).names()
    (tmp_path / "best.json").write_text('{"best": [{"points": 3}]}')
    with pytest.raises(CheckpointError, match="is damaged"):
        BestCheckpoints(tmp_path).entries()
