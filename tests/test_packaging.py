"""The sdist holds the whole repository, the wheel made from it the whole package, and the installed wheel works."""

import ast
import email
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import jax
import pytest
import yaml

import headrace
from headrace.native import library
from headrace.native.library import SUFFIX

ROOT = Path(__file__).parents[1]
# The import name of a distribution where it is another one.
IMPORTED_AS = {"pyyaml": "yaml", "pillow": "PIL", "tensorboardx": "tensorboardX"}
NEEDS_CHECKOUT = "git does not list files here: not a checkout"


def run(words: list[str], cwd: Path, environ: dict[str, str]) -> str:
    """Run a command to its end; return what it printed."""
    env = {**os.environ, **environ}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked_files() -> set[str]:
    """Return what git lists, of what is still there."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def build(kind: str, source: Path, out: Path, **environ: str) -> Path:
    """Build an sdist or a wheel without an environment of its own: this one has what a build requires."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    # -O0: what the compiler makes of the C and C++ code is tested elsewhere.
    return out / run([sys.executable, "-c", code], source, {"CFLAGS": "-O0"} | environ).splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    names = tracked_files()
    if not names:
        pytest.skip(NEEDS_CHECKOUT)
    copy = tmp_path_factory.mktemp("repository")  # a build leaves files behind
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    return build("sdist", copy, tmp_path_factory.mktemp("sdist"))


def unpack(sdist: Path, place: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (source,) = place.iterdir()
    return source


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", unpack(sdist, tmp_path_factory.mktemp("unpacked")), tmp_path_factory.mktemp("wheel"))


def install(wheel: Path, place: Path) -> dict[str, str]:
    """Install a wheel into a folder; return the environment of processes that shall use it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", "--target", str(place), str(wheel)], place, {})
    return {"PYTHONPATH": str(place), "JAX_PLATFORMS": "cpu"}


def test_the_sdist_holds_every_file_of_the_repository(sdist):
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert not tracked_files() - packed


def test_the_wheel_holds_every_file_of_the_package(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert not {name.removeprefix("src/") for name in tracked_files() if name.startswith("src/")} - packed
    assert all(name.startswith(("headrace/", "headrace_reference/", "headrace-")) for name in packed)


KERNELS = sorted(f"headrace/native/{path.name}" for path in Path(library.__file__).parent.glob(f"kernels*{SUFFIX}"))


def test_the_wheel_has_the_kernels(wheel, tmp_path):
    """Whoever installs it computes convolutions with them, without a checkout and a second step."""
    assert KERNELS
    assert (
        sorted(name for name in zipfile.ZipFile(wheel).namelist() if "/kernels" in name and SUFFIX in name) == KERNELS
    )
    said = run([sys.executable, "-P", "-m", "headrace", "--version"], tmp_path, install(wheel, tmp_path))
    assert said.splitlines()[1].startswith("kernels for CPUs: kernels")


def test_a_build_gets_the_headers_of_the_kernels():
    """pip builds where nothing is but what is required there: jaxlib, the oldest that jax may be."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (line,) = [line for line in project["project"]["dependencies"] if line.startswith("jax")]
    (oldest, *_) = re.findall(r"[\d.]+", line)
    wanted = [re.split(r"[;=<>]", line, maxsplit=1)[0] for line in project["build-system"]["requires"]]
    assert wanted == ["setuptools", "jaxlib", "jaxlib"]
    assert project["build-system"]["requires"][1].startswith(f"jaxlib=={oldest};")


def test_without_a_compiler_it_is_installed_and_says_what_is_missing(sdist, tmp_path):
    missing = {name: str(tmp_path / "no-such-compiler") for name in ("CC", "CXX")}
    (tmp_path / "out").mkdir()
    bare = build("wheel", unpack(sdist, tmp_path / "source"), tmp_path / "out", **missing)
    assert not [name for name in zipfile.ZipFile(bare).namelist() if SUFFIX in name]
    environ = install(bare, tmp_path / "out")
    said = run([sys.executable, "-P", "-m", "headrace", "--version"], tmp_path, environ)
    assert "install a C++ compiler, then Headrace again" in said


def test_the_installed_wheel_works(wheel, tmp_path):
    environ = install(wheel, tmp_path)
    printed = run([sys.executable, "-P", "-c", "import headrace; print(headrace.__file__)"], tmp_path, environ)
    assert Path(printed.strip()).is_relative_to(tmp_path)
    words = [
        "--model-name",
        "toy_model",
        "--num-epochs",
        "1",
        "--weight-updates-per-epoch",
        "2",
        "--progress",
        "none",
        "--validation",
        "no",
    ]
    run([sys.executable, "-P", "-m", "headrace", "train", *words], tmp_path, environ)
    assert list(tmp_path.glob("runs/*/checkpoints/step_*"))


def requirements() -> list[tuple[str, str]]:
    """Return (name, line) of each required or optional distribution in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [(re.split(r"[\[<>=!~ ]", line)[0].lower(), line) for line in lines]


def test_every_package_that_is_imported_is_declared():
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imported.add(node.module.partition(".")[0])
    declared = {IMPORTED_AS.get(name, name.replace("-", "_")) for name, _ in requirements()}
    undeclared = (
        imported - declared - set(sys.stdlib_module_names) - {"headrace", "headrace_reference", "jaxlib"}
    )  # jaxlib: jax requires it
    assert not undeclared


def test_jax_is_bounded_to_what_was_tested():
    """Private names of JAX are used, so a version that nobody tried is not installed."""
    lines = [line for name, line in requirements() if name == "jax"]
    assert len(lines) == 3  # required, with CUDA, and to compile for TPUs
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    for line in lines:
        bounds = re.fullmatch(r"jax(?:\[(?:cuda13|tpu)\])?>=([\d.]+),<([\d.]+)", line)
        assert bounds
        assert f"jax {bounds[1]}" in page
        assert f"below {bounds[2]}" in page


def test_the_metadata_name_license_and_python(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    assert (metadata["Name"], metadata["License-Expression"]) == ("headrace", "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Version"] == headrace.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == headrace.__version__


def test_public_ci_covers_what_the_metadata_promises():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = {found[1] for line in project["classifiers"] if (found := re.search(r":: (3\.\d+)$", line))}
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == promised
    (line,) = [line for line in project["dependencies"] if line.startswith("jax")]
    oldest, limit = re.findall(r"[\d.]+", line)
    assert {row["jax"] for row in rows} == {f"=={oldest}", f"<{limit}"}


def test_contributing_says_what_is_so():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert "eight virtual CPU devices" in page
    assert len(jax.devices()) == 8
    for room_file in re.findall(r"`((?:[a-z_]+/)+(?:[\w*]+\.(?:py|yml))?)`", page):
        folders = (ROOT, ROOT / "src", ROOT / "src" / "headrace")
        assert any(list(folder.glob(room_file.rstrip("/"))) for folder in folders), room_file


def test_containers_are_made_of_what_is_here():
    """The image and the containers for development; hadolint and their schema were asked by hand, no engine is here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile, image = (ROOT / "Makefile").read_text(), (ROOT / "Dockerfile").read_text()
    python, *others = set(re.findall(r"^FROM python:([\d.]+)-", image, re.MULTILINE))
    assert not others
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    for extra in re.findall(r"EXTRAS=\[(\w+)\]", image):
        assert extra in project["optional-dependencies"]
    files = sorted((ROOT / ".devcontainer").rglob("devcontainer.json"))
    assert len(files) == 2
    for file in files:
        container = json.loads(file.read_text())
        assert f"python:{python}-" in container["image"]
        target, *pip = container["updateContentCommand"].removeprefix("make ").split(" && ")
        assert f"\n{target}:" in makefile
        assert [re.findall(r"\[(\w+)\]", line) for line in pip] == [["cuda"]] * ("cuda" in str(file))
