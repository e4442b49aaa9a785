"""The verdict on what bound a run: the device's computing, or the host's preparing of its input."""

from dataclasses import dataclass

_COMPUTE, _MIXED = 0.02, 0.10  # shares of the time waited: below the first nothing is lost, above the second much is


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a run's calls, without the first."""

    images: int
    seconds: float
    wait_seconds: float  # of `seconds`: the device had no block
    prepare_seconds: float  # the host took to prepare that many images, sending included
    send_seconds: float = 0.0  # of `prepare_seconds`: until the devices had the bytes
    bytes_per_image: float = 0.0
    threads: int = 1
    cached: bool = False  # the data set is on the device
    decodes: bool = False  # the host decodes image files


def verdict(run: Measured) -> str:
    """Return in a sentence what bound the run, with the rates of both sides and, if input-bound, what to do."""
    if run.images <= 0 or run.seconds <= 0:
        return "no verdict: no call after the first one was timed"
    waited_seconds = min(max(run.wait_seconds, 0.0), run.seconds)
    share = waited_seconds / run.seconds
    waited = f"{100 * share:.1f} % of the time"
    if share < _COMPUTE:
        where = "the data set is on the device, which" if run.cached else "the device"
        return f"compute-bound: {where} never waited ({waited})"
    rates = _rates(run, run.seconds - waited_seconds)
    if share < _MIXED:
        return f"mostly compute-bound: the device waited {waited}; {rates}"
    return f"input-bound: {rates} and waited {waited}; {_advice(run)}"


def _rates(run: Measured, busy_seconds: float) -> str:
    host = "the host is idle"
    if run.prepare_seconds > 0:
        host = f"the host prepares {run.images / run.prepare_seconds:,.0f} img/s"
    making = run.prepare_seconds - run.send_seconds
    if run.send_seconds > 0 and making > 0 and run.bytes_per_image > 0:
        bandwidth = run.images * run.bytes_per_image / run.send_seconds / 1e9
        verb = "decodes" if run.decodes else "reads"
        host += (
            f" ({verb} {run.images / making:,.0f}, sends {run.images / run.send_seconds:,.0f} at {bandwidth:.2g} GB/s)"
        )
    device = f"{run.images / busy_seconds:,.0f}" if busy_seconds > 0 else "any number of"
    return f"{host}, the device takes {device} img/s"


def _advice(run: Measured) -> str:
    if run.cached:
        return "the set is already on the device: make calls longer (a lower --logs-per-epoch)"
    if run.send_seconds > run.prepare_seconds / 2:
        return "sending binds it: leave --eight-bit-transfer on, or use --dataset-cache device"
    if run.decodes:
        return (
            "pack the images (headrace data pack), keep them decoded (--dataset-cache decoded), "
            f"or use more --pipeline-num-parallel (now {run.threads})"
        )
    return f"use --dataset-cache device or more --pipeline-num-parallel (now {run.threads})"
