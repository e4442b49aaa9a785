"""One training step on the CPU: jitted alone, inside a device loop, and beside a peer that prints its own figure.

    python benchmarks/cpu_step.py --model cifar_resnet8 --batch 32 --rounds 5 --peer PYTHON PEER_SCRIPT

The step is forward, backward and SGD with momentum, float32, on a fixed random batch. The three are measured in turn,
`--rounds` times, so that a busy machine troubles them alike. A round's figure is the median of its calls; the best and
the median round of each are printed as JSON, and the CPU time of an image, which other work on the machine hardly
changes. `--loop 0` leaves the device loop out.
The peer is run as `PYTHON PEER_SCRIPT --model resnet8 --batch 32 --steps N` (our name without `cifar_`) and must end
its output with a JSON line that has `images_per_second`, and may have `cpu_ms_per_image`. `torch_step.py` is one.
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
from headrace.config.networks import find_variant
from headrace.model.context import Ctx, Draws
from headrace.model.network import Network
from headrace.model.zoo import build_network


def make_network(name: str, norm: str) -> Network:
    """Build the network at the image size and class count it was made for."""
    row = find_variant(name)
    norm_layer = {"name": norm, "num_groups": 8} if norm == "group_norm" else {"name": norm}
    model = config_from({"model_name": name, "norm_layer": norm_layer}).model
    return build_network(model, row.num_classes, (row.image_size, row.image_size, 3))


def make_step(network: Network, dtype: Any, cpu_kernels: str = "auto") -> Callable[[Any, Any], Any]:
    """Return step(state, (images, labels)) -> (state, loss), the whole of a plain SGD training step."""

    def loss_fn(params: Any, stats: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        draws = Draws(seed=0, step=0, samples=jnp.arange(len(images), dtype=jnp.uint32))
        ctx = Ctx(train=True, compute_dtype=dtype, draws=draws, cpu_kernels=cpu_kernels)
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
        self.state, self.batch, self.steps_per_call, self.rounds, self.cpu = state, batch, steps_per_call, [], []

    def round(self, steps: int) -> None:
        """Run about `steps` steps after one call of warm-up; keep the median."""
        self.state, out = self.program(self.state, self.batch)
        jax.block_until_ready(out)
        seconds = []
        for _ in range(max(1, steps // self.steps_per_call)):
            start, cpu = time.perf_counter(), time.process_time()
            self.state, out = self.program(self.state, self.batch)
            jax.block_until_ready(out)
            seconds.append((time.perf_counter() - start) / self.steps_per_call)
            self.cpu.append((time.process_time() - cpu) / self.steps_per_call)
        self.rounds.append(statistics.median(seconds))


def run_peer(command: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Run the peer once; return its figures."""
    name = args.model.removeprefix("cifar_")
    full = [*command, "--model", name, "--batch", str(args.batch), "--steps", str(args.steps)]
    full += ["--precision", "bf16"] if args.dtype == "bfloat16" else []
    done = subprocess.run(full, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


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
    programs = {"alone": alone}
    if args.loop:
        programs["in_loop"] = Measured(loop, fresh_state(network), batch, args.loop)
    peer: list[dict[str, float]] = []
    for _ in range(args.rounds):
        for program in programs.values():
            program.round(args.steps)
        peer += [run_peer(args.peer, args)] if args.peer else []
    result: dict[str, Any] = {}
    for name, program in programs.items():
        result[name] = summary([args.batch / seconds for seconds in program.rounds])
        result[name]["compile_seconds"] = round(program.compile_seconds, 2)
        result[name]["cpu_ms_per_image"] = round(1000 * min(program.cpu) / args.batch, 2)
    if args.loop:
        result["loop_over_alone_seconds"] = round(min(programs["in_loop"].rounds) / min(alone.rounds), 3)
    if peer:
        rates = [figures["images_per_second"] for figures in peer]
        result["peer"] = summary(rates)
        if "cpu_ms_per_image" in peer[0]:
            result["peer"]["cpu_ms_per_image"] = round(min(figures["cpu_ms_per_image"] for figures in peer), 2)
        for name, program in programs.items():
            result[f"{name}_over_peer"] = round(args.batch / min(program.rounds) / max(rates), 3)
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
    about["load"] = round(os.getloadavg()[0], 1)
    asked = {key: getattr(args, key) for key in ("model", "batch", "dtype", "norm", "steps", "loop", "rounds")}
    print(json.dumps(about | asked | measure(args)))


if __name__ == "__main__":
    main()
