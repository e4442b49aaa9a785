"""Where options and scripts of the reference enter, beside ordinary options."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import load
from headrace.config.field import CODE, DEFAULT, Option, Origin, normalise_name, option_names
from headrace.config.layers import Given, Layer
from headrace.config.load import NO_RECIPE, Resolved, Translation
from headrace.config.schema import SECTIONS, Config
from headrace.config.yaml_blocks import RECIPES, Block, blocks_of, choose
from headrace.core.errors import ConfigError
from headrace.core.json_text import parse_json
from headrace.core.local_path import local_text
from headrace.rows.values import format_value
from headrace_reference.tables import MEANS_IN_TF1, ROWS, TABLE, Reference
from headrace_reference.translate import REFERENCE_TIES, application_defaults, has_defaults, reword, translate

if TYPE_CHECKING:
    from headrace.weights.published import WeightFacts

CACHE_VARIABLE = "TF_POPLAR_FLAGS"  # where the reference says in which directory compiled programs are kept


def _environment(environ: Mapping[str, str]) -> Layer:
    found = {}
    for flag in environ.get(CACHE_VARIABLE, "").split():
        name, _, value = flag.partition("=")
        if name.lstrip("-") == "executable_cache_path" and value:
            origin = Origin(kind="environment", where=f"${CACHE_VARIABLE}")
            found["compilation_cache_dir"] = Given(value=local_text(value, origin.where), origin=origin)
    return found


def weight_options(name: str) -> Mapping[str, Any]:
    """Return the options that come with weights of a name; those of a run are in its newest checkpoint."""
    from headrace.checkpoint.store import MANIFEST_FILE
    from headrace.weights.named import facts_of

    path = Path(name).expanduser()
    if path.is_file() and (path.parent / MANIFEST_FILE).is_file():  # the tensors of a checkpoint, named as a file
        path = path.parent
    facts = _facts_of_run(path) if path.is_dir() else facts_of(name)
    return {**facts.network, **facts.data} if facts else {}


def _facts_of_run(path: Path) -> "WeightFacts | None":
    from headrace.checkpoint.store import MANIFEST_FILE, list_checkpoints, parse_manifest
    from headrace.weights.named import pixel_options
    from headrace.weights.published import WeightFacts

    places = [path, *reversed(list_checkpoints(path)), *reversed(list_checkpoints(_checkpoints_of(path)))]
    file = next((place / MANIFEST_FILE for place in places if (place / MANIFEST_FILE).is_file()), None)
    manifest = parse_manifest(file.read_bytes())[0] if file else None
    try:
        saved, form = (manifest or {})["config"], (manifest or {})["input"]
        model = from_saved(saved).config.model
    except (KeyError, ConfigError):  # too old, or given by code
        return None
    from headrace.data.decoding.crop import usual_shorter_side  # here, since it loads NumPy

    size, shorter = form["image_hwc"][0], form["shorter_side"]
    data = {"image_size": size, "eval_resize_size": shorter or usual_shorter_side(size)}
    data |= {"eval_interpolation": form.get("interpolation", "bilinear")}
    network = {"model_name": model.model_name, **load.network_changes(model)}
    return WeightFacts(network=network, data=data | pixel_options(form))


def _checkpoints_of(run: Path) -> Path:
    """Return the directory of a run's checkpoints, read as plain JSON: reading options should not load JAX."""
    try:
        chosen = parse_json((run / "config.json").read_bytes())["values"]["checkpoint_dir"]
    except (OSError, ValueError, LookupError, TypeError):
        chosen = None
    return Path(chosen) if isinstance(chosen, str) else run / "checkpoints"


REFERENCE = Translation(
    sections={"reference": Reference},
    ties=REFERENCE_TIES,
    recipes=(Path(__file__).parent / "recipes",),
    environment=_environment,
    has_defaults=has_defaults,
    reword=reword,
    translate=translate,
    weight_options=weight_options,
)
ALL_SECTIONS: Mapping[str, type] = {**SECTIONS, **REFERENCE.sections}


def known_options() -> Mapping[str, Option]:
    """Return every option that is accepted, ours and the reference's, by its flat name."""
    return REFERENCE.options


def resolve(
    options: Mapping[str, object],
    config_name: str | None = None,
    config_path: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Return the configuration of a named block with the command line's options over it.

    Without a name it is the shipped `default`, or `images` where the dataset is one of image files or only its path is
    given; `none` means the defaults of the schema alone. Without `environ` it is that of the process.
    """
    return load.resolve(options, config_name, config_path, environ, REFERENCE)


def override(saved: Resolved, options: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Resolved:
    """Return a saved configuration with the command line's options over it."""
    return load.override(saved, options, environ, REFERENCE)


def config_from(flat: Mapping[str, object]) -> Config:
    """Return a checked Config from flat option names (or their aliases); what is not named has its default."""
    return resolve_code(flat).config


def resolve_code(flat: Mapping[str, object], config_name: str | None = NO_RECIPE) -> Resolved:
    """Return the configuration of options that code gives over a recipe; None chooses it as `resolve` does."""
    if config_name == NO_RECIPE:
        return load.resolve_code(flat, REFERENCE)
    return load.resolve(flat, config_name, None, {}, REFERENCE, CODE)


def from_saved(saved: Mapping[str, object]) -> Resolved:
    """Return a configuration as it was stored with a run."""
    return load.from_saved(saved, REFERENCE)


def named_blocks(config_path: str | None) -> Mapping[str, Block]:
    """Return the named configurations of a user's file, or those that are shipped."""
    return blocks_of(config_path, (RECIPES, *REFERENCE.recipes))


def choose_block(name: str | None, config_path: str | None) -> Block:
    """Return a named configuration, or refuse the name."""
    return choose(named_blocks(config_path), name, config_path)


# Which of the two reference applications a command line was written for, judged by the option names it uses.
#
# Both have a script `train.py`. Their names differ even where the meaning does not (`--batch-size` and `--micro-batch-
# size`); for `headrace train` such a name is a mere alias, for a script of the reference it is a sign.


# Names that the first application has and the second has not, besides those of the section `reference`.
_NAMES = """
    batch_size replicas epochs data_dir optimiser model_size
    batch_norm group_norm groups bn_span bn_decay enable_recomputation
    enable_recompute xla_recompute eight_bit_io normalise_input valid_batch_size no_validation
    no_stochastic_rounding no_dataset_cache enable_half_partials internal_exchange_optimisation_target
    enable_conv_dithering group_dim expand_ratio mixup_alpha cutmix_lambda generated_data repeat distributed
    batches_per_step init_path variable_filter rts image_size widenet weight_avg_n weight_avg_exp
    convolution_groups use_relu no_se momentum warmup_epochs sharding_include_filter sharding_exclude_filter
"""
TF1_NAMES = frozenset(_NAMES.split())
# Options of the section `reference` that the second application has, or that belong to neither.
_NOT_TF1_NAMES = """
    application gather_conv_output conv_dithering min_remote_tensor_size scheduling_algorithm num_io_tiles
    on_demand nanoo
"""
_NOT_TF1 = frozenset(_NOT_TF1_NAMES.split())


_MODEL_NAMES = ("model", "model_name")


def detect_application(argv: Sequence[str]) -> str:
    """Return tf1 if an option of the first application is among the arguments, else tf2."""
    options = known_options()
    known = option_names(options)
    tf1 = TF1_NAMES | {
        name
        for name, spelled in known.items()
        if options[spelled.name].section == "reference" and spelled.name not in _NOT_TF1
    }
    for argument, following in zip(argv, [*argv[1:], ""], strict=False):
        # After it nothing is an option.
        if argument == "--":
            break
        if argument.startswith("--"):
            written, _, value = argument[2:].partition("=")
            name = normalise_name(written)
            exact = name in known or name in tf1
            meant = [name] if exact else [full for full in (*known, *tf1) if full.startswith(name)]
            if meant and all(full in tf1 for full in meant):
                return "tf1"
            # A family as a whole is a model there alone: the other application has networks of a size.
            if name in _MODEL_NAMES and (value or following) in TABLE:
                return "tf1"
    return "tf2"


@dataclass(frozen=True, kw_only=True)
class ApplicationHelp:
    """What help says otherwise in an application: defaults as texts, other meanings, and options it does not have."""

    name: str
    about: str
    defaults: Mapping[str, str]
    meanings: Mapping[str, str]
    hidden: frozenset[str]


_DECIDING = ("application", "model_name", "dataset", "dataset_path", "optimizer")  # what its defaults depend on


def application_help(options: Mapping[str, object]) -> ApplicationHelp | None:
    """Return what help says of the application that a command line names, with the network that it names; else None."""
    resolved = resolve({name: options[name] for name in _DECIDING if name in options}, "none", environ={})
    application = resolved.source["application"].value if "application" in resolved.source else "headrace"
    if application == "headrace":
        return None
    config, ours = load.to_flat(resolved.config), known_options()
    theirs = application_defaults(application, resolved.given())
    defaults = {
        name: format_value(config[name]) for name, origin in resolved.origins.items() if origin.kind != DEFAULT.kind
    }
    defaults |= {name: format_value(value) for name, value in theirs.items() if name not in ("model_name", "dataset")}
    moved = MEANS_IN_TF1 if application == "tf1" else {}
    defaults |= {name: defaults[other] for name, (other, _) in moved.items() if other in defaults}
    place = "" if config["dataset"] == "auto" else f" on {config['dataset']}"
    run = f"{config['model_name']}{place}, {config['num_epochs']} epoch{'s' * (config['num_epochs'] != 1)}"
    which = "first" if application == "tf1" else "second"
    return ApplicationHelp(
        name=application,
        about=f"Train a network as the {which} application of the reference does, with its option names, meanings and "
        f"defaults. With the network and dataset given here: {run}, micro batches of "
        f"{config['micro_batch_size']}, precision {config['precision']}, optimizer {config['optimizer']}.",
        defaults=defaults,
        meanings={name: told or ours[other].help for name, (other, told) in moved.items()},
        hidden=frozenset(row.option for row in ROWS if row.tf1_only) if application == "tf2" else frozenset(),
    )


def with_application(argv: Sequence[str]) -> list[str]:
    """Add --application to a reference's command line, unless it or a named configuration says one."""
    arguments = list(argv)
    return arguments if names_application(arguments) else [*arguments, "--application", detect_application(arguments)]


def names_application(argv: Sequence[str], *, by_config: bool = True) -> bool:
    """Whether a command line says which application it is for, or (`by_config`) names a configuration that may."""
    saying = ("--application", "--dialect", *(("--config",) if by_config else ()))
    return any(argument.partition("=")[0].replace("_", "-") in saying for argument in argv)


# Entry points compatible with the reference's scripts: each turns its arguments into a command line of ours.
#
# The files at the repository's root (train.py, validation.py, ...) are these scripts. The reference's two applications
# share their names; which one a command line is written for follows from the options that it uses.


EFFICIENTNET = "efficientnet_cifar10_pipeline"
ONE_DEVICE = ("--pipeline-splits", "0", "--micro-batch-size", "192", "--gradient-accumulation-count", "1")
CONFIGS_FILE = "configs.yml"
_SYNTHETIC = ("--generated-data", "--synthetic-data")


PLAN = "--plan"


def words_of(script: str, argv: list[str]) -> list[str]:
    """Return the words of our command that a script makes of its own; with --plan it plans instead of training."""
    words = SCRIPTS[script]([word for word in argv if word != PLAN])
    if PLAN not in argv or not words:
        return words
    if words[0] != "train":
        raise ConfigError(
            f"{PLAN} is given, but this would be `headrace {words[0]}`.",
            rule="What can be planned is a training.",
            remedy=f"Leave {PLAN} out.",
        )
    return ["plan", *words[1:]]


def train(argv: list[str]) -> list[str]:
    """Train; with --restore-path resume a run, or validate it if it is finished."""
    place, words = take_value(_with_own_file(argv), "--restore-path")
    if place is None:
        return ["train", *_for_application(words)]
    if is_finished(Path(place)):
        return ["validate", place, *words]
    return ["resume", place, *words]


def validation(argv: list[str]) -> list[str]:
    """Validate checkpoints (--restore-path); without one measure inference (synthetic data) or untrained weights."""
    place, words = take_value(_with_own_file(argv), "--restore-path")
    if place is not None:
        return ["validate", place, *words]
    if any(_name(word) in _SYNTHETIC for word in words):
        return ["bench", "--mode", "inference", *_first_application(words)]
    if not _asks_for_help(words):
        print("warning: no --restore-path: the weights are untrained", file=sys.stderr)
    return ["train", *_first_application(words), "--no-training"]


def restore(argv: list[str]) -> list[str]:
    """Resume a run."""
    return ["resume", *_restored("restore.py", argv)]


def weight_avg(argv: list[str]) -> list[str]:
    """Average the checkpoints of a run."""
    return ["average", *_restored("weight_avg.py", argv)]


def inference(argv: list[str]) -> list[str]:
    """Validate the newest EfficientNet of efficientnet_CIFAR10_train.py, or the run named first."""
    if argv and (not argv[0].startswith("-") or _asks_for_help(argv)):
        return ["validate", *argv]
    log_dir, _ = take_value(argv, "--log-dir")
    runs = sorted(Path(log_dir or "runs").glob("*/config.json"))
    found = [file for file in runs if _is_efficientnet_on_cifar10(file)]
    if not found:
        raise ConfigError(
            f"There is no run of an EfficientNet on CIFAR-10 in {log_dir or 'runs'}.",
            remedy="Train it first: python efficientnet_CIFAR10_train.py; or give the directory of a run.",
        )
    newest = max(found, key=lambda file: file.stat().st_mtime).parent
    return ["validate", str(newest), "--last", *argv]


def _is_efficientnet_on_cifar10(file: Path) -> bool:
    """Say whether a run's configuration is one, whatever the run is called."""
    try:
        values = parse_json(file.read_bytes())["values"]
        return (values["model_name"], values["dataset"]) == ("efficientnet_b0", "cifar10")
    except (OSError, ValueError, LookupError, TypeError):
        return False


SCRIPTS: Mapping[str, Callable[[list[str]], list[str]]] = {
    "train": train,
    "validation": validation,
    "restore": restore,
    "weight_avg": weight_avg,
    "dataset_benchmark": lambda argv: ["data", "bench", "--parts", "block", *with_application(argv)],
    "verify_dataset": lambda argv: ["data", "verify", *with_application(argv)],
    "efficientnet_CIFAR10_train": lambda argv: ["train", "--config", EFFICIENTNET, *argv],
    "efficientnet_CIFAR10_train_gpu": lambda argv: ["train", "--config", EFFICIENTNET, *ONE_DEVICE, *argv],
    "efficientnet_CIFAR10_inference": inference,
}


def take_value(argv: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """Take an option with its value out of an argv; the last one counts."""
    value, left, words = None, [], list(argv)
    while words:
        word = words.pop(0)
        if _name(word) != option:
            left.append(word)
            continue
        _, equals, value = word.partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"{option} has no value.", remedy="Give the directory of a run, such as runs/NAME.")
            value = words.pop(0)
    return value, left


def is_finished(place: Path) -> bool:
    """Whether a run has been trained to its end, by its records: its checkpoints may be anywhere."""
    from headrace.report.run_summary import read_summary  # here, since it loads JAX

    return read_summary(place).state == "finished"


def _with_own_file(argv: list[str]) -> list[str]:
    """Add --config-path where `configs.yml`, here or beside the script, has the named configuration."""
    name, file = take_value(argv, "--config")[0], take_value(argv, "--config-path")[0]
    if name is None or file is not None:
        return argv
    for folder in (Path(), Path(sys.argv[0]).parent):
        path = folder / CONFIGS_FILE
        if path.is_file() and name in named_blocks(str(path)):
            return [*argv, "--config-path", str(path)]
    return argv


def without_recipe(argv: list[str]) -> list[str]:
    """Drop a named configuration, once it is known to be one: a saved run brings its own options."""
    name, words = take_value(argv, "--config")
    file, words = take_value(words, "--config-path")
    if name is not None:
        choose_block(name, file)
        print(f"note: --config {name} is ignored: the options of the run apply", file=sys.stderr)
    return words


def _restored(script: str, argv: list[str]) -> list[str]:
    """Put the run that --restore-path names in front; a script that needs one says so."""
    place, words = take_value(_with_own_file(argv), "--restore-path")
    if place is None and not _asks_for_help(words):
        raise ConfigError(f"{script} needs --restore-path.", remedy="Give the directory of a run, such as runs/NAME.")
    return [place, *words] if place else words


def _for_application(argv: list[str]) -> list[str]:
    """Add --application, judged by the options of the command line and of the user's own configuration file."""
    name, file = take_value(argv, "--config")[0], take_value(argv, "--config-path")[0]
    if name is None or file is None:
        return with_application(argv)
    block = choose_block(name, file)
    arguments = [*(f"--{entry.key}={entry.value}" for entry in block.merged + block.own), *argv]
    if names_application(arguments, by_config=False):
        return argv
    return [*argv, "--application", detect_application(arguments)]


def _first_application(argv: list[str]) -> list[str]:
    """Only the reference's first application has a validation.py."""
    return argv if names_application(argv) else [*argv, "--application", "tf1"]


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv)
