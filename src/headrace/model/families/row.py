"""What the table of a family holds: rows that make the blocks of a network."""

from typing import Protocol

from headrace.model.build_options import BuildOptions
from headrace.model.composite import Named


class WithoutAliases:
    """A row whose split points have no other names."""

    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]:
        """Return no other names."""
        return ()


class Row(Protocol):
    """A row of a family's table: makes the blocks of a network, and other names of its split points."""

    def blocks(self, build: BuildOptions) -> tuple[Named, ...]: ...
    def aliases(self, build: BuildOptions) -> tuple[tuple[str, str], ...]: ...
