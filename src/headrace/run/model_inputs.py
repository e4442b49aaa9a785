"""The options and the network that a `Model` is made with: full names, refusals, what is known before any data."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.config.field import find_option, option_names
from headrace.config.load import NAMED_OF_DATA, Resolved, network_options, resolve_code
from headrace.config.networks import find_variant
from headrace.config.schema import Config, Data, all_options
from headrace.config.translations import known_options
from headrace.core.errors import ConfigError, did_you_mean
from headrace.data.dataset import DataInfo
from headrace.data.sets.arrays import ImageSpec, check_class_names
from headrace.data.sets.catalog import usual_statistics
from headrace.model.custom import custom_network
from headrace.model.custom_block import CustomBlock
from headrace.model.network import Network
from headrace.rows.tasks import CLASSIFICATION

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


def need_rate(resolved: Resolved) -> None:
    """Refuse an optimizer that code gives without a learning rate: nobody knows which one it needs."""
    if not any(resolved.origin(name).is_given for name in ("learning_rate", "lr_schedule_params")):
        raise ConfigError(
            "The optimizer is given by code, and no learning rate is.",
            rule="A rate can be chosen only for the optimizers that have a name.",
            remedy="Give learning_rate, too.",
        )


def without_data(options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options without those that name a dataset or shape it."""
    return {name: value for name, value in options.items() if name not in NAMED_OF_ONE_SET}


def refuse_named_data(options: Mapping[str, object], *, shapes: bool = True) -> None:
    """Refuse options that name a dataset where code gives one, and those that shape its images if it has `shapes`."""
    for name in options:
        if name in NAMED_OF_DATA and (shapes or name not in ("image_size", "num_channels")):
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
        task=info.task,
        scale=info.scale,
    )


def normalised_spec(spec: ImageSpec, data: Data) -> ImageSpec:
    """Return a description of images with ImageNet's normalization, where no training has decided it."""
    mean, std = usual_statistics(spec.image_hwc[2])
    wanted = data.normalization
    normalization = "per-channel" if wanted == "auto" else wanted
    return replace(spec, image_dtype="uint8", normalization=normalization, channel_mean=mean, channel_std=std)


def planned_spec(spec: ImageSpec, network: Network, data: Data) -> ImageSpec:
    """Return what is known of the images, with placeholders for what only the data can say."""
    # Images are 8 bits nearly always. Without normalization they are more likely numbers that have been prepared.
    dtype = spec.image_dtype or ("float32" if data.normalization == "none" else "uint8")
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
    task = config.data.task
    least = 2 if task == CLASSIFICATION.name else 1
    if num_classes is not None and (not isinstance(num_classes, int) or num_classes < least):
        raise ConfigError(f"num_classes is {num_classes!r}.", rule=f"It is a whole number of {least} or more.")
    classes = num_classes or (len(names) if names is not None else 0)
    size = config.data.image_size or find_variant(config.model.model_name).image_size
    height, width, channels = shape or (size, size, config.data.num_channels)
    return ImageSpec(
        image_hwc=(height, width, channels),
        num_classes=classes,
        class_names=check_class_names(names, classes) if names is not None else (),
        task=task,
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
