"""The live page over real HTTP: what it serves, what it refuses, and that it stands whatever happens to the runs."""

import http.client
import json
import re
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace.cli.board import board
from headrace.core.errors import ConfigError
from headrace.report.board_server import make_server
from headrace.report.server import LOCAL, Access

from .test_run_report import HOSTILE, end, make, start, trained, validated

Ask = Callable[..., tuple[int, str]]


@contextmanager
def serving(place: Path, access: Access | None = None, *, edits: bool = False) -> Iterator[int]:
    """Serve a directory; gives the port."""
    server = make_server(place, ("127.0.0.1", 0), access or Access(), edits=edits)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Ask]]:
    """Return a function that serves a directory and returns one that asks it."""
    with ExitStack() as stack:

        def begin(place: Path, access: Access | None = None) -> Ask:
            port = stack.enter_context(serving(place, access))

            def ask(path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
                line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                line.request(method, path, headers={"Host": host})
                answer = line.getresponse()
                found = answer.status, answer.read().decode()
                line.close()
                return found

            return ask

        yield begin


@pytest.fixture
def place(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    make(runs / "good", [start(), trained(1, 2.0), validated(1, 0.9), end(verdict="compute-bound")], seed=1)
    make(runs / "deep" / "nan", [start(HOSTILE), trained(1, float("nan")), validated(1, float("nan")), end()], seed=2)
    make(runs / "empty", [])
    make(tmp_path / "secret", [start("secret-model"), end()])
    return runs


def answer(ask: Ask, path: str) -> Any:
    status, text = ask(path)
    assert status == 200, text
    return json.loads(text)


def test_options_that_differ_have_columns(tmp_path, serve):
    for name, options in {
        "a": {"learning_rate": 0.1, "seed": 1, "model_name": "x", "log_dir": "p", "optimizer": "sgd"},
        "b": {"learning_rate": 0.25, "seed": 1, "model_name": "y", "log_dir": "q", "optimizer": "sgd"},
        "c": {"seed": 1, "model_name": "x", "log_dir": "q", "optimizer": "adamw"},
    }.items():
        make(tmp_path / name, [start(), end()], **options)
    found = answer(serve(tmp_path), "/api/runs")
    assert found["columns"] == ["optimizer", "learning_rate"]
    cells = {run["id"]: [(cell["text"], cell.get("sort")) for cell in run["cells"][-3:-1]] for run in found["runs"]}
    assert cells["a"] == [("sgd", None), ("0.1", 0.1)]
    assert cells["b"] == [("sgd", None), ("0.25", 0.25)]
    assert cells["c"] == [("adamw", None), ("-", None)]


def test_the_list_has_every_run_with_its_results(place, serve):
    ask = serve(place)
    rows = {run["id"]: [cell["text"] for cell in run["cells"]] for run in answer(ask, "/api/runs")["runs"]}
    assert rows.keys() == {"good", "deep/nan", "empty"}
    assert rows["good"][:4] == ["90.00 %", "10", "4/4", "12.0 s"]
    assert rows["deep/nan"][0] == "-"
    assert rows["empty"][-1] == "not started"
    status, page = ask("/")
    assert status == 200
    assert "<script>alert" not in page


def test_accuracies_are_sorted_by_what_they_are_at_least(tmp_path, serve):
    for name, top1, count in (("tiny", 1.0, 2), ("large", 0.95, 2000)):
        make(tmp_path / name, [start(), replace(validated(1, top1), num_samples=count), end()])
    rows = {run["id"]: run["cells"] for run in answer(serve(tmp_path), "/api/runs")["runs"]}
    assert [cell["text"] for cell in rows["tiny"][:2]] == ["100.00 %", "2"]
    assert rows["tiny"][0]["sort"] < rows["large"][0]["sort"]


def test_a_useless_run_is_marked(tmp_path, serve):
    make(tmp_path / "bad", [start(), validated(1, 0.9), end(model_verdict="constant: a is the answer to all images")])
    (row,) = answer(serve(tmp_path), "/api/runs")["runs"]
    assert row["cells"][-1] == {"text": "finished, constant", "state": "finished"}


@pytest.mark.parametrize("name", ["good", "deep/nan", "empty"])
def test_every_run_has_its_page(place, serve, name):
    status, page = serve(place)(f"/run?id={quote(name)}")
    assert status == 200
    assert f'"live": "api/run?id={name}"' in page
    assert "<script>alert" not in page


def test_new_records_arrive_and_nothing_is_sent_twice(place, serve):
    ask = serve(place)
    first = answer(ask, "/api/run?id=good&version=0")
    assert first["panels"][0]["lines"][0]["y"] == [2.0]
    assert "compute-bound" in first["parts"]["summary"]
    version = quote(first["version"])
    assert answer(ask, f"/api/run?id=good&version={version}") == {"version": first["version"]}
    line = trained(2, 1.0).to_json() + "\n"
    with (place / "good" / "metrics.jsonl").open("a") as file:
        file.write(line[:30])
        file.flush()
        assert answer(ask, f"/api/run?id=good&version={version}") == {"version": first["version"]}, "half a line"
        file.write(line[30:])
    assert answer(ask, f"/api/run?id=good&version={version}")["panels"][0]["lines"][0]["y"] == [2.0, 1.0]


def test_runs_are_compared(place, serve):
    ask = serve(place)
    status, page = ask("/compare?id=good&id=deep/nan")
    assert status == 200
    assert re.search(r"<td>seed</td><td>1</td><td>2</td>", page)
    update = answer(ask, "/api/compare?id=good&id=deep/nan")
    panels = {panel["title"]: panel for panel in update["panels"]}
    assert [line["y"] for line in panels["Training, loss"]["lines"]] == [[2.0], [None]]
    results = update["parts"]["results"]
    assert "best top-1" in results
    assert results in page, "the table that an update replaces is the one of the page"


def test_a_run_that_is_deleted_is_gone_and_the_server_is_not(place, serve, monkeypatch):
    monkeypatch.setattr("headrace.report.board_server._LISTING_SECONDS", 0.0)
    ask = serve(place)
    assert ask("/run?id=good")[0] == 200
    shutil.rmtree(place / "good")
    assert ask("/run?id=good")[0] == 404
    assert ask("/api/run?id=good")[0] == 404
    assert len(answer(ask, "/api/runs")["runs"]) == 2


@pytest.mark.parametrize(
    "path",
    [
        "/run?id=../secret",
        "/run?id=%2e%2e%2fsecret",
        "/run?id=good/../../secret",
        "/run?id=/etc",
        "/run?id=good%00",
        "/run",
        "/../secret/config.json",
        "/good/metrics.jsonl",
        "/%2e%2e/secret/config.json",
        "/api/run?id=..%5csecret",
        "//etc/passwd",
        "/compare?id=../secret",
        "/run?" + "&".join(["id=x"] * 200),
    ],
)
def test_nothing_outside_the_directory_can_be_reached(place, serve, path):
    status, text = serve(place)(path)
    assert status in (400, 404)
    assert "secret-model" not in text


def test_links_to_the_outside_are_not_followed(place, serve):
    (place / "linked").symlink_to(place.parent / "secret")
    (place / "good" / "log.txt").symlink_to(place.parent / "secret" / "metrics.jsonl")
    ask = serve(place)
    assert ask("/run?id=linked")[0] == 404
    assert ask("/run?id=good")[0] == 404
    (place / "good" / "log.txt").unlink()
    assert ask("/run?id=good")[0] == 200
    (place / "good" / "profile").symlink_to(place.parent / "secret")
    assert ask("/run?id=good")[0] == 404


def test_it_is_read_only_and_serves_only_who_names_this_host(place, serve):
    ask = serve(place)
    for method, status in (("POST", 405), ("PUT", 501), ("DELETE", 501)):
        assert ask("/", method)[0] == status
    assert ask("/api/runs", host="evil.example")[0] == 403, "another site's name that leads here"
    assert ask("/api/runs", host="localhost:1234")[0] == 200
    assert ask("/", "HEAD") == (200, "")


def test_requests_that_are_no_addresses_are_refused_before_anything_is_read(place, serve, capfd):
    ask = serve(place)
    assert ask("http://[::1")[0] == 400
    for host in ("[::1]x", "[::1", "localhost:", "127.0.0.1:80:90", "", "localhost:1234567"):
        assert ask("/api/runs", host=host)[0] == 403, host
    assert ask("/api/runs", host="[::1]:80")[0] == 200
    assert ask("http://[::1", host="evil.example")[0] == 403, "who asks comes first"
    assert "Traceback" not in capfd.readouterr().err


def test_no_page_may_be_framed(place):
    with serving(place) as port:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        line.request("GET", "/")
        assert "frame-ancestors 'none'" in (line.getresponse().getheader("Content-Security-Policy") or "")
        line.close()


def test_records_with_a_hole_take_no_memory(place, serve):
    records = place / "good" / "metrics.jsonl"
    before = records.read_bytes()
    with records.open("r+b") as file:
        file.truncate(1 << 30)  # a gigabyte of zeros after the last record
    ask = serve(place)
    tracemalloc.start()
    (row,) = [row for row in answer(ask, "/api/runs")["runs"] if row["id"] == "good"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert row["cells"][0]["text"] == "90.00 %", "what stands before the hole counts"
    assert peak < 64 << 20, "over 2 GiB before"
    records.write_bytes(before)


def test_a_token_is_needed_where_there_is_one(place, serve):
    ask = serve(place, Access(hosts=None, token="wheel&mill"))
    for path in ("/", "/api/runs", "/run?id=good", "/?token=", "/?token=wheel"):
        assert ask(path)[0] == 403
    status, page = ask("/?token=wheel%26mill")
    assert status == 200
    assert '"token": "&token=wheel%26mill"' in page


def test_a_thousand_runs_are_listed_quickly(tmp_path, serve):
    for number in range(1000):
        make(tmp_path / f"run{number:04}", [start(), trained(1), validated(1, number / 1000), end()], seed=number)
    ask = serve(tmp_path)
    began = time.process_time()
    assert len(answer(ask, "/api/runs")["runs"]) == 1000
    assert time.process_time() - began < 5, "0.2 s when nothing else runs"


def test_the_command_refuses_what_it_cannot_serve(tmp_path):
    for argv in ([str(tmp_path / "none")], [str(tmp_path), "--port", "70000"], [str(tmp_path), "--token", ""]):
        with pytest.raises(ConfigError):
            board(argv)
    assert "127.0.0.1" in LOCAL
