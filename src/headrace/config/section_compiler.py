"""The section of the schema about the compiler and the memory of devices; most of its options come from the IPU."""

from dataclasses import dataclass

from headrace.config.field import Facts, Remark, Rule, option
from headrace.config.values import FLOATS, at_least

TARGETS = ("cycles", "memory", "balanced")


def _proportions(values: tuple[float, ...]) -> str:
    """Limit to more than 0 and at most 100."""
    return "" if all(0 < value <= 100 for value in values) else "must be more than 0 and at most 100"


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """What the compiler is told. Options without effect on a device are named when a run starts."""

    half_partials: bool = option(
        False,
        "Let matrix products give 16-bit sums, as convolutions do; off means 32-bit sums, rounded when they are used.",
        aliases=("enable_half_partials",),
    )
    internal_exchange_optimization_target: str | None = option(
        None,
        "What the compiler should save: cycles (time), memory, or both in balance.",
        aliases=("internal_exchange_optimisation_target",),
        choices=TARGETS,
    )
    max_cross_replica_buffer_size: int | None = option(
        None, "Most bytes of gradients that one sum over the replicas joins; 0 joins none.", check=at_least(0)
    )
    max_reduce_many_buffer_size: int | None = option(
        None, "Most bytes that one scattering or gathering over the replicas joins; 0 joins none.", check=at_least(0)
    )
    available_memory_proportion: tuple[float, ...] = option(
        (),
        "Percent of a device's memory (in dialect tf1 its fraction) for the work space of convolutions and matrix "
        "products; one value, or two for each stage.",
        kind=FLOATS,
        check=_proportions,
    )
    gather_conv_output: bool = option(False, "Join small sums over replicas of distributed batch norm.")
    conv_dithering: bool = option(
        False, "Spread convolutions over the IPU's tiles.", aliases=("enable_conv_dithering",)
    )
    min_remote_tensor_size: int | None = option(
        None, "Fewest bytes of a tensor kept in the IPU's remote memory.", check=at_least(0)
    )
    scheduling_algorithm: str | None = option(None, "Order of operations on the IPU.")
    num_io_tiles: int | None = option(None, "Tiles of the IPU kept for input and output.", check=at_least(0))
    on_demand: bool | None = option(None, "Attach to devices when they are needed.")
    nanoo: bool | None = option(
        None,
        "Not a number where a 16-bit number overflows; off means the greatest one.",
    )


# Rules across the options of the compiler and of the dialects.


LARS_SKIPPED = {"beta", "gamma", "bias"}


def _proportions_checks_compiler(facts: Facts) -> tuple[float, ...]:
    return facts.config.compiler.available_memory_proportion


def _num_stages(facts: Facts) -> int:
    pipeline, legacy = facts.config.pipeline, facts.config.legacy
    return max(pipeline.num_stages, (legacy.shards or 1) if legacy.pipeline else 1)


def _is_tf1(facts: Facts) -> bool:
    return facts.config.run.dialect == "tf1"


def _wrong_unit(facts: Facts) -> bool:
    if _is_tf1(facts):
        return any(value > 1 for value in _proportions_checks_compiler(facts))
    return any(value < 1 for value in _proportions_checks_compiler(facts))


def _grouped_on_one(facts: Facts) -> bool:
    """Say whether a pipeline on one device was asked for in the same breath with a schedule of several."""
    legacy = facts.config.legacy
    one = bool(legacy.pipeline) and (legacy.shards or 1) == 1 and bool(facts.config.pipeline.pipeline_splits)
    said = "shards" if facts.given("shards") else "pipeline"
    kinds = {facts.origins[name].kind for name in (said, "pipeline_schedule") if name in facts.origins}
    return one and facts.given("pipeline_schedule") and len(kinds) == 1 and _schedule(facts) != "Sequential"


def _schedule(facts: Facts) -> str:
    return facts.config.pipeline.pipeline_schedule


def _bad_devices(facts: Facts) -> bool:
    words = facts.config.legacy.select_ipus
    return len(words) > 2 or not all(word.isdecimal() or word.lower() == "auto" for word in words)


COMPILER_RULES = (
    Rule(
        broken=lambda facts: len(_proportions_checks_compiler(facts)) > 1 and _num_stages(facts) == 1,
        problem=lambda facts: f"{facts.describe('available_memory_proportion')} without pipeline stages.",
        rule="Several values are for the stages of a pipeline, two for each.",
        remedy="Give one value, or name stages with --pipeline-splits.",
    ),
    Rule(
        broken=lambda facts: len(_proportions_checks_compiler(facts)) not in (0, 1, 2 * _num_stages(facts)),
        problem=lambda facts: (
            f"{facts.describe('available_memory_proportion')}: {len(_proportions_checks_compiler(facts))} values for "
            f"{_num_stages(facts)} stages."
        ),
        rule="One value, or two for each stage: for its convolutions and for its matrix products.",
        remedy="Give one value, or twice as many as there are stages.",
    ),
    Rule(
        broken=_wrong_unit,
        problem=lambda facts: f"{facts.describe('available_memory_proportion')} in {facts.describe('dialect')}.",
        rule="It is a fraction in dialect tf1 (0.15), and in percent elsewhere (15).",
        remedy="Write it in that unit, or say --dialect tf1 or tf2.",
    ),
    Rule(
        broken=lambda facts: (
            _is_tf1(facts) and bool(facts.config.pipeline.pipeline_splits) and not facts.config.legacy.pipeline
        ),
        problem=lambda facts: f"{facts.describe('pipeline_splits')} without --pipeline.",
        rule="In dialect tf1 --pipeline says that the parts are a pipeline, and --shards on how many devices.",
        remedy="Add --pipeline --shards N, or leave the splits out.",
    ),
    Rule(
        broken=_grouped_on_one,
        problem=lambda facts: f"{facts.describe('pipeline')} on one device with {facts.describe('pipeline_schedule')}.",
        rule="Stages on one device run one after the other.",
        remedy="Use --pipeline-schedule Sequential, or --shards with more devices.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.run.dialect == "tf2"
            and facts.config.pipeline.recomputation
            and facts.config.pipeline.num_stages == 1
        ),
        problem=lambda facts: (
            f"{facts.describe('recomputation')} without pipeline stages, in {facts.describe('dialect')}."
        ),
        rule="In dialect tf2 it is the stages whose inputs are kept.",
        remedy="Name stages with --pipeline-splits, or leave the dialect out.",
    ),
    Rule(
        broken=lambda facts: not set(facts.config.legacy.lars_skip_list) <= LARS_SKIPPED,
        problem=lambda facts: f"{facts.describe('lars_skip_list')}.",
        rule="LARS leaves beta, gamma and bias at the plain rate, and nothing else.",
        remedy="Leave lars_skip_list out.",
    ),
    Rule(
        broken=lambda facts: facts.config.legacy.restore_path is not None,
        problem=lambda facts: f"{facts.describe('restore_path')}.",
        rule="Which run a command works on is said on its command line.",
        remedy="Use `headrace resume RUN_DIR`, `headrace validate RUN_DIR`, or --restore-path with `headrace train`.",
    ),
    Rule(
        broken=_bad_devices,
        problem=lambda facts: f"{facts.describe('select_ipus')}.",
        rule="It is AUTO or the number of the first device, and perhaps another one for validation.",
        remedy="Leave it out to take the first devices.",
    ),
    Rule(
        broken=lambda facts: not all(0 <= decay < 1 for decay in facts.config.legacy.weight_avg_exp or ()),
        problem=lambda facts: f"{facts.describe('weight_avg_exp')}.",
        rule="A decay is at least 0 and less than 1.",
        remedy="Use 0.97, for instance.",
    ),
    Rule(
        broken=lambda facts: not all(epochs > 0 for epochs in facts.config.legacy.weight_avg_n or ()),
        problem=lambda facts: f"{facts.describe('weight_avg_n')}.",
        rule="It is a number of epochs before the end, more than 0.",
        remedy="Use 5, for instance.",
    ),
)

COMPILER_WARNINGS = (
    Remark(
        when=lambda facts: facts.config.compiler.half_partials and facts.config.numerics.precision == "32.32",
        text=lambda facts: f"{facts.describe('half_partials')} has no effect with {facts.describe('precision')}.",
    ),
    Remark(
        when=lambda facts: facts.config.legacy.iterations is not None and facts.given("warmup_epochs"),
        text=lambda facts: f"{facts.describe('warmup_epochs')} has no effect with {facts.describe('iterations')}.",
    ),
)
