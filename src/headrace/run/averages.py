"""Averages of checkpoints asked for together with training: made when it has ended well, and validated."""

from collections.abc import Iterator
from pathlib import Path

from headrace.checkpoint.store import list_checkpoints
from headrace.config.schema import Config
from headrace.core.bounded_json import parse_json
from headrace.run.directory import layout
from headrace.run.run_average import Averaged, AverageOptions, average_run


def averages_after(run: Path, config: Config) -> Iterator[Averaged]:
    """Make the means over the last epochs and the exponential averages of all checkpoints that were asked for."""
    for epochs in config.checkpoint.average_last_epochs or ():
        last = _newest_of(layout(run, config).checkpoints, epochs)
        yield average_run(run, AverageOptions(last=last, name=f"weight_avg_N_{epochs:g}"))
    for decay in config.checkpoint.average_decays or ():
        yield average_run(run, AverageOptions(mode="exponential", decay=decay, name=f"weight_avg_exp_{decay:g}"))


def _newest_of(checkpoints: Path, epochs: float) -> int:
    """Return how many of the newest checkpoints lie in the last epochs, rounded to a tenth as the reference does."""
    manifests = [path / "manifest.json" for path in list_checkpoints(checkpoints)]
    ends = [round(float(parse_json(file.read_bytes())["epoch"]), 1) for file in manifests if file.is_file()]
    return max(1, sum(end >= round(ends[-1] - epochs, 1) for end in ends)) if ends else 1
