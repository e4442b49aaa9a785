"""`headrace train` and `headrace resume RUN_DIR`: start a run, or continue one from its newest good checkpoint."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.options import Parsed, read_arguments, read_config_arguments, resolve_arguments
from headrace.job import Restart, detect_restart
from headrace.reference.scripts import take_value

if TYPE_CHECKING:
    from headrace.config.load import Resolved
    from headrace.config.schema import Config
    from headrace.run.trained_model import RunResult

DESCRIPTION = "Train a network. Without options this is the embedded default: a small ResNet on handwritten digits."
RESUME_DESCRIPTION = "Resume a run from its newest good checkpoint, bit for bit."


def main(argv: list[str]) -> int:
    """Run `headrace train`; return its exit code."""
    path, rest = take_value(argv, "--restore-path")
    if path is not None:  # the reference's way to resume a run
        return resume([path, *rest])
    parsed = read_config_arguments(argv, "headrace train", description=DESCRIPTION)
    resolved, restart = resolve_arguments(parsed), detect_restart(os.environ)
    from headrace.job import join_job
    from headrace.run.fit import train, train_or_resume

    if restart and restart.batch_replicas:
        resolved = _with_whole_batch(parsed, resolved, restart)
    with join_job(distributed=resolved.config.run.distributed) as process:
        if resolved.config.logging.resume == "auto" or restart:
            result = train_or_resume(resolved, parsed.options, restart)
        else:
            result = train(resolved)
    _print_result(result)
    if process is None or process.is_first:
        _make_averages(result, resolved.config, validate_them=process is None)
    return _exit_code(result)


def _with_whole_batch(parsed: Parsed, resolved: "Resolved", restart: Restart) -> "Resolved":
    """Return the configuration with the batch that it has with all replicas, of which a restart may have lost some."""
    from headrace.run.choices import with_choices
    from headrace.run.design import with_batch_of

    whole = resolve_arguments(parsed, restart.whole_environ(os.environ))
    return with_batch_of(with_choices(whole), with_choices(resolved))


def resume(argv: list[str]) -> int:
    """Run `headrace resume`; return its exit code."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of a run that was started before")

    parsed = read_arguments(argv, "headrace resume", add_arguments, RESUME_DESCRIPTION)
    from headrace.job import join_job
    from headrace.run.fit import resume as resume_run

    restart = detect_restart(os.environ)
    with join_job(distributed=bool(parsed.options.get("distributed"))):
        notes = (restart.note,) if restart and restart.number else ()
        result = resume_run(parsed.args.run_dir, parsed.options, notes=notes)
    _print_result(result)
    return _exit_code(result)


def _print_result(result: "RunResult") -> None:
    """Print, in process 0, the table at the end of a run."""
    from headrace.cli.run_end import end_lines
    from headrace.job import current_group
    from headrace.report.run_summary import read_summary

    if current_group().is_first:
        print("\n" + "\n".join(end_lines(result, read_summary(result.directory))))


def _make_averages(result: "RunResult", config: "Config", *, validate_them: bool) -> None:
    """Average checkpoints as requested with the training, and validate the averages where one process can."""
    requested = config.checkpoint.average_last_epochs or config.checkpoint.average_decays
    if result.outcome not in ("finished", "stopped") or not requested:
        return
    from headrace.cli.validate import Table
    from headrace.run.averages import averages_after
    from headrace.run.validation import validate

    for made in averages_after(result.directory, config):
        print(f"{made.path.name}: of {len(made.members)} checkpoints, {made.path}")
        table = Table()
        for row in validate(made.path) if config.validation.validation and validate_them else ():
            table.show(row)


def _exit_code(result: "RunResult") -> int:
    """Return 0, or 75 for a run that was interrupted and can be resumed."""
    from headrace.core.errors import INTERRUPTED_EXIT_CODE

    return INTERRUPTED_EXIT_CODE if result.outcome == "interrupted" else 0
