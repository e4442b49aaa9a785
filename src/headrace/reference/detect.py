"""Which of the two reference applications a command line was written for, judged by the option names it uses.

Both have a script `train.py`. Their names differ even where the meaning does not (`--batch-size` and
`--micro-batch-size`); for `headrace train` such a name is a mere alias, for a script of the reference it is a sign.
"""

from collections.abc import Sequence

from headrace.config.field import normalise_name, option_names
from headrace.reference.entrance import known_options

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


def detect_application(argv: Sequence[str]) -> str:
    """Return tf1 if an option of the first application is among the arguments, else tf2."""
    options = known_options()
    known = option_names(options)
    tf1 = TF1_NAMES | {
        name
        for name, spelled in known.items()
        if options[spelled.name].section == "reference" and spelled.name not in _NOT_TF1
    }
    for argument in argv:
        # After it nothing is an option.
        if argument == "--":
            break
        if argument.startswith("--"):
            name = normalise_name(argument[2:].partition("=")[0])
            exact = name in known or name in tf1
            meant = [name] if exact else [full for full in (*known, *tf1) if full.startswith(name)]
            if meant and all(full in tf1 for full in meant):
                return "tf1"
    return "tf2"


def with_application(argv: Sequence[str]) -> list[str]:
    """Add --application to a reference's command line, unless it or a named configuration says one."""
    arguments = list(argv)
    return arguments if names_application(arguments) else [*arguments, "--application", detect_application(arguments)]


def names_application(argv: Sequence[str], *, by_config: bool = True) -> bool:
    """Whether a command line says which application it is for, or (`by_config`) names a configuration that may."""
    saying = ("--application", "--dialect", *(("--config",) if by_config else ()))
    return any(argument.partition("=")[0].replace("_", "-") in saying for argument in argv)
