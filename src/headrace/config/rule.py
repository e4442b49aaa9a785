"""What checks across options are made of: the facts they look at, rules that refuse, remarks that tell."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.config.field import DEFAULT, Origin
from headrace.config.schema import Config, all_options
from headrace.config.values import shown


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at: the configuration and where its values came from."""

    config: Config
    origins: Mapping[str, Origin]

    def given(self, name: str) -> bool:
        """Say whether somebody wrote the value, be it the default's."""
        return self.origins.get(name, DEFAULT).is_given

    def told(self, name: str) -> str:
        """Return an option with its value and origin, for a message."""
        value = getattr(getattr(self.config, all_options()[name].section), name)
        return f"{name} {shown(value)} ({self.origins.get(name, DEFAULT)})"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A combination that cannot work: when it is there, how to put it, why not, and what to do."""

    broken: Callable[[Facts], bool]
    problem: Callable[[Facts], str]
    rule: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A combination that works and may surprise."""

    when: Callable[[Facts], bool]
    text: Callable[[Facts], str]
