"""Files of repositories on the Hugging Face hub, by plain HTTP, kept in the hub's own cache.

The package huggingface_hub is not needed (24 MB with what it installs, 0.4 s to import), but a file that it, timm or
transformers downloaded is found, and they find ours: CACHE/models--OWNER--NAME (or datasets--OWNER--NAME) with blobs,
refs and snapshots. The variables that it reads mean the same here: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT,
HF_TOKEN, HF_TOKEN_PATH. A cached file is used without asking the server.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from headrace.core.download import Head, Remote, ask, download, terminal_progress
from headrace.core.errors import DownloadError
from headrace.core.files import cache_directory, path_inside, write_atomic
from headrace.core.json_text import parse_json

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_LISTED = 256 << 20  # bytes of a listing: some 200 for each file
_REPO = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class HubRepo:
    """A repository at a revision: a branch, a tag or a commit."""

    name: str  # OWNER/NAME
    revision: str = "main"
    kind: Literal["model", "dataset"] = "model"
    guess: str = field(default="", compare=False)  # 'Did you mean X? ', for messages

    @staticmethod
    def parse(text: str, kind: Literal["model", "dataset"] = "model") -> "HubRepo":
        """Return the repository that `OWNER/NAME` or `OWNER/NAME@REVISION` means."""
        name, _, revision = text.partition("@")
        try:
            if not _REPO.fullmatch(name) or ".." in text or not re.fullmatch(r"[\w./-]*", revision):
                raise ValueError
            # Both become paths in the cache.
            path_inside(Path(), name)
            path_inside(Path(), revision or "main")
            path_inside(Path(), _folder_of(name))
        except ValueError:
            raise DownloadError(
                f"hf:{text[:200]} names no repository.", rule="It is hf:OWNER/NAME, or hf:OWNER/NAME@REVISION."
            ) from None
        return HubRepo(name=name, revision=revision or "main", kind=kind)

    def __str__(self) -> str:
        return self.name if self.revision == "main" else f"{self.name}@{self.revision}"

    @property
    def folder(self) -> Path:
        """Return where the cache keeps it."""
        return hub_cache() / _folder_of(self.name, self.kind)

    @property
    def path(self) -> str:
        """Return its path on the hub."""
        return self.name if self.kind == "model" else f"datasets/{self.name}"


def _folder_of(name: str, kind: str = "model") -> str:
    return f"{kind}s--{name.replace('/', '--')}"


def hub_cache() -> Path:
    """Return the directory of the hub's cache."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named).expanduser() if named else _home() / "hub"


def _home() -> Path:
    named = os.environ.get("HF_HOME")
    return Path(named).expanduser() if named else cache_directory("huggingface")


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _authorization() -> tuple[tuple[str, str], ...]:
    """Return the header with the user's token, if there is one: in the environment, or stored by `hf auth login`."""
    token = os.environ.get("HF_TOKEN", "")
    if not token:
        with suppress(OSError, UnicodeDecodeError):
            token = Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token").expanduser().read_text()
    return (("Authorization", f"Bearer {token.strip()}"),) if token.strip() else ()


def hub_file(repo: HubRepo, names: Sequence[str]) -> Path:
    """Return the path of the first of these files that the repository has; download it unless it is cached."""
    for name in names:
        if (cached := _cached(repo, name)) is not None:
            return cached
    if _is_offline():
        raise DownloadError(
            f"{' or '.join(names)} of hf:{repo} is not in {hub_cache()}, and HF_HUB_OFFLINE is set.",
            remedy=repo.guess + "Unset it for one command, or copy the cache of a machine that has the file.",
        )
    for name in names:
        # In one part, as the hub expects it: a revision such as refs/pr/1 has slashes.
        url = f"{_endpoint()}/{repo.path}/resolve/{quote(repo.revision, safe='')}/{name}"
        try:
            head = ask(url, _authorization())
        except DownloadError as error:
            raise DownloadError(error.problem, rule=error.rule, remedy=repo.guess + error.remedy) from None
        if head.status == 404 and head.headers.get("X-Error-Code") == "EntryNotFound":
            continue
        _refuse(repo, name, head)
        return _fetch(repo, name, url, head)
    raise DownloadError(
        f"hf:{repo} has no {' or '.join(names)}.", remedy="Give the address of its file of weights instead."
    )


def hub_listing(repo: HubRepo) -> tuple[str, ...] | None:
    """Return the names of all files of a repository, None where it has no such revision.

    The listing of a commit is kept beside the files; that of a branch is asked for unless its commit is cached.
    """
    kept = repo.folder / "listings"
    commit = _cached_commit(repo)
    if commit and (kept / f"{commit}.json").is_file():
        return _names_in(parse_json((kept / f"{commit}.json").read_bytes(), _MOST_LISTED))
    if _is_offline():
        raise DownloadError(
            f"The list of files of hf:{repo} is not in {hub_cache()}, and HF_HUB_OFFLINE is set.",
            remedy="Unset it for one command, or copy the cache of a machine that has the files.",
        )
    url = f"{_endpoint()}/api/{repo.kind}s/{repo.name}/revision/{quote(repo.revision, safe='')}"
    head = ask(url, _authorization())
    if head.status == 404 and head.headers.get("X-Error-Code") == "RevisionNotFound":
        return None
    if head.status >= 400:
        _refuse(repo, "the list of files", head)
    arrived = kept / f".arrived-{os.getpid()}.json"
    try:
        download(Remote(urls=(url,), headers=_authorization()), arrived)
        said = parse_json(arrived.read_bytes(), _MOST_LISTED)
        commit = str(said.get("sha", ""))
        names = _names_in(said)
        if not _COMMIT.fullmatch(commit):
            raise ValueError(f"the commit {commit or 'unknown'}")
        arrived.replace(kept / f"{commit}.json")
        if commit != repo.revision:
            ref = repo.folder / "refs" / repo.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(ref, commit.encode())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DownloadError(
            f"{_endpoint()} does not answer as a Hugging Face hub: {error}.", remedy="Check HF_ENDPOINT."
        ) from None
    finally:
        arrived.unlink(missing_ok=True)
    return names


def _names_in(said: Any) -> tuple[str, ...]:
    """Return the names in a listing that are paths inside of the repository."""
    names = [str(each["rfilename"]) for each in said["siblings"]]
    for name in names:
        path_inside(Path(), name)
    return tuple(names)


def _cached(repo: HubRepo, name: str) -> Path | None:
    commit = _cached_commit(repo)
    path = repo.folder / "snapshots" / commit / name
    return path if commit and path.is_file() else None


def _cached_commit(repo: HubRepo) -> str:
    """Return the commit that the cache has for the revision, or nothing."""
    commit = repo.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repo.folder / "refs" / repo.revision).read_text().strip()
        except OSError:
            return ""
    return commit if _COMMIT.fullmatch(commit) else ""


def _refuse(repo: HubRepo, name: str, head: Head) -> None:
    """Refuse an answer that is not about this file."""
    said = head.headers.get("X-Error-Message", "").rstrip(".")
    if head.status in (401, 403, 404):
        has_token = bool(_authorization())
        raise DownloadError(
            f"{_endpoint()} does not give {name} of hf:{repo}: it answers {head.status}{f' ({said})' if said else ''}.",
            rule="The repository does not exist, or it is private or gated and the token does not allow it."
            if has_token
            else "The repository does not exist, or it is private or gated and needs a token.",
            remedy=repo.guess
            + (
                "Check the name, or accept its conditions on its page."
                if has_token
                else "Check the name, or set HF_TOKEN."
            ),
        )
    commit, etag = head.headers.get("X-Repo-Commit", ""), _etag(head)
    if head.status >= 400 or not _COMMIT.fullmatch(commit) or not is_file_name(etag):
        raise DownloadError(
            f"{_endpoint()} does not answer as a Hugging Face hub: {head.status}, commit {commit or 'unknown'}.",
            remedy="Check HF_ENDPOINT and the proxy variables.",
        )


def is_file_name(text: str) -> bool:
    """Say whether what a server sends can be the name of a file in the cache."""
    try:
        path_inside(Path(), text)
    except ValueError:
        return False
    return re.fullmatch(r"[\w.-]+", text) is not None


def _etag(head: Head) -> str:
    """Return what identifies the content: the SHA-256 of a large file, the git hash of a small one."""
    etag = head.headers.get("X-Linked-Etag") or head.headers.get("ETag") or ""
    return etag.removeprefix("W/").strip('"')


def _fetch(repo: HubRepo, name: str, url: str, head: Head) -> Path:
    """Download a file into the cache: first its content, then the names that lead to it."""
    commit, etag = head.headers["X-Repo-Commit"], _etag(head)
    checksum = f"sha256:{etag}" if _SHA256.fullmatch(etag) else f"git:{etag}" if _COMMIT.fullmatch(etag) else ""
    remote = Remote(urls=(url,), checksum=checksum, headers=_authorization())
    blob = download(remote, repo.folder / "blobs" / etag, partial(terminal_progress(), f"{repo.name}/{name}"))
    path = repo.folder / "snapshots" / commit / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        link = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        try:
            link.symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", etag))
            link.replace(path)  # in one step: another process may be doing the same
        except OSError:  # a file system without symbolic links: huggingface_hub, too, moves the file there then
            blob.replace(path)
        if commit != repo.revision:
            ref = repo.folder / "refs" / repo.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(ref, commit.encode())
    except OSError as error:
        raise DownloadError(
            f"{path} cannot be written: {error.strerror or error}.", remedy="Choose another directory with HF_HOME."
        ) from None
    return path
