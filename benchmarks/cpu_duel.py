"""One training step on the CPU, Headrace beside PyTorch: alternating rounds in processes that stay.

    python benchmarks/cpu_duel.py --torch PYTHON resnet50:8:torch,torch_compile,headrace,headrace_off

A job is NETWORK:BATCH:SIDES. The sides take turns, `--rounds` times `--steps` steps, so that a busy machine troubles
them alike. For each side a step of the best and of the median round, the CPU time and page faults of a step of the best
round, and the ratios to the first side that is not Headrace's are printed as a JSON line. The step is forward, backward
and SGD with momentum on a fixed random batch; a round of ours is one call of the device loop, as in training, and
PyTorch's images are channels last. Everything is float32; `_bf16` at the end of a side is bfloat16: precision 16.32
here, autocast with float32 weights there. `headrace_off` leaves convolutions to XLA, and `headrace_direct` uses no
Winograd. `headrace_eval`, `torch_eval`, `torch_compile_eval` and `onnx_eval` (onnxruntime, the network exported by
torch) are the forward pass alone, ours as `headrace predict` and `bench --mode inference` run it.
`--torch` is a Python with torch and, for other networks than the CIFAR ResNets, torchvision.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODES = {"headrace": "auto", "headrace_off": "off", "headrace_direct": "no-winograd"}


def headrace_steps(model: str, batch: int, side: str) -> Callable[[int], None]:
    """Return a function that takes that many steps of a network here; it keeps its state."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from cpu_step import fresh_state, make_network, make_step

    from headrace.engine.devices import replica_mesh, run_in_calling_thread
    from headrace.engine.forward import LOGITS, EvalSpec, WholeForward

    if "_eval" in side:
        run_in_calling_thread()
    network = make_network(model, "batch_norm")
    dtype = jnp.bfloat16 if side.endswith("_bf16") else jnp.float32
    side = side.removesuffix("_bf16")
    mode = MODES[side.removesuffix("_eval")]
    rng = np.random.default_rng(0)
    images = jnp.array(rng.standard_normal((batch, *network.input_hwc)), jnp.float32)
    labels = jnp.array(rng.integers(0, network.num_classes, batch))
    state = fresh_state(network)
    if side.endswith("_eval"):

        class Images:
            def __call__(self, _resident: Any, block: Any) -> tuple[Any, None]:
                return block["images"], None

            def labels(self, _resident: Any, _block: Any) -> None: ...

        spec = EvalSpec(
            network=network,
            fetch=Images(),
            compute_dtype=dtype,
            num_replicas=1,
            reducer=LOGITS,
            cpu_kernels=mode,
        )
        forward, block = WholeForward(replica_mesh(jax.devices()[:1]), spec), {"images": images[None]}
        placed = forward.place(state[:2])
        program = forward.compile(placed, None, block)
        prepared = program.prepare(placed, None, block)
        return repeated(lambda: jax.block_until_ready(program(prepared, None, block)))
    step = make_step(network, dtype, mode)

    def loop(state: Any, data: Any, count: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, carry: step(carry[0], data), (state, jnp.float32(0)))

    program = jax.jit(loop, donate_argnums=0)

    def steps(count: int) -> None:
        nonlocal state
        state, loss = program(state, (images, labels), count)
        jax.block_until_ready((state, loss))

    return steps


def repeated(step: Callable[[], Any]) -> Callable[[int], None]:
    """Return a function that calls `step` that many times."""

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    return steps


def torch_steps(model: str, batch: int, side: str) -> Callable[[int], None]:
    """Return the same for PyTorch, or for onnxruntime with PyTorch's network."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch_peer import build_network, fixed_batch, forward_pass, training_step

    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    cast = torch.autocast("cpu", torch.bfloat16) if side.endswith("_bf16") else None
    side = side.removesuffix("_bf16")
    net = build_network(model)
    images, labels = fixed_batch(batch, *((32, 10) if model.startswith("cifar_resnet") else (224, 1000)))
    if side == "onnx_eval":
        return onnx_steps(net, images.contiguous(), num_threads)
    net = net.to(memory_format=torch.channels_last)
    forward = torch.compile(net) if "compile" in side else net
    if side.endswith("_eval"):
        return repeated(forward_pass(net, forward, images, cast))
    return repeated(training_step(net, forward, (images, labels), cast))


def onnx_steps(net: Any, images: Any, num_threads: int) -> Callable[[int], None]:
    """Export the network with its batch norms folded, as onnxruntime's own optimizer leaves it; return its steps."""
    import onnxruntime  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "network.onnx"))
        torch.onnx.export(net, (images,), path, input_names=["images"], dynamo=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {"images": images.numpy()}
    return repeated(lambda: session.run(None, feed))


def serve(model: str, batch: int, side: str) -> None:
    """Be one side: for each number read, take that many steps and print seconds, CPU seconds and page faults of one."""
    steps = (headrace_steps if side.startswith("headrace") else torch_steps)(model, batch, side)
    steps(1)
    steps(2)
    print("ready", flush=True)
    for line in sys.stdin:
        count = int(line)
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        steps(count)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps([wall / count, cpu / count, (after.ru_minflt - before.ru_minflt) / count]), flush=True)


def duel(model: str, batch: int, sides: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Let the sides of a job take turns; return their figures."""
    children: dict[str, Any] = {}
    for side in sides:
        python = sys.executable if side.startswith("headrace") else args.torch
        command = [python, __file__, "--serve", model, str(batch), side]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=args.errors, text=True)
        assert child.stdout is not None
        if child.stdout.readline().strip() == "ready":
            children[side] = child
        else:
            print(f"{model}: {side} does not run", file=sys.stderr)
    rounds: dict[str, list[list[float]]] = {side: [] for side in children}
    for _ in range(args.rounds):
        for side, child in children.items():
            child.stdin.write(f"{args.steps}\n")
            child.stdin.flush()
            rounds[side].append(json.loads(child.stdout.readline()))
    for child in children.values():
        child.stdin.close()
        child.wait()
    figures: dict[str, Any] = {}
    for side, found in rounds.items():
        wall, cpu, faults = zip(*found, strict=True)
        figures[side] = {
            "best_ms": round(1000 * min(wall), 2),
            "median_ms": round(1000 * statistics.median(wall), 2),
            "cpu_ms": round(1000 * min(cpu), 2),
            "faults": round(min(faults)),
        }
    base = next((figures[side] for side in children if not side.startswith("headrace")), None)
    if base is not None:
        for row in figures.values():
            row["speed"] = {
                key: round(base[key] / max(row[key], 1e-9), 2) for key in ("best_ms", "median_ms", "cpu_ms")
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
