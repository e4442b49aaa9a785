"""The average of the checkpoints of a run, as a checkpoint below its directory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.store import list_checkpoints, load, save
from headrace.config.schema import Config
from headrace.core.errors import ConfigError
from headrace.core.json_text import parse_json
from headrace.run.averages import average, choose
from headrace.run.directory import layout, read_run

FOLDER = "averages"
_FROM_NEWEST = ("step", "epoch", "seed", "config", "plan", "class_names", "input", "elapsed_seconds")


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """An average that was written: where, its label, its members, and damaged checkpoints that were skipped."""

    path: Path
    label: str
    members: tuple[str, ...]
    damaged: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """Which checkpoints are averaged, and how."""

    mode: str = "mean"
    last: int | None = None
    decay: float = 0.99
    discard_last: int = 0
    weights: str = "raw"
    name: str | None = None


def average_run(run: Path, options: AverageOptions) -> Averaged:
    """Average the checkpoints of a run (or of a directory of them); an earlier average of that name is replaced."""
    folder, home = (run, run.parent) if list_checkpoints(run) else _of_run(run)
    for what, number in (("last", options.last), ("discard_last", options.discard_last)):
        if number is not None and number < (1 if what == "last" else 0):
            raise ConfigError(f"{what} is {number}.", rule="It must be a count.")
    paths, damaged = choose(folder, options.last, options.discard_last)
    arrays = average(paths, options.mode, options.decay, options.weights)
    _, manifest = load(paths[-1])
    label = f"{'mean' if options.mode == 'mean' else 'exp'} {len(paths)}"
    how = options.mode if options.mode == "mean" else f"{options.mode}-{options.decay:g}"
    ema = "" if options.weights == "raw" else f"-{options.weights}"
    name = options.name or f"{how}{ema}-{len(paths)}-{paths[-1].name}"
    if Path(name).name != name or name.startswith("."):
        raise ConfigError(f"The name {name!r} cannot be the name of a directory.", remedy="Leave slashes out.")
    given = {key: manifest[key] for key in _FROM_NEWEST if key in manifest}
    members = tuple(path.name for path in paths)
    made = {"mode": options.mode, "of": list(members), "weights": options.weights}
    made |= {"decay": options.decay} if options.mode != "mean" else {}
    path = save(home / FOLDER, name, arrays, given | {"weights": label, "averaged": made})
    return Averaged(path=path, label=label, members=members, damaged=tuple(damaged))


def _of_run(run: Path) -> tuple[Path, Path]:
    directory, resolved = read_run(run)
    return layout(directory.path, resolved.config).checkpoints, directory.path


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
