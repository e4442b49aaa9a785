"""`headrace demo RUN_DIR|CHECKPOINT`: a page to drop a photograph into, on this machine."""

from headrace.cli.board import add_server_arguments, serve, server_access
from headrace.cli.options import add_model_arguments, add_path_argument, model_and_weights
from headrace.config.command_line import Parser

_DEMO = (
    "Serve a page to drop a photograph into: the classes that the network sees in it, and where it looked (Grad-CAM). "
    "Images are kept nowhere. Only this machine can ask, unless --host is given; then a token is needed."
)


def demo(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace demo", description=_DEMO)
    add_path_argument(parser)
    add_server_arguments(parser, port=8801)
    add_model_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    name, which = model_and_weights(args.path, args.weights, args.use)
    access = server_access(args)
    from headrace.engine.devices import start_devices
    from headrace.run.demo import make_demo
    from headrace.run.read_weights import find_weights

    weights = find_weights(name, which)
    start_devices(args.platform, 1)
    title = f"{weights.network.name}: {name}"
    return serve(args, access, lambda address: make_demo(weights, title, address, access))
