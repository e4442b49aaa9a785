"""Remarks across options about the weights that training starts from."""

from headrace.config.rule import Remark


def _without_file(name: str) -> Remark:
    """Say that an option about a file of weights does nothing without one."""
    return Remark(
        when=lambda facts: facts.given(name) and facts.config.weights.init_from is None,
        text=lambda facts: f"{facts.told(name)} has no effect without init_from.",
    )


WEIGHT_NOTES = tuple(_without_file(name) for name in ("init_ema", "init_min_loaded"))
