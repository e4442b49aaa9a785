"""What a `Model` shows of its network and of an evaluation."""

from typing import Any

from headrace.model.cost import FLOPS_CONVENTION
from headrace.model.network import Network
from headrace.rows.metrics import OF_CLASSES, UNEVEN, class_ratio


class Report(dict[str, Any]):
    """The result of an evaluation: num_samples, loss, top1, top5, classes, confusion_matrix and more by name."""

    def __repr__(self) -> str:
        if "task" in self:
            numbers = {"loss": self["loss"], **self["metrics"]}
        else:
            rows = OF_CLASSES if self._is_uneven() else ()
            beside = {row.name: self[row.name] for row in rows if self[row.name] is not None}
            numbers = {"loss": self["loss"], "top1": self["top1"], **beside, **self.get("metrics", {})}
        means = ", ".join(f"{name}={value:.4f}" for name, value in numbers.items())
        return f"Report(num_samples={self['num_samples']}, {means})"

    def _is_uneven(self) -> bool:
        return (class_ratio([row["num_samples"] for row in self["classes"]]) or 1.0) >= UNEVEN


class Summary(str):
    """A text that an interactive session shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def network_summary(network: Network) -> Summary:
    """Return a table of the network's blocks: output shape, parameters and FLOPs of each."""
    total = network.total_cost()
    rows = [("block", "output", "parameters", "MFLOPs")]
    for (name, cost), shape in zip(network.costs().items(), network.shapes()[1:], strict=True):
        rows.append((name, shape_text(shape), f"{cost.params:,}", f"{cost.flops / 1e6:,.2f}"))
    rows.append(("total", "", f"{total.params:,}", f"{total.flops / 1e6:,.2f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{network.name}: {shape_text(network.input_hwc)} images, {network.num_classes:,} classes"]
    for name, shape, params, flops in rows:
        lines.append(f"{name:{widths[0]}}  {shape:>{widths[1]}}  {params:>{widths[2]}}  {flops:>{widths[3]}}".rstrip())
    return Summary("\n".join([*lines, f"FLOPs per image, forward: {FLOPS_CONVENTION}."]))


def shape_text(shape: Any) -> str:
    """Return a shape, or several, as text: 32x32x3."""
    if shape and isinstance(shape[0], tuple):
        return " + ".join(map(shape_text, shape))
    return "x".join(map(str, shape))
