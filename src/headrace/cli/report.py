"""`headrace report RUN...`: the report of a run as one HTML file, or of several runs side by side."""

import shlex
import string
from pathlib import Path

from headrace.cli.options import add_platform_argument
from headrace.config.arguments import Parser
from headrace.core.errors import CheckpointError, ConfigError

DESCRIPTION = (
    "Write the report of a run as one HTML file: curves, where the time went, confusion matrix, plan and schedule, "
    "options. Of several runs: curves together, options that differ, results. The file needs nothing else."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace report", description=DESCRIPTION)
    parser.add_argument("paths", metavar="RUN_DIR", nargs="+", type=Path, help="a run, or several to compare")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="file to write [RUN_DIR/report.html, or comparison.html]"
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="predict the validation images with the best weights first: mistakes, calibration, thresholds",
    )
    add_platform_argument(parser, "kind of device for --images [the run's]")
    args = parser.parse_args(argv)
    if len(args.paths) > len(string.ascii_uppercase):
        raise ConfigError(f"The number of runs is {len(args.paths)}.", rule="At most twenty-six can be compared.")
    if args.platform and not args.images:
        raise ConfigError("--platform is given without --images.", rule="Only the prediction of images needs a device.")
    from headrace.report.comparison import read_compared
    from headrace.report.run_report import write_comparison, write_run_report

    runs = read_compared(args.paths)
    if args.images:
        from headrace.report.run_files import read_mapping
        from headrace.run.image_results import write_image_results
        from headrace.telemetry.trackers import write_mistakes

        for run in runs:
            given = {"platform": args.platform} if args.platform else {}
            file = write_image_results(run.path, given)
            count = write_mistakes(run.path, read_mapping(file))
            more = f"; TensorBoard has {count} mistakes" if count else ""
            print(f"images: {shlex.quote(str(file))}{more}")
    try:
        if len(runs) == 1:
            file = write_run_report(runs[0].path, args.output)
        else:
            file = args.output or Path("comparison.html")
            write_comparison(runs, file)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {error.filename or args.output}: {error.strerror}.", remedy="Name another file with -o FILE."
        ) from error
    print(f"written: {shlex.quote(str(file))}")
    return 0
