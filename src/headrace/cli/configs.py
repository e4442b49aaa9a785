"""`headrace configs`: the named configurations, one of them with the origin of each value, and the options."""

import argparse
import shutil

from headrace.cli.options import print_remarks, read_arguments
from headrace.config.arguments import Parser
from headrace.config.describe import blocks_text, options_markdown, params_markdown, resolved_text
from headrace.config.yaml_blocks import RECIPES, blocks_of, listed
from headrace.core.errors import ConfigError
from headrace.reference.entrance import ALL_SECTIONS, REFERENCE, resolve

USAGE = """usage: headrace configs [--reference | --config-path FILE]
       headrace configs show NAME [--all] [options of headrace train]
       headrace configs options

(nothing), list  the recipes of the package, those with measured results first;
                 --reference: those of the reference system, under its names
                 --config-path FILE: those of a YAML file of your own
show             a recipe with the origin of each value; the defaults too with --all
options          all options as Markdown tables

examples:
  headrace configs
  headrace configs show cifar10_resnet20
  headrace train --config cifar10_resnet20 --dataset-path CIFAR"""


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    parts = {"list": _list, "show": _show, "options": _options}
    part = parts.get(argv[0]) if argv else _list
    return part(argv[1:]) if part else _list(argv)


def _list(argv: list[str]) -> int:
    parser = Parser(prog="headrace configs", usage=USAGE.removeprefix("usage: "))
    parser.add_argument("--config-path", "--config_path", metavar="FILE")
    parser.add_argument("--reference", action="store_true")
    args = parser.parse_args(argv)
    if args.reference and args.config_path:
        raise ConfigError("Both --reference and --config-path are given.", remedy="Leave one of them out.")
    places = REFERENCE.recipes if args.reference else (RECIPES,)
    print(blocks_text(listed(blocks_of(args.config_path, places)), shutil.get_terminal_size((100, 40)).columns))
    if not args.config_path and not args.reference:
        print("\nTrain one with `headrace train --config NAME`; `headrace configs --reference` lists those of the")
        print("reference system, under its names.")
    return 0


def _show(argv: list[str]) -> int:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", metavar="NAME", help="the configuration (default: default)")
        parser.add_argument("--config", metavar="NAME", help="the same")
        parser.add_argument(
            "--config-path", metavar="FILE", help="YAML file that has it (default: the shipped recipes)"
        )
        parser.add_argument("--all", action="store_true", help="show the options that have their default, too")

    parsed = read_arguments(argv, "headrace configs show", extra)
    resolved = resolve(parsed.options, parsed.args.name or parsed.args.config, parsed.args.config_path)
    print(resolved_text(resolved, everything=parsed.args.all, sections=ALL_SECTIONS))
    print_remarks(resolved)
    return 0


def _options(argv: list[str]) -> int:
    Parser(prog="headrace configs options").parse_args(argv)
    print(options_markdown(ALL_SECTIONS))
    print(f"\n### settings inside a mapping\n\n{params_markdown()}")
    return 0
