"""What a `Model` takes and shows: its options and network, what code may pass as data, reports and tables."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.field import find_option, option_names
from headrace.config.load import NAMED_OF_DATA, Resolved, network_options
from headrace.config.networks import find_variant
from headrace.config.schema import Config, Data, all_options
from headrace.config.section_data import DATASETS, FOLDER_SETS, IMAGE_DATASETS
from headrace.core.errors import ConfigError, DataError, did_you_mean
from headrace.core.local_path import local_path
from headrace.data.dataset import DataInfo, DataSet, describe_dataset, open_dataset, resolved_set
from headrace.data.decoding.image_source import ImageSource
from headrace.data.sets.arrays import ImageSpec, check_class_names
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.catalog import usual_statistics
from headrace.data.sets.folder import TRAIN_NAMES, list_classes, split_folder
from headrace.data.sets.held_out import hold_out
from headrace.data.sets.image_sets import evaluation_view
from headrace.data.sets.samples import FileSamples
from headrace.data.sets.source import ArraySource, Source
from headrace.model.cost import FLOPS_CONVENTION
from headrace.model.custom import custom_network
from headrace.model.custom_block import CustomBlock
from headrace.model.network import Network
from headrace.reference.entrance import known_options, resolve_code
from headrace.rows.metrics import OF_CLASSES, UNEVEN, class_ratio
from headrace.run.trained_model import refuse_other_classes


class Report(dict[str, Any]):
    """The result of an evaluation: num_samples, loss, top1, top5, classes, confusion_matrix and more by name."""

    def __repr__(self) -> str:
        beside = {row.name: self[row.name] for row in OF_CLASSES if self._is_uneven() and self[row.name] is not None}
        numbers = {"loss": self["loss"], "top1": self["top1"], **beside, **self.get("metrics", {})}
        means = ", ".join(f"{name}={value:.4f}" for name, value in numbers.items())
        return f"Report(num_samples={self['num_samples']}, {means})"

    def _is_uneven(self) -> bool:
        return (class_ratio([row["num_samples"] for row in self["classes"]]) or 1.0) >= UNEVEN


class Summary(str):
    """A text that an interactive session shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def network_summary(network: Network) -> Summary:
    """Return a table of the network's blocks: output shape, parameters and FLOPs of each."""
    total = network.total_cost()
    rows = [("block", "output", "parameters", "MFLOPs")]
    for (name, cost), shape in zip(network.costs().items(), network.shapes()[1:], strict=True):
        rows.append((name, shape_text(shape), f"{cost.params:,}", f"{cost.flops / 1e6:,.2f}"))
    rows.append(("total", "", f"{total.params:,}", f"{total.flops / 1e6:,.2f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{network.name}: {shape_text(network.input_hwc)} images, {network.num_classes:,} classes"]
    for name, shape, params, flops in rows:
        lines.append(f"{name:{widths[0]}}  {shape:>{widths[1]}}  {params:>{widths[2]}}  {flops:>{widths[3]}}".rstrip())
    return Summary("\n".join([*lines, f"FLOPs per image, forward: {FLOPS_CONVENTION}."]))


def shape_text(shape: Any) -> str:
    """Return a shape, or several, as text: 32x32x3."""
    if shape and isinstance(shape[0], tuple):
        return " + ".join(map(shape_text, shape))
    return "x".join(map(str, shape))


# The options and the network that a `Model` is made with: full names, refusals, what is known before any data.


_REFUSED = {
    "training": "fit trains, evaluate and predict do not.",
    "compile_only": "fit compiles and trains.",
    "weights": "The argument weights takes a name, a file, a checkpoint or a run.",
}
OF_ONE_RUN = frozenset({*_REFUSED, "run_name", "checkpoint_dir"})
NAMED_OF_ONE_SET = NAMED_OF_DATA | {"validation_split"}
# options of batch norm that reach only Headrace's layer
_NORM_LAYER_OPTIONS = ("stable_norm", "dbn_replica_group_size")


def check_custom_options(options: Mapping[str, object], network: Network) -> dict[str, Any]:
    """Return the options of a custom network with the momentum that its batch norms ask for."""
    given = dict(options)
    custom = [block for _, block in network.blocks if isinstance(block, CustomBlock)]
    if any(block.has_stats for block in custom):
        for name in _NORM_LAYER_OPTIONS:
            if given.get(name, default := all_options()[name].default) != default:
                raise ConfigError(
                    f"{name} is given, but a block of {network.name} has another batch norm.",
                    rule=f"{name} affects only Headrace's norm layer.",
                    remedy="Leave it out, or use that layer.",
                )
    momentums = {value for block in custom for value in block.functions.momentums if value < 1}
    if not momentums or "bn_momentum" in given:
        return given
    if len(momentums) > 1:
        values = ", ".join(f"{value:g}" for value in sorted(momentums))
        raise ConfigError(
            f"The batch norms of {network.name} have several momentums: {values}.",
            rule="Headrace updates all running statistics alike, once per step.",
            remedy="Give the one to use: bn_momentum=...",
        )
    return given | {"bn_momentum": momentums.pop()}


def full_names(options: Mapping[str, object], has_network: bool) -> dict[str, Any]:
    """Return the options under their full names; refuse those that code gives in another way."""
    known, named = option_names(known_options()), {}
    for written, value in options.items():
        spelled = find_option(written, known)
        if spelled.name in _REFUSED or (has_network and spelled.name in network_options()):
            rule = _REFUSED.get(spelled.name, "The network is given by code, so options cannot name or shape it.")
            raise ConfigError(f"The option {written} has no meaning here.", rule=rule)
        # A negated name as it is written: its full name would mean the opposite.
        named[written if spelled.negated else spelled.name] = value
    return named


def resolve_for_arrays(options: Mapping[str, object], recipe: str | None) -> Resolved:
    """Return the configuration of a run on arrays: like the digits, they define their size and their parts."""
    try:
        # Arrays have a fixed size and their own splits, as the digits have: the same options are refused, in other
        # words.
        return resolve_code({"dataset": "digits", **options}, recipe)
    except ConfigError as error:
        problem = error.problem.replace("the dataset digits, which defines it", "arrays, which define it")
        remedy = error.remedy if problem == error.problem else "Leave it out."
        raise ConfigError(problem, rule=error.rule, remedy=remedy) from None


def without_data(options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options without those that name a dataset or shape it."""
    return {name: value for name, value in options.items() if name not in NAMED_OF_ONE_SET}


def refuse_named_data(options: Mapping[str, object]) -> None:
    """Refuse options that name a dataset where code gives one."""
    for name in options:
        if name in NAMED_OF_DATA:
            raise ConfigError(
                f"The option {name} has no meaning here.",
                rule="The data is given by code, so options cannot name or shape it.",
            )


def spec_of(info: DataInfo) -> ImageSpec:
    """Return what images must be to be like those of a dataset."""
    return ImageSpec(
        image_hwc=info.image_hwc,
        num_classes=info.num_classes,
        class_names=info.class_names,
        image_dtype=info.image_dtype,
        normalization=info.normalization,
        channel_mean=info.channel_mean,
        channel_std=info.channel_std,
    )


def normalised_spec(spec: ImageSpec, data: Data) -> ImageSpec:
    """Return a description of images with ImageNet's normalization, where no training has decided it."""
    mean, std = usual_statistics(spec.image_hwc[2])
    wanted = data.wanted_normalization
    normalization = "per-channel" if wanted == "auto" else wanted
    return replace(spec, image_dtype="uint8", normalization=normalization, channel_mean=mean, channel_std=std)


def planned_spec(spec: ImageSpec, network: Network, data: Data) -> ImageSpec:
    """Return what is known of the images, with placeholders for what only the data can say."""
    # Images are 8 bits nearly always. Without normalization they are more likely numbers that have been prepared.
    dtype = spec.image_dtype or ("float32" if data.wanted_normalization == "none" else "uint8")
    channels = network.input_hwc[2]
    return replace(
        spec,
        image_hwc=network.input_hwc,
        num_classes=network.num_classes,
        image_dtype=dtype,
        channel_mean=spec.channel_mean or (0.5,) * channels,
        channel_std=spec.channel_std or (1.0,) * channels,
    )


def square_options(image_hwc: tuple[int, int, int]) -> dict[str, Any]:
    """Return the options by which image files get this shape; one that is not square is refused."""
    height, width, channels = image_hwc
    if height != width:
        raise ConfigError(
            f"The network takes images of {height}x{width}.",
            rule="Image files become squares.",
            remedy="Give arrays, or make the network for square images.",
        )
    return {"image_size": height, "num_channels": channels}


def unfitted_spec(config: Config, shape: Any, num_classes: int | None, names: Any) -> ImageSpec:
    """Return what is known of a shipped network's images before it has seen any; 0 is not known."""
    if shape is not None and (len(shape) != 3 or not all(isinstance(side, int) and side > 0 for side in shape)):
        raise ConfigError(f"input_shape is {shape!r}.", rule="It is (height, width, channels) of an image.")
    if num_classes is not None and (not isinstance(num_classes, int) or num_classes < 2):
        raise ConfigError(f"num_classes is {num_classes!r}.", rule="It is a whole number of 2 or more.")
    classes = num_classes or (len(names) if names is not None else 0)
    size = config.data.image_size or find_variant(config.model.model_name, config.model.model_size).image_size
    height, width, channels = shape or (size, size, config.data.num_channels)
    return ImageSpec(
        image_hwc=(height, width, channels),
        num_classes=classes,
        class_names=check_class_names(names, classes) if names is not None else (),
    )


def make_network(network: Any, input_shape: Any, num_classes: int | None, name: str) -> Network:
    """Return a network given by code, or made from its blocks."""
    if isinstance(network, Network):
        if input_shape is not None or num_classes is not None:
            raise ConfigError(
                "input_shape and num_classes are given beside a Network, which has both.", remedy="Leave them out."
            )
        return network
    if input_shape is None or num_classes is None:
        raise ConfigError(
            "A list of blocks needs input_shape and num_classes.",
            remedy="Give one image's shape and the number of classes: input_shape=(32, 32, 3), num_classes=10.",
        )
    return custom_network(network, input_shape=input_shape, num_classes=num_classes, name=name)


def refuse_weights(weights: str, possible: Sequence[str]) -> None:
    """Refuse weights that a model does not have."""
    if weights not in possible:
        raise ConfigError(
            f"weights is {weights!r}.",
            rule="raw are the weights themselves, ema their moving average (ema_decay), auto the better ones.",
            remedy=did_you_mean(str(weights), possible),
        )


def positive(value: object, name: str) -> int:
    """Return a count, and refuse anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}.", rule="It is a whole number of 1 or more.")
    return value


# What code may pass as data: the path of a dataset, the name of a known one, arrays, or an opened dataset.


NAMES = tuple(name for name in DATASETS if name not in IMAGE_DATASETS or name in FOLDER_SETS)


@dataclass(frozen=True, kw_only=True)
class GivenData:
    """Data as it was given, in one of three forms."""

    options: dict[str, Any] = field(default_factory=dict)  # that name a dataset
    arrays: tuple[Any, Any] | None = None
    dataset: DataSet | None = None


def given_data(data: object, labels: object = None) -> GivenData:
    """Return what was given; refuse what is neither a path, a name, a pair of arrays nor a dataset."""
    if labels is not None:
        return GivenData(arrays=(data, labels))
    if isinstance(data, DataSet):
        return GivenData(dataset=data)
    if isinstance(data, tuple | list) and len(data) == 2 and not isinstance(data[0], str | os.PathLike):
        return GivenData(arrays=(data[0], data[1]))
    if isinstance(data, str | os.PathLike):
        path = local_path(data).expanduser()
        # A folder of that name wins: whoever has a folder called digits means it.
        if isinstance(data, str) and data in NAMES and not path.exists():
            return GivenData(options={"dataset": data})
        if not path.exists():
            raise DataError(
                f"There is no {data}, neither a path nor a known dataset.",
                remedy=did_you_mean(str(data), NAMES) if os.sep not in str(data) else "Check the path.",
            )
        return GivenData(options={"dataset_path": str(path)})
    raise ConfigError(
        f"The data is a {type(data).__name__}.",
        rule="It is the path of a dataset, a pair (images, labels), or what headrace.open_dataset returns.",
    )


def array_spec(spec: ImageSpec, images: Any, labels: Any) -> ImageSpec:
    """Return what arrays must be for a shipped network that has not seen data: they decide it."""
    first = np.shape(images)[1:] if hasattr(images, "shape") else np.shape(images[0])
    if len(first) != 3:
        raise ConfigError(
            f"The images are {list(np.shape(images))}.",
            rule="Images are an array [N, H, W, C].",
            remedy="Add a dimension for the single channel: images[..., None]." if len(first) == 2 else "",
        )
    height, width, channels = map(int, first)
    if height in (1, 3) and width == channels > 4:
        raise ConfigError(
            f"The images are {list(np.shape(images))}, which looks like [N, C, H, W].",
            rule="Images are an array [N, H, W, C].",
            remedy="Put the channels last: images.transpose(0, 2, 3, 1).",
        )
    found = np.asarray(labels)
    # What is no class number is refused, in words, where the labels are read.
    is_number = found.ndim == 1 and found.size and found.dtype.kind in "iu"
    classes = spec.num_classes or (int(found.max()) + 1 if is_number else 0)
    return replace(spec, image_hwc=(height, width, channels), num_classes=classes)


def refuse_mismatch(network: Network | None, num_classes: int, info: DataInfo) -> None:
    """Refuse data whose images or classes are not those of the model, as far as they are known."""
    if network is not None and info.image_hwc != network.input_hwc:
        raise ConfigError(
            f"The network takes {shape_text(network.input_hwc)} images, "
            f"{info.place or info.name} has {shape_text(info.image_hwc)}."
        )
    if num_classes and info.num_classes != num_classes:
        raise ConfigError(
            f"The model has {num_classes} classes, {info.place or info.name} has {info.num_classes}.",
            remedy="Leave num_classes out, or check the folders of the classes.",
        )


def evaluation_set(config: Data, spec: ImageSpec, named: bool) -> DataSet:
    """Return the dataset whose validation part is to be evaluated, with the images prepared as `spec` says.

    Class folders without a training folder beside them are evaluated whole. `named`: the path was not given alone.
    """
    data = resolved_set(config) if not named else config
    path = Path(data.dataset_path).expanduser()
    if data.dataset != "folder" or split_folder(path, TRAIN_NAMES):
        refuse_other_classes(describe_dataset(data), spec.num_classes, spec.class_names)
        opened = open_dataset(data, 0)
        return replace(opened, info=_evaluated_info(opened.info, spec, len(opened.validation)))
    listing = list_classes(path, spec.class_names or None)
    samples = FileSamples(listing.root, list(listing.files), listing.labels)
    bad = BadSamples(str(path), len(samples), data.max_bad_samples)
    source = ImageSource(samples, evaluation_view(data, spec.image_hwc[0], spec.image_hwc[2]), "validation", bad)
    info = DataInfo(
        name="folder",
        image_hwc=spec.image_hwc,
        class_names=listing.class_names,
        num_train=0,
        num_validation=len(source),
        augmentation="none",
        normalization=spec.normalization,
        channel_mean=spec.channel_mean,
        channel_std=spec.channel_std,
        place=str(path),
    )
    refuse_other_classes(info, spec.num_classes, spec.class_names)
    return DataSet(info=info, train=no_images(spec), validation=source, bad=bad)


def no_images(spec: ImageSpec) -> Source:
    """Return an empty split."""
    return ArraySource(np.zeros((0, *spec.image_hwc), spec.image_dtype or "uint8"), np.zeros(0, np.int32))


def image_paths(images: Any) -> Sequence[Path] | None:
    """Return the paths of image files or folders, None where something else was given."""
    each = images if isinstance(images, list | tuple) else (images,)
    if not each or not all(isinstance(one, str | os.PathLike) for one in each):
        return None
    return [local_path(one).expanduser() for one in each]


def held_out(
    images: object, labels: object, fraction: object, class_names: tuple[str, ...]
) -> tuple[tuple[Any, Any], tuple[Any, Any], tuple[str, ...]]:
    """Return (images, labels) of training and of validation, a fraction of each class, and remarks on the split."""
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ConfigError(f"validation_split is {fraction!r}.", rule="It is a fraction between 0 and 1.")
    images, labels = np.asarray(images), np.asarray(labels)
    # By position, not by seed: every fit on these arrays validates on the same images.
    names = tuple(map(str, range(len(labels))))
    found = hold_out(names, labels, float(fraction), class_names, "The data", "validation_data")
    mask = found.mask
    return (images[~mask], labels[~mask]), (images[mask], labels[mask]), found.remarks


def validation_folder(data: object) -> dict[str, Any]:
    """Return the option for validation data that is given beside the path of training data."""
    if data is None:
        return {}
    if not isinstance(data, str | os.PathLike):
        raise ConfigError(
            f"validation_data is a {type(data).__name__}, beside the path of a dataset.",
            rule="Beside a path it is a path too: a folder with one folder for each class.",
            remedy="Give a folder, or both parts as (images, labels).",
        )
    return {"validation_path": str(local_path(data).expanduser())}


def image_pair(data: object) -> tuple[Any, Any]:
    """Return validation data as (images, labels)."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ConfigError("validation_data is not a pair.", rule="It is (images, labels).")
    return data[0], data[1]


def validation_option(options: Mapping[str, object], has_data: bool) -> dict[str, Any]:
    """Return the option that turns validation off where there is nothing to validate with."""
    if options.get("validation") is True and not has_data:
        raise ConfigError(
            "validation is on, but there is no validation_data.", remedy="Give fit some, or leave it out."
        )
    return {} if has_data else {"validation": False}


def _evaluated_info(info: DataInfo, spec: ImageSpec, num_validation: int) -> DataInfo:
    if info.image_hwc != spec.image_hwc:
        raise DataError(
            f"The images of {info.name} are {shape_text(info.image_hwc)}, "
            f"the network takes {shape_text(spec.image_hwc)}."
        )
    return replace(
        info,
        num_validation=num_validation,
        normalization=spec.normalization or info.normalization,
        channel_mean=spec.channel_mean or info.channel_mean,
        channel_std=spec.channel_std or info.channel_std,
    )
