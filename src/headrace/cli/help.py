"""`--help`, `--help-all` and `--help GROUP` of the commands: descriptions, examples, and options of the schema."""

import argparse
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from headrace.config.field import Option, option_names, options_of
from headrace.config.schema import usage_of
from headrace.core.errors import ConfigError, nearest
from headrace.reference.entrance import ALL_SECTIONS, ApplicationHelp, known_options
from headrace.rows.curves import CURVES
from headrace.rows.optimizers import OPTIMIZERS
from headrace.rows.values import BOOL, format_value

HELP, HELP_ALL = ("-h", "--help"), "--help-all"
REFERENCE_GROUP = "reference"
_VALIDATING = ("run", "data", "batch", "pipeline", "numerics", "validation", "checkpoint", "compiler")
_ONLY_TRAINING = frozenset(
    (
        "compile_only", "profile", "target_accuracy", "early_stopping", "training", "train_augmentation", "train_crop",
        "shuffle", "repeated_augmentation",
        "balanced_sampling", "num_epochs", "weight_updates_per_epoch", "logs_per_epoch", "ckpts_per_epoch",
        "validations_per_epoch", "call_seconds", "clean_dir", "keep_best", "max_ckpts_to_keep", "average_last_epochs",
        "average_decays", "loss_scaling", "loss_scaling_params", "nan_policy", "stochastic_rounding",
    )
)  # fmt: skip
_EVERYTHING = (
    "run", "data", "augment", "model", "weights", "batch", "pipeline", "numerics", "learning", "validation",
    "checkpoint", "logging", "compiler", REFERENCE_GROUP,
)  # fmt: skip


def some(names: Collection[str], shown: tuple[str, ...]) -> str:
    """Return a few of the names, and how many others there are."""
    assert set(shown) <= set(names)
    return f"{', '.join(shown)} or {len(names) - len(shown)} others"


def _all_but(*groups: str) -> tuple[str, ...]:
    return tuple(group for group in _EVERYTHING if group not in groups)


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The help of one command.

    `rows` has the options for the first screen by topic, as people type them, each with a phrase. `groups` names the
    groups of options that have an effect, less `without`; other options are accepted with a note where `strict`.
    """

    about: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    rows: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    groups: tuple[str, ...] = _EVERYTHING
    without: frozenset[str] = frozenset()
    strict: bool = False
    application: ApplicationHelp | None = None


_DEVICE = {
    "device": "auto, cpu, gpu or tpu",
    "num-replicas": "devices that share each batch",
    "precision": "32.32, 16.32 or 16.16: bits of computation and weights",
}
_BENCHED = {
    "dataset-path DIR": "folder of images, or of a known dataset",
    "dataset": "which dataset",
    "synthetic-data": "random images made on the device instead",
    "model NAME": "network; `headrace models` lists them",
    "image-size": "height and width of the images",
    "micro-batch-size": "images in one pass of one device",
}
_OF_DATA = {"data": {"dataset-path DIR": "folder of images, or of a known dataset", "dataset": "which dataset"}}
_READING = ("data", "augment", "model", "batch", "run", REFERENCE_GROUP)

SCREENS: Mapping[str, Screen] = {
    "train": Screen(
        about="Train a network. Without options: a small ResNet on handwritten digits.",
        examples=(
            ("headrace train", "the demo"),
            ("headrace train --dataset-path photos/ --epochs 20", "images, a folder per class"),
            ("headrace train --dataset-path photos/ --weights timm/resnet50.a1_in1k", ""),
            ("headrace train --config cifar10_resnet20 --seed 1", "a recipe, changed"),
        ),
        rows={
            "data": {
                "dataset-path DIR": "folder of images, or of a known dataset",
                "dataset": "which dataset; auto finds out from the files",
                "image-size": "height and width of the images",
            },
            "network": {
                "model NAME": "network; `headrace models` lists them",
                "weights NAME": "weights to start from: a name, a file, a run",
                "freeze NAME": "weights to keep: backbone, or regular expressions",
            },
            "training": {
                "epochs": "passes over the training images",
                "batch-size": "images per weight update",
                "lr": "peak learning rate",
                "lr-schedule": some(CURVES, ("cosine", "const", "flat_cosine")),
                "warmup-epochs": "epochs until the learning rate has its peak",
                "optimizer": some(OPTIMIZERS, ("sgd", "adamw", "muon")),
                "weight-decay": "decay of the weights, times the learning rate",
                "early-stopping": "end after N validations without a better one",
                "seed": "seed of all randomness",
            },
            "device": _DEVICE,
            "results": {
                "output DIR": "directory of the run [runs/NETWORK-DATASET-TIME]",
                "dry-run-steps": "stop after a few steps, to try things out",
                "tensorboard": "write event files for TensorBoard",
            },
        },
    ),
    "lr-find": Screen(
        about="Find a learning rate: a short run whose rate grows until the loss rises. Only the plot is written.",
        examples=(("headrace lr-find --dataset-path photos/", "for your images"),),
        rows={
            "data": {"dataset-path DIR": "folder of images, or of a known dataset"},
            "training": {"model NAME": "network", "batch-size": "images per weight update", "optimizer": "optimizer"},
            "device": _DEVICE,
        },
        groups=_all_but("validation", "checkpoint", "logging"),
        without=frozenset(("learning_rate", "lr_schedule", "lr_schedule_params", "lr_warmup_params", "warmup_epochs")),
        strict=True,
    ),
    "resume": Screen(
        about="Resume a run from its newest good checkpoint, bit for bit. Its options apply; these may change.",
        examples=(
            ("headrace resume runs/NAME", "train to the planned end"),
            ("headrace resume runs/NAME --epochs 40", "train longer than planned"),
        ),
        rows={
            "data": {"dataset-path DIR": "where the dataset is now"},
            "training": {
                "epochs": "passes over the training images, those done included",
                "lr": "peak learning rate of the steps to come",
            },
            "device": {
                "device": "auto, cpu, gpu or tpu",
                "num-replicas": "devices that share each batch; the batch stays",
            },
            "results": {
                "checkpoint-dir DIR": "where checkpoints are kept",
                "max-ckpts-to-keep": "newest checkpoints to keep",
                "tensorboard": "write event files for TensorBoard",
            },
        },
        groups=_all_but("model", "weights", REFERENCE_GROUP),
        without=frozenset(
            (
                "seed",
                "dataset",
                "decode_once",
                "balanced_sampling",
                "repeated_augmentation",
                "shuffle",
                "optimizer",
                "precision",
                "half_type",
                "ema_decay",
            )
        ),
    ),
    "validate": Screen(
        about="Validate all checkpoints of a run, or one of them. The options of the run apply; these may change.",
        examples=(
            ("headrace validate runs/NAME --best", "the best checkpoint"),
            ("headrace validate runs/NAME photos2/", "on other images of its classes"),
            ("headrace validate --weights timm/resnet50.a1_in1k --dataset-path imagenet/", ""),
        ),
        rows={
            "data": {
                "dataset-path DIR": "where the dataset is",
                "validation-path DIR": "the same as FOLDER",
            },
            "device": {
                "device": "auto, cpu, gpu or tpu",
                "validation-micro-batch-size": "images in one pass of one device",
                "validation-num-replicas": "devices that validate",
                "precision": "bits of the computation",
            },
        },
        groups=(*_VALIDATING, "weights"),
        without=_ONLY_TRAINING | {"freeze", "variable_filter", "layer_lr"},
        strict=True,
    ),
    "convert": Screen(
        about="Make a checkpoint of weights from elsewhere, for headrace predict, validate and export. The network "
        "comes with a known name; of a plain file, name it with --model.",
        examples=(
            ("headrace convert timm/resnet50.a1_in1k --out r50", "a known name"),
            ("headrace convert mine.pth --model resnet18 --out r18", "a plain file"),
        ),
        rows={
            "network": {
                "model NAME": "network of a plain file; `headrace models` lists them",
                "model-dialect": "whose padding and epsilon, where the names in the file leave it open",
                "init-ema": "the averaged weights in the file",
            },
            "input": {"image-size": "height and width of the images", "pixel-mean": "mean of each channel"},
        },
        groups=("model", "weights", "data"),
        without=frozenset(("weights",)),
        strict=True,
    ),
    "average": Screen(
        about="Average the newest checkpoints of a run in float64, and validate the result. It is a checkpoint under "
        "averages/ in the run. The options of the run apply to the validation; these may change.",
        examples=(("headrace average runs/NAME --last 5", "the mean of the last five"),),
        rows={"data": {"dataset-path DIR": "where the dataset is"}, "device": {"device": "auto, cpu, gpu or tpu"}},
        groups=_VALIDATING,
        without=_ONLY_TRAINING - {"average_decays"},
        strict=True,
    ),
    "plan": Screen(
        about="Print batches, steps, learning rate, memory and pipeline of a run, without a device.",
        examples=(
            ("headrace plan --config cifar10_resnet20", "what a recipe would do"),
            ("headrace plan --dataset-path photos/ --batch-size 64", "your images"),
        ),
        rows={
            "data": {"dataset-path DIR": "folder of images, or of a known dataset", "dataset": "which dataset"},
            "network": {"model NAME": "network; `headrace models` lists them", "image-size": "size of the images"},
            "training": {
                "epochs": "passes over the training images",
                "batch-size": "images per weight update",
                "lr": "peak learning rate",
                "gradient-accumulation-count": "passes whose gradients make one update",
            },
            "device": {
                "num-replicas": "devices that share each batch",
                "num-pipeline-stages": "stages that the network is cut into",
                "precision": "32.32, 16.32 or 16.16: bits of computation and weights",
            },
        },
        groups=_all_but("logging"),
        strict=True,
    ),
    "bench": Screen(
        about="Measure images per second: training (the real feed and device loop, without validation, records and "
        "checkpoints) or inference. With --synthetic-data only the device is measured.",
        examples=(
            ("headrace bench --config synthetic_resnet50", "training, the device alone"),
            ("headrace bench --dataset-path photos/", "training, with decoding"),
            ("headrace bench --list", "the named benchmarks"),
        ),
        rows={"what": _BENCHED, "device": _DEVICE},
        groups=_all_but("validation", "checkpoint", "logging", "weights"),
        strict=True,
    ),
    "profile": Screen(
        about="Record a few calls of training after two that warm up, and print where the time of the devices went: "
        "by kind of work and by block, the slowest kernels, use of arithmetic and memory bandwidth. Of a run that was "
        "profiled (train --profile), print that; of another run, profile its options.",
        examples=(
            ("headrace profile --config synthetic_resnet50", "a recipe, the device alone"),
            ("headrace profile runs/NAME", "a run"),
        ),
        rows={"what": _BENCHED, "device": _DEVICE},
        groups=_all_but("validation", "checkpoint", "logging", "weights"),
        strict=True,
    ),
    "configs show": Screen(
        about="Print a configuration as YAML, each value with its origin. All options of headrace train are accepted.",
        examples=(("headrace configs show cifar10_resnet20 --lr 0.2", "a recipe, changed"),),
    ),
    "data verify": Screen(
        about="Read every file of a dataset and report what is wrong with it.",
        examples=(("headrace data verify --dataset-path photos/", "your images"),),
        rows=_OF_DATA,
        groups=("data", REFERENCE_GROUP),
    ),
    "data build": Screen(
        about="Write class folders as TFRecords, as ImageNet's: a few large files that other programs read.",
        examples=(("headrace data build --dataset-path photos/ --output-dir records/", ""),),
        rows=_OF_DATA,
        groups=_READING,
    ),
    "data pack": Screen(
        about="Pack the images of a dataset, made smaller, into one file that is read two to three times as fast.",
        examples=(("headrace data pack --dataset-path photos/ --output photos.hrp", ""),),
        rows=_OF_DATA,
        groups=_READING,
    ),
    "data bench": Screen(
        about="Measure how many images per second the host reads, decodes and prepares, by the number of threads.",
        examples=(("headrace data bench --dataset-path photos/", ""),),
        rows=_OF_DATA,
        groups=_READING,
    ),
}
OTHER = Screen(rows=_OF_DATA, groups=_READING)


# `--help`, `--help-all` and `--help GROUP` of the commands that take options of the schema.


_NAME_COLUMN, _TEXT_COLUMN = 2, 34
_SHORT_COLUMN = 24  # of the first screen, so that a phrase fits beside its option in 80 columns


@dataclass(frozen=True, kw_only=True)
class HelpRequest:
    """What help is asked for: everything, one group or option, or (neither) the first screen."""

    everything: bool = False
    about: str = ""


def find_request(argv: Iterable[str]) -> HelpRequest | None:
    """Return the help that an argv asks for, None where it asks for none. What follows `--` is not looked at."""
    words = list(argv)
    words = words[: words.index("--")] if "--" in words else words
    if HELP_ALL in words or "--help_all" in words:
        return HelpRequest(everything=True)
    place = next((place for place, word in enumerate(words) if word.partition("=")[0] in HELP), None)
    if place is None:
        return None
    _, _, about = words[place].partition("=")
    follows = words[place + 1] if place + 1 < len(words) and not words[place + 1].startswith("-") else ""
    return HelpRequest(about=about or follows)


def without_help(argv: Iterable[str]) -> list[str]:
    """Return an argv without the words that ask for help."""
    return [word for word in argv if word.partition("=")[0].replace("_", "-") not in (*HELP, HELP_ALL)]


def screen_of(prog: str) -> Screen:
    """Return the help of a command, such as `headrace train`."""
    return SCREENS.get(prog.removeprefix("headrace "), OTHER)


def has_effect(screen: Screen, option: Option) -> bool:
    """Say whether a command makes use of an option; those of the reference stand for others."""
    if option.name in screen.without:
        return False
    return option.section == REFERENCE_GROUP or option.section in screen.groups


def help_text(
    prog: str, parser: argparse.ArgumentParser, request: HelpRequest, application: ApplicationHelp | None = None
) -> str:
    """Return the help that is asked for; `parser` has the arguments that only this command has.

    Of an application of the reference it says that one's defaults, and what names mean there.
    """
    width = max(60, min(shutil.get_terminal_size((100, 40)).columns, 120))
    screen = screen_of(prog)
    if application:
        screen = replace(screen, examples=(), without=screen.without | application.hidden, application=application)
    if request.about:
        return "\n".join(_about(prog, screen, request.about, width))
    words = [(action.metavar or action.dest, action.nargs) for action in parser._actions if not action.option_strings]
    usage = [f"usage: {prog}", *(f"[{word}]" if nargs == "?" else f"{word}" for word, nargs in words), "[options]"]
    if application:
        usage.insert(1, f"--application {application.name}")
    lines = [" ".join(usage), ""]
    about = application.about if application and prog == "headrace train" else screen.about
    lines += textwrap.wrap(about or parser.description or "", width)
    if screen.examples:
        lines += ["", "examples:", *_examples(screen.examples)]
    lines += _own_arguments(parser, width)
    if request.everything:
        return "\n".join([*lines, *_every_option(screen, width)])
    for topic, rows in screen.rows.items():
        named = {_short_usage(flag): phrase for flag, phrase in rows.items()}
        lines += ["", f"{topic}:", *_columns(named, width, _SHORT_COLUMN)]
    groups = ", ".join(group for group in screen.groups if group != REFERENCE_GROUP)
    in_groups = (option for option in known_options().values() if option.section in screen.groups)
    count = sum(has_effect(screen, option) for option in in_groups)
    lines += ["", *textwrap.wrap(f"--help-all lists all {count} options, --help GROUP one group: {groups}.", width)]
    return "\n".join(lines)


def _examples(examples: Iterable[tuple[str, str]]) -> list[str]:
    wide = max((len(command) for command, what in examples if what), default=0)
    return [f"  {command:{wide}}  {what}".rstrip() for command, what in examples]


def _about(prog: str, screen: Screen, about: str, width: int) -> list[str]:
    """Return the help on one group, or on one option."""
    name = about.lower().lstrip("-").replace("-", "_")
    if name in screen.groups:
        return _group(screen, name, width)
    spelled = option_names(known_options()).get(name)
    option = known_options().get(spelled.name) if spelled else None
    if option is not None and has_effect(screen, option):
        group = f"(group {option.section}: {prog} --help {option.section})"
        return [*_option_lines(option, width, screen.application), group]
    guess = nearest(name, [*screen.groups, *option_names(known_options())])
    raise ConfigError(
        f"{prog} has no group of options, and no option, named {about}.",
        rule=f"Groups are {', '.join(screen.groups)}.",
        remedy=f"Did you mean {guess.replace('_', '-')}?" if guess else "",
    )


def _every_option(screen: Screen, width: int) -> list[str]:
    opening = (
        "Names may be abbreviated where that is unambiguous, and written with dashes or underscores. The value in "
        "[brackets] is used where neither the configuration nor the command line gives one."
    )
    lines = ["", *textwrap.wrap(opening, width)]
    for group in screen.groups:
        if group == REFERENCE_GROUP:
            lines += _other_names(screen, width)
        lines += ["", *_group(screen, group, width)]
    return lines


def _group(screen: Screen, group: str, width: int) -> list[str]:
    """Return the help on a group of options, each with its default in brackets."""
    lines = textwrap.wrap(f"{group}: {ALL_SECTIONS[group].__doc__}", width)
    for option in options_of(group, ALL_SECTIONS[group]).values():
        if has_effect(screen, option):
            lines += _option_lines(option, width, screen.application)
    return lines


def _other_names(screen: Screen, width: int) -> list[str]:
    """Return the aliases of all options, most of which are names that the reference's applications have for them."""
    named = {
        f"--{alias.replace('_', '-')}": option.flag
        for option in known_options().values()
        for alias in option.aliases
        if has_effect(screen, option) and option.section != REFERENCE_GROUP
    }
    return ["", "other names of these options:", *_columns(named, width)]


def _option_lines(option: Option, width: int, application: ApplicationHelp | None) -> list[str]:
    told, default = option.help, option.default_text
    if application:
        told = application.meanings.get(option.name, told)
        default = application.defaults.get(option.name, format_value(option.default))  # nothing is chosen there
    name, choices = usage_of(option), ""
    if len(name) + _NAME_COLUMN > width:  # too many choices for a line: they are named in the text
        name, choices = f"{option.flag} NAME", f" One of {', '.join(option.choices)}."
    return _columns({name: f"{told}{choices} [{default}]"}, width)


def _short_usage(row: str) -> str:
    """Return an option with what stands for its value, which the row may name."""
    flag, _, value = row.partition(" ")
    option = known_options()[option_names(known_options())[flag.replace("-", "_")].name]
    if option.kind is BOOL:
        return f"--{flag}"
    value = value or ("NAME" if option.choices else option.kind.metavar)
    return f"--{flag} [{value}]" if option.bare_value is not None else f"--{flag} {value}"


def _own_arguments(parser: argparse.ArgumentParser, width: int) -> list[str]:
    """Return the help on the arguments that only this command has, in the parser's groups."""
    titled: dict[str, dict[str, str]] = {}
    for group in parser._action_groups:
        title = "arguments" if group.title in (None, "options", "positional arguments") else group.title
        rows = {_usage_of_action(action): action.help for action in group._group_actions if action.help}
        titled[title] = titled.get(title, {}) | rows
    filled = [(title, rows) for title, rows in titled.items() if rows]
    return [line for title, rows in filled for line in ("", f"{title}:", *_columns(rows, width, _SHORT_COLUMN))]


def _usage_of_action(action: argparse.Action) -> str:
    metavar = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return metavar
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    return f"{names} {'{' + ','.join(map(str, action.choices)) + '}' if action.choices else metavar}"


def _columns(rows: Mapping[str, str], width: int, column: int = _TEXT_COLUMN) -> list[str]:
    """Return a name and a text per row; texts begin in one column, on the next line where the name is too long."""
    lines = []
    indent = " " * column
    for name, text in rows.items():
        wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        head = " " * _NAME_COLUMN + name
        beside = len(head) + 2 <= column and wrapped
        lines += [head.ljust(column) + wrapped[0].lstrip(), *wrapped[1:]] if beside else [head, *wrapped]
    return lines
