"""`headrace data`: download, verify or show a dataset, build TFRecords, pack images, measure the input path."""

import argparse
import sys
from pathlib import Path

from headrace.config.command_line import Parser
from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.local_path import local_text

ACTIONS = {
    "get": "download a dataset by name, check it and unpack it",
    "verify": "check all files of a dataset and print the number of images of each class and split",
    "report": "write a page: counts, sizes, images of each class, images nearly equal, doubtful labels",
    "build": "write ImageNet's TFRecords from class folders",
    "pack": "pack images, made smaller, into one file that is read about twice as fast",
    "bench": "measure the host's input path: images per second of each part and number of threads",
}


def main(argv: list[str]) -> int:
    """Run the command; return 0, or 1 when something is wrong with the dataset."""
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:8}{text}" for name, text in ACTIONS.items()]
        print("\n".join(["usage: headrace data ACTION [--dataset NAME] [--dataset-path PATH] ...", "", *lines]))
        print("\n`headrace data ACTION --help` describes it.")
        return 0
    action, *rest = argv
    if action not in ACTIONS:
        raise ConfigError(f"There is no `headrace data {action}`.", remedy=did_you_mean(action, ACTIONS))
    return {"get": _get, "verify": _verify, "report": _report, "build": _build, "pack": _pack, "bench": _bench}[action](
        rest
    )


def _get(argv: list[str]) -> int:
    from headrace.data.sets.catalog import KNOWN_SETS
    from headrace.data.sets.get import MIRROR, PUBLISHED, datasets_directory, get_set

    parser = Parser(prog="headrace data get", description="Download datasets by name.")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"one or more of {', '.join(PUBLISHED)}")
    parser.add_argument(
        "--dataset-path", type=local_text, metavar="DIR", help=f"directory for them [{datasets_directory()}]"
    )
    parser.add_argument("--mirror", default="", metavar="URL", help=f"server with URL/NAME/FILE [${MIRROR}]")
    args = parser.parse_intermixed_args(argv)
    from headrace.core.download import terminal_progress

    for name in args.names:
        place = Path(args.dataset_path).expanduser() if args.dataset_path else None
        folder = get_set(name, place, args.mirror, terminal_progress())
        if name in KNOWN_SETS:
            from headrace.config.load import config_from
            from headrace.data.verify import refuse_problems

            # At once: a damaged download is better found now than by the first run.
            refuse_problems(config_from({"dataset": name, "dataset_path": str(folder)}).data)
        print(f"{name} is in {folder}")
        print(f"train on it: headrace train --dataset {name}{f' --dataset-path {folder}' if place else ''}")
    return 0


def _verify(argv: list[str]) -> int:
    from headrace.cli.options import parse

    resolved, _ = parse(argv, "headrace data verify")
    from headrace.data.verify import format_report, verify

    report = verify(resolved.config.data)
    print(format_report(report))
    return 1 if report.problems or report.duplicates else 0


def _report(argv: list[str]) -> int:
    from headrace.cli.options import check_output, parse, writing
    from headrace.core.files import write_atomic
    from headrace.core.local_path import local_path

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "-o",
            "--output",
            type=local_path,
            default=Path("data.html"),
            metavar="FILE",
            help="file to write [data.html]",
        )
        parser.add_argument(
            "--run",
            default="",
            metavar="RUN_DIR",
            help="a run, or a sweep of folds, whose networks judge the labels of images they were not trained on",
        )

    resolved, args = parse(argv, "headrace data report", extra)
    check_output(args.output, "-o")
    from headrace.data.survey import near_duplicates, survey
    from headrace.report.data_report import data_page

    found = survey(resolved.config.data)
    doubts = None
    if args.run:
        from headrace.engine.devices import start_devices
        from headrace.run.doubtful_labels import doubtful_labels

        start_devices(resolved.config.run.platform, 1)
        doubts = doubtful_labels(found, args.run)
        print(f"doubtful labels: {len(doubts.found):,} of {doubts.judged:,} images")
    pairs = near_duplicates(found.found)
    print(
        f"images: {len(found.found):,}, {len(found.images.class_names):,} classes; nearly equal: {len(pairs):,} pairs"
    )
    with writing(args.output, "-o"):
        write_atomic(args.output, data_page(found, pairs, doubts).encode())
    print(f"written: {args.output}")
    return 0


def _build(argv: list[str]) -> int:
    from headrace.cli.options import parse

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--output-dir", type=local_text, required=True, metavar="DIR", help="folder for the shards")
        parser.add_argument("--train-shards", type=int, default=1024, metavar="N", help="shards of training [1024]")
        parser.add_argument("--validation-shards", type=int, default=128, metavar="N", help="of validation [128]")
        parser.add_argument(
            "--metadata", type=local_text, metavar="FILE", help="names of classes: folder TAB description"
        )
        parser.add_argument(
            "--boxes", type=local_text, metavar="FILE", help="boxes of objects: file,xmin,ymin,xmax,ymax from 0 to 1"
        )

    resolved, args = parse(argv, "headrace data build", extra)
    from headrace.data.feeding.block_reader import num_threads_of
    from headrace.data.sets.build_tfrecords import BuildPlan, build, read_boxes, read_metadata
    from headrace.data.sets.formats.folder import read_folders

    data = resolved.config.data
    for name in (args.metadata, args.boxes):
        if name and not Path(name).is_file():
            raise ConfigError(f"There is no file {name}.")
    plan = BuildPlan(
        folders=read_folders(Path(data.dataset_path).expanduser(), data.validation_split),
        output=Path(args.output_dir),
        train_shards=args.train_shards,
        validation_shards=args.validation_shards,
        num_threads=num_threads_of(data),
        texts=read_metadata(Path(args.metadata)) if args.metadata else {},
        boxes=read_boxes(Path(args.boxes)) if args.boxes else {},
    )
    report = build(plan)
    counts = ", ".join(f"{count:,} {split}" for split, count in report.counts.items())
    print(f"wrote {counts} images of {len(plan.folders.class_names):,} classes to {plan.output}")
    print(f"{report.encoded_again:,} were encoded again as RGB JPEGs; {len(report.bad):,} could not be read")
    for line in report.bad:
        print(f"  {line}")
    return 1 if report.bad else 0


def _pack(argv: list[str]) -> int:
    from headrace.cli.options import check_output, parse

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--output", type=local_text, required=True, metavar="FILE", help="packed file to write, such as my.hrp"
        )
        parser.add_argument("--shorter-side", type=int, default=256, metavar="N", help="of packed images [256]")
        parser.add_argument("--quality", type=int, default=90, metavar="N", help="of their JPEGs, 1 to 100 [90]")

    resolved, args = parse(argv, "headrace data pack", extra)
    from headrace.config.section_data import IMAGE_DATASETS
    from headrace.core.units import format_bytes
    from headrace.data.dataset import resolved_set
    from headrace.data.feeding.block_reader import num_threads_of
    from headrace.data.sets.image_sets import open_image_set
    from headrace.data.sets.pack import write_pack
    from headrace.rows.tasks import CLASSIFICATION

    data, output = resolved_set(resolved.config.data), Path(args.output)
    if data.dataset not in IMAGE_DATASETS or data.synthetic_on:
        raise ConfigError(
            f"The dataset {data.dataset} has no image files to pack.",
            rule="Folders of images and files that hold encoded images can be packed.",
            remedy="Name them with --dataset-path.",
        )
    if args.shorter_side < 1 or not 1 <= args.quality <= 100:
        raise ConfigError(
            f"A shorter side of {args.shorter_side} with quality {args.quality}.", rule="At least 1; 1 to 100."
        )
    if output.exists():
        raise ConfigError(f"{output} exists.", remedy="Delete it first, or choose another --output.")
    check_output(output, "--output")
    if data.task != CLASSIFICATION.name:
        raise ConfigError(
            f"--task {data.task} with data pack.", rule="A packed file holds classes.", remedy="Leave --task out."
        )
    images = open_image_set(data, data.dataset)
    report = write_pack(
        output,
        images.class_names,
        (images.train, images.validation),
        (args.shorter_side, args.quality),
        num_threads_of(data),
    )
    print(
        f"packed {report.num_samples:,} images of {len(images.class_names):,} classes into {output}: "
        f"{format_bytes(report.num_bytes)}, from {format_bytes(report.before_bytes)}; "
        f"{len(report.bad):,} could not be read"
    )
    for line in report.bad:
        print(f"  {line}")
    return 1 if report.bad else 0


def _bench(argv: list[str]) -> int:
    from headrace.cli.options import parse
    from headrace.cli.tables import print_fitted

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="numbers of threads [1 and all]")
        parser.add_argument("--seconds", type=float, default=3.0, metavar="X", help="time of each measurement [3]")
        parser.add_argument(
            "--parts", nargs="+", choices=("read", "decode", "view", "block"), help="what to time [all]"
        )
        parser.add_argument("--json", action="store_true", help="print the line of JSON alone")

    resolved, args = parse(argv, "headrace data bench", extra)
    import json

    from headrace.data.decoding.jpeg import decoders
    from headrace.data.feeding.block_reader import num_threads_of
    from headrace.data.feeding.input_bench import PARTS, bench_input

    config = resolved.config
    threads = tuple(args.threads or sorted({1, num_threads_of(config.data)}))
    rates, bad = bench_input(config.data, config.run.seed, threads, args.seconds, tuple(args.parts or PARTS))
    rows = [rate.to_dict() for rate in rates]
    if not args.json:
        print(f"JPEGs are decoded by {decoders()}")
        print(f"{'part':8}{'threads':>8}{'images/s':>12}{'GB/s':>8}")
        for row in rows:
            rate, bandwidth = row["elements_per_second"], row["bandwidth"]
            print(f"{row['part']:8}{row['threads']:>8}{rate:>12,.0f}{bandwidth:>8.3f}")
    if bad:
        print_fitted(f"warning: {bad}", sys.stderr)
    print(json.dumps({"decoder": decoders(), "epochs": rows}))
    return 0
