"""`headrace board`: a live page, on this machine."""

import secrets

from headrace.cli.runs import add_place, refuse_missing
from headrace.config.command_line import Parser
from headrace.core.errors import ConfigError

_BOARD = (
    "Serve a page of the runs in a directory: a list to sort, filter and compare, and each run's report, updated while "
    "it trains. Nothing is changed. Only this machine can ask, unless --host is given; then a token is needed."
)


def board(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace board", description=_BOARD)
    add_place(parser)
    parser.add_argument("--port", type=int, default=8800, help="port; 0 takes a free one [8800]")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on [127.0.0.1]")
    parser.add_argument(
        "--token", metavar="TEXT", help="token that every request must carry [generated if --host is given]"
    )
    args = parser.parse_intermixed_args(argv)
    refuse_missing(args.place)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"The port is {args.port}.", rule="Ports are 0 to 65535.")
    if args.token == "":
        raise ConfigError("The token is empty.", remedy="Leave --token out: one is generated where it is needed.")
    from headrace.report.board_server import LOCAL, Access, make_server

    is_local = args.host in LOCAL
    token = args.token or ("" if is_local else secrets.token_urlsafe(18))
    try:
        server = make_server(args.place, (args.host, args.port), Access(hosts=LOCAL if is_local else None, token=token))
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {args.host}, port {args.port}: {error.strerror}.", remedy="Try --port 0: any free port."
        ) from error
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"http://{host}:{server.server_address[1]}/{f'?token={token}' if token else ''}", flush=True)
    print("Press Ctrl-C to stop.", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
