"""The live page: a small server of the runs in a directory, from the same files and code as reports.

A run is asked for by its path below the directory, and only a path that the listing of runs contains is opened: what
a browser sends never becomes part of a path. Requests must name this host (a page elsewhere could otherwise read the
answers under a name of its own) and, where one is set, know the token. Notes, tags, names and deletion are POSTs, which
are answered only where editing was asked for, and then there always is a token.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.config.schema import all_options
from headrace.core.errors import CheckpointError, ConfigError, HeadraceError
from headrace.core.json_text import parse_json
from headrace.report.comparison import compare_options
from headrace.report.curves import Curves, draw_compared, draw_panels
from headrace.report.markup import Html, element, page
from headrace.report.run_edits import LABELS_FILE, Labels, checked, delete_run, read_labels, rename_run, write_labels
from headrace.report.run_files import (
    IMAGES_FILE,
    MACHINE_FILE,
    PLAN_FILE,
    PROFILE_FILE,
    SCHEDULE_FILE,
    RunFiles,
    read_files,
)
from headrace.report.run_report import comparison_page, results_section, run_names, run_page
from headrace.report.run_summary import CONFIG_FILE, RUNNING, UNREADABLE, RunSummary, find_runs, read_summary
from headrace.report.sections import run_sections
from headrace.report.server import Access, Answer, Query, Routes, json_answer, make_pages_server
from headrace.rows.values import format_value
from headrace.telemetry.records import LOG_FILE, METRICS_FILE, REPORTS

_LISTING_SECONDS = 1.5  # for which a listing is used again: several pages may ask at once
_MOST_CURVES = 32  # runs whose columns are kept in memory
_MOST_COMPARED = 26
_FILES_READ = (
    *(CONFIG_FILE, METRICS_FILE, PLAN_FILE, MACHINE_FILE, IMAGES_FILE, SCHEDULE_FILE, LABELS_FILE),
    *(LOG_FILE, REPORTS, PROFILE_FILE, PROFILE_FILE.partition("/")[0]),
)
# Options that have columns: what is tried out, unless another column says it.
_SECTIONS, _MORE = ("learning", "batch", "augment", "model", "weights", "numerics"), ("seed", "image_size")
_SHOWN = ("model_name", "num_epochs")
_MOST_COLUMNS = 8
_HEADS = ("", "run", "top-1", "images", "epochs", "time", "device time", "img/s", "model", "dataset", "written")
_EDITOR = Html(
    '<dialog id="editor"><form method="dialog"><h3 id="edited"></h3>'
    '<label>name <input id="name" maxlength="100"></label>'
    '<label>tags, with commas between them <input id="tags" maxlength="400"></label>'
    '<label>note <textarea id="note" rows="4" maxlength="2000"></textarea></label>'
    '<p class="problem" id="refused" hidden></p><div class="controls"><button id="save" value="save">Save</button>'
    '<button class="plain" value="cancel">Cancel</button></div></form></dialog>'
)
_LIVE_PARTS = ("summary", "time", "validation", "notes")  # of a run's page, beside its curves


@dataclass
class Board:
    """The runs in a directory, with what was read of them before."""

    place: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _listed: float = -1e9
    _runs: dict[str, RunSummary] = field(default_factory=dict)
    _seen: dict[str, tuple[int, int, RunSummary]] = field(default_factory=dict)
    _curves: OrderedDict[str, Curves] = field(default_factory=OrderedDict)

    def runs(self) -> dict[str, RunSummary]:
        """Return the runs by their path below the directory."""
        with self._lock:
            if time.monotonic() - self._listed > _LISTING_SECONDS:
                found = {_name(path, self.place): path for path in find_runs(self.place)}
                self._runs = {name: self._summary(name, path) for name, path in found.items()}
                self._seen = {name: seen for name, seen in self._seen.items() if name in found}
                self._listed = time.monotonic()
            return self._runs

    def _summary(self, name: str, path: Path) -> RunSummary:
        """Read a run's records again only if they changed, or may end without a change of theirs."""
        try:
            facts = (path / METRICS_FILE).stat()
            size, changed = facts.st_size, facts.st_mtime_ns
        except OSError:
            size, changed = -1, -1
        before = self._seen.get(name)
        if before and before[:2] == (size, changed) and before[2].state not in (RUNNING, UNREADABLE) and size >= 0:
            return before[2]
        summary = read_summary(path)
        self._seen[name] = size, changed, summary
        return summary

    def forget(self) -> None:
        """List the runs anew at the next request."""
        with self._lock:
            self._listed = -1e9

    def curves(self, name: str, path: Path) -> Curves:
        """Return the columns of a run, read to the end of its records."""
        with self._lock:
            curves = self._curves.setdefault(name, Curves(path))
            self._curves.move_to_end(name)
            while len(self._curves) > _MOST_CURVES:
                self._curves.popitem(last=False)
        # Outside the lock: reading a long run for the first time must not hold up the other pages.
        curves.read_more()
        return curves


def _name(path: Path, place: Path) -> str:
    return path.relative_to(place).as_posix().encode(errors="replace").decode() if path != place else "."


def make_server(place: Path, address: tuple[str, int], access: Access, *, edits: bool = False) -> ThreadingHTTPServer:
    """Return a server of the runs in a directory; port 0 takes a free one. Editing needs a token."""
    if edits and not access.token:
        raise ConfigError("The board has no token.", rule="What changes runs is for who knows the token.")
    pages = _Pages(Board(place), access.token, edits=edits)
    return make_pages_server(Routes(get=pages.routes, post=pages.edits if edits else {}), address, access)


class _Pages:
    """The answers of the board by path."""

    def __init__(self, board: Board, token: str, *, edits: bool) -> None:
        self._board, self._token, self._may_edit = board, f"&token={quote(token)}" if token else "", edits
        self._options: tuple[tuple[str, ...], Mapping[str, list[Any]]] = ((), {})
        self.routes: dict[str, Callable[[Query], Answer | None]] = {
            "/": self._list,
            "/run": self._run,
            "/compare": self._compare,
            "/api/runs": self._api_runs,
            "/api/run": self._api_run,
            "/api/compare": self._api_compare,
        }
        self.edits: dict[str, Callable[[Query, bytes], Answer | None]] = {
            "/api/label": self._edit(self._label),
            "/api/rename": self._edit(self._rename),
            "/api/delete": self._edit(self._delete),
        }

    def _list(self, query: Query) -> Answer:
        head = element("tr", *(element("th", name) for name in (*_HEADS, "state")))
        table = element("table", element("thead", head), element("tbody"), id="runs", class_="sortable")
        controls = [
            Html('<input type="search" id="filter" placeholder="filter" aria-label="filter">'),
            Html('<label class="faint">group by <select id="group" aria-label="group by"></select></label>'),
            element("button", "Compare", id="compare", disabled=""),
            *([element("button", "Delete", id="delete", disabled="", class_="plain")] if self._may_edit else []),
            element("span", id="count", class_="faint"),
        ]
        body = [
            element("h1", "Runs"),
            element("div", self._board.place, class_="faint"),
            element("div", class_="problem", id="connection"),
            element("section", element("div", *controls, class_="controls"), element("div", table, class_="wide")),
        ]
        if self._may_edit:
            body.append(_EDITOR)
        data = {**self._listed(), "token": self._token, "edits": self._may_edit}
        return Answer(page(f"Runs in {self._board.place}", body, data).encode())

    def _listed(self) -> dict[str, Any]:
        """Return the rows of all runs, newest first, and the options that have columns: those in which runs differ."""
        runs = sorted(self._board.runs().items(), key=lambda item: -item[1].modified)
        options = self._differing(dict(runs))
        rows = []
        for place, (name, run) in enumerate(runs):
            *cells, state = _cells(run)
            cells += [_option_cell(values[place]) for values in options.values()]
            labels = read_labels(run.path) if _stays_inside(run.path, self._board.place) else Labels()
            said = {"note": labels.note, "tags": list(labels.tags)}
            rows.append({"id": name, "name": name, **said, "cells": [*cells, state]})
        return {"runs": rows, "columns": list(options)}

    def _differing(self, runs: Mapping[str, RunSummary]) -> Mapping[str, list[Any]]:
        """Return the values of a few options by name; a run's options never change, so that they are kept."""
        key = tuple(runs)
        if self._options[0] != key:
            known = all_options()
            found = {
                name: values
                for name, values in compare_options(list(runs.values())).items()
                if (option := known.get(name)) is not None  # no keys of mappings, which are many
                and (option.section in _SECTIONS or option.name in _MORE)
                and option.name not in _SHOWN
            }
            # Rates and batches first, then as the options are listed.
            order = {option.name: _place(option.section, k) for k, option in enumerate(known.values())}
            first = sorted(found, key=lambda name: order[name])[:_MOST_COLUMNS]
            self._options = key, {name: found[name] for name in first}
        return self._options[1]

    def _api_runs(self, query: Query) -> Answer:
        return json_answer(self._listed())

    def _edit(self, change: Callable[[RunSummary, Mapping[str, Any]], object]) -> Callable[..., Answer | None]:
        """Return the answer to a POST that changes runs: {"ids": [...], ...} as JSON."""

        def answer(query: Query, sent: bytes) -> Answer | None:
            try:
                asked = parse_json(sent.decode())
                if not isinstance(asked, dict) or not isinstance(asked.get("ids"), list):
                    raise ValueError
                runs, named = self._board.runs(), dict.fromkeys(map(str, asked["ids"]))
            except ValueError:
                return json_answer({"problem": "What was sent is not understood."}, HTTPStatus.BAD_REQUEST)
            if not named or not set(named) <= set(runs) or "." in named:
                return None
            try:
                for name in named:
                    if not _stays_inside(runs[name].path, self._board.place):
                        raise CheckpointError(f"{name} has links to somewhere else.")
                    change(runs[name], asked)
            except (HeadraceError, OSError) as error:
                return json_answer({"problem": str(error)})
            finally:
                self._board.forget()
            return json_answer({})

        return answer

    def _label(self, run: RunSummary, asked: Mapping[str, Any]) -> None:
        write_labels(run.path, checked(asked.get("note", ""), asked.get("tags", [])))

    def _rename(self, run: RunSummary, asked: Mapping[str, Any]) -> None:
        rename_run(run.path, asked.get("name"))

    def _delete(self, run: RunSummary, asked: Mapping[str, Any]) -> None:
        delete_run(run.path)

    def _up(self) -> Html:
        return Html(f'<div><a href="./?{self._token[1:]}">all runs</a></div>')

    def _chosen(self, query: Query) -> dict[str, RunSummary]:
        runs = self._board.runs()
        named = {name: runs[name] for name in query.get("id", [])[:_MOST_COMPARED] if name in runs}
        return {name: run for name, run in named.items() if _stays_inside(run.path, self._board.place)}

    def _run(self, query: Query) -> Answer | None:
        for name, run in self._chosen(query).items():
            curves = self._board.curves(name, run.path)
            live = {"live": f"api/run?id={quote(name)}{self._token}", "version": _version([curves], [run])}
            return Answer(run_page(self._files(run), curves, live, self._up()).encode())
        return None

    def _files(self, run: RunSummary) -> RunFiles:
        return read_files(run.path, self._board.runs().values())

    def _api_run(self, query: Query) -> Answer | None:
        for name, run in self._chosen(query).items():
            curves = self._board.curves(name, run.path)
            version = _version([curves], [run])
            # Nothing new, which is the usual answer: a page asks every two seconds.
            if query.get("version") == [version]:
                return json_answer({"version": version})
            parts = run_sections(self._files(run))
            shown = {part: parts[part].text for part in _LIVE_PARTS}
            return json_answer({"version": version, "panels": draw_panels(curves), "parts": shown})
        return None

    def _compare(self, query: Query) -> Answer | None:
        runs, curves = self._compared(query)
        if not runs:
            return None
        address = "&".join(f"id={quote(name)}" for name in runs)
        version = _version(curves, list(runs.values()))
        live = {"live": f"api/compare?{address}{self._token}", "version": version}
        return Answer(comparison_page(list(runs.values()), curves, live, self._up()).encode())

    def _api_compare(self, query: Query) -> Answer | None:
        runs, curves = self._compared(query)
        if not runs:
            return None
        version = _version(curves, list(runs.values()))
        if query.get("version") == [version]:
            return json_answer({"version": version})
        summaries = list(runs.values())
        panels = draw_compared(dict(zip(run_names(summaries), curves, strict=True)))
        parts = {"results": results_section(summaries).text}
        return json_answer({"version": version, "panels": panels, "parts": parts})

    def _compared(self, query: Query) -> tuple[dict[str, RunSummary], list[Curves]]:
        runs = {name: run for name, run in self._chosen(query).items() if run.state != UNREADABLE}
        return runs, [self._board.curves(name, run.path) for name, run in runs.items()]


def _version(curves: Sequence[Curves], runs: Sequence[RunSummary]) -> str:
    """Return a text that changes with what a page shows."""
    return " ".join(f"{each.version} {run.state}" for each, run in zip(curves, runs, strict=True))


def _stays_inside(run: Path, place: Path) -> bool:
    """Say whether no file that is read of a run is a link to somewhere outside the directory that is served."""
    files = [*(run / name for name in _FILES_READ), *(run / REPORTS).glob("*.json")]
    root = place.resolve()
    return all(file.resolve().is_relative_to(root) for file in files if file.is_symlink())


def _cells(run: RunSummary) -> list[dict[str, Any]]:
    start, rate = run.start, run.images_per_second
    return [
        # Sorted by what the accuracy is at least: few images say little.
        _cell(run.score_text, run.accuracy_bound),
        _cell(f"{run.best.num_samples:,}" if run.best else None, run.best.num_samples if run.best else None),
        _cell(f"{run.epoch:.4g}" + (start.of_epochs if start else ""), run.epoch),
        _cell(run.time_text, run.seconds),
        _cell(run.cost_text, run.device_hours),
        _cell(None if rate is None else f"{rate:,.0f}", rate),
        {"text": start.model if start else ""},
        {"text": run.dataset},
        _cell(run.written, run.modified),
        {"text": run.state_text, "state": run.state},
    ]


def _place(section: str, number: int) -> tuple[int, int]:
    return (_SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS), number)


def _option_cell(value: object) -> dict[str, Any]:
    if value is None:
        return {"text": "-"}
    text = value if isinstance(value, str) else format_value(tuple(value) if isinstance(value, list) else value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _cell(text, float(value))
    return {"text": text}


def _cell(text: str | None, value: float | None) -> dict[str, Any]:
    """Return a cell with the number that it is sorted by; one that is not finite comes last."""
    is_number = value is not None and value == value and abs(value) != float("inf")
    return {"text": text or "-", "sort": value if is_number else "-"}
