"""Make the site of the documents: mkdocs.yml names this file, and MkDocs calls the functions `on_...`.

The index of docs/ is the navigation, so that there is one list of pages. Pages link to files of the repository that are
not in docs/, as they must for who reads them there: those files become part of the site, pages as pages and others as
they are.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def path_in_site(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return path.removeprefix("docs/")


def path_in_repository(path: str) -> str:
    """Return where a file of the site is in the repository."""
    return f"docs/{path}" if (ROOT / "docs" / path).exists() else path


def rewritten(text: str, page: str) -> tuple[str, set[str]]:
    """Return a page's text with links as the site needs them, and what they lead to; `page` is in the repository."""
    found = set[str]()

    def link(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
        found.add(path)
        return match[1] + posixpath.relpath(path_in_site(path), posixpath.dirname(path_in_site(page)) or ".") + match[3]

    parts = CODE.split(text)
    return "".join(part if at % 2 else LINK.sub(link, part) for at, part in enumerate(parts)), found


def on_config(config: MkDocsConfig) -> None:
    """Take the navigation from the index: a part for each heading, with the pages that it links to."""
    index = (ROOT / "docs" / "index.md").read_text()
    config.nav = [{"Start": "index.md"}]
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title = part.partition("\n")[0].partition(":")[0]
        links = re.findall(r"\[([^]]+)\]\(([^)#]+)\)", part)
        config.nav.append({title: [{name: path_in_site(posixpath.normpath(f"docs/{path}"))} for name, path in links]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages lead to, and those that these lead to."""
    waiting = [path_in_repository(file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for path in rewritten((ROOT / page).read_text(), page)[1] - seen:
            seen.add(path)
            if not path.startswith("docs/") and (ROOT / path).is_file():
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
                if path.endswith(".md"):
                    waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's text with links as the site needs them."""
    return rewritten(markdown, path_in_repository(page.file.src_uri))[0]
