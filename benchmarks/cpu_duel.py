"""One training step on the CPU, Headrace beside PyTorch: alternating rounds in processes that stay, float32.

    python benchmarks/cpu_duel.py --torch PYTHON resnet50:8:torch,torch_compile,headrace,headrace_off

A job is NETWORK:BATCH:SIDES. The sides take turns, `--rounds` times `--steps` steps, so that a busy machine troubles
them alike. For each side the best and the median step, the CPU time of the best step, and the ratios to the first side
that is PyTorch's are printed as a JSON line. The step is forward, backward and SGD with momentum on a fixed random
batch; PyTorch's images are channels last. `headrace_off` leaves convolutions to XLA, `headrace_direct` uses no
Winograd, `headrace_eval` and `torch_eval` (and `torch_compile_eval`) are the forward pass alone. `--torch` is a Python
with torch and, for other networks than the CIFAR ResNets, torchvision.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODES = {"headrace": "auto", "headrace_off": "off", "headrace_direct": "no-winograd"}


def headrace_step(model: str, batch: int, side: str) -> Callable[[], None]:
    """Return a step of a network here; it keeps its state."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from cpu_step import fresh_state, make_network, make_step

    from headrace.model.context import Ctx

    network = make_network(model, "batch_norm")
    mode = MODES[side.removesuffix("_eval")]
    rng = np.random.default_rng(0)
    images = jnp.array(rng.standard_normal((batch, *network.input_hwc)), jnp.float32)
    labels = jnp.array(rng.integers(0, network.num_classes, batch))
    state = fresh_state(network)
    if side.endswith("_eval"):
        ctx = Ctx(train=False, cpu_kernels=mode)
        forward = jax.jit(lambda params, stats, x: network.apply(params, stats, x, ctx)[0])
        return lambda: jax.block_until_ready(forward(*state[:2], images))
    program = jax.jit(make_step(network, jnp.float32, mode), donate_argnums=0)

    def step() -> None:
        nonlocal state
        state, loss = program(state, (images, labels))
        jax.block_until_ready((state, loss))

    return step


def torch_step(model: str, batch: int, side: str) -> Callable[[], None]:
    """Return the same step in PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    sys.path.insert(0, str(HERE.parent / "tests" / "weights"))
    from torch_side import build  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cifar = model.startswith("cifar_resnet")
    net = build("cifar", model.removeprefix("cifar_resnet") + "-end") if cifar else build("torchvision", model)
    net = net.to(memory_format=torch.channels_last)
    size, classes = (32, 10) if cifar else (224, 1000)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, (batch,))
    forward = torch.compile(net) if "compile" in side else net
    if side.endswith("_eval"):
        net.eval()

        def infer() -> None:
            with torch.inference_mode():
                forward(images)

        return infer
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        torch.nn.functional.cross_entropy(forward(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def serve(model: str, batch: int, side: str) -> None:
    """Be one side: for each number read, take that many steps and print the seconds of wall clock and of CPU."""
    step = (torch_step if side.startswith("torch") else headrace_step)(model, batch, side)
    step()
    step()
    print("ready", flush=True)
    for line in sys.stdin:
        wall, cpu = [], []
        for _ in range(int(line)):
            start, start_cpu = time.perf_counter(), time.process_time()
            step()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
        print(json.dumps([wall, cpu]), flush=True)


def duel(model: str, batch: int, sides: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Let the sides of a job take turns; return their figures."""
    children: dict[str, Any] = {}
    for side in sides:
        python = args.torch if side.startswith("torch") else sys.executable
        command = [python, __file__, "--serve", model, str(batch), side]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=args.errors, text=True)
        assert child.stdout is not None
        if child.stdout.readline().strip() == "ready":
            children[side] = child
        else:
            print(f"{model}: {side} does not run", file=sys.stderr)
    wall: dict[str, list[float]] = {side: [] for side in children}
    cpu: dict[str, list[float]] = {side: [] for side in children}
    for _ in range(args.rounds):
        for side, child in children.items():
            child.stdin.write(f"{args.steps}\n")
            child.stdin.flush()
            seconds, cpu_seconds = json.loads(child.stdout.readline())
            wall[side] += seconds
            cpu[side] += cpu_seconds
    for child in children.values():
        child.stdin.close()
        child.wait()
    figures = {
        side: {
            "best_ms": round(1000 * min(wall[side]), 2),
            "median_ms": round(1000 * statistics.median(wall[side]), 2),
            "cpu_ms": round(1000 * min(cpu[side]), 2),
        }
        for side in children
    }
    base = next((figures[side] for side in children if side.startswith("torch")), None)
    if base is not None:
        for found in figures.values():
            found["speed"] = {
                key: round(base[key] / max(found[key], 1e-9), 2) for key in ("best_ms", "median_ms", "cpu_ms")
            }
    return {"model": model, "batch": batch, "load": round(os.getloadavg()[0], 1)} | figures


def main() -> None:
    """Parse, measure, print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help="NETWORK:BATCH:SIDE,SIDE...")
    parser.add_argument("--torch", default=sys.executable, help="a Python with torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--verbose", action="store_true", help="show what the sides print as errors")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.errors = None if args.verbose else subprocess.DEVNULL
    if args.serve:
        serve(args.serve[0], int(args.serve[1]), args.serve[2])
        return
    for job in args.jobs:
        model, batch, sides = job.split(":")
        print(json.dumps(duel(model, int(batch), sides.split(","), args)), flush=True)


if __name__ == "__main__":
    main()
