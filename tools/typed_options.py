"""Write src/headrace/config/typed_options.py, the options as types for editors: `python tools/typed_options.py`.

A name and its type follow from the option's row, so that a misspelt option, or a value of another kind, is an error in
an editor that checks types. tests/config/test_typed_options.py keeps the file in step with the rows.
"""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "src" / "headrace" / "config" / "typed_options.py"
sys.path.insert(0, str(ROOT / "src"))

from headrace.config.field import Option  # noqa: E402
from headrace.config.schema import all_options  # noqa: E402
from headrace.rows import values as kinds  # noqa: E402
from headrace.rows.values import Kind  # noqa: E402

KERAS = {"steps_per_epoch": "weight_updates_per_epoch"}  # beside the options' own other names
NOT_BY_CODE = ("training", "compile_only", "weights")  # Model refuses them; weights is an argument of its own
# Arguments of their own: of Model and Model.fit, each of which has those of the other as options.
OF_MODEL = ("num_classes",)
OF_FIT = ("labels", "loss", "optimizer", "resume")

TYPES: dict[Kind, str] = {
    kinds.BOOL: "bool",
    kinds.INT: "int",
    kinds.FLOAT: "float",
    kinds.FRACTION: "float | str",
    kinds.TEXT: "str",
    kinds.PLACE: "str | os.PathLike[str]",
    kinds.ANYWHERE: "str | os.PathLike[str]",
    kinds.PATH: "str | os.PathLike[str]",
    kinds.WORDS: "str | Sequence[str]",
    kinds.NUMBERS: "Sequence[int]",
    kinds.FLOATS: "float | Sequence[float]",
    kinds.MAPPING: "str | Mapping[str, object]",
    kinds.BYTES: "int | str",
    kinds.DURATION: "float | str",
    kinds.REPLICAS: 'int | Literal["auto"]',
    kinds.LOSS_SCALE: f"float | Literal[{', '.join(map(json.dumps, kinds.LOSS_SCALES))}]",
    kinds.CLASS_WEIGHTS: 'Literal["balanced"] | Sequence[float]',
}
HEAD = '''"""The options as types, for editors: made by tools/typed_options.py from the rows of the options.

Nothing of this is imported when a program runs.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

'''


def words(option: Option) -> tuple[str, ...]:
    """Return the words that an option of text takes; none if it takes any."""
    return () if option.code_adds else (*option.choices, *(word for word, _ in option.synonyms))


def type_of(option: Option) -> str:
    """Return the type of an option's values."""
    found = TYPES[option.kind]
    if words(option) and option.kind in (kinds.TEXT,):
        found = f"Literal[{', '.join(json.dumps(word) for word in dict.fromkeys(words(option)))}]"
    if option.kind is kinds.WORDS and takes(option, 2):
        found += " | int"
    return f"{found} | None" if option.optional and "None" not in found else found


def takes(option: Option, value: object) -> bool:
    """Say whether an option takes a value."""
    try:
        option.read(value)
    except Exception:
        return False
    return True


def lines_of(name: str, option: Option) -> Iterator[str]:
    """Yield the lines of a name: its type, and for editors what the option does."""
    yield f"    {name}: {type_of(option)}"
    shown = option.help if name == option.name else f"The same as {option.name}."
    said = shown.replace("\\", "")
    yield from textwrap.wrap(f'"""{said}"""', 116, initial_indent="    ", subsequent_indent="    ")


def file_text() -> str:
    """Return the text of the file."""
    options, parts = all_options(), {"Options": [], "FitOptions": [], "ModelOptions": []}
    for option in options.values():
        if option.name in NOT_BY_CODE:
            continue
        where = "FitOptions" if option.name in OF_MODEL else "ModelOptions" if option.name in OF_FIT else "Options"
        also = [name for name, meant in KERAS.items() if meant == option.name]
        for name in (option.name, *option.aliases, *also):
            parts[where] += lines_of(name, option)
    says = {
        "Options": "The options that Model, fit and find_learning_rate take by keyword.",
        "FitOptions": "The options of fit.",
        "ModelOptions": "The options of Model.",
    }
    classes = [
        "\n".join(
            [
                f"class {name}({'TypedDict' if name == 'Options' else 'Options'}, total=False):",
                f'    """{says[name]}"""',
                "",
                *lines,
            ]
        )
        for name, lines in parts.items()
    ]
    return HEAD + "\n\n\n".join(["", *classes]).lstrip("\n") + "\n"


def formatted(text: str) -> str:
    """Return a text as ruff lays it out."""
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    FILE.write_text(formatted(file_text()))
    print(f"wrote {FILE.relative_to(ROOT)}")
