"""`headrace explain RUN_DIR|CHECKPOINT IMAGE`: where in an image a network found its class, as a PNG."""

import io
import shlex
from pathlib import Path

from headrace.cli.options import add_model_arguments, model_and_weights
from headrace.config.arguments import Parser

DESCRIPTION = (
    "Explain a prediction with Grad-CAM: write the image as the network gets it, and beside it the places that speak "
    "for the class, in the last blocks of the network."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace explain", description=DESCRIPTION)
    parser.add_argument("path", nargs="?", metavar="RUN_DIR|CHECKPOINT", help="a run (its best weights) or checkpoint")
    parser.add_argument("image", metavar="IMAGE", type=Path, help="an image file")
    parser.add_argument("--class", dest="class_name", metavar="NAME", help="the class to explain [the one predicted]")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="PNG file to write [IMAGE_explained.png here]"
    )
    add_model_arguments(parser)
    args = parser.parse_args(argv)
    name, which = model_and_weights(args.path, args.weights, args.use)
    from headrace.core.errors import CheckpointError
    from headrace.core.files import write_atomic
    from headrace.engine.devices import start_devices
    from headrace.run.named_model import find_model
    from headrace.run.prediction import draw_explanation, explain

    model = find_model(name, which)
    start_devices(args.platform, 1)
    found = explain(model, args.image, args.class_name)
    file, out = args.output or Path(f"{args.image.stem}_explained.png"), io.BytesIO()
    draw_explanation(found).save(out, "PNG")
    try:
        write_atomic(file, out.getvalue())
    except OSError as error:
        raise CheckpointError(f"Cannot write {file}: {error.strerror}.", remedy="Name another with -o FILE.") from error
    print(", ".join(f"{name} {100 * share:.2f} %" for name, share in found.best))
    print(f"explained: {found.name}; left the image, then blocks {', '.join(found.maps)}")
    print(f"written: {shlex.quote(str(file))}")
    return 0
