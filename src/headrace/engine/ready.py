"""Run a forward pass over blocks of images: compiled for the first of them, with weights that are prepared once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.core.tree import PyTree
from headrace.engine.forward import Forward, ForwardProgram


@dataclass(frozen=True)
class Ready:
    """A compiled forward pass with its weights, for blocks like the one that it was compiled for."""

    program: ForwardProgram
    prepared: PyTree

    @classmethod
    def of(cls, program: ForwardProgram, placed: PyTree, resident: PyTree, block: PyTree) -> "Ready":
        """Prepare weights that are on the devices: what follows from them alone is computed here."""
        return cls(program, program.prepare(placed, resident, block))

    def __call__(self, resident: PyTree, block: PyTree) -> PyTree:
        """Return what the reducer keeps of a block."""
        return self.program(self.prepared, resident, block)


def outputs(
    forward: Forward, weights: tuple[PyTree, PyTree], blocks: Iterable[PyTree], resident: PyTree = None
) -> Iterator[PyTree]:
    """Yield what the reducer keeps of each block, for weights (params, stats) in host memory."""
    placed, ready = forward.place(weights), None
    for block in blocks:
        ready = ready or Ready.of(forward.compile(placed, resident, block), placed, resident, block)
        yield ready(resident, block)
