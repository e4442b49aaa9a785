"""`headrace convert WEIGHTS --out DIR`: weights of a name, an address or a file as a checkpoint, without a dataset."""

import argparse
import sys

from headrace.cli.options import read_arguments
from headrace.core.local_path import local_path
from headrace.core.units import format_bytes

_CONVERT = (
    "Write weights from elsewhere as a checkpoint, which headrace predict, validate and export take. The network comes "
    "with a known name; of a plain file it is named with --model, and the file's names say whose definition it is."
)


def convert(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = read_arguments(argv, "headrace convert", _add_convert_arguments, _CONVERT)
    from headrace.run.named_weights import convert as write_checkpoint
    from headrace.run.named_weights import load_named
    from headrace.weights.convert import table_lines

    weights = load_named(parsed.args.name, parsed.options)
    print("\n".join(table_lines(weights)))
    print(*weights.remarks, sep="\n", end="\n" if weights.remarks else "", file=sys.stderr)
    path = write_checkpoint(weights, parsed.args.out)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{weights.network.name}, {len(weights.class_names):,} classes: {weights.class_names[0]}, ...")
    print(f"written: {path} ({format_bytes(size)})")
    return 0


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="WEIGHTS", help="a known name, hf:OWNER/NAME, an address, or a file")
    parser.add_argument("--out", type=local_path, metavar="DIR", required=True, help="directory of the checkpoint")
