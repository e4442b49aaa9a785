"""A hub on the loopback address: repositories made in the test are read from it, and models are pushed to it.

It speaks what the package huggingface_hub sends: repos/create, preupload, the batches of Git LFS, commit.
"""

import base64
import hashlib
import json
import re
from typing import Any

from tests.core.file_server import FileServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(FileServer):
    """Serves files of `repositories` ({"OWNER/NAME/FILE": bytes}) beside plain `files`.

    Large files are redirected to another host name, as on the real one. `private` repositories need a token. Who pushes
    needs the token of `writer`; what was made is in `created`, and each commit in `commits`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repositories: dict[str, bytes] = {}
        self.private: set[str] = set()
        self.writer = "hf_writer"
        self.created: list[dict[str, Any]] = []
        self.commits: list[list[dict[str, Any]]] = []
        self.stored: dict[str, bytes] = {}  # large files, by SHA-256

    @property
    def other_url(self) -> str:
        return f"http://localhost:{self.server_address[1]}"

    @property
    def commit(self) -> str:
        """The newest commit, of any repository."""
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest() if self.commits else COMMIT

    class Handler(FileServer.Handler):
        server: "Hub"  # pyright: ignore[reportIncompatibleVariableOverride]

        def answer(self) -> None:
            hub = self.server
            listed = re.fullmatch(r"/api/(datasets/.+)/revision/(main|refs%2Fconvert%2Fparquet)", self.path)
            if listed:
                start = f"{listed[1]}/"
                files = [name.removeprefix(start) for name in hub.repositories if name.startswith(start)]
                if not files:
                    return self._refuse(401, "RepoNotFound", "Repository not found")
                # What the hub makes of other files is on a branch of its own.
                made = [file for file in files if file.startswith("default/")]
                if listed[2] != "main" and not made:
                    return self._refuse(404, "RevisionNotFound", "Invalid rev id")
                shown = made if listed[2] != "main" else [file for file in files if file not in made]
                answer = {"sha": hub.commit, "siblings": [{"rfilename": file} for file in shown]}
                return self.content(json.dumps(answer).encode(), {"Content-Type": "application/json"})
            asked = re.fullmatch(
                r"/(.+)/resolve/(?:main|refs%2F(?:pr%2F1|convert%2Fparquet)|[0-9a-f]{40})/(.+)", self.path
            )
            if not asked or self.path in hub.files:
                return super().answer()
            repo, file = asked.groups()
            known = any(name.startswith(f"{repo}/") for name in hub.repositories)
            if not known or (repo in hub.private and "Authorization" not in self.headers):
                return self._refuse(401, "RepoNotFound", "Invalid username or password.")
            data = hub.repositories.get(f"{repo}/{file}")
            if data is None:
                return self._refuse(404, "EntryNotFound", "Entry not found")
            if file.endswith((".json", ".md")):
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                return self.content(data, {"X-Repo-Commit": hub.commit, "ETag": f'"{blob}"'})
            hub.files["/large/" + file] = data
            digest = hashlib.sha256(data).hexdigest()
            where = {"Location": f"{hub.other_url}/large/{file}", "X-Repo-Commit": hub.commit, "Content-Length": "0"}
            return self.head(302, where | {"X-Linked-Etag": f'"{digest}"'})

        def do_POST(self) -> None:
            self.asked_to_write(self.read_body())

        def do_PUT(self) -> None:
            data = self.read_body()
            self.server.stored[self.path.rpartition("/")[2]] = data
            self.head(200, {"Content-Length": "0"})

        def read_body(self) -> bytes:
            """Read what was sent, in chunks or in one piece."""
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def asked_to_write(self, body: bytes) -> None:
            hub, path = self.server, self.path.partition("?")[0]
            if path == "/api/validate-yaml":
                return self.json({"errors": [], "warnings": []})
            if self.headers.get("Authorization") != f"Bearer {hub.writer}":
                return self._refuse(403, "", "you must use a write token to push")
            if path == "/api/repos/create":
                made = json.loads(body)
                hub.created.append(made)
                return self.json({"url": f"{hub.url}/{made['organization']}/{made['name']}"})
            if path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**each, "actions": {"upload": {"href": f"{hub.other_url}/store/{each['oid']}"}}}
                    for each in json.loads(body)["objects"]
                ]
                return self.json({"transfer": "basic", "objects": objects})
            asked = re.fullmatch(r"/api/models/(.+)/(preupload|commit)/main", path)
            if asked is None:
                return self.send_error(404)
            if asked[2] == "preupload":
                mode = {False: "regular", True: "lfs"}
                files = [
                    {"path": each["path"], "uploadMode": mode[each["path"].endswith("tensors")], "shouldIgnore": False}
                    for each in json.loads(body)["files"]
                ]
                return self.json({"files": files})
            rows = [json.loads(line) for line in body.splitlines()]
            hub.commits.append(rows)
            for row in rows:
                value = row["value"]
                if row["key"] == "file":
                    hub.repositories[f"{asked[1]}/{value['path']}"] = base64.b64decode(value["content"])
                elif row["key"] == "lfsFile":
                    hub.repositories[f"{asked[1]}/{value['path']}"] = hub.stored[value["oid"]]
            return self.json({"commitOid": hub.commit, "commitUrl": f"{hub.url}/{asked[1]}/commit/{hub.commit}"})

        def json(self, answer: object) -> None:
            """Send an answer that is JSON."""
            data = json.dumps(answer).encode()
            self.head(200, {"Content-Length": str(len(data)), "Content-Type": "application/json"})
            self.wfile.write(data)

        def _refuse(self, status: int, code: str, message: str) -> None:
            self.head(status, {"X-Error-Code": code, "X-Error-Message": message, "Content-Length": "0"})
