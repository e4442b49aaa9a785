"""Rules across the options of the compiler and of the dialects."""

from headrace.config.rule import Facts, Remark, Rule

LARS_SKIPPED = {"beta", "gamma", "bias"}


def _proportions(facts: Facts) -> tuple[float, ...]:
    return facts.config.compiler.available_memory_proportion


def _num_stages(facts: Facts) -> int:
    pipeline, legacy = facts.config.pipeline, facts.config.legacy
    return max(pipeline.num_stages, (legacy.shards or 1) if legacy.pipeline else 1)


def _is_tf1(facts: Facts) -> bool:
    return facts.config.run.dialect == "tf1"


def _wrong_unit(facts: Facts) -> bool:
    if _is_tf1(facts):
        return any(value > 1 for value in _proportions(facts))
    return any(value < 1 for value in _proportions(facts))


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
        broken=lambda facts: len(_proportions(facts)) > 1 and _num_stages(facts) == 1,
        problem=lambda facts: f"{facts.told('available_memory_proportion')} without pipeline stages.",
        rule="Several values are for the stages of a pipeline, two for each.",
        remedy="Give one value, or name stages with --pipeline-splits.",
    ),
    Rule(
        broken=lambda facts: len(_proportions(facts)) not in (0, 1, 2 * _num_stages(facts)),
        problem=lambda facts: (
            f"{facts.told('available_memory_proportion')}: {len(_proportions(facts))} values for "
            f"{_num_stages(facts)} stages."
        ),
        rule="One value, or two for each stage: for its convolutions and for its matrix products.",
        remedy="Give one value, or twice as many as there are stages.",
    ),
    Rule(
        broken=_wrong_unit,
        problem=lambda facts: f"{facts.told('available_memory_proportion')} in {facts.told('dialect')}.",
        rule="It is a fraction in dialect tf1 (0.15), and in percent elsewhere (15).",
        remedy="Write it in that unit, or say --dialect tf1 or tf2.",
    ),
    Rule(
        broken=lambda facts: (
            _is_tf1(facts) and bool(facts.config.pipeline.pipeline_splits) and not facts.config.legacy.pipeline
        ),
        problem=lambda facts: f"{facts.told('pipeline_splits')} without --pipeline.",
        rule="In dialect tf1 --pipeline says that the parts are a pipeline, and --shards on how many devices.",
        remedy="Add --pipeline --shards N, or leave the splits out.",
    ),
    Rule(
        broken=_grouped_on_one,
        problem=lambda facts: f"{facts.told('pipeline')} on one device with {facts.told('pipeline_schedule')}.",
        rule="Stages on one device run one after the other.",
        remedy="Use --pipeline-schedule Sequential, or --shards with more devices.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.run.dialect == "tf2"
            and facts.config.pipeline.recomputation
            and facts.config.pipeline.num_stages == 1
        ),
        problem=lambda facts: f"{facts.told('recomputation')} without pipeline stages, in {facts.told('dialect')}.",
        rule="In dialect tf2 it is the stages whose inputs are kept.",
        remedy="Name stages with --pipeline-splits, or leave the dialect out.",
    ),
    Rule(
        broken=lambda facts: not set(facts.config.legacy.lars_skip_list) <= LARS_SKIPPED,
        problem=lambda facts: f"{facts.told('lars_skip_list')}.",
        rule="LARS leaves beta, gamma and bias at the plain rate, and nothing else.",
        remedy="Leave lars_skip_list out.",
    ),
    Rule(
        broken=lambda facts: facts.config.legacy.restore_path is not None,
        problem=lambda facts: f"{facts.told('restore_path')}.",
        rule="Which run a command works on is said on its command line.",
        remedy="Use `headrace resume RUN_DIR`, `headrace validate RUN_DIR`, or --restore-path with `headrace train`.",
    ),
    Rule(
        broken=_bad_devices,
        problem=lambda facts: f"{facts.told('select_ipus')}.",
        rule="It is AUTO or the number of the first device, and perhaps another one for validation.",
        remedy="Leave it out to take the first devices.",
    ),
    Rule(
        broken=lambda facts: not all(0 <= decay < 1 for decay in facts.config.legacy.weight_avg_exp or ()),
        problem=lambda facts: f"{facts.told('weight_avg_exp')}.",
        rule="A decay is at least 0 and less than 1.",
        remedy="Use 0.97, for instance.",
    ),
    Rule(
        broken=lambda facts: not all(epochs > 0 for epochs in facts.config.legacy.weight_avg_n or ()),
        problem=lambda facts: f"{facts.told('weight_avg_n')}.",
        rule="It is a number of epochs before the end, more than 0.",
        remedy="Use 5, for instance.",
    ),
)

COMPILER_WARNINGS = (
    Remark(
        when=lambda facts: facts.config.compiler.half_partials and facts.config.numerics.precision == "32.32",
        text=lambda facts: f"{facts.told('half_partials')} has no effect with {facts.told('precision')}.",
    ),
    Remark(
        when=lambda facts: facts.config.legacy.iterations is not None and facts.given("warmup_epochs"),
        text=lambda facts: f"{facts.told('warmup_epochs')} has no effect with {facts.told('iterations')}.",
    ),
)
