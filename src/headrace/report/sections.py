"""The parts of a run's report as HTML: summary, time, validation, images, profile, plan, schedule, options, machine."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.units import format_bytes, format_count, format_duration, format_percent
from headrace.engine.hlo_text import IDLE, KINDS
from headrace.plan.draw.diagram import FAINT, INK, LINE, MICROSECONDS, PAPER, WASH, draw_svg
from headrace.plan.schedule import Action, Work
from headrace.plan.simulation import by_shares, make_table
from headrace.plan.timeline import Cell, Table
from headrace.report.markup import Html, element, rows_table, section
from headrace.report.run_summary import RunFiles
from headrace.rows.metrics import OF_CLASSES, TOP1
from headrace.rows.values import format_value
from headrace.telemetry.device_trace import ProfileSummary, summary_from, utilisation_lines
from headrace.telemetry.metric_totals import KIND_NAMES
from headrace.telemetry.model_verdict import never_recognized
from headrace.telemetry.records import LOG_FILE, RunEnd

_SIZE, _LEFT, _TOP, _RIGHT, _BOTTOM = 300, 46, 10, 290, 250


def draw_scores(files: RunFiles) -> Html:
    """Return the section of calibration, top-k and thresholds."""
    found = files.images
    if not found:
        return Html("")
    calibration = found["calibration"]
    ranks = ", ".join(f"top-{k} {format_percent(share)}" for k, share in found["top_k"].items())
    facts = f"{found['num_images']:,} images, {found['weights']} weights of {found['checkpoint']}: {ranks}. "
    facts += f"Expected calibration error {format_percent(calibration['ece'])}."
    diagram = element("div", element("h3", "Reliability"), _reliability(calibration["bins"]))
    parts = [diagram]
    if "thresholds" in found:
        rows = [
            (
                f"{row['threshold']:.2f}",
                *(format_percent(row[name]) for name in ("precision", "recall", "f1", "accuracy")),
            )
            for row in found["thresholds"]
        ]
        heading = ("probability at least", "precision", "recall", "F1", "accuracy")
        title = f"Thresholds for {found['positive']}"
        auc = "" if found["auc"] is None else f"Area under the ROC curve: {found['auc']:.4f}."
        table = rows_table(rows, heading, (0, 1, 2, 3, 4))
        parts.append(element("div", element("h3", title), table, element("p", auc, class_="note")))
    return section("scores", "Probabilities", element("p", facts), element("div", *parts, class_="pair"))


def _reliability(bins: Sequence[Mapping[str, Any]]) -> Html:
    """Return the diagram: accuracy of the images in each bin of probability; on the diagonal, they are equal."""

    def across(share: float) -> float:
        return _LEFT + share * (_RIGHT - _LEFT)

    def up(share: float) -> float:
        return _BOTTOM - share * (_BOTTOM - _TOP)

    marks = []
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        text = f"{100 * tick:.0f}"
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>')
        marks.append(f'<text x="{_LEFT - 7}" y="{up(tick) + 4:.1f}" text-anchor="end">{text}</text>')
        marks.append(f'<text x="{across(tick):.1f}" y="{_BOTTOM + 17}" text-anchor="middle">{text}</text>')
    for each in bins:
        if each["count"]:
            left, right = across(each["low"]) + 1, across(each["high"]) - 1
            top = up(each["accuracy"])
            tip = (
                f"{each['count']:,} images: accuracy {each['accuracy']:.1%}, mean probability {each['confidence']:.1%}"
            )
            box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{max(_BOTTOM - top, 1):.1f}"'
            marks.append(f'<rect {box} style="fill:var(--c0)" opacity="0.75"><title>{tip}</title></rect>')
    marks.append(f'<path d="M{_LEFT} {_BOTTOM}L{_RIGHT} {_TOP}" style="stroke:var(--c1)" stroke-dasharray="5 4"/>')
    axis = "probability of the class predicted, %"
    marks.append(f'<text x="{across(0.5):.0f}" y="{_BOTTOM + 36}" text-anchor="middle">{axis}</text>')
    label = 'role="img" aria-label="accuracy by predicted probability"'
    svg = f'<svg viewBox="0 0 {_SIZE} {_SIZE - 8}" {label} style="max-width:340px">{"".join(marks)}</svg>'
    note = (
        "Accuracy in % (vertical) of the images in each bin. Below the dashed line the network is too sure of itself."
    )
    return element("div", Html(svg), element("p", note, class_="note"), class_="chart")


def draw_images(files: RunFiles) -> Html:
    """Return the section of notable images, and the mosaic of training images."""
    found = files.images
    if not found:
        return Html("")
    parts: list[Html] = []
    root = _root([row["file"] for name in ("mistakes", "hardest") for row in found[name]])
    for name, title in (("mistakes", "The most confident mistakes"), ("hardest", "Correct, but barely")):
        if found[name]:
            parts += [
                element("h3", title),
                element("div", *(_figure(row, root) for row in found[name]), class_="images"),
            ]
    if not found["mistakes"]:
        parts.append(element("p", f"There is no mistake among {found['num_images']:,} images."))
    if root:
        parts.append(element("p", f"Files are below {root}", class_="note"))
    if _is_image(found.get("mosaic")):
        sheet = Html(f'<img src="{found["mosaic"]}" alt="training images">')
        note = "Some training images as the network gets them in the first epoch, before any mixing."
        parts += [element("h3", "Training images"), element("div", sheet, class_="mosaic")]
        parts.append(element("p", note, class_="note"))
    return section("images", "Images", *parts)


def _is_image(address: object) -> bool:
    """Say whether an address is an image in itself: the file may have been written by anyone."""
    return isinstance(address, str) and address.startswith("data:image/") and not set(address) & set("\"'<> ")


def _root(files: Sequence[str]) -> str:
    """Return the directory that all files are in, to be shown once; '' for none."""
    levels = zip(*(file.split("/")[:-1] for file in files), strict=False)
    return "".join(f"{names[0]}/" for names in takewhile(lambda names: len(set(names)) == 1, levels))


def _figure(row: Mapping[str, Any], root: str) -> Html:
    picture = Html(f'<img src="{row["image"]}" alt="">' if _is_image(row["image"]) else "")
    text = f"{row['predicted']} {100 * row['probability']:.1f} %"
    if row["predicted"] == row["true"]:
        lines = [element("b", text)]
    else:
        lines = [element("b", text), Html("<br>"), f"is {row['true']} ({100 * row['true_probability']:.1f} %)"]
    file = element("div", row["file"].removeprefix(root), class_="faint", title=row["file"])
    return element("figure", picture, element("figcaption", *lines, file))


# The profile in a run's report: where the time of the devices went, by kind of work, block and kernel.


_MOST_BLOCKS = 200


def draw_profile(files: RunFiles) -> Html:
    """Return the section of a run that was profiled."""
    if not files.profile:
        return Html("")
    found = summary_from(files.profile)
    work = found.workload
    about = (
        f"{work.num_steps:,} steps ({work.num_images:,} images) of {work.num_devices} x {work.device}, recorded after "
        "the first calls; of several devices, the mean. Where kernels overlap, the one that started last counts."
    )
    blocks = (
        element("h3", "By block"),
        rows_table(_block_rows(found), ("block", "forward ms", "backward ms", "share %"), numbers=(1, 2, 3)),
    )
    kernels = (
        element("h3", "Slowest kernels"),
        rows_table(
            _kernel_rows(found),
            ("kernel", "kind", "block", "ms", "share %", "times", "memory"),
            numbers=(3, 4, 5, 6),
        ),
    )
    return section(
        "profile",
        f"Where the devices' time went: {format_duration(found.seconds)} recorded",
        *_bar(found),
        element("pre", "\n".join(utilisation_lines(found))),
        element("div", element("div", *blocks), element("div", *kernels), class_="pair"),
        element("p", about, class_="note"),
    )


def _bar(found: ProfileSummary) -> list[Html]:
    rows = []
    for kind, seconds in found.kinds.items():
        color = KINDS.index(kind) % 6 if kind in KINDS else 3
        # The page has six colours for more kinds: those of a second round are faint.
        rows.append((kind, seconds, color, kind == IDLE or color != KINDS.index(kind)))
    return _share_bar(rows, found.seconds)


def _share_bar(rows: Iterable[tuple[str, float, int, bool]], whole: float) -> list[Html]:
    """Return a bar of (name, seconds, number of the colour, is it faint) and its legend, the longest first."""
    bars, parts = [], []
    for name, seconds, color, is_faint in sorted(rows, key=lambda row: -row[1]):
        look = f"{'opacity:.45;' * is_faint}background:var(--c{color})"
        text = f"{name} {format_duration(seconds)} ({seconds / whole:.1%})"
        if seconds > 0.0005 * whole:  # anything thinner would be less than a pixel of the bar
            bars.append(element("div", style=f"width:{100 * seconds / whole:.2f}%;{look}", title=text))
        parts.append(element("span", element("i", style=look), text))
    return [element("div", *bars, class_="bar"), element("div", *parts, class_="parts")]


def _block_rows(found: ProfileSummary) -> list[tuple[str, ...]]:
    return [
        (
            block.name,
            f"{1e3 * block.forward:.3f}",
            f"{1e3 * block.backward:.3f}",
            f"{100 * block.seconds / found.seconds:.2f}",
        )
        for block in sorted(found.blocks, key=lambda block: -block.seconds)[:_MOST_BLOCKS]
    ]


def _kernel_rows(found: ProfileSummary) -> list[tuple[str, ...]]:
    return [
        (
            kernel.name[:120],
            kernel.kind,
            kernel.place,
            f"{1e3 * kernel.seconds:.3f}",
            f"{100 * kernel.seconds / found.seconds:.2f}",
            f"{kernel.count:,}",
            f"{format_bytes(int(kernel.bytes_per_second))}/s" if kernel.bytes_per_second else "",
        )
        for kernel in found.kernels
    ]


# The schedule of a pipelined run in its report: planned, from plan.json, and measured, where it was traced.


_MOST_CELLS = 20_000


def draw_schedule(files: RunFiles) -> Html:
    """Return the section with the diagram of one step; nothing for a run without a pipeline."""
    pipeline = files.plan.get("pipeline")
    if not pipeline or files.plan.get("one_program") or len(pipeline["stages"]) < 2:
        return Html("")
    work = Work(_mapping(pipeline["device_mapping"]), pipeline["num_micros"])
    if 2 * work.num_micros * len(work.device_of) > _MOST_CELLS:
        return Html("")
    shares = [stage["time_share"] for stage in pipeline["stages"]]
    planned = make_table(pipeline["schedule"], work, by_shares(shares))
    tables = {"planned, from the stages' shares of the time": planned}
    if measured := _measured(files.schedule, work):
        tables["measured"] = measured
    idle = ", ".join(f"{name.partition(',')[0]} {table.bubble:.1%}" for name, table in tables.items())
    facts = f"{pipeline['schedule']}, {work.num_stages} stages on {work.num_devices} devices, {work.num_micros} micro "
    facts += f"batches per step. Devices idle: {idle}."
    note = (
        "A row is a device; F2 is the forward pass of micro batch 2, B2 its backward pass. Point at one for its times."
    )
    return section(
        "schedule",
        "Schedule of one step",
        element("p", facts),
        element("div", Html(_themed(draw_svg(tables))), class_="schedule"),
        element("p", note, class_="note"),
    )


def _mapping(value: object) -> Any:
    return tuple(_mapping(item) for item in value) if isinstance(value, list) else value


def _measured(trace: Mapping[str, Any], work: Work) -> Table | None:
    """Return the table of a Chrome trace that `--trace-schedule` wrote: the events of its last process."""
    events = [event for event in trace.get("traceEvents", []) if event.get("ph") == "X"]
    if not events:
        return None
    last = max(event["pid"] for event in events)
    scale = MICROSECONDS["seconds"]
    cells = [
        Cell(event["ts"] / scale, (event["ts"] + event["dur"]) / scale, event["tid"], Action.parse(event["name"]))
        for event in events
        if event["pid"] == last
    ]
    # The first process of a trace is the plan: with it alone nothing was measured.
    if last == 0 or len(cells) > _MOST_CELLS or not {action for *_, action in cells} <= set(work.actions()):
        return None
    return Table(cells=tuple(sorted(cells, key=lambda cell: (cell.start, cell.device))), work=work, unit="seconds")


def _themed(svg: str) -> str:
    """Let the colors of a diagram follow the page's; labels stay dark on their light boxes."""
    return "\n".join(map(_themed_line, svg.splitlines()))


def _themed_line(line: str) -> str:
    if 'text-anchor="middle"' in line:  # a label within a box
        return line
    for color, name in ((INK, "ink"), (FAINT, "faint"), (LINE, "line"), (WASH, "wash"), (PAPER, "card")):
        line = line.replace(f'"{color}"', f'"var(--{name})"')
    return line


# The parts of a run's report as HTML: summary, time, validation, plan, options, machine.


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
    planned = f" of {start.num_epochs}" if start else ""
    tiles = [("state", run.state), ("epochs", f"{run.epoch:.4g}{planned}")]
    if best is not None and not run.is_trial:
        row = run.monitor
        where = f"epoch {best.epoch:.4g}{best.weights_text}"
        tiles.insert(0, (f"best {row.title}, {where}, {best.num_samples:,} images", row.text(best.metric(row.name))))
        last = [record for record in run.validations if record.weights == best.weights][-1]
        tiles.insert(1, (f"last validation, top-1, loss {last.loss:.4g}", format_percent(last.top1)))
        beside = dict.fromkeys((TOP1, *(start.metrics_beside if start else ())))
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
    saving = [element("p", end.saving_text[0].upper() + end.saving_text[1:] + ".")] if end.saving_text else []
    return [*_share_bar(rows, end.wall_seconds or 1.0), *saving, element("p", note, class_="note")]


def _validation(files: RunFiles) -> Html:
    report = files.report
    if not report:
        return Html("")
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
    """Return the confusion matrix; of many classes, of those with the most mistakes."""
    matrix: Sequence[Sequence[int]] = report["confusion_matrix"]
    names = [row["name"] for row in report["classes"]]
    chosen, note = list(range(len(matrix))), ""
    if len(matrix) > _MOST_CLASSES:
        by_column = [sum(column) for column in zip(*matrix, strict=True)]
        wrong = [sum(row) + by_column[k] - 2 * row[k] for k, row in enumerate(matrix)]
        # In the order of the labels again, as in the table beside it.
        chosen = sorted(sorted(chosen, key=lambda k: -wrong[k])[:_MOST_CLASSES])
        note = f"The {_MOST_CLASSES} of {len(matrix):,} classes with the most mistakes."
    head = element(
        "tr",
        element("th", "true \\ predicted"),
        *(element("th", element("span", names[k]), title=names[k]) for k in chosen),
    )
    body = [
        element("tr", element("th", names[k], title=names[k]), *(_cell(matrix, names, k, j) for j in chosen))
        for k in chosen
    ]
    tall = "matrix tall" if len(chosen) > 6 and max(len(names[k]) for k in chosen) > 3 else "matrix"
    table = element("table", element("thead", head), element("tbody", *body), class_=tall)
    return element("div", element("h3", "Confusion matrix"), element("div", table, class_="scroll"), *_note(note))


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
