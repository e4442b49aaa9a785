"""`headrace models`: the networks with their parameters and FLOPs, and one of them block by block."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from headrace.config.arguments import Parser
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.model.network import Network

USAGE = """usage: headrace models [list] [options]
       headrace models show NAME [options]

list (or nothing)  all networks: parameters, FLOPs per image, image size
show               one network block by block; each block is a split point

Without options a network is shown at the image size and number of classes it was made for.
  --dataset NAME       the image shape and classes of a data set
  --image-size PIXELS  --num-channels COUNT  --num-classes COUNT
  --norm-layer JSON    such as '{"name": "group_norm", "num_groups": 8}'"""


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    if argv and argv[0] == "show":
        return _show(argv[1:])
    return _list(argv[1:] if argv and argv[0] == "list" else argv)


def _list(argv: list[str]) -> int:
    options = _parser("headrace models").parse_args(argv)
    from headrace.model.cost import FLOPS_CONVENTION
    from headrace.model.families import model_names

    rows, problems = [], []
    for name in model_names():
        try:
            network = _build(name, options)
        except ConfigError as error:
            problems.append(error.problem)
            continue
        cost = network.total_cost()
        rows.append(
            (name, f"{cost.params:,}", _count(cost.flops), _shape(network.input_hwc), f"{network.num_classes:,}")
        )
    print(f"FLOPs per image, forward: {FLOPS_CONVENTION}.")
    _print_table(("name", "parameters", "FLOPs", "image", "classes"), rows)
    for problem in problems:
        print(problem)
    return 0


def _show(argv: list[str]) -> int:
    parser = _parser("headrace models show")
    parser.add_argument("name", metavar="NAME")
    options = parser.parse_args(argv)
    from headrace.model.cost import FLOPS_CONVENTION

    network = _build(options.name, options)
    total = network.total_cost()
    print(f"{network.name}: {_shape(network.input_hwc)} images, {network.num_classes:,} classes")
    print(f"FLOPs per image, forward: {FLOPS_CONVENTION}.")
    costs = network.costs().items()
    rows = [
        (name, _shape(shape), f"{cost.params:,}", _count(cost.flops))
        for (name, cost), shape in zip(costs, network.shapes()[1:], strict=True)
    ]
    rows.append(("total", "", f"{total.params:,}", _count(total.flops)))
    _print_table(("block", "output", "parameters", "FLOPs"), rows)
    return 0


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, usage=USAGE.removeprefix("usage: "))
    parser.add_argument("--dataset")
    for name in ("image-size", "num-channels", "num-classes"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", type=_whole)
    parser.add_argument("--norm-layer", "--norm_layer", type=_mapping, default={"name": "batch_norm"})
    return parser


def _build(name: str, options: argparse.Namespace) -> "Network":
    """Build a network at the sizes asked for, else at those of the data set, else at its own."""
    from headrace.config.load import config_from
    from headrace.data.dataset import describe
    from headrace.model.families import build_network, model_row

    row = model_row(name)
    (height, width, channels), num_classes = (row.image_size, row.image_size, 3), row.num_classes
    if options.dataset:
        info = describe(config_from({"dataset": options.dataset}).data)
        (height, width, channels), num_classes = info.image_hwc, info.num_classes
    if options.image_size:
        height = width = options.image_size
    model = config_from({"model_name": name, "norm_layer": options.norm_layer}).model
    return build_network(model, options.num_classes or num_classes, (height, width, options.num_channels or channels))


def _print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table, coloured on a terminal; in a pipe as wide as it needs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if terminal else 200, highlight=False).print(table)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _count(number: int) -> str:
    """Return a count with four digits and its unit, such as 24.48 M."""
    value, units = float(number), ["", "k", "M", "G", "T"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{number} " if len(units) == 5 else f"{value:.4g} {units[0]}"


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON mapping")
    return value
