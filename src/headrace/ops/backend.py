"""The one place that asks which backend a program is traced for."""

import jax


def on_cpu() -> bool:
    """Say, at trace time, whether the program will run on the CPU."""
    return jax.default_backend() == "cpu"
