"""`headrace board`: a live page, on this machine."""

import argparse
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.cli.runs import add_place, refuse_missing
from headrace.config.command_line import Parser
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

    from headrace.report.server import Access

_BOARD = (
    "Serve a page of the runs in a directory: a list to sort, filter, group and compare, and each run's report, "
    "updated while it trains. Nothing is changed unless --edit is given: then runs get notes and tags there, and are "
    "renamed and deleted. Only this machine can ask, unless --host is given; with --host and --edit a token is needed."
)


def board(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace board", description=_BOARD)
    add_place(parser)
    add_server_arguments(parser, port=8800)
    parser.add_argument("--edit", action="store_true", help="allow notes, tags, renaming and deleting; makes a token")
    args = parser.parse_intermixed_args(argv)
    refuse_missing(args.place)
    access = server_access(args, needs_token=args.edit)
    from headrace.report.board_server import make_server

    return serve(args, access, lambda address: make_server(args.place, address, access, edits=args.edit))


def add_server_arguments(parser: argparse.ArgumentParser, port: int) -> None:
    """Add where a page is served, and for whom."""
    parser.add_argument("--port", type=int, default=port, help=f"port; 0 takes a free one [{port}]")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on [127.0.0.1]")
    parser.add_argument(
        "--token", metavar="TEXT", help="token that every request must carry [generated if --host is given]"
    )


def server_access(args: argparse.Namespace, *, needs_token: bool = False) -> "Access":
    """Return who may ask; what cannot be served is refused."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"The port is {args.port}.", rule="Ports are 0 to 65535.")
    if args.token == "":
        raise ConfigError("The token is empty.", remedy="Leave --token out: one is generated where it is needed.")
    from headrace.report.server import LOCAL, Access

    is_local = args.host in LOCAL
    token = args.token or (secrets.token_urlsafe(18) if needs_token or not is_local else "")
    return Access(hosts=LOCAL if is_local else None, token=token)


def serve(args: argparse.Namespace, access: "Access", make: Callable[[tuple[str, int]], "ThreadingHTTPServer"]) -> int:
    """Print the address of a page, and serve it until Ctrl-C; return the exit code."""
    try:
        server = make((args.host, args.port))
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {args.host}, port {args.port}: {error.strerror}.", remedy="Try --port 0: any free port."
        ) from error
    host = f"[{args.host}]" if ":" in args.host else args.host
    query = f"?token={access.token}" if access.token else ""
    print(f"http://{host}:{server.server_address[1]}/{query}", flush=True)
    print("Press Ctrl-C to stop.", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
