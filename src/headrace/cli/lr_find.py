"""`headrace lr-find`: train a short while with a growing learning rate, plot the loss, and suggest a rate."""

import argparse
from pathlib import Path

from headrace.cli.options import parse, print_remarks

DESCRIPTION = "Find a learning rate: a short run whose rate grows until the loss rises. Only the plot is written."


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    resolved, args = parse(argv, "headrace lr-find", _add_arguments, DESCRIPTION)
    print_remarks(resolved)
    from headrace.core.files import write_atomic
    from headrace.run.lr_finder import find_learning_rate
    from headrace.telemetry.plot import draw_rates

    found = find_learning_rate(resolved, num_steps=args.steps, lowest=args.lowest, highest=args.highest)
    points = list(zip(found.rates.tolist(), found.losses.tolist(), strict=True))
    write_atomic(args.plot, draw_rates(points, found.suggested).encode())
    print(f"suggested   {found.suggested:.2g}, where the loss has fallen half of its way ({len(points)} steps)")
    print(f"plot        {args.plot}")
    print(f"next        headrace train ... --lr {found.suggested:.2g}")
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="weight updates at most [100]")
    parser.add_argument("--lowest", type=float, default=1e-5, metavar="X", help="first learning rate [1e-5]")
    parser.add_argument("--highest", type=float, default=10.0, metavar="X", help="last learning rate [10]")
    parser.add_argument("--plot", type=Path, default=Path("lr-find.svg"), metavar="FILE", help="SVG [lr-find.svg]")
