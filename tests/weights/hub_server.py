"""A hub on the loopback address, with repositories made in the test."""

import hashlib
import re

from tests.core.file_server import FileServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(FileServer):
    """Serves files of `repositories` ({"OWNER/NAME/FILE": bytes}) beside plain `files`.

    Large files are redirected to another host name, as on the real one. `private` repositories need a token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repositories: dict[str, bytes] = {}
        self.private: set[str] = set()

    @property
    def other_url(self) -> str:
        return f"http://localhost:{self.server_address[1]}"

    class Handler(FileServer.Handler):
        server: "Hub"  # pyright: ignore[reportIncompatibleVariableOverride]

        def answer(self) -> None:
            hub = self.server
            asked = re.fullmatch(r"/(.+)/resolve/(?:main|refs%2Fpr%2F1)/(.+)", self.path)
            if not asked or self.path in hub.files:
                return super().answer()
            repo, file = asked.groups()
            known = {name.rpartition("/")[0] for name in hub.repositories}
            if repo not in known or (repo in hub.private and "Authorization" not in self.headers):
                return self._refuse(401, "RepoNotFound", "Invalid username or password.")
            data = hub.repositories.get(f"{repo}/{file}")
            if data is None:
                return self._refuse(404, "EntryNotFound", "Entry not found")
            if file.endswith(".json"):
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                return self.content(data, {"X-Repo-Commit": COMMIT, "ETag": f'"{blob}"'})
            hub.files["/large/" + file] = data
            digest = hashlib.sha256(data).hexdigest()
            where = {"Location": f"{hub.other_url}/large/{file}", "X-Repo-Commit": COMMIT, "Content-Length": "0"}
            return self.head(302, where | {"X-Linked-Etag": f'"{digest}"'})

        def _refuse(self, status: int, code: str, message: str) -> None:
            self.head(status, {"X-Error-Code": code, "X-Error-Message": message, "Content-Length": "0"})
