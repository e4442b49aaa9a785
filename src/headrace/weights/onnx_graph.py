"""A growing ONNX graph: nodes and weights under the paths of the layers that they belong to."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError

OPSET = 18  # ReduceMean takes its axes as an input from here on; onnxruntime 1.14 and newer read it
INT64 = np.int64


@dataclass(frozen=True)
class Graph:
    """The nodes and weights so far (shared by all views of the graph), and where in the network we are."""

    nodes: list[Any] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    path: str = ""

    def under(self, name: str) -> "Graph":
        """Return the graph as seen from a part of this layer."""
        return replace(self, path=f"{self.path}/{name}" if self.path else name)

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output; return the output's name."""
        from onnx import helper

        name = f"{self.path}/{kind}_{next(self.numbers)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def weight(self, name: str, array: Any) -> str:
        """Add float32 weights; return their name."""
        return self._add(f"{self.path}/{name}", np.asarray(array, np.float32))

    def constant(self, array: Any) -> str:
        """Add a constant of its own type; return its name."""
        return self._add(f"{self.path}/constant_{next(self.numbers)}", np.asarray(array))

    def reshaped(self, x: str, shape: Sequence[int]) -> str:
        """Reshape; 0 keeps a dim, -1 takes the rest."""
        return self.node("Reshape", [x, self.constant(np.array(shape, INT64))])

    def _add(self, name: str, array: np.ndarray) -> str:
        from onnx import numpy_helper

        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return name


def require_onnx() -> Any:
    """Return the packages onnx and onnxruntime; without them say how to get them."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"ONNX export needs the package {error.name}.", remedy="pip install 'headrace[onnx]'"
        ) from error
    return onnx, onnxruntime
