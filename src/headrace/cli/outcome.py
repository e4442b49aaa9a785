"""What a run came to, as the last lines on the terminal and as an exit code."""

from headrace.run.books import RunResult
from headrace.run.group import current_group
from headrace.run.interrupt import INTERRUPTED


def tell(result: RunResult) -> None:
    """Print the last accuracy, where the run lies, and how to go on with it when it was interrupted; process 0 does."""
    if not current_group().is_first:
        return
    for weights, record in result.validation.items():
        print(f"top-1 {100 * record.top1:.2f} % on {record.num_samples:,} validation images ({weights} weights)")
    print(f"run directory: {result.directory}")
    if result.can_resume:
        print(f"interrupted; go on with: headrace resume {result.directory}")


def exit_code(result: RunResult) -> int:
    """Return 0, or 75 for a run that was interrupted and can be resumed."""
    return INTERRUPTED if result.outcome == "interrupted" else 0
