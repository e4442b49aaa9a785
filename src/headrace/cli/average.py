"""`headrace average RUN_DIR`: average the checkpoints of a run, and validate the result."""

import argparse
import sys
from pathlib import Path

from headrace.cli.options import read_arguments

DESCRIPTION = (
    "Average the newest checkpoints of a run in float64: their mean, or an exponential average. The result is a "
    "checkpoint under averages/ in the run, with a label that names the average; it is validated at once."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = read_arguments(argv, "headrace average", _add_arguments, DESCRIPTION)
    args = parsed.args
    from headrace.run.averages import AverageOptions, average_run

    options = AverageOptions(
        mode=args.mode,
        last=args.last,
        decay=args.decay,
        discard_last=args.discard_last,
        weights=args.weights,
        name=args.name,
    )
    made = average_run(args.path, options)
    for path, problem in made.damaged:
        print(f"warning: skipped: {path.name}: {problem}", file=sys.stderr)
    print(f"{made.label}: the {options.mode} of {', '.join(made.members)}")
    print(f"written: {made.path}")
    if args.validate:
        from headrace.cli.validate import Table
        from headrace.run.validation import validate

        table = Table()
        for result in validate(made.path, parsed.options):
            table.show(result)
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN_DIR", type=Path, help="a run's directory, or a directory of checkpoints")
    parser.add_argument("--mode", choices=("mean", "exponential"), default="mean", help="kind of average [mean]")
    parser.add_argument("-N", "--last", type=int, metavar="N", help="how many of the newest checkpoints [all]")
    parser.add_argument("--decay", type=float, default=0.99, help="decay of an exponential average [0.99]")
    parser.add_argument("--discard-last", type=int, default=0, metavar="N", help="leave out the newest N [0]")
    parser.add_argument("--weights", choices=("raw", "ema"), default="raw", help="which of their weights [raw]")
    parser.add_argument("--filename", dest="name", metavar="NAME", help="name of the result under averages/")
    parser.add_argument("--no-validate", dest="validate", action="store_false", help="do not validate the result")
