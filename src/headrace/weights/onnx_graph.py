"""An ONNX graph under construction: nodes and weights, named by the paths of their layers."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError

OPSET = 18  # ReduceMean takes its axes as an input from here on; onnxruntime 1.14 and newer read it


@dataclass(frozen=True)
class Graph:
    """The nodes and weights so far (shared by all views of the graph), and the current path in the network."""

    nodes: list[Any] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    path: str = ""
    dtype: Any = np.float32  # of weights, and of constants that are not whole numbers

    def under(self, name: str) -> "Graph":
        """Return a view of the graph for a part of this layer."""
        return replace(self, path=f"{self.path}/{name}" if self.path else name)

    def node(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output; return the output's name."""
        from onnx import helper

        name = f"{self.path}/{kind}_{next(self.numbers)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def weight(self, name: str, array: object) -> str:
        """Add weights in the graph's type; return their name."""
        return self._add(f"{self.path}/{name}", np.asarray(array, self.dtype))

    def constant(self, array: object) -> str:
        """Add a constant, a floating-point one in the graph's type; return its name."""
        values = np.asarray(array)
        typed = values.astype(self.dtype) if values.dtype.kind == "f" else values
        return self._add(f"{self.path}/constant_{next(self.numbers)}", typed)

    def reshaped(self, x: str, shape: Sequence[int]) -> str:
        """Reshape; 0 keeps a dim, -1 takes the rest."""
        return self.node("Reshape", [x, self.constant(np.array(shape, np.int64))])

    def _add(self, name: str, array: np.ndarray) -> str:
        from onnx import numpy_helper

        # The reshape: ascontiguousarray makes a vector of a single number.
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))
        return name


def require_onnx() -> Any:
    """Return the packages onnx and onnxruntime; if missing, refuse with instructions."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"ONNX export needs the package {error.name}.", remedy="pip install 'headrace[onnx]'"
        ) from error
    return onnx, onnxruntime
