"""`headrace average RUN_DIR`: average the checkpoints of a run, and validate the result."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from headrace.cli.options import read_arguments, without_recipe
from headrace.cli.validate import ResultTable
from headrace.config.field import COMMAND_LINE
from headrace.config.translations import known_options
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_path
from headrace.rows.values import format_value

_AVERAGE = (
    "Average the newest checkpoints of a run in float64: their mean, or an exponential average. The result is a "
    "checkpoint under averages/ in the run, with a label that names the average; it is validated at once."
)


def average(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = read_arguments(without_recipe(argv), "headrace average", _add_average_arguments, _AVERAGE)
    args = parsed.args
    from headrace.run.averaged_checkpoint import AverageOptions, average_run

    left, decays = _decays(args, parsed.options)
    made = [
        average_run(
            args.path,
            AverageOptions(
                mode=mode,
                last=args.last,
                decay=decay,
                discard_last=args.discard_last,
                weights=args.weights,
                name=args.name,
            ),
        )
        for mode, decay in decays
    ]
    for one, (mode, _) in zip(made, decays, strict=True):
        for path, problem in one.damaged:
            print(f"warning: skipped: {path.name}: {problem}", file=sys.stderr)
        print(f"{one.label}: the {mode} of {', '.join(one.members)}")
        print(f"written: {one.path}")
    if args.validate:
        from headrace.run.validation import validate

        table = ResultTable()
        for one in made:
            for result in validate(one.path, left):
                table.show(result)
    return 0


def _decays(args: argparse.Namespace, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, float]]]:
    """Return the options for the validation, and (kind, decay) of each average.

    --weight-avg-exp asks for exponential ones. --weight-avg-N counts epochs, --last counts checkpoints: refused.
    """
    known, left = known_options(), dict(options)
    if "average_last_epochs" in left:
        epochs = known["average_last_epochs"].read(left["average_last_epochs"], COMMAND_LINE)
        raise ConfigError(
            f"--average-last-epochs (--weight-avg-N) is {format_value(epochs)}.",
            rule="It is about a training that averages at its end, and counts epochs; here checkpoints are counted.",
            remedy="Use -N with a number of checkpoints.",
        )
    mode, decay, asked = args.mode, args.decay, left.pop("average_decays", None)
    if asked is None:
        return left, [(mode or "mean", 0.99 if decay is None else decay)]
    decays = known["average_decays"].read(asked, COMMAND_LINE)
    if mode == "mean" or decay is not None or (args.name and len(decays) > 1):
        other = "--mode mean" if mode == "mean" else "--filename" if decay is None else f"--decay {decay:g}"
        raise ConfigError(
            f"Both are given: --average-decays (--weight-avg-exp) {format_value(decays)} and {other}.",
            rule="It takes an exponential average for each of its decays, and names each by its decay.",
            remedy="Leave one of them out.",
        )
    return left, [("exponential", each) for each in decays]


def _add_average_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="RUN_DIR", type=local_path, help="a run's directory, or a directory of checkpoints"
    )
    parser.add_argument("--mode", choices=("mean", "exponential"), help="kind of average [mean]")
    parser.add_argument("-N", "--last", type=int, metavar="N", help="how many of the newest checkpoints [all]")
    parser.add_argument("--decay", type=float, help="decay of an exponential average [0.99]")
    parser.add_argument("--discard-last", type=int, default=0, metavar="N", help="leave out the newest N [0]")
    parser.add_argument("--weights", choices=("raw", "ema"), default="raw", help="which of their weights [raw]")
    parser.add_argument("--filename", dest="name", metavar="NAME", help="name of the result under averages/")
    parser.add_argument("--no-validate", dest="validate", action="store_false", help="do not validate the result")
