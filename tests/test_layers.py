"""The house keeps its shape: imports go one way, files say what they are, the command line starts fast."""

import ast
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "headrace"
FILES = sorted(SRC.rglob("*.py"))

# A package may import those left of it. Telemetry and checkpoint are side by side and do not import each other.
ROW = (
    *("native", "core", "job", "rows", "config", "data", "ops", "model", "weights", "plan", "engine", "program"),
    *(("telemetry", "checkpoint"), "report", "run", "cli"),
)

# Reading options and printing help must not wait for these.
SLOW_IMPORTS = {"jax", "jaxlib", "optax", "numpy", "safetensors", "PIL", "rich"}


def allowed_rooms() -> dict[str, set[str]]:
    allowed, left = {}, set()
    for place in ROW:
        packages = {place} if isinstance(place, str) else set(place)
        allowed |= {name: left | {name} for name in packages}
        left = left | packages
    return allowed


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    return imported(path, list(ast.walk(tree_of(path))))


def imported(path: Path, nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """Return (line, absolute module name) of each import among the nodes."""
    package = path.relative_to(SRC.parent).parent.parts
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module or "").split(".")))
            found += [(node.lineno, f"{module.strip('.')}.{alias.name}") for alias in node.names]
    return found


def when_imported(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes that run when the module is imported: not function bodies, not `if TYPE_CHECKING`."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
    return found


def name_of(path: Path) -> str:
    return path.relative_to(SRC.parent).as_posix()


def test_the_row_names_every_room():
    assert {path.name for path in SRC.iterdir() if (path / "__init__.py").exists()} == set(allowed_rooms())


def test_the_checker_sees_forbidden_imports():
    tree = ast.parse(
        "import headrace.run.fit\ndef f():\n    from headrace.engine import step\n    from ..cli import main\n"
    )
    names = {name for _, name in imported(SRC / "plan" / "x.py", list(ast.walk(tree)))}
    assert names == {"headrace.run.fit", "headrace.engine.step", "headrace.cli.main"}
    assert [name for _, name in imported(SRC / "plan" / "x.py", when_imported(tree))] == ["headrace.run.fit"]


def test_a_room_imports_only_rooms_to_its_left():
    wrong = []
    for path in FILES:
        if path.parent == SRC:  # headrace itself imports them all
            continue
        allowed = allowed_rooms()[path.relative_to(SRC).parts[0]]
        for line, module in imports_of(path):
            package, *names = module.split(".")
            if package == "headrace" and (not names or names[0] not in allowed):
                wrong.append(f"{name_of(path)}:{line} imports {module}")
    assert not wrong


def test_the_job_is_imported_through_its_package():
    names = {file.stem for file in (SRC / "job").rglob("*.py")} - {"__init__"} | {"launchers"}
    wrong = [
        f"{name_of(path)}:{line} imports {module}, which is to come from headrace.job"
        for path in FILES
        for line, module in imports_of(path)
        if SRC / "job" not in path.parents and module.startswith("headrace.job.") and module.split(".")[2] in names
    ]
    assert not wrong


def reached_when_imported(start: list[Path]) -> dict[str, str]:
    """Return {outside package: the file that imports it} over everything that importing these files imports."""
    outside: dict[str, str] = {}
    waiting, done = list(start), set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        for _, module in imported(path, when_imported(tree_of(path))):
            parts = module.split(".")
            if parts[0] not in ("headrace", "headrace_reference"):
                outside.setdefault(parts[0], name_of(path))
                continue
            for depth in range(len(parts)):  # importing a.b.c runs a, a.b and a.b.c
                stem = SRC.parent.joinpath(*parts[: depth + 1])
                waiting += [p for p in (stem / "__init__.py", stem.with_suffix(".py")) if p.is_file()]
    return outside


def test_options_and_command_line_are_read_without_slow_imports():
    """`headrace --help` answers at once: config, core.errors, core.units and every command import lazily."""
    start = [SRC / "core" / "errors.py", SRC / "core" / "units.py", *(SRC / "config").glob("*.py")]
    start += (SRC.parent / "headrace_reference").glob("*.py")
    start += (SRC / "cli").glob("*.py")
    slow = {package: by for package, by in reached_when_imported(start).items() if package in SLOW_IMPORTS}
    assert not slow


def test_files_open_with_what_they_are():
    wrong = [name_of(path) for path in FILES if tree_of(path).body and not ast.get_docstring(tree_of(path))]
    assert not wrong


def test_a_class_name_means_one_thing():
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert not {name: files for name, files in places.items() if len(files) > 1}
