"""`headrace models`, `configs` and `devices`: the networks, the recipes with their options, and this machine."""

import argparse
import dataclasses
import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.cli.options import Column, add_platform_argument, print_fitted, print_remarks, read_arguments, table_lines
from headrace.config.field import COMMAND_LINE, TRANSLATED, find_option, option_names, options_of
from headrace.config.load import Resolved, to_flat
from headrace.config.params import TABLES
from headrace.config.schema import SECTIONS, Parser, all_options, options_in, take_options, usage_of
from headrace.config.yaml_blocks import RECIPES, Block, blocks_of, listed
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_text
from headrace.core.units import format_bytes
from headrace.reference.entrance import ALL_SECTIONS, REFERENCE, resolve
from headrace.rows.values import REQUIRED, format_value

if TYPE_CHECKING:
    from headrace.model.network import Network

_MODELS = """usage: headrace models [list] [options]
       headrace models show NAME [options]
       headrace models --weights [TEXT]

list (or nothing)  all networks: parameters, FLOPs per image, image size
show               one network block by block; each block is a split point, and so is each layer inside one
--weights          the known names of trained weights, those that contain TEXT

Without options a network has the image size and number of classes it was designed for.
  --dataset NAME       the image shape and classes of a dataset
  --image-size PIXELS  --num-channels COUNT  --num-classes COUNT
  and all options of the network, such as --model-size 50, --group-norm, --group-dim 16"""

_IMAGE_OPTIONS = ("dataset", "image_size", "num_channels", "num_classes")


def models(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    if any(word in ("-h", "--help") for word in argv):
        print(_MODELS)
        return 0
    if argv and argv[0] == "--weights":
        return _list_weights(argv[1:])
    if argv and argv[0] == "show":
        return _show_model(argv[1:])
    return _list_models(argv[1:] if argv and argv[0] == "list" else argv)


def _list_models(argv: list[str]) -> int:
    options, _ = _network_options(argv, Parser(prog="headrace models"))
    from headrace.model.cost import FLOPS_CONVENTION
    from headrace.model.zoo import model_names

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


def _list_weights(argv: list[str]) -> int:
    from headrace.weights.published import published_weights

    parser = Parser(prog="headrace models --weights")
    parser.add_argument("text", nargs="?", default="", metavar="TEXT")
    text = parser.parse_args(argv).text.lower()
    rows = []
    for row in published_weights().values():
        network, data = row.facts.network["model_name"], row.facts.data
        if text in row.name.lower() or text in network:
            rows.append((row.name, network, str(data["image_size"])))
    if not rows:
        raise ConfigError(f"No known weights have {text!r} in their name.", remedy="`headrace models --weights`")
    _print_table(("name", "network", "image"), rows)
    print(f"{len(rows):,} names for --weights; also hf:OWNER/NAME, an address, a file, a run")
    return 0


def _show_model(argv: list[str]) -> int:
    parser = Parser(prog="headrace models show")
    parser.add_argument("name", metavar="NAME")
    options, args = _network_options(argv, parser)
    from headrace.model.cost import FLOPS_CONVENTION

    network = _build(args.name, options)
    total = network.total_cost()
    print(f"{network.name}: {_shape(network.input_hwc)} images, {network.num_classes:,} classes")
    print(f"FLOPs per image, forward: {FLOPS_CONVENTION}.")
    costs, others = network.costs().items(), _other_names(network)
    rows = [
        (name, _shape(shape), f"{cost.params:,}", _count(cost.flops), " ".join(others.get((i, 0), [])))
        for i, ((name, cost), shape) in enumerate(zip(costs, network.shapes()[1:], strict=True))
    ]
    rows.append(("total", "", f"{total.params:,}", _count(total.flops), ""))
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    _print_table(("block", "output", "parameters", "FLOPs", "other names")[: len(rows[0])], rows)
    _print_inner(network, others)
    return 0


def _other_names(network: "Network") -> dict[tuple[int, int], list[str]]:
    """Return the names in other dialects of every place for a cut."""
    points = network.split_points()
    names: dict[tuple[int, int], list[str]] = {}
    for alias in dict.fromkeys(alias for alias, _ in network.aliases):
        if alias in points and alias not in network.block_names:
            names.setdefault(points[alias], []).append(alias)
    return names


def _print_inner(network: "Network", others: Mapping[tuple[int, int], list[str]]) -> None:
    """Print the layers inside blocks before which a cut may lie, one line for all blocks that have the same."""
    from headrace.model.composite import split_layers

    alike: dict[str, list[int]] = {}
    for i, (name, block) in enumerate(network.blocks):
        pieces = " ".join(piece.removeprefix(f"{name}/") for piece, _ in split_layers(name, block)[1:])
        if pieces:
            alike.setdefault(pieces, []).append(i)
    if not alike:
        return
    print("\nA cut may also lie inside a block, before a layer: BLOCK/LAYER or BLOCK_LAYER.")
    for pieces, blocks in alike.items():
        print(f"{', '.join(network.block_names[i] for i in blocks)}:\n  {pieces}")
    if named := [name for (_, piece), names in others.items() if piece for name in names]:
        print(f"Other names for such cuts: {' '.join(named)}")


def _network_options(argv: list[str], parser: Parser) -> tuple[dict[str, Any], Any]:
    """Return the options of the network and of its images as read, by name, and the command's other arguments."""
    taken, left = take_options(argv, parser)
    options = {}
    for written, raw in taken.items():
        spelled = find_option(written, option_names(all_options()))
        option = all_options()[spelled.name]
        if option.section != "model" and option.name not in _IMAGE_OPTIONS:
            raise ConfigError(f"{option.flag} does not change a network.", remedy=f"See `{parser.prog} --help`.")
        options[written] = raw if spelled.negated else option.read(raw, COMMAND_LINE)
    return options, parser.parse_args(left)


def _build(name: str, options: Mapping[str, Any]) -> "Network":
    """Build a network for the sizes given, else for those of the dataset, else for its default sizes."""
    from headrace.config.load import config_from
    from headrace.config.section_model import find_variant
    from headrace.data.dataset import describe_dataset
    from headrace.model.zoo import build_network

    variant = find_variant(name, options.get("model_size"), options.get("image_size"))
    (height, width, channels), num_classes = (variant.image_size, variant.image_size, 3), variant.num_classes
    if options.get("dataset"):
        info = describe_dataset(config_from({"dataset": options["dataset"]}).data)
        (height, width, channels), num_classes = info.image_hwc, info.num_classes
    if options.get("image_size"):
        height = width = options["image_size"]
    channels = options.get("num_channels") or channels
    chosen = {key: value for key, value in options.items() if key not in _IMAGE_OPTIONS}
    model = config_from({**chosen, "model_name": variant.name}).model
    return build_network(model, options.get("num_classes") or num_classes, (height, width, channels))


def _print_table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table: names and dialects to the left, numbers to the right."""
    cells = zip(*rows, strict=True)
    left = ("name", "network", "block", "other names")
    columns = [Column(title=t, cells=c, right=t not in left) for t, c in zip(titles, cells, strict=False)]
    print("\n".join(table_lines(columns)))


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _count(number: int) -> str:
    """Return a count with four digits and its unit, such as 24.48 M."""
    value, units = float(number), ["", "k", "M", "G", "T"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{number} " if len(units) == 5 else f"{value:.4g} {units[0]}"


# Configurations and options in writing: the list of recipes, a configuration with its origins, the options.


def blocks_text(blocks: Iterable[Block], width: int = 100) -> str:
    """Return the named configurations: name, first sentence and measured result; those without a result at the end."""
    rows = list(blocks)
    wide = max((len(block.name) for block in rows), default=0)
    if wide > width // 2:
        wide = 2  # the sentence goes below the name
    measured = [block for block in rows if _is_measured(block)]
    others = [block for block in rows if not _is_measured(block)]
    lines = [line for block in measured for line in _block_lines(block, wide, width)]
    if measured and others:
        lines += ["", "without a measured result:"]
    lines += [line for block in others for line in _block_lines(block, wide, width)]
    return "\n".join(lines)


def _is_measured(block: Block) -> bool:
    return bool(block.result) and not block.result.startswith("not ")


def _block_lines(block: Block, wide: int, width: int) -> list[str]:
    indent = " " * (wide + 2)
    shown = "" if block.result in ("", "not measured yet") else f"result: {block.result}"
    texts = [_first_sentence(block.description), shown]
    lines = [line for text in texts for line in textwrap.wrap(text, max(30, width - len(indent)))]
    if len(block.name) > wide:
        return [block.name, *(indent + line for line in lines)]
    return [f"{block.name:{wide}}  {lines[0] if lines else ''}".rstrip(), *(indent + line for line in lines[1:])]


def resolved_text(resolved: Resolved, *, everything: bool = False, sections: Mapping[str, type] = SECTIONS) -> str:
    """Return a configuration as YAML, each value with its origin in a comment; defaults only where asked for.

    What follows from options of another application is commented out, since it would follow again when the text is
    read; so are defaults next to such options, since that application may have others.
    """
    flat = to_flat(resolved.config) | {name: given.value for name, given in resolved.source.items()}
    origins = {**resolved.origins, **{name: given.origin for name, given in resolved.source.items()}}
    commented = (TRANSLATED, "default") if resolved.source else (TRANSLATED,)
    rows = []
    for name, option in options_in(sections).items():
        if name in flat and (everything or origins[name].kind != "default"):
            mark = "# " if origins[name].kind in commented else ""
            rows.append((option.section, f"  {mark}{name}: {_yaml(flat[name])}", str(origins[name])))
    wide = min(max((len(text) for _, text, _ in rows), default=0), 70)
    lines = [f"{resolved.name or 'defaults'}:"]
    section = ""
    for row_section, text, origin in rows:
        if everything and row_section != section:
            section = row_section
            lines.append(f"  # {section}: {sections[section].__doc__}")
        lines.append(f"{text:{wide}}  # {origin}")
    return "\n".join(lines if rows else [f"{lines[0]} {{}}  # every option has its default"])


def options_markdown(sections: Mapping[str, type] = SECTIONS) -> str:
    """Return all options as Markdown tables, one per section."""
    lines = []
    for section, cls in sections.items():
        lines += ["", f"### {section}", "", f"{cls.__doc__}", "", "| option | default | meaning |", "|---|---|---|"]
        for option in options_of(section, cls).values():
            also = f" Also {', '.join(f'`--{alias}`' for alias in option.aliases)}." if option.aliases else ""
            usage = usage_of(option).replace("|", "\\|")
            default = option.chosen or f"`{format_value(option.default)}`"
            lines.append(f"| `{usage}` | {default} | {option.help}{also.replace('_', '-')} |")
    return "\n".join(lines[1:])


def params_markdown() -> str:
    """Return the keys inside the options that are mappings as a Markdown table; a default stands in brackets."""
    lines = ["| option | for | keys |", "|---|---|---|"]
    for table in TABLES.values():
        for name, row in table.rows.items():
            # a regular expression has | and * in it, which mean something in a table
            values = {p.name: f"`{format_value(p.default)}`".replace("|", "\\|") for p in row.params}
            keys = [f"`{p.name}`{'' if p.default is REQUIRED else f' ({values[p.name]})'}" for p in row.params]
            either = " or ".join(f"`{param.name}`" for param in row.one_of)
            keys += [f"either {either}"] if either else []
            lines.append(f"| `{table.option}` | {name} | {', '.join(keys)} |")
    return "\n".join(lines)


def _first_sentence(text: str) -> str:
    sentence, dot, _ = text.partition(". ")
    return sentence.rstrip(".") + ("." if dot or text.endswith(".") else "")


def _yaml(value: object) -> str:
    """Return a value as YAML that reads back as the same value."""
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][-\w./]*", value) and value.lower() != "null":
        return value
    return json.dumps(value)


# `headrace configs`: the named configurations, one of them with the origin of each value, and the options.


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
    places = REFERENCE.recipes if args.reference else (RECIPES,)
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
    print(resolved_text(resolved, everything=parsed.args.all, sections=ALL_SECTIONS))
    print_remarks(resolved)
    return 0


def _print_options(argv: list[str]) -> int:
    Parser(prog="headrace configs options").parse_args(argv)
    print(options_markdown(ALL_SECTIONS))
    print(f"\n### settings inside a mapping\n\n{params_markdown()}")
    return 0


# `headrace devices`: the devices of this machine, their memory and number formats, and what is installed.


_DEVICES = "List the devices that a run would find here, the memory and number formats of each, and versions."


def devices(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace devices", description=_DEVICES)
    add_platform_argument(parser, "kind of device [auto]", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from headrace.engine.devices import start_devices
    from headrace.engine.machine import describe_machine

    start_devices(args.platform, 1)
    machine = describe_machine()
    if args.json:
        print(json.dumps(dataclasses.asdict(machine)))
        return 0
    rows = machine.devices
    memories = [format_bytes(row.memory_bytes) if row.memory_bytes else "" for row in rows]
    columns = [
        Column(title="platform", cells=[row.platform for row in rows]),
        Column(title="device", cells=[row.name for row in rows]),
        Column(title="count", cells=[str(row.count) for row in rows], right=True),
        Column(
            title="memory of each",
            cells=memories,
        ),
        Column(title="capability", cells=[row.capability for row in rows]),
        Column(title="bfloat16", cells=[row.bfloat16 for row in rows]),
    ]
    print("\n".join(table_lines(columns)))
    memory = f", {format_bytes(machine.memory_bytes)} of memory" if machine.memory_bytes else ""
    print_fitted(f"\nhost      {machine.host}: {machine.processors} processors for this process{memory}")
    print_fitted(f"kernels   {machine.kernels}")
    print_fitted(f"versions  {', '.join(f'{name} {version}' for name, version in machine.versions.items())}")
    for note in machine.notes:
        print(f"note: {note}")
    return 0
