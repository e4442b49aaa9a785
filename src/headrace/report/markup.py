"""HTML of reports: escaped texts, tables, and whole pages that need nothing from outside."""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

_FILES = Path(__file__).parent / "files"


@dataclass(frozen=True)
class Html:
    """Text that is HTML already; everything else is escaped when it becomes part of a page."""

    text: str


def html(value: object) -> str:
    """Return a value as HTML. Halves of surrogate pairs, from names that are not UTF-8, cannot be written."""
    return value.text if isinstance(value, Html) else escape(str(value)).encode(errors="replace").decode()


def element(tag: str, *content: object, **attributes: object) -> Html:
    """Return an element; `class_` is its class, `data_x` its attribute data-x."""
    given = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    inside = "".join(f' {name}="{html(value)}"' for name, value in given)
    return Html(f"<{tag}{inside}>{''.join(map(html, content))}</{tag}>")


def section(name: str, title: str, *content: object) -> Html:
    """Return a part of a page; `name` is its id, under which a live page replaces it."""
    return element("section", element("h2", title), *content, id=name) if content else Html("")


def rows_table(rows: Iterable[tuple[object, ...]], heading: Sequence[str] = (), numbers: Sequence[int] = ()) -> Html:
    """Return a table; columns in `numbers` are aligned right. With a heading it can be sorted by a click."""
    head = [element("th", name, class_="number" if k in numbers else None) for k, name in enumerate(heading)]
    body = [
        element("tr", *(element("td", cell, class_="number" if k in numbers else None) for k, cell in enumerate(row)))
        for row in rows
    ]
    top = [element("thead", element("tr", *head))] if heading else []
    table = element("table", *top, element("tbody", *body), class_="sortable" if heading else "facts")
    return element("div", table, class_="scroll")


def json_script(name: str, value: object) -> Html:
    """Return data for the page's script. No text in it can end the element: `<` is written as an escape."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{name}">{text}</script>')


@cache
def _file(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def page_policy() -> str:
    """Return the content security policy of all pages: nothing from elsewhere, and no script but ours, by its hash.

    A server adds who may show the page in a frame, which a page cannot say of itself.
    """
    digest = base64.b64encode(hashlib.sha256(_file("page.js").encode()).digest()).decode()
    # Styles may be inline, since bars and cells have their widths and shades in attributes; scripts may not.
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def page(title: str, body: Iterable[Html], data: Mapping[str, object]) -> str:
    """Return a whole page. `data` is what its script draws: `panels`, and for a live page `live`, where to ask."""
    head = [
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{escape(page_policy())}">'),
        Html('<meta name="color-scheme" content="light dark">'),
        element("title", title),
        Html(f"<style>{_file('page.css')}</style>"),
    ]
    content = element("main", *body)
    script = Html(f"<script>{_file('page.js')}</script>")
    whole = element(
        "html", element("head", *head), element("body", content, json_script("data", data), script), lang="en"
    )
    return "<!doctype html>\n" + whole.text + "\n"
