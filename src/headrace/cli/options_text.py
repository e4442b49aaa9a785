"""Configurations and options in writing: the list of recipes, a configuration with its origins, the options."""

import json
import re
import textwrap
from collections.abc import Iterable, Mapping

from headrace.config.command_line import usage_of
from headrace.config.field import TRANSLATED
from headrace.config.load import Resolved, to_flat
from headrace.config.params import TABLES
from headrace.config.schema import SECTIONS, options_in
from headrace.config.spellings import SPELLINGS
from headrace.config.yaml_blocks import Block
from headrace.rows.values import REQUIRED, format_value


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
    commented = (TRANSLATED, "default") if resolved.source.keys() - SPELLINGS.keys() else (TRANSLATED,)
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
        for option in options_in({section: cls}).values():
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
            keys += [f"either {either}{'' if row.needs_one else ' or neither'}"] if either else []
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
