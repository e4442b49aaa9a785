"""The public surface: every name is there, documented and typed, and documents use no other."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import headrace

ROOT = Path(__file__).parents[1]
MODULES: dict[str, ModuleType] = {
    "headrace": headrace,
    **{f"headrace.{name}": getattr(headrace, name) for name in ("loops", "nn", "ray", "schedules")},
}
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py")])
# These explain the inside of the package, or name what is gone.
MORE_THAN_PUBLIC = {"architecture.md", "versions.md", "CHANGELOG.md", "CONTRIBUTING.md"}
DOTTED = re.compile(r"`headrace\.([\w.]+)")


def public_values() -> Iterator[tuple[str, Any]]:
    """Return (dotted name, value) of everything public, and of the public methods that Headrace's classes define."""
    for module, value in MODULES.items():
        for name in value.__all__:
            found = getattr(value, name)
            if name.startswith("__") or isinstance(found, ModuleType):
                continue
            yield f"{module}.{name}", found
            if inspect.isclass(found):
                for method, member in vars(found).items():
                    function = member.fget if isinstance(member, property) else inspect.unwrap(member)
                    function = getattr(function, "__func__", function)
                    if inspect.isfunction(function) and not method.startswith("_"):
                        yield f"{module}.{name}.{method}", function


VALUES = dict(public_values())


def test_public_names_are_there():
    assert set(headrace.__all__) == {"__version__", *headrace._HOME, *headrace._MODULES}
    assert dir(headrace) == sorted(headrace.__all__)
    assert headrace.load_checkpoint.__module__ == "headrace.checkpoint.store"
    with pytest.raises(AttributeError, match="no name nothing"):
        _ = headrace.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", VALUES)
def test_a_public_name_is_documented_and_typed(name):
    value = VALUES[name]
    text = inspect.getdoc(value)
    assert text
    assert not text.startswith(f"{value.__name__}("), "only what dataclass writes by itself"
    function = value.__dict__.get("__init__", value) if inspect.isclass(value) else value
    if not inspect.isfunction(function) or getattr(value, "_is_protocol", False):
        return
    signature = inspect.signature(function)
    untyped = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls")
    ]
    assert not untyped
    assert signature.return_annotation is not signature.empty or function.__name__ == "__init__"


def imports_and_uses(code: str) -> set[str]:
    """Return the dotted names of Headrace that a program imports, or uses through `import headrace`."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"headrace(\.\w+)*", ast.unparse(node)):
            found.add(ast.unparse(node))
    return {name for name in found if name.partition(".")[0] == "headrace"}


def is_public(name: str) -> bool:
    """Say whether a dotted name is a public module, a name in one, or an attribute of such a name."""
    owner, _, last = name.rpartition(".")
    if name in MODULES:
        return True
    return last in MODULES[owner].__all__ if owner in MODULES else name.count(".") > 1 and is_public(owner)


def code_in(path: Path) -> list[str]:
    """Return the programs in a document: itself, its blocks of Python, and what `python -c` is given."""
    text = path.read_text()
    if path.suffix == ".py":
        return [text]
    blocks = re.findall(r"^```(?:python|py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks = map(textwrap.dedent, blocks)
    return [re.sub(r"^(>>>|\.\.\.) ?", "", block, flags=re.MULTILINE) for block in blocks] + re.findall(
        r"python3? -c '(.*?)'", text
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_use_public_names_only(path):
    used = set().union(*map(imports_and_uses, code_in(path)))
    if path.suffix == ".md" and path.name not in MORE_THAN_PUBLIC:
        used |= {f"headrace.{name.rstrip('.')}" for name in DOTTED.findall(path.read_text())}
    assert not {name for name in used if not is_public(name)}


def test_the_walk_over_documents_sees_private_names():
    code = "from headrace.model.layers import Conv\nheadrace.run.fit.train()\nheadrace.nn.Conv(channels=3)"
    private = {name for name in imports_and_uses(code) if not is_public(name)}
    assert private == {"headrace.model.layers.Conv", "headrace.run.fit.train", "headrace.run.fit", "headrace.run"}
    found = set().union(*(imports_and_uses(code) for path in DOCUMENTS for code in code_in(path)))
    assert {"headrace.Model", "headrace.nn.Conv", "headrace.loops", "headrace.Infeed"} <= found
