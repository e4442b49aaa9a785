"""`headrace lr-find`: train a short while with a growing learning rate, plot the loss, and suggest a rate."""

import argparse
import shlex
from pathlib import Path

from headrace.cli.options import check_output, parse, print_remarks, writing
from headrace.core.local_path import local_path

_LR_FIND = "Find a learning rate: a short run whose rate grows until the loss rises. Only the plot is written."


def lr_find(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    resolved, args = parse(argv, "headrace lr-find", _add_arguments, _LR_FIND)
    check_output(args.plot, "--plot")
    print_remarks(resolved)
    from headrace.core.files import write_atomic
    from headrace.report.curve_svg import draw_rates
    from headrace.run.lr_find import find_learning_rate

    found = find_learning_rate(resolved, num_steps=args.steps, lowest=args.lowest, highest=args.highest)
    with writing(args.plot, "--plot"):
        write_atomic(args.plot, draw_rates(found.rates, found.losses, found.suggested).encode())
    where = "midway between half of the loss's fall and its lowest value"
    print(f"suggested   {found.suggested:.2g}, {where} ({len(found.rates)} steps)")
    if compared := found.compared():
        print(f"train       {compared}")
    print(f"plot        {args.plot}")
    print(f"next        headrace train {shlex.join([*_for_train(argv), '--lr', f'{found.suggested:.2g}'])}")
    return 0


def _for_train(argv: list[str]) -> list[str]:
    """Return the words of an argv without the arguments that lr-find alone has, each of which takes a value."""
    words, kept = list(argv), []
    while words:
        word = words.pop(0)
        if word.partition("=")[0] in ("--steps", "--lowest", "--highest", "--plot"):
            del words[: 0 if "=" in word else 1]
        else:
            kept.append(word)
    return kept


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="weight updates at most [100]")
    parser.add_argument("--lowest", type=float, default=1e-5, metavar="X", help="first learning rate [1e-5]")
    parser.add_argument("--highest", type=float, default=10.0, metavar="X", help="last learning rate [10]")
    parser.add_argument(
        "--plot", type=local_path, default=Path("lr-find.svg"), metavar="FILE", help="SVG [lr-find.svg]"
    )
