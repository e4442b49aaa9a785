"""docs/documents: its tables are those of the code, its examples print what it says, and all its commands work.

tests/test_seed_commands.py tests what the documents themselves type, test_checklist.py the rows of the tables.
"""

import re
import shlex
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import main
from headrace.config.field import find_option, option_names
from headrace.config.translations import known_options
from headrace_reference.scripts import SCRIPTS
from tests.reference.test_checklist import commands
from tests.seeds.checklist import FOLDER
from tests.seeds.option_tables import ELSEWHERE, NAMES
from tests.seeds.page import PART, filled
from tests.seeds.reading import read_commands

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="not run from the repository")
ROOT = FOLDER.parents[1]
PAGES = sorted(FOLDER.glob("*.md"))
PROGRAMS = ("headrace ", "python ", "python3 ")


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    """Begin in an empty directory, without variables that say where data are."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATASETS_DIR", "DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


def by_hand(path: Path) -> str:
    """Return what is written by hand on a page, without its examples."""
    return re.sub(r"```.*?```", "", PART.sub("", path.read_text()), flags=re.DOTALL)


def typed() -> list[str]:
    """Return the commands on the pages that are neither a document's nor shown with their output."""
    found = (text for path in PAGES for text in re.findall(r"`([^`\n]+)`", by_hand(path)))
    return list(dict.fromkeys(text for text in found if text.startswith(PROGRAMS)))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_made_parts_are_up_to_date(path):
    assert filled(path.read_text()) == path.read_text(), "run: python -m tests.seeds.page"


def test_every_command_of_the_documents_is_on_its_page():
    for document in ("000", "001", "003", "004"):
        lines = re.findall(rf"<!-- commands {document}: ([^>]*?) -->", (FOLDER / f"{document}.md").read_text())
        on_page = [int(number) for part in lines for number in part.split()]
        assert on_page == [command.line for command in read_commands() if command.seed == document]


@pytest.mark.parametrize("name", sorted({*NAMES["tf1"], *NAMES["tf2"]}))
def test_every_name_of_the_documents_is_an_option(name):
    if name.replace("_", "-") not in ELSEWHERE:
        assert find_option(name, option_names(known_options())).name in known_options()


@pytest.mark.parametrize("text", [text for text in typed() if text not in commands()])
def test_a_command_beside_the_tables_exists(text, capsys):
    words = shlex.split(text)
    if words[0] != "headrace":
        assert words[1] == "-m" or (ROOT / words[1]).is_file()
        return
    action = words[2:3] if words[1] == "data" else []
    with pytest.raises(SystemExit) as left:
        raise SystemExit(main([words[1], *action, "--help"]))
    assert left.value.code == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", sorted({name for p in PAGES for name in re.findall(r"`hr\.([\w.]+)", p.read_text())}))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_name_of_the_interface_exists(name):
    found = headrace
    for part in name.split("."):
        found = getattr(found, part)


def test_files_that_are_named_exist():
    for path in PAGES:
        text = path.read_text()
        for place in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            assert (path.parent / place).exists(), place
        for place in re.findall(r"`(src/headrace/[\w/.]+|tests/[\w/.]+)`", text):
            assert (ROOT / place).exists(), place


def test_the_examples_print_what_the_pages_say(capsys):
    examples = [
        found for path in PAGES for found in re.findall(r"```\n\$ (headrace [^\n]*)\n(.*?)```", path.read_text(), re.S)
    ]
    assert len(examples) == 3
    for command, output in examples:
        main(shlex.split(command)[1:])
        captured = capsys.readouterr()
        assert captured.out + captured.err == output, command


def test_every_script_that_a_document_names_is_there():
    for name in ("requirements.txt", "configs.yml", "README_Benchmarks.md"):
        assert (ROOT / name).is_file()
    for name in (*SCRIPTS, "efficientnet_CIFAR10_train_ipu", "efficientnet_CIFAR10_inference_ipu"):
        assert (ROOT / f"{name}.py").is_file()
