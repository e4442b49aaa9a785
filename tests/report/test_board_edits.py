"""What may be changed on the board, and by whom: real requests, real directories."""

import http.client
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.core.directory_lock import lock_directory
from headrace.core.errors import ConfigError
from headrace.report.board_server import make_server
from headrace.report.run_edits import LABELS_FILE, Labels, checked, read_labels, write_labels
from headrace.report.run_summary import read_summary
from headrace.report.server import Access

from .test_board import serving
from .test_run_report import HOSTILE, end, make, start, trained, validated

TOKEN = "wheel"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    for name in ("a", "deep/b", "c"):
        make(runs / name, [start(), trained(1, 2.0), validated(1, 0.9), end()])
        (runs / name / "checkpoints").mkdir()
        (runs / name / "checkpoints" / "x").write_text("weights")
    make(tmp_path / "secret", [start(), end()])
    return runs


@pytest.fixture
def port(place: Path) -> Iterator[int]:
    with serving(place, Access(token=TOKEN), edits=True) as port:
        yield port


def ask(port: int, path: str, sent: object = None, method: str = "POST", **headers: str) -> tuple[int, Any]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    line.request(method, path, None if method == "GET" else body, {"Host": "127.0.0.1", **headers})
    answer = line.getresponse()
    text = answer.read().decode()
    line.close()
    return answer.status, json.loads(text) if answer.getheader("Content-Type") == "application/json" else text


def listed(port: int) -> dict[str, Any]:
    return {run["id"]: run for run in ask(port, f"/api/runs?token={TOKEN}", method="GET")[1]["runs"]}


def test_notes_and_tags_are_kept_beside_the_records(place, port):
    sent = {"ids": ["a", "deep/b"], "note": f" {HOSTILE} ", "tags": [" paper", "", "paper", "x"]}
    assert ask(port, f"/api/label?token={TOKEN}", sent) == (200, {})
    rows = listed(port)
    assert rows["a"]["tags"] == rows["deep/b"]["tags"] == ["paper", "x"]
    assert rows["a"]["note"] == HOSTILE.strip()
    assert (rows["c"]["tags"], rows["c"]["note"]) == ([], "")
    assert read_labels(place / "a") == Labels(note=HOSTILE.strip(), tags=("paper", "x"))
    assert ask(port, f"/api/label?token={TOKEN}", {"ids": ["a"]}) == (200, {})
    assert not (place / "a" / LABELS_FILE).exists(), "nothing is left of labels that were taken back"


def test_runs_are_renamed_and_deleted_but_not_while_they_train(place, port):
    assert ask(port, f"/api/rename?token={TOKEN}", {"ids": ["deep/b"], "name": "d"}) == (200, {})
    assert set(listed(port)) == {"a", "deep/d", "c"}
    assert (place / "deep" / "d" / "checkpoints" / "x").read_text() == "weights"
    for name in ("../c", "", ".hidden", "a/b", "c\n", "x" * 101, 3, None):
        status, told = ask(port, f"/api/rename?token={TOKEN}", {"ids": ["a"], "name": name})
        assert (status, "cannot be the name" in told["problem"]) == (200, True), name
    status, told = ask(port, f"/api/rename?token={TOKEN}", {"ids": ["a"], "name": "c"})
    assert (status, "There is a c already" in told["problem"]) == (200, True)
    with lock_directory(place / "a"):
        for what in ("delete", "rename"):
            status, told = ask(port, f"/api/{what}?token={TOKEN}", {"ids": ["a"], "name": "z"})
            assert (status, bool(told["problem"])) == (200, True)
            assert "a" in listed(port)
    assert ask(port, f"/api/delete?token={TOKEN}", {"ids": ["a", "deep/d"]}) == (200, {})
    assert set(listed(port)) == {"c"}
    assert sorted(path.name for path in place.rglob("*") if path.is_file() and path.name != ".lock") == [
        "config.json",
        "metrics.jsonl",
        "x",
    ]


def test_nothing_is_changed_by_get_without_the_token_from_elsewhere_or_outside(place, port):
    sent = {"ids": ["a"], "name": "z"}
    for what in ("label", "rename", "delete"):
        assert ask(port, f"/api/{what}?token={TOKEN}&id=a", method="GET")[0] == 404
        assert ask(port, f"/api/{what}", sent)[0] == 403
        assert ask(port, f"/api/{what}?token=wrong", sent)[0] == 403
        assert ask(port, f"/api/{what}?token={TOKEN}", sent, Origin="http://evil.example")[0] == 403
        for ids in (["../secret"], ["."], [], ["a", "nothing"], ["/etc"], [""]):
            assert ask(port, f"/api/{what}?token={TOKEN}", {"ids": ids, "name": "z"})[0] == 404, ids
        for wrong in (b"", b"\xff", b"[1]", b'{"ids": "a"}', b"{"):
            assert ask(port, f"/api/{what}?token={TOKEN}", wrong)[0] == 400, wrong
    (place / "link").symlink_to(place.parent / "secret")
    for what in ("rename", "delete"):
        assert ask(port, f"/api/{what}?token={TOKEN}", {"ids": ["link"], "name": "z"})[0] in (200, 404)
    assert (place.parent / "secret" / "config.json").is_file()
    assert {"a", "deep/b", "c"} <= set(listed(port))


def test_without_being_asked_for_there_is_no_editing(place):
    with pytest.raises(ConfigError, match="no token"):
        make_server(place, ("127.0.0.1", 0), Access(), edits=True)
    with serving(place, Access(token=TOKEN)) as port:
        assert ask(port, f"/api/delete?token={TOKEN}", {"ids": ["a"]})[0] == 405
        assert '"edits": false' in ask(port, f"/?token={TOKEN}", method="GET")[1]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"note": 3, "tags": []}', '{"note": "", "tags": [1]}', '{"note": ""}']
)
def test_foreign_labels_are_no_labels(tmp_path, text):
    (tmp_path / LABELS_FILE).write_text(text)
    assert read_labels(tmp_path) == Labels()


def test_labels_have_limits(tmp_path):
    for note, tags in (("x" * 2001, []), ("", ["y" * 41]), ("", list(map(str, range(21)))), (3, []), ("", "tag")):
        with pytest.raises(ConfigError):
            checked(note, tags)
    labels = checked("x" * 2000, ["ä" * 40, *map(str, range(19))])
    write_labels(tmp_path, labels)
    assert read_labels(tmp_path) == labels


def test_what_a_run_cost_counts_its_devices_and_the_energy_of_all_its_processes(tmp_path):
    begun = replace(start(), num_devices=4)
    records = [begun, replace(end(), time_to_train=900, energy_joules=1.8e6)]
    records += [begun, replace(end(), time_to_train=1800, energy_joules=3.6e6)]
    run = read_summary(make(tmp_path / "a", records))
    assert run.device_hours == 2
    assert run.energy_joules == 5.4e6
    assert run.cost_text == "2.0 h, 1.5 kWh"
    short = read_summary(make(tmp_path / "b", [replace(start(), num_devices=2), replace(end(), time_to_train=60)]))
    assert short.cost_text == "2 min 00 s"
    assert read_summary(make(tmp_path / "c", [])).cost_text == "-"
