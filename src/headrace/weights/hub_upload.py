"""Files sent to a model repository on the Hugging Face hub, by the package huggingface_hub (the extra `hub`).

It is imported only here: to read, plain HTTP is enough (core/hub.py).
"""

import importlib
import importlib.util
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.hub import HubRepo


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A commit on the hub, and the files that were left as they were there."""

    url: str  # of the repository
    commit: str
    kept: tuple[str, ...] = ()


def refuse_unable() -> None:
    """Raise ConfigError where nothing can be sent, before anything is computed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            "The package huggingface_hub is not installed, which sends files to the hub.",
            remedy="pip install 'headrace[hub]', or write the files with --out FOLDER.",
        )
    if importlib.import_module("huggingface_hub").get_token() is None:
        raise ConfigError(
            "There is no token of the Hugging Face hub.",
            rule="Only who may write to a repository can push to it.",
            remedy="hf auth login, or set HF_TOKEN; --out FOLDER writes the files alone.",
        )


def upload(folder: Path, repo: HubRepo, message: str, private: bool | None, marks: Mapping[str, str]) -> Pushed:
    """Send the files of a folder as one commit; make the repository where it is not there.

    A file there without its mark (`marks`: {file: text}) is somebody's own, and is left as it is.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    errors: Any = importlib.import_module("huggingface_hub.errors")
    names = sorted(path.name for path in folder.iterdir())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the library about itself
            api = hub.HfApi(library_name="headrace")
            place = api.create_repo(repo.name, private=private, exist_ok=True)
            if repo.revision != "main":
                api.create_branch(repo.name, branch=repo.revision, exist_ok=True)
            kept = tuple(name for name, mark in marks.items() if name in names and _is_theirs(api, repo, name, mark))
            added = [
                hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name)
                for name in names
                if name not in kept
            ]
            made = api.create_commit(repo.name, added, commit_message=message, revision=repo.revision)
    except errors.HfHubHTTPError as error:
        raise _refused(repo, error) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreached(error) from None
    except Exception as error:
        # Errors of the network: the library's of HTTP is httpx, under one of two names.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
            raise
        raise _unreached(error) from None
    # What the cache of this machine has under the branch's name is no longer what it means.
    (repo.folder / "refs" / repo.revision).unlink(missing_ok=True)
    return Pushed(url=str(place), commit=made.oid, kept=kept)


def _is_theirs(api: Any, repo: HubRepo, name: str, mark: str) -> bool:
    """Say whether the repository has such a file that was not made by a push."""
    if not api.file_exists(repo.name, name, revision=repo.revision):
        return False
    with tempfile.TemporaryDirectory() as place:
        found = api.hf_hub_download(repo.name, name, revision=repo.revision, local_dir=place)
        return mark not in Path(found).read_text(errors="replace")


def _unreached(error: Exception) -> HeadraceError:
    errors = (each for each in (error, error.__cause__) if each is not None)
    causes = dict.fromkeys(str(each).strip().rstrip(".") or type(each).__name__ for each in errors)
    return HeadraceError(
        f"Nothing was committed on the hub: {': '.join(causes)}.", remedy="Check the network and HF_ENDPOINT."
    )


def _refused(repo: HubRepo, error: Any) -> HeadraceError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = getattr(error, "server_message", None) or str(error).partition("\n")[0]
    problem = f"The hub refused to take hf:{repo}: {status or ''} {said}".strip().rstrip(".")
    if status in (401, 403, 404):
        return HeadraceError(
            f"{problem}.",
            rule="The token has to allow writing, and the repository's owner has to be its user or an organisation.",
            remedy="`hf auth whoami` says whose token it is; make one with the role write, and set HF_TOKEN.",
        )
    return HeadraceError(f"{problem}.", remedy="Try again later; nothing was changed there.")
