"""Which of the two applications of the reference a command line is for, and what help says of each.

Both have a script `train.py`. Their names differ even where the meaning does not (`--batch-size` and `--micro-batch-
size`); for `headrace train` such a name is a mere alias, for a script of the reference it is a sign.
"""

from collections.abc import Mapping, Sequence

from headrace.config.field import DEFAULT, normalise_name, option_names
from headrace.config.load import resolve, to_flat
from headrace.config.spellings import WHOLES
from headrace.config.translations import ApplicationHelp, known_options
from headrace.rows.values import format_value
from headrace_reference.tables import MEANS_IN_TF1, ROWS, TABLE
from headrace_reference.translate import application_defaults

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


_DECIDING = ("application", "model_name", "dataset", "dataset_path", "optimizer")  # what its defaults depend on


def application_help(argv: Sequence[str], options: Mapping[str, object]) -> ApplicationHelp | None:
    """Return what help says of the application that a command line names, with the network that it names; else None."""
    if not names_application(argv, by_config=False):
        return None
    resolved = resolve({name: options[name] for name in _DECIDING if name in options}, "none", environ={})
    application = resolved.source["application"].value if "application" in resolved.source else "headrace"
    if application == "headrace":
        return None
    config, ours = to_flat(resolved.config), known_options()
    theirs = application_defaults(application, resolved.given())
    defaults = {
        name: format_value(config[name]) for name, origin in resolved.origins.items() if origin.kind != DEFAULT.kind
    }
    defaults |= {name: format_value(value) for name, value in theirs.items() if name not in ("model_name", "dataset")}
    for row in WHOLES:
        said = row.states(theirs[row.of[0]]) if row.of[0] in theirs else None
        defaults |= {} if said is None else {row.name: format_value(said)}
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
