"""The documents are one book: every page is in the index, and every link leads somewhere."""

import re
import unicodedata
from pathlib import Path

import pytest

import headrace
from headrace.cli.help_screens import SCREENS
from headrace.config.field import option_names
from headrace.config.other_names import OTHER_NAMES
from headrace.config.schema import all_options

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PARTS = ("tutorials", "howto", "reference", "explanation", "documents")
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)|<img[^>]* src=\"([^\"]+)\"")


def words_of(text: str) -> str:
    """Return a page without what is shown as code."""
    return re.sub(r"`[^`\n]*`", "code", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    without_code = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", without_code, re.MULTILINE)
    plain = [unicodedata.normalize("NFKD", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)) for title in titles]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in plain}


def links_of(page: Path) -> list[tuple[str, str]]:
    """Return (path, anchor) of a page's links to this repository."""
    found = [(path or image, anchor) for path, anchor, image in LINK.findall(words_of(page.read_text()))]
    return [(path, anchor) for path, anchor in found if "://" not in path and not path.startswith("mailto:")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for path, anchor in links_of(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        assert not anchor or target.suffix != ".md" or anchor in anchors_of(target.read_text()), f"{path}#{anchor}"


def test_the_index_has_every_page():
    listed = {(DOCS / path).resolve() for path, _ in links_of(DOCS / "index.md")}
    folders = {page for page in DOCS.rglob("*.md") if page.parent != DOCS and page.parent.name != "documents"}
    assert not folders - listed
    assert [page.name for page in DOCS.glob("*.md")] == ["index.md"], f"a page belongs into one of {', '.join(PARTS)}"
    assert {page.parent.name for page in DOCS.rglob("*.md")} == {"docs", *PARTS}


def test_the_python_names_are_all_on_their_page():
    modules = {"headrace": headrace, **{f"headrace.{name}": getattr(headrace, name) for name in headrace._MODULES}}
    public = {f"{module}.{name}" for module, value in modules.items() for name in value.__all__}
    described = re.findall(r"^::: (\S+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted(public - set(modules) - {"headrace.__version__"})


def test_the_walk_finds_links_and_anchors():
    assert anchors_of("# A `b_c` d\n```\n# no\n```\n## E, f (g)\n") == {"a-b_c-d", "e-f-g"}
    assert LINK.findall("[a](b.md#c) ![d](e.png)") == [("b.md", "c", ""), ("e.png", "", "")]


# What speaks of other spellings: names of other programs' options, and lines that are about the spellings themselves.
ELSEWHERE = re.compile(
    r"alias|Names of timm|Also `|older form|legacy|poprun|tensorboard --logdir|benchmarks/|examples/porting|cifar10\.py"
    r"|train\.py|data build|application|weight-avg|is ignored, with a warning|`--lr` \(|--data-dir"
)


def test_an_option_has_the_spelling_of_the_help():
    known = option_names(all_options())
    typed = [row.split()[0] for rows in SCREENS["train"].rows.values() for row in rows]
    shown = {known[name.replace("-", "_")].name: name for name in typed}
    wrong = []
    for page in PAGES:
        if page.is_relative_to(DOCS / "documents") or (not page.is_relative_to(DOCS) and page.name != "README.md"):
            continue
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if ELSEWHERE.search(line) or line.startswith("| `--"):
                continue
            for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", line):
                name = flag.replace("-", "_")
                if name in known:
                    right = shown.get(known[name].name, known[name].name.replace("_", "-"))
                    if flag != ("no-" if known[name].negated else "") + right:
                        wrong.append(f"{page.relative_to(ROOT)}:{number}: --{flag} is --{right} in --help")
                elif name in OTHER_NAMES and OTHER_NAMES[name].same:
                    wrong.append(f"{page.relative_to(ROOT)}:{number}: --{flag} is another trainer's name")
    assert not wrong, "\n".join(wrong)
