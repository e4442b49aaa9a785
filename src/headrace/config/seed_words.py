"""Which of the two reference applications a command line was written for, told by the names it uses.

Both are called `train.py`. Their names differ even where the meaning does not (`--batch-size`, `--micro-batch-size`);
on our own command line such a name is an alias and says nothing, in a script of the reference it does.
"""

from collections.abc import Sequence

from headrace.config.field import plain, spellings
from headrace.config.schema import all_options

# Names that the first application has and the second has not, beside those of the section legacy.
_NAMES = """
    batch_size replicas epochs data_dir optimiser model_size
    batch_norm group_norm groups bn_span bn_decay enable_recomputation
    enable_recompute xla_recompute eight_bit_io normalise_input valid_batch_size no_validation
    no_stochastic_rounding no_dataset_cache enable_half_partials internal_exchange_optimisation_target
    enable_conv_dithering group_dim expand_ratio mixup_alpha cutmix_lambda generated_data repeat distributed
    batches_per_step init_path variable_filter rts image_size widenet
    convolution_groups use_relu no_se
"""
TF1_NAMES = frozenset(_NAMES.split())


def seed_dialect(argv: Sequence[str]) -> str:
    """Return tf1 where a name of the first application is among the words, else tf2."""
    known = spellings(all_options())
    legacy = {name for name, spelled in known.items() if all_options()[spelled.name].section == "legacy"}
    tf1 = TF1_NAMES | legacy
    for word in argv:
        if word == "--":
            break
        if word.startswith("--"):
            name = plain(word[2:].partition("=")[0])
            meant = (
                [name] if name in known or name in tf1 else [full for full in (*known, *tf1) if full.startswith(name)]
            )
            if meant and all(full in tf1 for full in meant):
                return "tf1"
    return "tf2"


def with_seed_dialect(argv: Sequence[str]) -> list[str]:
    """Return a reference's command line with its dialect said, unless it or a named configuration says one."""
    words = list(argv)
    said = any(word.partition("=")[0].replace("_", "-") in ("--dialect", "--config") for word in words)
    return words if said else [*words, "--dialect", seed_dialect(words)]
