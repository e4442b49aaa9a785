"""`headrace configs`: the named configurations, one of them with the origin of each value, and the options."""

import argparse
import shutil

from headrace.cli.options import print_remarks, read_arguments
from headrace.cli.options_text import blocks_text, options_markdown, params_markdown, resolved_text
from headrace.config.command_line import Parser
from headrace.config.load import resolve
from headrace.config.translations import known_sections, translation, without_translation
from headrace.config.yaml_blocks import RECIPES, blocks_of, listed
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_text

_CONFIGS = """usage: headrace configs [--reference | --config-path FILE]
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


def configs(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    if argv and argv[0] in ("-h", "--help"):
        print(_CONFIGS)
        return 0
    parts = {"list": _list_configs, "show": _show_config, "options": _print_options}
    part = parts.get(argv[0]) if argv else _list_configs
    return part(argv[1:]) if part else _list_configs(argv)


def _list_configs(argv: list[str]) -> int:
    parser = Parser(prog="headrace configs", usage=_CONFIGS.removeprefix("usage: "))
    parser.add_argument("--config-path", "--config_path", type=local_text, metavar="FILE")
    parser.add_argument("--reference", action="store_true")
    args = parser.parse_args(argv)
    if args.reference and args.config_path:
        raise ConfigError("Both --reference and --config-path are given.", remedy="Leave one of them out.")
    if args.reference and not translation().recipes:
        raise ConfigError("Another application's recipes are not installed.", remedy=without_translation())
    places = translation().recipes if args.reference else (RECIPES,)
    print(blocks_text(listed(blocks_of(args.config_path, places)), shutil.get_terminal_size((100, 40)).columns))
    if not args.config_path and not args.reference:
        print("\nTrain one with `headrace train --config NAME`; `headrace configs --reference` lists those of the")
        print("reference system, under its names.")
    return 0


def _show_config(argv: list[str]) -> int:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", nargs="?", metavar="NAME", help="the configuration (default: default)")
        parser.add_argument("--config", metavar="NAME", help="the same")
        parser.add_argument(
            "--config-path",
            type=local_text,
            metavar="FILE",
            help="YAML file that has it (default: the shipped recipes)",
        )
        parser.add_argument("--all", action="store_true", help="show the options that have their default, too")

    parsed = read_arguments(argv, "headrace configs show", extra)
    resolved = resolve(parsed.options, parsed.args.name or parsed.args.config, parsed.args.config_path)
    if resolved.config.weights.weights:
        from headrace.run.choices import with_definition  # here, since it loads JAX

        resolved = with_definition(resolved)
    print(resolved_text(resolved, everything=parsed.args.all, sections=known_sections()))
    print_remarks(resolved)
    return 0


def _print_options(argv: list[str]) -> int:
    Parser(prog="headrace configs options").parse_args(argv)
    print(options_markdown(known_sections()))
    print(f"\n### settings inside a mapping\n\n{params_markdown()}")
    return 0
