"""Two-stage pipelines with two replicas, as a program of a job: each process saves what it has at the end."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from headrace import Infeed, OptimizerOutput, Outfeed, Stage, pipeline
from headrace.job import join_job

REPLICAS, MICROS, STEPS, CALLS = 2, 3, 2, 2
RNG = np.random.default_rng(0)
WEIGHTS = [RNG.normal(size=shape).astype(np.float32) for shape in ((5, 8), (8, 2))]
DATA = [
    (RNG.normal(size=(6, 5)).astype(np.float32), RNG.integers(0, 2, 6))
    for _ in range(CALLS * STEPS * MICROS * REPLICAS)
]

# Updates of each stage by itself, of both together on the first device, and cut over the replicas.
CASES: dict[str, tuple[optax.GradientTransformation, bool, dict[str, Any]]] = {
    "adam": (optax.adam(0.05), True, {}),
    "clipped": (
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
        False,
        {"pipeline_schedule": "interleaved"},
    ),
    "sharded": (optax.adam(0.05), True, {"replicated_optimizer_state_sharding": True}),
}


def elements(process: int, num_processes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the elements of a process's replicas: of each micro batch one for every replica."""
    return [element for n, element in enumerate(DATA) if n % REPLICAS * num_processes // REPLICAS == process]


def first(params: Any, state: Any, x: Any, y: Any) -> Any:
    """Apply weights; the state, which is not trained, differs between replicas until the end of a step."""
    h = jnp.tanh(x @ params)
    return (h, y), state + jnp.mean(h)


def last(params: Any, h: Any, y: Any) -> Any:
    """Return the loss."""
    return jnp.mean(jnp.square(h @ params - jax.nn.one_hot(y, 2)))


def train(case: str, process: int = 0, num_processes: int = 1) -> dict[str, np.ndarray]:
    """Train in two calls; return weights, state, and the losses of this process's replicas."""
    optimizer, apart, options = CASES[case]
    outfeed = Outfeed()
    pipe = pipeline(
        [Stage(first, WEIGHTS[0], state=np.float32(0)), Stage(last, WEIGHTS[1])],
        MICROS,
        optimizer_function=lambda loss: OptimizerOutput(optimizer, loss, apart=apart),
        infeed=Infeed(elements(process, num_processes)),
        outfeed=outfeed,
        repeat_count=STEPS,
        replicas=REPLICAS,
        **options,
    )
    state = pipe.init()
    for _ in range(CALLS):
        state = pipe(state)
    found = {"first": state.params[0], "last": state.params[1], "state": state.state[0], "losses": outfeed.dequeue()}
    return {name: np.asarray(array) for name, array in found.items()}


def main(folder: str) -> None:
    """Join the job, train every case and save the results."""
    with join_job() as info:
        assert info is not None
        for case in CASES:
            np.savez(Path(folder) / f"{case}-{info.process}.npz", **train(case, info.process, info.num_processes))  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main(*sys.argv[1:])
