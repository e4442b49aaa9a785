"""`headrace train` and `resume`: start a run, or continue one."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.options import Parsed, read_arguments, read_config_arguments, resolve_arguments, without_recipe
from headrace.cli.run_end import end_lines
from headrace.cli.slips import is_run
from headrace.config.command_line import take_value
from headrace.core.local_path import run_place
from headrace.job import Restart, detect_process_info, detect_restart

if TYPE_CHECKING:
    from headrace.config.load import Resolved
    from headrace.job import ProcessInfo
    from headrace.run.run_result import RunResult

DESCRIPTION = "Train a network. Without options this is the embedded default: a small ResNet on handwritten digits."
RESUME_DESCRIPTION = "Resume a run from its newest good checkpoint, bit for bit."


def main(argv: list[str]) -> int:
    """Run `headrace train`; return its exit code."""
    path, rest = take_value(argv, "--restore-path")
    if path is not None:  # another way to resume a run
        return resume([path, *rest])
    for place, word in enumerate(argv[:-1]):
        if word == "--resume" and is_run(argv[place + 1]):  # as others have it
            return resume([argv[place + 1], *argv[:place], *argv[place + 2 :]])
    parsed = read_config_arguments(argv, "headrace train", description=DESCRIPTION)
    resolved, restart = resolve_arguments(parsed), detect_restart(os.environ)
    config = resolved.config
    if not restart and config.logging.resume != "auto" and not _is_in_job(distributed=config.run.distributed):
        from headrace.engine.visible import start_early

        start_early(config.run)
    from headrace.job import join_job
    from headrace.run.fit import train, train_or_resume

    if restart and restart.batch_replicas:
        resolved = _with_whole_batch(parsed, resolved, restart)
    with join_job(distributed=config.run.distributed) as process:
        if resolved.config.logging.resume == "auto" or restart:
            result = train_or_resume(resolved, parsed.options, restart)
        else:
            result = train(resolved)
    return _finish(result, process)


def _is_in_job(*, distributed: bool) -> bool:
    return detect_process_info(os.environ, distributed=distributed) is not None


def _with_whole_batch(parsed: Parsed, resolved: "Resolved", restart: Restart) -> "Resolved":
    """Return the configuration with the batch that it has with all replicas, of which a restart may have lost some."""
    from headrace.run.choices import with_choices
    from headrace.run.design import with_batch_of

    whole = resolve_arguments(parsed, restart.whole_environ(os.environ))
    return with_batch_of(with_choices(whole), with_choices(resolved))


def resume(argv: list[str]) -> int:
    """Run `headrace resume`; return its exit code."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "run_dir",
            metavar="RUN_DIR",
            type=run_place,
            help="directory of a run that was started before, here or in a store",
        )

    from headrace.run.sweep import is_sweep

    if argv and is_sweep(Path(argv[0])):
        from headrace.cli.sweep import resume as resume_sweep

        return resume_sweep(Path(argv[0]), argv[1:])
    parsed = read_arguments(without_recipe(argv), "headrace resume", add_arguments, RESUME_DESCRIPTION)
    from headrace.job import join_job
    from headrace.run.fit import resume as resume_run

    restart = detect_restart(os.environ)
    with join_job(distributed=bool(parsed.options.get("distributed"))) as process:
        notes = (restart.note,) if restart and restart.number else ()
        result = resume_run(parsed.args.run_dir, parsed.options, notes=notes)
    return _finish(result, process)


def _finish(result: "RunResult", process: "ProcessInfo | None") -> int:
    """Print the table at the end of a run and average its checkpoints, in process 0; return the exit code.

    It is 75 for a run that was interrupted and can be resumed, else 0.
    """
    from headrace.core.errors import INTERRUPTED_EXIT_CODE
    from headrace.report.run_summary import read_summary

    if process is None or process.is_first:
        print("\n" + "\n".join(end_lines(result, read_summary(result.directory))))
        _make_averages(result, validate_them=process is None)
    return INTERRUPTED_EXIT_CODE if result.outcome == "interrupted" else 0


def _make_averages(result: "RunResult", *, validate_them: bool) -> None:
    """Average checkpoints as requested with the training, and validate the averages where one process can."""
    from headrace.run.directory import read_run

    # As the run saved it: a resumed one may have been asked for them when it was started, and the name of the
    # checkpoints' directory may contain the time of the start.
    config = read_run(result.directory)[1].config
    requested = config.checkpoint.average_last_epochs or config.checkpoint.average_decays
    if result.outcome not in ("finished", "stopped") or not requested:
        return
    from headrace.cli.validate import ResultTable
    from headrace.run.averaged_checkpoint import averages_after
    from headrace.run.validation import validate

    for made in averages_after(result.directory, config):
        print(f"{made.path.name}: of {len(made.members)} checkpoints, {made.path}")
        table = ResultTable()
        for row in validate(made.path) if config.validation.validation and validate_them else ():
            table.show(row)
