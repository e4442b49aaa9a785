"""What cannot be meant for a task: options of the loss, of classes and of mixing, and metrics of another task."""

from headrace.config.field import Facts, Rule, conflict
from headrace.config.schema import Augment, Data, Learning
from headrace.rows.row import Scale
from headrace.rows.tasks import CLASSIFICATION, MONITORS, MULTILABEL, REGRESSION, TASKS

_SECTIONS = {"data": Data, "learning": Learning, "augment": Augment}
# Options that only classes give a meaning, by section; their defaults are off.
OF_CLASSES = {"learning": ("class_weights", "label_smoothing_classes"), "data": ("balanced_sampling", "label_pattern")}
# Those that make no target of a number, besides.
NOT_OF_NUMBERS = {"learning": ("label_smoothing",), "augment": ("mixup_alpha", "cutmix_lambda", "cutmix_alpha")}


def refused_options(task: str) -> dict[str, object]:
    """Return the options that have no meaning for a task, with the defaults that turn them off."""
    if task == CLASSIFICATION.name:
        return {}
    tables = (OF_CLASSES, NOT_OF_NUMBERS) if task == REGRESSION.name else (OF_CLASSES,)
    return {
        name: getattr(_SECTIONS[section](), name)
        for table in tables
        for section, names in table.items()
        for name in names
    }


def metric_names(task: str) -> tuple[str, ...]:
    """Return the names of the metrics of a task that may be monitored."""
    return tuple(metric.name for metric in TASKS[task].metrics(Scale()))


def _value(facts: Facts, name: str) -> object:
    sections = (getattr(facts.config, section) for section in _SECTIONS)
    return next(getattr(section, name) for section in sections if hasattr(section, name))


_WHY = {
    "class_weights": "They are weights of classes, of which an image has one.",
    "label_smoothing_classes": "Each label is answered on its own: a smoothed target lies between it and one half.",
    "balanced_sampling": "It makes classes equally frequent, and an image has none.",
    "label_pattern": "The name of a file holds one class; other labels are in a CSV file (--labels).",
    "label_smoothing": "A number is no share of classes that could be spread.",
} | dict.fromkeys(
    NOT_OF_NUMBERS["augment"], "The number of two mixed images is not known: it need not lie between theirs."
)


def _refused(name: str, default: object) -> Rule:
    return conflict(
        name,
        "task",
        lambda facts: name in refused_options(facts.config.data.task) and _value(facts, name) != default,
        _WHY[name],
        f"Leave {name} out.",
    )


TASK_RULES = (
    *(_refused(name, default) for name, default in refused_options(REGRESSION.name).items()),
    Rule(
        broken=lambda facts: facts.config.learning.loss not in TASKS[facts.config.data.task].losses,
        problem=lambda facts: f"{facts.describe('loss')} with {facts.describe('task')}.",
        rule="; ".join(f"{row.name}: {', '.join(row.losses)}" for row in TASKS.values()) + ".",
        remedy="Leave --loss out, or choose a loss of the task.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.run.monitor in MONITORS
            and facts.config.run.monitor not in metric_names(facts.config.data.task)
        ),
        problem=lambda facts: f"{facts.describe('monitor')} with {facts.describe('task')}.",
        rule="; ".join(f"{name}: {', '.join(metric_names(name))}" for name in TASKS) + ".",
        remedy="Leave --monitor out, or choose a metric of the task.",
    ),
    *(
        conflict(
            name,
            "task",
            lambda facts, name=name: (
                getattr(facts.config.data, name) is not None and facts.config.data.task != REGRESSION.name
            ),
            "Only the targets of a regression have a scale.",
            f"Add --task regression, or leave {name} out.",
        )
        for name in ("target_mean", "target_std")
    ),
    Rule(
        broken=lambda facts: (
            "," in (facts.config.data.label_column or "") and facts.config.data.task == CLASSIFICATION.name
        ),
        problem=lambda facts: f"{facts.describe('label_column')} with {facts.describe('task')}.",
        rule="A class is in one column.",
        remedy=f"Name one, or add --task {MULTILABEL.name} (columns of 0 and 1) or {REGRESSION.name} (numbers).",
    ),
)
