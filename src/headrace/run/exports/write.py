"""Write a trained network in a format for elsewhere, and check the file before it gets its name."""

import importlib
import json
import os
from dataclasses import fields
from pathlib import Path

from headrace.core.errors import CheckpointError, ConfigError, did_you_mean
from headrace.core.files import sync_directory, write_synced
from headrace.rows.exports import DTYPES, EXPORTS, Export, find_export
from headrace.run.check_images import check_images
from headrace.run.exports.values import Exported, ExportOptions
from headrace.weights.weights import Weights


def export_model(weights: Weights, out: Path | None, options: ExportOptions) -> Exported:
    """Write the network in a format; `out` defaults to a file in the directory of the run, named after the network."""
    row = find_export(options.format)
    _refuse(weights, options, row)
    form = importlib.import_module(row.module)
    path = out or _default_directory(weights)
    if path.is_dir():
        path = path / f"{weights.network.name}{row.suffixes[0]}"
    if not path.parent.is_dir():
        raise ConfigError(f"There is no directory {path.parent}.", remedy="Make it, or choose another --out.")
    images = check_images(weights, options.check_images)
    made = form.make(weights, path, options)
    description = path.with_name(f"{path.name}.json")
    # Both or none: a file without the description of its input would be guessed at.
    temporary = [each.with_name(f".{each.name}.tmp-{os.getpid()}") for each in (path, description)]
    try:
        write_synced(temporary[0], made.data)
        # Before the file gets its name: what fails its check never replaces a file that worked.
        difference, checker = form.check(temporary[0], weights, options, images)
        along = weights.describe() | {"format": options.format, "dtype": options.dtype} | made.more
        along["check"] = {"images": images.what, "by": checker, "largest_logit_difference": difference}
        write_synced(temporary[1], (json.dumps(along, indent=1, ensure_ascii=False) + "\n").encode())
        for each, name in zip(temporary, (path, description), strict=True):
            each.replace(name)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {path}: {error.strerror}.", remedy="Name another place with --out."
        ) from error
    finally:
        for each in temporary:
            each.unlink(missing_ok=True)
    sync_directory(path.parent)
    result = f"checked {checker} on {images.what}: logits differ by at most {difference:.2g}"
    return Exported(path=path, description=description, remark="\n".join(filter(None, (made.remark, result))))


def _refuse(weights: Weights, options: ExportOptions, row: Export) -> None:
    """Refuse options that the format or the network cannot follow."""
    if options.dtype not in DTYPES:
        raise ConfigError(f"There is no type {options.dtype!r}.", remedy=did_you_mean(options.dtype, DTYPES))
    for option in fields(options):
        fitting = [each.name for each in EXPORTS.values() if option.name in each.takes]
        given = getattr(options, option.name) != option.default
        if given and fitting and row.name not in fitting:
            raise ConfigError(
                f"--{option.name.replace('_', '-')} has no meaning for --format {row.name}.",
                rule=f"It writes {row.says}.",
                remedy=f"Leave it out, or choose --format {' or '.join(fitting)}.",
            )
    row.refuse_missing()
    if not options.with_preprocessing:
        return
    height, width, _ = weights.network.input_hwc
    if not options.as_pixels:
        raise ConfigError(
            "--with-preprocessing takes pixels, --input float numbers that have been normalised.",
            remedy="Leave one of them out.",
        )
    if height != width:
        raise ConfigError(
            f"{weights.network.name} takes images of {height} x {width} pixels.",
            rule="--with-preprocessing cuts a square from the centre of an image.",
            remedy="Leave --with-preprocessing out.",
        )


def _default_directory(weights: Weights) -> Path:
    run = weights.path.parent.parent if weights.path else Path()
    return run if (run / "config.json").is_file() else Path()
