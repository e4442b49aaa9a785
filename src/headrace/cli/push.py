"""`headrace push RUN_DIR OWNER/NAME`: a trained network on the Hugging Face hub, with a model card."""

import argparse
from pathlib import Path

from headrace.cli.options import WHICH, add_platform_argument, model_and_weights
from headrace.config.command_line import Parser
from headrace.core.local_path import local_path
from headrace.core.units import format_bytes

DESCRIPTION = (
    "Publish a run's best weights on the Hugging Face hub: the weights (checked before they are sent; under timm's "
    "names where timm has the network), config.json with the input and the classes, and a model card made from the "
    "run's records: accuracy with its interval, data, options. `--weights hf:OWNER/NAME` loads them again. "
    "Paths and names of this machine are not sent."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace push", description=DESCRIPTION)
    _add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    from headrace.core.hub import HubRepo

    name, which = model_and_weights(args.path, "", args.use)
    repo = HubRepo.parse(args.repository.removeprefix("hf:"))
    from headrace.run.push import PushOptions, push, run_of, write_repository
    from headrace.weights.hub_upload import refuse_unable

    if args.out is None:
        refuse_unable()
    from headrace.engine.devices import start_devices
    from headrace.run.read_weights import find_weights

    options = PushOptions(repo=repo, license=args.license, private=args.private, message=args.message)
    weights = find_weights(name, which)
    start_devices(args.platform, 1)
    run = run_of(name, weights)
    if args.out is not None:
        written, pushed = write_repository(weights, run, options, args.out), None
    else:
        written, pushed = push(weights, run, options)
    print(f"{weights.network.name}, {weights.label} weights of {Path(weights.origin).name} (epoch {weights.epoch:g})")
    print(written.remark)
    if pushed is None:
        files = [(file, (written.folder / file).stat().st_size) for file in written.names]
        sizes = ", ".join(f"{file} ({format_bytes(size)})" for file, size in files)
        print(f"written: {written.folder}: {sizes}")
        return 0
    for file in pushed.kept:
        print(f"left as it is there: {file}, which was edited by hand")
    print(f"pushed: {pushed.url}, commit {pushed.commit[:12]}")
    print(f"use: headrace predict --weights hf:{repo} IMAGES")
    if written.architecture:
        print(f'     timm.create_model("hf_hub:{repo}", pretrained=True)')
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN_DIR|CHECKPOINT", help="a run (its best weights) or checkpoint")
    parser.add_argument("repository", metavar="OWNER/NAME", help="the repository; @BRANCH for another one than main")
    parser.add_argument(
        "-o", "--out", type=local_path, metavar="FOLDER", help="write the files into this folder and send nothing"
    )
    parser.add_argument(
        "--private", action="store_true", default=None, help="make the repository private, where it is not there yet"
    )
    parser.add_argument("--license", default="", metavar="NAME", help="its licence as the hub names it: apache-2.0")
    parser.add_argument(
        "-m",
        "--message",
        default="Push a network trained with Headrace",
        metavar="TEXT",
        help="of the commit [Push a network trained with Headrace]",
    )
    parser.add_argument("--use", choices=WHICH, default="auto", help="raw or averaged weights of a run [the better]")
    add_platform_argument(parser, "kind of device to check the weights on [auto]", default="auto")
