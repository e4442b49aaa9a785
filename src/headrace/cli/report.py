"""`headrace report`: the report of a run, or of several side by side."""

import shlex
import string
from pathlib import Path

from headrace.cli.options import add_platform_argument, check_output, writing
from headrace.config.command_line import Parser
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_path

_REPORT = (
    "Write the report of a run as one HTML file: curves, where the time went, confusion matrix, plan and schedule, "
    "options. Of several runs: curves together, options that differ, results. The file needs nothing else."
)


def report(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace report", description=_REPORT)
    parser.add_argument("paths", metavar="RUN_DIR", nargs="+", type=local_path, help="a run, or several to compare")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=local_path,
        help="file to write [RUN_DIR/report.html, or comparison.html]",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="predict the validation images with the best weights first: mistakes, calibration, thresholds",
    )
    add_platform_argument(parser, "kind of device for --images [the run's]")
    args = parser.parse_intermixed_args(argv)
    if len(args.paths) > len(string.ascii_uppercase):
        raise ConfigError(f"The number of runs is {len(args.paths)}.", rule="At most twenty-six can be compared.")
    check_output(args.output, "-o")
    if args.platform and not args.images:
        raise ConfigError("--platform is given without --images.", rule="Only the prediction of images needs a device.")
    from headrace.report.comparison import read_compared
    from headrace.report.run_report import COMPARISON_FILE, REPORT_FILE, write_comparison, write_run_report

    runs = read_compared(args.paths)
    if args.images:
        from headrace.report.run_files import read_mapping
        from headrace.run.image_results import write_image_results
        from headrace.telemetry.trackers.tensorboard import write_mistakes

        for run in runs:
            given = {"platform": args.platform} if args.platform else {}
            file = write_image_results(run.path, given)
            count = write_mistakes(run.path, read_mapping(file))
            more = f"; TensorBoard has {count} mistakes" if count else ""
            print(f"images: {shlex.quote(str(file))}{more}")
    file = args.output or (runs[0].path / REPORT_FILE if len(runs) == 1 else Path(COMPARISON_FILE))
    with writing(file, "-o"):
        if len(runs) == 1:
            write_run_report(runs[0].path, file)
        else:
            write_comparison(runs, file)
    print(f"written: {shlex.quote(str(file))}")
    return 0
