"""docs/documents/checklist.md: every row has a status with its evidence; commands and options do what it says."""

import re
import shlex
from pathlib import Path

import pytest

from headrace.cli.main import main, run_script
from headrace.cli.options import parse
from headrace.config.field import find_option, option_names
from headrace.config.load import resolve
from headrace.config.spellings import SPELLINGS, Part
from headrace.config.translations import known_options
from headrace.engine.compiler import COUNTERPARTS
from headrace.run.design import design_run
from tests.reference.test_tables_defaults import ROWS, value_of
from tests.seeds.checklist import (
    EVIDENCE,
    FOLDER,
    HOW,
    KINDS,
    NOT_TYPED,
    SUITE,
    Item,
    all_items,
    functions_of,
    is_executed,
)
from tests.seeds.figures import FIGURES, RECORDS, figures
from tests.seeds.option_tables import ELSEWHERE, PROOFS, STATED, defaults_markdown, example_of
from tests.seeds.reading import read_commands
from tests.seeds.running import tf_config

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="not run from the repository")
ROOT = FOLDER.parents[1]
ITEMS = all_items() if FOLDER.is_dir() else []
RUNS = {"000": "--application tf2 --model cifar_resnet8", "001": "--application tf1 --dataset cifar-10"}


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin in an empty directory, without variables that say where data are."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATASETS_DIR", "DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


def commands() -> dict[str, list[Item]]:
    """Return the commands that rows written by hand type, with their rows."""
    found: dict[str, list[Item]] = {}
    for item in ITEMS:
        for text in re.findall(r"`([^`]+)`", item.typed) if item.by_hand else ():
            if text.startswith(HOW):
                found.setdefault(text, []).append(item)
    return found


@pytest.mark.parametrize(("text", "items"), commands().items(), ids=range(len(commands())))
def test_a_command_does_what_its_rows_say(text: str, items: list[Item], capsys) -> None:
    words = shlex.split(text)
    if not is_executed(words):
        assert all("`tests/" in item.status or item.kind == KINDS["ran "] for item in items), text
        if words[0] != "headrace" and words[1] != "-m":
            assert (ROOT / words[1]).is_file()
        return
    refused = [re.search(r'refused with "([^"]+)"', item.status) for item in items]
    code = main(words[1:]) if words[0] == "headrace" else run_script(Path(words[1]).stem, words[2:])
    printed = " ".join("".join(capsys.readouterr()).split())
    assert code == (2 if all(refused) else 0), printed
    for item in items:
        for part in re.findall(r'(?:prints|refused with) "([^"]+)"', item.status):
            assert part in printed, printed


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.document}: {item.name}")
def test_a_row_has_a_status_with_its_evidence(item: Item) -> None:
    assert item.kind, item.status
    assert item.evidence in EVIDENCE
    for place in re.findall(r"`(tests/[^`:]+)", item.status):
        assert (ROOT / place).exists(), place
    for file, name in item.tests:
        assert name in functions_of(file), f"{file} has no {name}"
    if item.kind == KINDS["works"] and not any(is_executed(words) for words in item.commands):
        assert item.tests or item.status == SUITE, item
    if item.kind == KINDS["ran "]:
        assert re.match(r"ran 20\d\d-\d\d-\d\d\b", item.status)
    if item.typed == NOT_TYPED:
        assert item.kind in (KINDS["no counterpart: "], KINDS["not measured: "])
    # A row that types --help shows a command's options, and nothing else.
    assert "--help" not in item.typed or "options" in item.name


@pytest.mark.parametrize(
    ("document", "name"),
    [(document, row["option"]) for document, headings in STATED.items() for rows in headings.values() for row in rows],
)
def test_an_option_changes_the_run_or_is_said_to_have_no_effect(document: str, name: str, monkeypatch) -> None:
    example = example_of(document, name)
    spelled = {text for text, found in option_names(known_options()).items() if found.name == example.option}
    names = {spelling for text in (*spelled, example.option, name) for spelling in (text, text.replace("_", "-"))}
    assert re.search(
        rf"(?<![\w-])(?:--)?({'|'.join(map(re.escape, names))})(?!\w)",
        (ROOT / example.test.partition("::")[0]).read_text(),
    )
    if name.replace("_", "-") in ELSEWHERE or example.option == "restore_path":
        return  # not options of a run
    if name == "distributed":
        monkeypatch.setenv("TF_CONFIG", tf_config(301))
    base = shlex.split(f"{RUNS[document]} {example.needs}")
    without, _ = parse(base, "headrace plan")
    given, _ = parse([*base, *shlex.split(example.typed)], "headrace plan")
    changed = {key for key, value in vars(given.config).items() if value != getattr(without.config, key)}
    assert changed or any(f"without effect: {example.option}" in note for note in given.notes)


# What an option does only while a run goes on, by our name; its test looks at it there.
IN_THE_RUN = {
    "average_decays",
    "average_last_epochs",
    "checkpoint_dir",
    "clean_dir",
    "dataset_path",
    "gc_profile",
    "wandb",
}
OF_NO_RUN = {"config", "config_path", "repeat", "restore_path", "distributed"}


def executed(words: list[str]) -> tuple[object, ...]:
    """Return what a run of this command line executes: plan, network, numbers, feed and compiler's options."""
    resolved, _ = parse(words, "headrace plan")
    config, design = resolved.config, design_run(resolved.config, absent_ok=True)
    plan = design.plan.to_dict() | {"warnings": None}
    asked = [(name, getattr(config.compiler, name)) for name in COUNTERPARTS]
    compiler = [
        COUNTERPARTS[name](value, backend)
        for backend in ("cpu", "gpu", "tpu")
        for name, value in asked
        if value not in (None, ())
    ]
    numbers = config.learning, config.numerics, design.precision, config.run.seed, config.run.first_device
    norms = config.model.stable_norm, config.model.dbn_replica_group_size, config.model.bn_momentum
    return tuple(map(repr, (plan, design.network, numbers, norms, design.plan.feed, compiler)))


@pytest.mark.parametrize(
    ("document", "name"),
    [(document, row["option"]) for document, headings in STATED.items() for rows in headings.values() for row in rows],
)
def test_an_option_reaches_what_is_executed_or_is_noted(document: str, name: str) -> None:
    example = example_of(document, name)
    if example.option in OF_NO_RUN | IN_THE_RUN:
        return
    base = shlex.split(f"{RUNS[document]} {example.needs}")
    typed = [*base, *shlex.split(example.typed)]
    noted = parse(typed, "headrace plan")[0].notes
    said = any(f"{example.option} (" in text or "changes nothing" in text for text in noted)
    assert executed(base) != executed(typed) or said, noted


def test_every_proof_is_of_an_option_of_the_documents() -> None:
    used = {example_of(d, r["option"]).option for d, hs in STATED.items() for rows in hs.values() for r in rows}
    assert used == set(PROOFS)


def test_every_default_that_differs_from_a_stated_one_is_in_the_table() -> None:
    listed = set(re.findall(r"^\| `(\w+)`", defaults_markdown(), re.MULTILINE))
    said_otherwise = {name: row.of[0] for name, row in SPELLINGS.items() if not isinstance(row, Part)}
    said_otherwise["shards"] = "pipeline_schedule"
    for _, row in ROWS:
        ours = resolve(row.get("given", {}), "none", environ={})
        if value_of(ours, row["option"]) != row["value"]:
            name = find_option(row["option"], option_names(known_options())).name
            assert said_otherwise.get(name, name) in listed, row
    assert f"exactly that one: {len(ROWS)} of them" in (FOLDER / "README.md").read_text()


def test_every_figure_of_document_003_has_a_line_with_its_plan_and_its_record():
    rows = list(figures())
    wanted = [command for command in read_commands() if command.seed == "003"]
    assert [each.command for each in rows if each.batch == each.command.plan.get("micro_batch")] == [
        command for command in wanted if command.plan
    ]
    for command in wanted:
        batches = [each.batch for each in rows if each.command == command]
        assert batches == list(command.bench.get("sweep", batches[:1]))
    assert set(FIGURES) == {each.entry for each in rows}
    for each in rows:
        if each.rate is not None:
            written = (RECORDS / each.record).read_text()
            assert re.search(rf"`{each.entry.removesuffix('_pod16')}`.*\b{each.rate:,} ", written), each
    page = (FOLDER / "003.md").read_text()
    assert all(f"| {each.command.line} | `{each.entry}` | {each.batch} |" in page for each in rows)
    assert sum(each.rate is not None for each in rows) >= 15, "8 trainings and 7 points of inference"
