"""Rules across the options of the model: what a family does not have, and norms that contradict each other."""

from headrace.config.model_table import NORM_OPTIONS, OPTION_FAMILIES, norm_choice, variant_of
from headrace.config.rule import Facts, Rule
from headrace.config.schema import all_options


def _differs(facts: Facts, name: str) -> bool:
    return getattr(facts.config.model, name) != all_options()[name].default


def _foreign(facts: Facts, option: str) -> bool:
    variant = variant_of(facts.config.model)
    return variant is not None and _differs(facts, option) and variant.family not in OPTION_FAMILIES[option]


def _family_rule(option: str) -> Rule:
    families = " and ".join(OPTION_FAMILIES[option])
    return Rule(
        broken=lambda facts: _foreign(facts, option),
        problem=lambda facts: f"{facts.told(option)} does not concern {facts.told('model_name')}.",
        rule=f"{option} is for {families}.",
        remedy=f"Leave {option} out, or choose a network of that family.",
    )


def _needless_norm(facts: Facts) -> str:
    """Return the norm option given for a network without norms, if any."""
    variant = variant_of(facts.config.model)
    if variant is None or variant.has_norm:
        return ""
    return next((name for name in (*NORM_OPTIONS, "stable_norm") if _differs(facts, name)), "")


def _contradicting_norms(facts: Facts) -> str:
    """Return the two options that say different norms, if any."""
    model = facts.config.model
    group = "groups" if model.groups is not None else "group_norm" if model.group_norm else ""
    if model.batch_norm and group:
        return f"{facts.told('batch_norm')} and {facts.told(group)}"
    said = model.norm_layer["name"].removeprefix("custom_")
    if _differs(facts, "norm_layer") and (group or (model.batch_norm and said != "batch_norm")):
        return f"{facts.told('norm_layer')} and {facts.told(group or 'batch_norm')}"
    return ""


def _norm_name(facts: Facts) -> str:
    return norm_choice(facts.config.model)["name"]


MODEL_RULES = (
    *(_family_rule(option) for option in OPTION_FAMILIES),
    Rule(
        broken=lambda facts: bool(_needless_norm(facts)),
        problem=lambda facts: f"{facts.told(_needless_norm(facts))} for {facts.told('model_name')}.",
        rule="This network has no norm layers.",
        remedy="Leave the option out.",
    ),
    Rule(
        broken=lambda facts: bool(_contradicting_norms(facts)),
        problem=lambda facts: f"Two norms are asked for: {_contradicting_norms(facts)}.",
        rule="A network has one kind of norm; groups says group norm.",
        remedy="Leave one of them out.",
    ),
    Rule(
        broken=lambda facts: _differs(facts, "group_order") and _norm_name(facts) != "group_norm",
        problem=lambda facts: f"{facts.told('group_order')} without group norm.",
        rule="Only group norm has groups of channels.",
        remedy="Add --group-norm, or leave group_order out.",
    ),
    Rule(
        broken=lambda facts: facts.config.model.proxy_norm and _norm_name(facts) not in ("group_norm", "layer_norm"),
        problem=lambda facts: f"{facts.told('proxy_norm')} with {_norm_name(facts)}.",
        rule="Proxy norm goes with norms that look at one image at a time: group_norm, layer_norm.",
        remedy="Add --group-norm, or leave proxy_norm out.",
    ),
    Rule(
        broken=lambda facts: _differs(facts, "proxy_epsilon") and not facts.config.model.proxy_norm,
        problem=lambda facts: f"{facts.told('proxy_epsilon')} without proxy norm.",
        rule="It belongs to proxy norm.",
        remedy="Add --proxy-norm, or leave proxy_epsilon out.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.model.dbn_replica_group_size > 1
            and _norm_name(facts) not in ("batch_norm", "custom_batch_norm")
        ),
        problem=lambda facts: f"{facts.told('dbn_replica_group_size')} with {_norm_name(facts)}.",
        rule="Only batch norm has statistics to share between replicas.",
        remedy="Leave dbn_replica_group_size out.",
    ),
)
