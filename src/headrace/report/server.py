"""A small server of pages on this machine: who may ask, what is refused, and the headers of every answer.

Requests must name this host (a page elsewhere could otherwise read the answers under a name of its own) and, where one
is set, know the token. What changes something is never a GET, and must come from a page of this server.
"""

import hmac
import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from headrace.report.markup import element, page, page_policy, section

LOCAL = ("127.0.0.1", "localhost", "::1")
MOST_BYTES = 64 << 20  # of what a page sends


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask: requests that name one of the hosts (any where None), and that know the token if there is one."""

    hosts: tuple[str, ...] | None = LOCAL
    token: str = ""


@dataclass(frozen=True)
class Answer:
    body: bytes
    kind: str = "text/html; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


Query = Mapping[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class Routes:
    """What is answered, by path: to GET, and to POST with what was sent. None is not found."""

    get: Mapping[str, Callable[[Query], Answer | None]]
    post: Mapping[str, Callable[[Query, bytes], Answer | None]] = field(default_factory=dict)


def make_pages_server(routes: Routes, address: tuple[str, int], access: Access) -> ThreadingHTTPServer:
    """Return a server of the routes; port 0 takes a free one."""

    class Handler(_Handler):
        served, allowed = routes, access

    class Server(ThreadingHTTPServer):
        # A page that keeps its connection open must not keep the program from ending.
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET

    return Server(address, Handler)


def json_answer(value: object, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return Answer(json.dumps(value, allow_nan=False).encode(), "application/json", status)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET, HEAD and, where there are routes for it, POST; everything else is refused by the base class."""

    served: Routes
    allowed: Access
    server_version, sys_version = "headrace", ""
    timeout = 30  # seconds, after which a connection that sends nothing is closed, and its thread ends

    def do_GET(self) -> None:
        """Answer a request."""
        self._send(self._answer())

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self._send(self._answer(), body=False)

    def do_POST(self) -> None:
        """Answer a request that sends something."""
        self._send(self._answer(sends=True))

    def _answer(self, *, sends: bool = False) -> Answer:
        # A page elsewhere could have a name of its own lead to this address, and read the answers as its own.
        if self.allowed.hosts is not None and _host(self.headers.get("Host", "")) not in self.allowed.hosts:
            return _refused(HTTPStatus.FORBIDDEN)
        try:
            address = urlsplit(self.path)  # which may be one of IPv6 without its other bracket
            query = parse_qs(address.query, max_num_fields=100)
        except ValueError:
            return _refused(HTTPStatus.BAD_REQUEST)
        given = query.get("token", [""])[0]
        if self.allowed.token and not hmac.compare_digest(given.encode(), self.allowed.token.encode()):
            return _refused(HTTPStatus.FORBIDDEN)
        if sends:
            return self._sent(address.path, query)
        make = self.served.get.get(address.path)
        found = make(query) if make else None
        return found or _refused(HTTPStatus.NOT_FOUND)

    def _sent(self, path: str, query: Query) -> Answer:
        """Answer a POST; whatever is refused unread ends the connection."""
        self.close_connection = True
        take = self.served.post.get(path)
        if take is None:
            return _refused(HTTPStatus.METHOD_NOT_ALLOWED if not self.served.post else HTTPStatus.NOT_FOUND)
        # A form of a page elsewhere can send to this address, too; its browser says where it comes from.
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
            return _refused(HTTPStatus.FORBIDDEN)
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,12}", length):
            return _refused(HTTPStatus.LENGTH_REQUIRED)
        if int(length) > MOST_BYTES:
            return _refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        try:
            body = self.rfile.read(int(length))
        except OSError:  # it sends nothing any more
            return _refused(HTTPStatus.REQUEST_TIMEOUT)
        if len(body) < int(length):
            return _refused(HTTPStatus.BAD_REQUEST)
        return take(query, body) or _refused(HTTPStatus.NOT_FOUND)

    def _send(self, answer: Answer, *, body: bool = True) -> None:
        self.send_response(answer.status)
        headers = {
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.body)),
            "Content-Security-Policy": f"{page_policy()}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",  # an address may hold the token
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            try:
                self.wfile.write(answer.body)
            except OSError:  # the browser has gone
                self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a page asks every two seconds."""


def _host(text: str) -> str:
    """Return the host of `host`, `host:port` or `[address]:port`; "" for anything else."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]+))(?::[0-9]{1,5})?", text)
    return (found[1] or found[2]) if found else ""


def _refused(status: HTTPStatus) -> Answer:
    text = section("refused", status.phrase, element("p", status.description))
    return Answer(page(status.phrase, [text], {}).encode(), status=status)
