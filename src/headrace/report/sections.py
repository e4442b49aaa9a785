"""The parts of a run's report as HTML: summary, time, validation, plan, options, machine."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.units import format_bytes, format_count, format_duration, format_percent
from headrace.report.images import draw_images
from headrace.report.markup import Html, element, rows_table, section
from headrace.report.outputs import draw_outputs
from headrace.report.profile import draw_profile, share_bar
from headrace.report.run_files import RunFiles
from headrace.report.run_summary import wilson_interval
from headrace.report.schedule import draw_schedule
from headrace.report.scores import draw_scores
from headrace.rows.metrics import OF_CLASSES
from headrace.rows.values import format_value
from headrace.telemetry.clock import KIND_NAMES
from headrace.telemetry.model_verdict import never_recognized
from headrace.telemetry.records import LOG_FILE, RunEnd

_KIND_COLORS = {"train": 0, "validate": 2, "compile": 5, "wait": 1, "wait_validation": 1, "save": 4}
_MOST_CLASSES = 30  # in a confusion matrix that can still be read; of more, those confused most
_MOST_ROWS = 2_000  # of the table of classes
# What a damaged or foreign file makes the code below raise: one part is then missing, not the page.
_UNUSABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, HeadraceError)


def run_sections(files: RunFiles) -> dict[str, Html]:
    """Return the parts of a run's report by their id, in order; the charts are drawn by the page's script."""
    parts: dict[str, Callable[[RunFiles], Html]] = {
        "summary": _summary,
        "schedule": draw_schedule,
        "curves": lambda files: section("curves", "Curves", element("div", class_="charts", id="charts")),
        "time": _time,
        "profile": draw_profile,
        "validation": _validation,
        "scores": draw_scores,
        "images": draw_images,
        "plan": _plan,
        "options": _options,
        "machine": _machine,
        "notes": _notes,
    }
    return {name: _guarded(name, make, files) for name, make in parts.items()}


def _guarded(name: str, make: Callable[[RunFiles], Html], files: RunFiles) -> Html:
    try:
        found = make(files)
    except _UNUSABLE as error:
        found = section(name, name.capitalize(), element("p", f"cannot be shown: {error!r}", class_="problem"))
    return found if found.text else element("section", id=name, hidden="")  # a place that a live page may fill


def run_title(files: RunFiles) -> str:
    """Return what was trained on what."""
    start = files.summary.start
    return f"{start.model} on {files.summary.dataset}" if start else files.summary.path.name


def _summary(files: RunFiles) -> Html:
    run, start, end, best = files.summary, files.summary.start, files.summary.end, files.summary.best
    planned = f" of {start.num_epochs}" if start and start.of_epochs else ""
    tiles = [("state", run.state), ("epochs", f"{run.epoch:.4g}{planned}")]
    if best is not None and not run.is_trial:
        row = run.monitor
        where = f"epoch {best.epoch:.4g}{best.weights_text}"
        tiles.insert(0, (f"best {row.title}, {where}, {best.num_samples:,} images", row.text(best.metric(row.name))))
        last = [record for record in run.validations if record.weights == best.weights][-1]
        head = run.headline
        tiles.insert(1, (f"last validation, {head.title}, loss {last.loss:.4g}", head.text(last.metric(head.name))))
        beside = dict.fromkeys((head, *(start.metrics_beside if start else ())))
        tiles[1:1] = [(each.title, each.text(best.metric(each.name))) for each in beside if each != row]
    if run.seconds is not None:
        tiles.append(("time to train", format_duration(run.seconds)))
    if rate := run.images_per_second:
        tiles.append(("images per second", f"{rate:,.0f}"))
    if start:
        tiles.append(("images per step", f"{start.global_batch_size:,}"))
        if start.num_parameters:
            tiles.append(("parameters", format_count(start.num_parameters, short=True)))
    texts = [
        element(
            "div",
            *(element("div", element("b", value), element("span", name), class_="tile") for name, value in tiles),
            class_="tiles",
        )
    ]
    if standing := _standing(files):
        texts.append(element("p", standing))
    if run.is_trial:
        texts.append(element("p", "A trial (dry_run_steps): an accuracy on so few images means nothing."))
    if end and end.reason:
        texts.append(element("p", f"{end.outcome}: {end.reason}"))
    if end and end.model_verdict:
        texts.append(element("p", end.model_verdict, class_="problem"))
    if not run.is_trial and (missed := never_recognized(files.report)):
        texts.append(element("p", f"Never recognized: {missed}.", class_="problem"))
    if end and end.verdict:
        texts.append(element("p", end.verdict, class_="verdict"))
    if run.problem:
        texts.append(element("p", run.problem, class_="problem"))
    return section("summary", "Summary", *texts)


def _standing(files: RunFiles) -> str:
    """Say how sure the best accuracy is, what a constant answer has, and what the best other run has."""
    best = files.summary.best
    if best is None or files.summary.is_trial or best.top1 is None or not 0 <= best.top1 <= 1:
        return ""
    low, high = wilson_interval(best.top1, best.num_samples)
    text = f"Top-1 {format_percent(best.top1)} of {best.num_samples:,} images: {100 * low:.1f} to {100 * high:.1f} % "
    text += "with a certainty of 95 %."
    classes = files.report.get("classes")
    if classes and (total := sum(row["num_samples"] for row in classes)):
        largest = max(classes, key=lambda row: row["num_samples"])
        text += f" A constant answer ({largest['name']}) has {format_percent(largest['num_samples'] / total)}."
    if (rival := files.rival) is not None and rival.best is not None:
        text += f" The best other run on these images, {rival.path.name}, has {format_percent(rival.best.top1)}."
    return text


def _time(files: RunFiles) -> Html:
    end = files.summary.end
    if end is None or not end.wall_seconds or not end.seconds:
        return Html("")
    return section("time", f"Where the time went: {format_duration(end.wall_seconds)}", *_time_bar(end))


def _time_bar(end: RunEnd) -> list[Html]:
    rows = [
        (KIND_NAMES.get(kind, kind), seconds, _KIND_COLORS.get(kind, 3), kind in ("wait_validation", "rest"))
        for kind, seconds in end.seconds.items()
    ]
    note = "Of the last process of the run; the kinds do not overlap and add up to its wall time."
    saving = [element("p", f"Saving: {end.saving_text}.")] if end.saving_text else []
    return [*share_bar(rows, end.wall_seconds or 1.0), *saving, element("p", note, class_="note")]


def _validation(files: RunFiles) -> Html:
    report = files.report
    if not report:
        return Html("")
    if "task" in report:
        return draw_outputs(files)
    classes: Sequence[Mapping[str, Any]] = report["classes"]
    epoch = next((r.epoch for r in files.summary.validations if r.step == files.report_step), None)
    where = f"{files.report_weights} weights at step {files.report_step:,}" + (f", epoch {epoch:.4g}" if epoch else "")
    facts = f"{report['num_samples']:,} images, {where}: top-1 {format_percent(report['top1'])}, "
    facts += ", ".join(f"{row.title} {row.text(report[row.name])}" for row in OF_CLASSES if row.name in report)
    rows = [
        (
            row["name"],
            f"{row['num_samples']:,}",
            f"{row['num_correct']:,}",
            format_percent(row["recall"]),
            format_percent(row["precision"]),
            format_percent(_f1(row)),
        )
        for row in classes[:_MOST_ROWS]
    ]
    heading = ("class", "images", "correct", "recall", "precision", "F1")
    more = f"The first {_MOST_ROWS:,} of {len(classes):,} classes." if len(classes) > _MOST_ROWS else ""
    table = element("div", element("h3", "Classes"), rows_table(rows, heading, (1, 2, 3, 4, 5)), *_note(more))
    return section(
        "validation", "Validation", element("p", facts), element("div", _matrix(report), table, class_="pair")
    )


def _f1(row: Mapping[str, Any]) -> float | None:
    both = row["num_samples"] + row["num_predicted"]
    return 2 * row["num_correct"] / both if both else None


def _matrix(report: Mapping[str, Any]) -> Html:
    """Return the confusion matrix; of many classes, those with the most mistakes, and as what they are mistaken."""
    matrix: Sequence[Sequence[int]] = report["confusion_matrix"]
    names = [row["name"] for row in report["classes"]]
    rows = columns = list(range(len(matrix)))
    parts: list[Html] = []
    if len(matrix) > _MOST_CLASSES:
        # In the order of the labels again, as in the table beside it.
        rows = _most(rows, [sum(row) - row[k] for k, row in enumerate(matrix)])
        columns = _most(columns, [sum(matrix[k][j] for k in rows) for j in columns])
        if not rows:
            return element("div", element("h3", "Confusion matrix"), element("p", "There is no mistake."))
        note = (
            f"Of {len(matrix):,} classes, the {len(rows)} with the most mistakes (rows), and the {len(columns)} that "
        )
        parts += [*_note(note + "most of their images are taken for (columns)."), *_pairs(report)]
    head = element(
        "tr",
        element("th", "true \\ predicted"),
        *(element("th", element("span", names[k]), title=names[k]) for k in columns),
    )
    body = [
        element("tr", element("th", names[k], title=names[k]), *(_cell(matrix, names, k, j) for j in columns))
        for k in rows
    ]
    tall = "matrix tall" if len(columns) > 6 and max(len(names[k]) for k in columns) > 3 else "matrix"
    table = element("table", element("thead", head), element("tbody", *body), class_=tall)
    return element("div", element("h3", "Confusion matrix"), element("div", table, class_="scroll"), *parts)


def _most(places: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the places with the largest counts, those with none left out, in their order."""
    return sorted(k for k in sorted(places, key=lambda k: -counts[k])[:_MOST_CLASSES] if counts[k])


def _pairs(report: Mapping[str, Any]) -> list[Html]:
    rows = [(pair["true"], pair["predicted"], f"{pair['count']:,}") for pair in report.get("most_confused", ())]
    return [element("h3", "Most confused"), rows_table(rows, ("true", "predicted", "images"), (2,))] if rows else []


def _cell(matrix: Sequence[Sequence[int]], names: Sequence[str], true: int, predicted: int) -> Html:
    count, total = matrix[true][predicted], sum(matrix[true])
    share = count / total if total else 0.0
    hue = "heat" if true == predicted else "bad"
    # The root of the share: few mistakes, which one looks for, would be invisible otherwise.
    style = f"background:rgba(var(--{hue}),{0.08 + 0.55 * share**0.5:.2f})" if count else None
    title = f"{names[true]} predicted as {names[predicted]}: {count:,} of {total:,} ({share:.1%})"
    return element("td", f"{count:,}" if count else "", style=style, title=title)


def _plan(files: RunFiles) -> Html:
    plan = files.plan
    if not plan:
        return Html("")
    batch, steps = plan["batch"], plan["steps"]
    parts = f"{batch['micro_batch_size']:,} x {batch['num_replicas']} x {batch['gradient_accumulation_count']}"
    rows: list[tuple[object, ...]] = [
        ("global batch", f"{batch['global_batch_size']:,} images: {parts} (micro batch x replicas x accumulation)"),
        ("devices", f"{plan['num_devices']} in {plan['num_processes']} process{'es' * (plan['num_processes'] != 1)}"),
        ("steps", f"{steps['total_steps']:,}: {steps['num_epochs']} epochs of {steps['updates_per_epoch']:,}"),
        ("parameters", f"{plan['num_parameters']:,}"),
        ("forward pass", f"{format_count(plan['flops_per_image'], short=True)} FLOP per image"),
        ("dataset", f"{plan['dataset_cache']['where']}: {plan['dataset_cache']['reason']}"),
    ]
    memory = [
        (row["name"], format_bytes(row["bytes"]), row["detail"]) for row in plan["memory"]["rows"] if row["bytes"]
    ]
    memory.append(("total", format_bytes(plan["memory"]["total_bytes"]), "of the fullest device"))
    memory += _measured_memory(files.summary.end)
    left = element("div", element("h3", "Batches and steps"), rows_table(rows))
    right = element("div", element("h3", "Memory of a device, planned and measured"), rows_table(memory, numbers=(1,)))
    warnings = [element("p", text, class_="problem") for text in plan.get("warnings", [])]
    return section("plan", "Plan", element("div", left, right, class_="pair"), *warnings)


def _measured_memory(end: RunEnd | None) -> list[tuple[str, str, str]]:
    """Return the row of what was measured; on a CPU that is the process, with Python, the libraries and the dataset."""
    if end is None or not end.memory:
        return []
    if "device_peak_bytes" not in end.memory:
        detail = "resident peak of the process, with Python and its libraries: devices here do not count"
        return [("measured", format_bytes(int(end.memory["process_peak_bytes"])), detail)]
    limit = end.memory.get("device_limit_bytes")
    detail = f"the fullest device's peak{f', of {format_bytes(int(limit))}' if limit else ''}"
    return [("measured", format_bytes(int(end.memory["device_peak_bytes"])), detail)]


def _options(files: RunFiles) -> Html:
    values, origins = files.config.get("values", {}), files.config.get("origins", {})
    if not values:
        return Html("")
    said = files.config.get("source", {})  # what was given in other words, as it was
    values, origins = values | {name: given.get("value") for name, given in said.items()}, origins | said

    def row(name: str) -> tuple[str, str, str]:
        origin = origins.get(name, {})
        where = origin.get("where") or ""
        value = tuple(values[name]) if isinstance(values[name], list) else values[name]
        return name, format_value(value), f"{origin.get('kind', 'default')}{f' ({where})' if where else ''}"

    given = [row(name) for name in values if name in origins]
    rest = [row(name) for name in values if name not in origins]
    heading = ("option", "value", "origin")
    defaults = element("details", element("summary", f"{len(rest)} defaults"), rows_table(rest, heading))
    chosen = rows_table(given, heading) if given else element("p", "Every option has its default.")
    return section("options", "Options", chosen, defaults)


def _machine(files: RunFiles) -> Html:
    start, machine, command = files.summary.start, files.machine, files.config.get("command")
    parts = []
    if isinstance(command, list) and command:
        parts += [element("h3", "The command"), element("pre", shlex.join(map(str, command)))]
    rows: list[tuple[object, ...]] = []
    if start:
        rows += [("started", start.time), ("device", start.device or start.platform), ("seed", start.seed)]
    if machine:
        devices = [f"{kind['count']} x {kind['name']} ({kind['platform']})" for kind in machine["devices"]]
        rows += [
            ("devices of the host", ", ".join(devices)),
            ("processor", f"{machine['host']}, {machine['processors']} for the process"),
        ]
        if machine.get("memory_bytes"):
            rows.append(("memory of the host", format_bytes(machine["memory_bytes"])))
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in machine["versions"].items())))
    elif start:
        rows.append(("version", f"headrace {start.version}"))
    rows.append(("directory", files.summary.path))
    return section("machine", "Machine, versions, command", *parts, rows_table(rows))


def _notes(files: RunFiles) -> Html:
    """Return the end of the log, which has the notes and warnings."""
    file = files.summary.path / LOG_FILE
    if not file.is_file():
        return Html("")
    with file.open("rb") as log:
        # From the end: the log of a long run may have hundreds of megabytes.
        log.seek(max(0, file.stat().st_size - 20_000))
        lines = log.read().decode(errors="replace").splitlines()[-60:]
    last = element("details", element("summary", f"the last {len(lines)} lines"), element("pre", "\n".join(lines)))
    return section("notes", "Log", last)


def _note(text: str) -> list[Html]:
    return [element("p", text, class_="note")] if text else []
