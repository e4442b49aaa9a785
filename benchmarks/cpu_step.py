"""One training step on the CPU: jitted alone, inside a device loop, and beside a peer that prints its own figure.

    python benchmarks/cpu_step.py --model cifar_resnet8 --batch 32 --rounds 5 --peer PYTHON PEER_SCRIPT

The step is forward, backward and SGD with momentum, float32, on a fixed random batch. The three are measured in turn,
`--rounds` times, so that a busy machine troubles them alike. A round's figure is the median of its calls; the best and
the median round of each are printed as JSON.
The peer is run as `PYTHON PEER_SCRIPT --model resnet8 --batch 32 --steps N` (our name without `cifar_`) and must end
its output with a JSON line that has `images_per_second`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.load import config_from
from headrace.model import Ctx, Network, build_network
from headrace.model.families import model_row


def make_network(name: str, norm: str) -> Network:
    """Build the network at the image size and class count it was made for."""
    row = model_row(name)
    norm_layer = {"name": norm, "num_groups": 8} if norm == "group_norm" else {"name": norm}
    model = config_from({"model_name": name, "norm_layer": norm_layer}).model
    return build_network(model, row.num_classes, (row.image_size, row.image_size, 3))


def make_step(network: Network, dtype: Any) -> Callable[[Any, Any], Any]:
    """Return step(state, (images, labels)) -> (state, loss), the whole of a plain SGD training step."""
    ctx = Ctx(train=True, compute_dtype=dtype)

    def loss_fn(params: Any, stats: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        logits, batch_stats = network.apply(params, stats, images, ctx)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -jnp.mean(chosen), batch_stats

    def step(state: Any, batch: Any) -> Any:
        params, stats, momentum = state
        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, *batch)
        momentum = jax.tree.map(lambda m, g, p: 0.9 * m + g + 1e-4 * p, momentum, grads, params)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum)
        stats = jax.tree.map(lambda s, b: 0.97 * s + 0.03 * b, stats, batch_stats)
        return (params, stats, momentum), loss

    return step


def fresh_state(network: Network) -> Any:
    """Return (params, stats, momentum) as device arrays of their own."""
    params, stats = network.init(0)
    return jax.tree.map(jnp.array, (params, stats, jax.tree.map(np.zeros_like, params)))


class Measured:
    """A compiled program that keeps its state between rounds: seconds per step of each round, and its compile time."""

    def __init__(self, program: Any, state: Any, batch: Any, steps_per_call: int) -> None:
        start = time.perf_counter()
        self.program = jax.jit(program, donate_argnums=0).lower(state, batch).compile()
        self.compile_seconds = time.perf_counter() - start
        self.state, self.batch, self.steps_per_call, self.rounds = state, batch, steps_per_call, []

    def round(self, steps: int) -> None:
        """Run about `steps` steps after one call of warm-up; keep the median."""
        self.state, out = self.program(self.state, self.batch)
        jax.block_until_ready(out)
        seconds = []
        for _ in range(max(1, steps // self.steps_per_call)):
            start = time.perf_counter()
            self.state, out = self.program(self.state, self.batch)
            jax.block_until_ready(out)
            seconds.append((time.perf_counter() - start) / self.steps_per_call)
        self.rounds.append(statistics.median(seconds))


def run_peer(command: list[str], args: argparse.Namespace) -> float:
    """Run the peer once; return its images per second."""
    name = args.model.removeprefix("cifar_")
    full = [*command, "--model", name, "--batch", str(args.batch), "--steps", str(args.steps)]
    full += ["--precision", "bf16"] if args.dtype == "bfloat16" else []
    done = subprocess.run(full, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])["images_per_second"]


def summary(images_per_second: list[float]) -> dict[str, float]:
    """Return best and median."""
    best, median = max(images_per_second), statistics.median(images_per_second)
    return {"best_images_per_second": round(best, 1), "median_images_per_second": round(median, 1)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all programs in turn; return the figures."""
    network = make_network(args.model, args.norm)
    step = make_step(network, jnp.dtype(args.dtype))
    rng = np.random.default_rng(0)
    images = jnp.array(rng.standard_normal((args.batch, *network.input_hwc)), jnp.float32)
    batch = images, jnp.array(rng.integers(0, network.num_classes, args.batch))

    def loop(state: Any, batch: Any) -> Any:
        return jax.lax.scan(lambda s, _: step(s, batch), state, None, length=args.loop)

    alone = Measured(step, fresh_state(network), batch, 1)
    scanned = Measured(loop, fresh_state(network), batch, args.loop)
    peer: list[float] = []
    for _ in range(args.rounds):
        alone.round(args.steps)
        scanned.round(args.steps)
        peer += [run_peer(args.peer, args)] if args.peer else []
    result: dict[str, Any] = {"compile_seconds": round(alone.compile_seconds, 2)}
    result["loop_compile_seconds"] = round(scanned.compile_seconds, 2)
    for name, program in (("alone", alone), ("in_loop", scanned)):
        result[name] = summary([args.batch / seconds for seconds in program.rounds])
    result["loop_over_alone_seconds"] = round(min(scanned.rounds) / min(alone.rounds), 3)
    if peer:
        result["peer"] = summary(peer)
        result["alone_over_peer"] = round(args.batch / min(alone.rounds) / max(peer), 3)
        result["in_loop_over_peer"] = round(args.batch / min(scanned.rounds) / max(peer), 3)
    return result


def main() -> None:
    """Parse, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cifar_resnet8")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--norm", choices=["batch_norm", "group_norm", "none"], default="batch_norm")
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument("--loop", type=int, default=5, help="steps per call of the device loop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", nargs=2, metavar=("PYTHON", "SCRIPT"))
    args = parser.parse_args()
    about = {"jax": jax.__version__, "cores": os.cpu_count(), "machine": platform.machine()}
    asked = {key: getattr(args, key) for key in ("model", "batch", "dtype", "norm", "steps", "loop", "rounds")}
    print(json.dumps(about | asked | measure(args)))


if __name__ == "__main__":
    main()
