"""Names of options as people spell them: dashes or underscores, aliases, `no-` forms and unambiguous prefixes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.config.field import Option
from headrace.core.errors import ConfigError, nearest

SECOND_RANK = ("compiler", "legacy")  # sections of the reference's names, so that they take no prefix from ours


@dataclass(frozen=True, kw_only=True)
class Spelled:
    """What a spelling stands for: an option, and whether it was written in its `no-` form."""

    name: str
    negated: bool = False
    rank: int = 0  # a prefix looks at names of rank 1 only where none of rank 0 begins with it

    def __str__(self) -> str:
        return f"no_{self.name}" if self.negated else self.name


def plain(name: str) -> str:
    """Return a name as it is compared: lower case, underscores."""
    return name.strip().lower().replace("-", "_")


def spellings(options: Mapping[str, Option], extra: Iterable[str] = ()) -> dict[str, Spelled]:
    """Return all full spellings of the options, and of further names that a command knows."""
    found = {plain(name): Spelled(name=plain(name)) for name in extra}
    for name, option in options.items():
        for spelling in (name, *option.aliases):
            rank = int(option.section in SECOND_RANK)
            found[spelling] = Spelled(name=name, rank=rank)
            if option.no_value is not None:
                found[f"no_{spelling}"] = Spelled(name=name, negated=True, rank=rank)
    return found


def find(written: str, known: Mapping[str, Spelled], *, place: str = "", dashes: str = "") -> Spelled:
    """Return what `written` stands for; `place` (file and line) and `dashes` (on a command line) dress errors."""
    wanted = plain(written)
    if wanted in known:
        return known[wanted]
    begins = [known[name] for name in known if name.startswith(wanted)] if wanted else []
    first = min((spelled.rank for spelled in begins), default=0)
    matches = {str(spelled): spelled for spelled in begins if spelled.rank == first}
    if len(matches) == 1:
        return next(iter(matches.values()))

    def shown(name: str) -> str:
        return dashes + name.replace("_", "-") if dashes else name

    if matches:
        raise ConfigError(
            f"{place}{dashes}{written} could be several options.",
            rule="A name may be cut short only where one option begins with it.",
            remedy=f"Write one of: {', '.join(shown(name) for name in matches)}.",
        )
    guess = nearest(wanted, known)
    remedy = f"Did you mean {shown(guess)}?" if guess else "`headrace configs options` lists all options."
    raise ConfigError(f"{place}{'there' if place else 'There'} is no option {dashes}{written}.", remedy=remedy)
