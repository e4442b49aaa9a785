"""Configurations and options in writing: the list of recipes, a configuration with its origins, the options."""

import json
import re
from collections.abc import Iterable
from typing import Any

from headrace.config.arguments import usage_of
from headrace.config.load import Resolved, to_flat
from headrace.config.params import REQUIRED, TABLES
from headrace.config.schema import SECTIONS, all_options
from headrace.config.values import shown
from headrace.config.yaml_blocks import Block


def blocks_text(blocks: Iterable[Block]) -> str:
    """Return one line per named configuration: its name, the first sentence on it, and its result."""
    rows = [(block.name, _first_sentence(block.description), block.result) for block in blocks]
    wide = max((len(name) for name, _, _ in rows), default=0)
    lines = []
    for name, sentence, result in rows:
        lines.append(f"{name:{wide}}  {sentence}".rstrip())
        if result:
            lines.append(f"{'':{wide}}  result: {result}")
    return "\n".join(lines)


def resolved_text(resolved: Resolved, *, everything: bool = False) -> str:
    """Return a configuration as YAML, each value with its origin in a comment; defaults only where asked for.

    What follows from a dialect is a comment as a whole, since it would follow again when the text is read.
    """
    flat = to_flat(resolved.config)
    follows = ("dialect", "default") if resolved.config.run.dialect == "tf1" else ("dialect",)
    rows = []
    for name, option in all_options().items():
        origin = resolved.origins[name]
        if everything or origin.kind != "default":
            mark = "# " if origin.kind in follows else ""
            rows.append((option.section, f"  {mark}{name}: {_yaml(flat[name])}", str(origin)))
    wide = min(max((len(text) for _, text, _ in rows), default=0), 70)
    lines = [f"{resolved.name or 'defaults'}:"]
    section = ""
    for row_section, text, origin in rows:
        if everything and row_section != section:
            section = row_section
            lines.append(f"  # {section}: {SECTIONS[section].__doc__}")
        lines.append(f"{text:{wide}}  # {origin}")
    return "\n".join(lines if rows else [f"{lines[0]} {{}}  # every option has its default"])


def options_markdown() -> str:
    """Return all options as Markdown tables, one per section."""
    lines = []
    for section, cls in SECTIONS.items():
        lines += ["", f"### {section}", "", f"{cls.__doc__}", "", "| option | default | meaning |", "|---|---|---|"]
        for option in all_options().values():
            if option.section == section:
                also = f" Also {', '.join(f'`--{alias}`' for alias in option.aliases)}." if option.aliases else ""
                usage = usage_of(option).replace("|", "\\|")
                lines.append(f"| `{usage}` | `{shown(option.default)}` | {option.help}{also.replace('_', '-')} |")
    return "\n".join(lines[1:])


def params_markdown() -> str:
    """Return the keys inside the options that are mappings as a Markdown table; a default stands in brackets."""
    lines = ["| option | for | keys |", "|---|---|---|"]
    for table in TABLES.values():
        for name, row in table.rows.items():
            keys = [f"`{p.name}`{'' if p.default is REQUIRED else f' ({shown(p.default)})'}" for p in row.params]
            either = " or ".join(f"`{param.name}`" for param in row.one_of)
            keys += [f"either {either}"] if either else []
            lines.append(f"| `{table.option}` | {name} | {', '.join(keys)} |")
    return "\n".join(lines)


def _first_sentence(text: str) -> str:
    sentence, dot, _ = text.partition(". ")
    return sentence.rstrip(".") + ("." if dot or text.endswith(".") else "")


def _yaml(value: Any) -> str:
    """Return a value as YAML that reads back as the same value."""
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][-\w./]*", value) and value.lower() != "null":
        return value
    return json.dumps(value)
