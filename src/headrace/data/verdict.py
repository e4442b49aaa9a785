"""The verdict on what bound a run: the device's computing, or the host's preparing of its input."""

_COMPUTE, _MIXED = 0.02, 0.10  # shares of the time waited: below the first nothing is lost, above the second much is


def verdict(
    images: int, seconds: float, wait_seconds: float, prepare_seconds: float, threads: int, cached: bool
) -> str:
    """Return in a sentence what bound the run, with the rates of both sides and, if input-bound, what to do.

    `images` and `seconds` are of the same calls, without the first; `wait_seconds` is the part of `seconds` in which
    the device had no block; `prepare_seconds` is how long the host took to prepare that many images.
    """
    if images <= 0 or seconds <= 0:
        return "no verdict: no call after the first one was timed"
    wait_seconds = min(max(wait_seconds, 0.0), seconds)
    share = wait_seconds / seconds
    waited = f"{100 * share:.1f} % of the time"
    if share < _COMPUTE:
        where = "the data set is on the device, which" if cached else "the device"
        return f"compute-bound: {where} never waited ({waited})"
    rates = _rates(images, seconds - wait_seconds, prepare_seconds)
    if share < _MIXED:
        return f"mostly compute-bound: the device waited {waited}; {rates}"
    return f"input-bound: {rates} and waited {waited}; {_advice(threads, cached)}"


def _rates(images: int, busy_seconds: float, prepare_seconds: float) -> str:
    host = f"the host prepares {images / prepare_seconds:,.0f} img/s" if prepare_seconds > 0 else "the host is idle"
    device = f"{images / busy_seconds:,.0f}" if busy_seconds > 0 else "any number of"
    return f"{host}, the device takes {device} img/s"


def _advice(threads: int, cached: bool) -> str:
    if cached:
        return "the set is already on the device: make calls longer (a lower --logs-per-epoch)"
    return f"use --dataset-cache device or more --pipeline-num-parallel (now {threads})"
