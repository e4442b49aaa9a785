"""What a run came to, as the last lines on the terminal and as an exit code."""

from headrace.config.schema import Config
from headrace.core.errors import INTERRUPTED_EXIT_CODE
from headrace.job import current_group
from headrace.run.recorder import RunResult


def tell(result: RunResult) -> None:
    """Print the last accuracy, where the run lies, and how to go on with it when it was interrupted; process 0 does."""
    if not current_group().is_first:
        return
    for weights, record in result.validation.items():
        print(f"top-1 {100 * record.top1:.2f} % on {record.num_samples:,} validation images ({weights} weights)")
    print(f"run directory: {result.directory}")
    if result.can_resume:
        print(f"interrupted; go on with: headrace resume {result.directory}")


def tell_averages(result: RunResult, config: Config, *, validated: bool) -> None:
    """Make the averages of checkpoints that were asked for with training, and validate them where one process can."""
    asked = config.checkpoint.average_last_epochs or config.checkpoint.average_decays
    if result.outcome != "finished" or not asked:
        return
    from headrace.cli.validate import Table
    from headrace.run.averages import averages_after
    from headrace.run.validation import validate

    for made in averages_after(result.directory, config):
        print(f"{made.path.name}: of {len(made.members)} checkpoints, {made.path}")
        table = Table()
        for row in validate(made.path) if config.validation.validation and validated else ():
            table.show(row)


def exit_code(result: RunResult) -> int:
    """Return 0, or 75 for a run that was interrupted and can be resumed."""
    return INTERRUPTED_EXIT_CODE if result.outcome == "interrupted" else 0
