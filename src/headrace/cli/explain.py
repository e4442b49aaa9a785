"""`headrace explain RUN_DIR|CHECKPOINT IMAGE`: where in an image a network found its class, as a PNG."""

import io
import shlex
from pathlib import Path

from headrace.cli.options import add_model_arguments, add_path_argument, check_output, model_and_weights, writing
from headrace.config.command_line import Parser
from headrace.core.files import write_atomic
from headrace.core.local_path import local_path

_EXPLAIN = (
    "Explain a prediction with Grad-CAM: write the image as the network gets it, and beside it where the last blocks "
    "of the network found evidence for the class."
)


def explain(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace explain", description=_EXPLAIN)
    add_path_argument(parser)
    parser.add_argument("image", metavar="IMAGE", type=local_path, help="an image file")
    parser.add_argument("--class", dest="class_name", metavar="NAME", help="the class to explain [the one predicted]")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=local_path, help="PNG file to write [IMAGE_explained.png here]"
    )
    add_model_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    name, which = model_and_weights(args.path, args.weights, args.use)
    file = args.output or Path(f"{args.image.stem}_explained.png")
    check_output(file, "-o")
    from headrace.engine.devices import start_devices
    from headrace.run.grad_cam import draw_explanation
    from headrace.run.grad_cam import explain as explain_image
    from headrace.run.read_weights import find_weights

    weights = find_weights(name, which)
    start_devices(args.platform, 1)
    found = explain_image(weights, args.image, args.class_name)
    out = io.BytesIO()
    draw_explanation(found).save(out, "PNG")
    with writing(file, "-o"):
        write_atomic(file, out.getvalue())
    print(", ".join(f"{name} {found.task.text(share)}" for name, share in found.best))
    print(f"explained: {found.name}; left the image, then blocks {', '.join(found.maps)}")
    print(f"written: {shlex.quote(str(file))}")
    return 0
