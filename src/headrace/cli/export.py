"""`headrace export`: weights or a network for other programs."""

import argparse
from pathlib import Path

from headrace.cli.options import add_model_arguments, add_path_argument, model_and_weights
from headrace.config.command_line import Parser
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_path
from headrace.core.units import format_bytes
from headrace.rows.exports import DTYPES, EXPORTS, PLATFORMS, TORCH_NAMES, format_of, taken_by

DESCRIPTION = (
    "Write a run's best weights, or those of a name, for other programs. The file is compared with the network on "
    "images before it is kept; a JSON file beside it describes the input and names the classes. Formats: "
    + "; ".join(f"{row.name}: {row.says}" for row in EXPORTS.values()).replace("`", "")
    + "."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace export", description=DESCRIPTION)
    _add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    if args.format is None and args.out is None:
        raise ConfigError("Neither --format nor --out is given.", remedy="Give --format onnx or --out model.onnx.")
    from headrace.engine.devices import start_devices
    from headrace.run.exports.values import ExportOptions
    from headrace.run.exports.write import export_model
    from headrace.run.read_weights import find_weights

    name, which = model_and_weights(args.path, args.weights, args.use)
    start_devices(args.platform, 1)
    options = ExportOptions(
        format=args.format or format_of(args.out),
        names=args.names,
        input=args.input,
        platforms=tuple(args.platforms.replace(",", " ").split()),
        dtype=args.dtype,
        with_preprocessing=args.with_preprocessing,
        check_images=tuple(args.check_images or ()),
    )
    weights = find_weights(name, which)
    made = export_model(weights, args.out, options)
    trained = f"{weights.label} weights of {Path(weights.origin).name} (epoch {weights.epoch:g})"
    print(f"{weights.network.name}, {trained if weights.step else f'weights {name}'}")
    print(made.remark)
    print(f"written: {made.path} ({format_bytes(made.path.stat().st_size)}) and {made.description.name}")
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path_argument(parser)
    parser.add_argument("--format", choices=tuple(EXPORTS), help="what is written [as --out ends: .onnx, .pth ...]")
    parser.add_argument("-o", "--out", type=local_path, metavar="FILE", help="file or directory [the run's directory]")
    add_model_arguments(parser)
    parser.add_argument(
        "--names",
        choices=TORCH_NAMES,
        default="",
        help=f"whose names {taken_by('names')} uses [those of the model's dialect, or the first that fit]",
    )
    parser.add_argument(
        "--input",
        choices=("uint8", "float"),
        default="uint8",
        help=f"input of {taken_by('input')}: pixels, or numbers that have been normalised [uint8]",
    )
    parser.add_argument(
        "--with-preprocessing",
        action="store_true",
        help=f"{taken_by('with_preprocessing')}: take uint8 pixels of images of any size, and resize and crop them as "
        "validation does",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of weights [float32]")
    parser.add_argument(
        "--check-images",
        nargs="+",
        type=local_path,
        metavar="PATH",
        help="image files or folders to check the export on [the run's validation images, else generated ones]",
    )
    parser.add_argument(
        "--platforms",
        default=",".join(PLATFORMS),
        metavar="LIST",
        help=f"platforms of {taken_by('platforms')} [{','.join(PLATFORMS)}]",
    )
