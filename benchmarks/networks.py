"""Images per second of networks in training or inference, Headrace beside torchvision's, on one GPU (or the CPU).

    python benchmarks/networks.py [--mode inference] [--sides headrace,eager,compile] resnet50:256 convnext_tiny:256

A job is NETWORK:BATCH, or NETWORK:BATCH:SIZE for another image size than the network's. Every side runs in a process of
its own, one after the other. Its figures are printed to stderr at once, so that a time limit loses only what has not
been run; a job's line of a Markdown table when its sides are done. Headrace's figure is that of `headrace bench` on a
synthetic dataset. PyTorch's is the median of `--rounds` rounds of steps (forward, cross-entropy, backward, SGD with
momentum) on one batch that is on the device: channels last, autocast to bfloat16 on a GPU, fused SGD, cuDNN's benchmark
mode. Compile seconds are those of `bench`, and of PyTorch's first step. `--torch` is a Python with torch and
torchvision. Inference adds the median latency of one batch at a time, from 8-bit images in the host's memory to scores
there.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIDES = ("headrace", "eager", "compile")


def run_torch(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one network in PyTorch, in this process."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch_peer import build_network, fixed_batch, forward_pass, training_step

    model, batch, size = parse(args.jobs[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    net = build_network(model).to(device=device, memory_format=torch.channels_last)
    images, labels = fixed_batch(batch, size, 1000, device)
    cast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    forward = torch.compile(net) if args.side == "compile" else net
    is_training = args.mode == "training"
    step = (
        training_step(net, forward, (images, labels), cast) if is_training else forward_pass(net, forward, images, cast)
    )

    def seconds(step: Callable[[], Any], count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    first = seconds(step, 1)
    seconds(step, 3)
    count = max(1, round(1.0 / (seconds(step, 3) / 3)))  # steps that take about a second
    rounds = [seconds(step, count) / count for _ in range(args.rounds)]
    found = {"images_per_second": batch / statistics.median(rounds), "compile_seconds": first}
    if is_training:
        return found
    # As `headrace bench` does: one batch at a time, from 8-bit images in the host's memory to scores there.
    sent = torch.randint(0, 256, images.shape, dtype=torch.uint8).to(memory_format=torch.channels_last)
    sent = sent.pin_memory() if device == "cuda" else sent

    def answer() -> None:
        with torch.inference_mode(), cast:
            there = sent.to(device, non_blocking=True)
            forward(((there.float() - 127) / 64).to(memory_format=torch.channels_last)).float().cpu()

    seconds(answer, 3)
    return found | {"latency": 1000 * statistics.median(seconds(answer, 1) for _ in range(50))}


def run_headrace(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one network by `headrace bench`."""
    model, batch, size = parse(args.jobs[0])
    options = ["--mode", args.mode, "--config", "none", "--model", model, "--micro-batch-size", str(batch)]
    options += ["--dataset", "synthetic", "--num-classes", "1000", "--image-size", str(size)]
    options += ["--num-samples", str(args.steps * batch), "--precision", args.precision]
    options += ["--steps-per-call", str(args.steps), "--num-calls", str(args.rounds), *args.options.split()]
    command = [sys.executable, "-m", "headrace", "bench", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads(lines[-1])
    kept = {name: found[name] for name in ("images_per_second", "compile_seconds")}
    latency = found.get("latency_milliseconds")
    return kept | ({"latency": latency["p50"]} if latency else {})


def parse(job: str) -> tuple[str, int, int]:
    """Return (network, batch, image size) of a job."""
    match = re.fullmatch(r"(\w+):(\d+)(?::(\d+))?", job)
    if match is None:
        raise SystemExit(f"{job!r} is no job: give NETWORK:BATCH or NETWORK:BATCH:SIZE")
    return match[1], int(match[2]), int(match[3] or 224)


def main() -> None:
    """Run the jobs, or one side of one job in a process started for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="NETWORK:BATCH[:SIZE]")
    parser.add_argument("--mode", choices=("training", "inference"), default="training")
    parser.add_argument("--sides", default=",".join(SIDES), help="[%(default)s]")
    parser.add_argument("--precision", default="16.32", help="of Headrace; 32.32 on a CPU [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of one of Headrace's rounds [%(default)s]")
    parser.add_argument("--options", default="", help="more options of headrace bench, in one word")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one side of one job [%(default)s]")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(run_headrace(args) if args.side == "headrace" else run_torch(args)))
        return
    sides = args.sides.split(",")
    print("| network | batch | px |" + "".join(f" {side} img/s (compile s) |" for side in sides), flush=True)
    print("|---" * (3 + len(sides)) + "|", flush=True)
    for job in args.jobs:
        model, batch, size = parse(job)
        cells = []
        for side in sides:
            cells.append(_cell(args, job, side))
            print(f"{job} {side}: {cells[-1]}", file=sys.stderr, flush=True)
        print(f"| {model} | {batch} | {size} | " + " | ".join(cells) + " |", flush=True)


def _cell(args: argparse.Namespace, job: str, side: str) -> str:
    python = sys.executable if side == "headrace" else args.torch
    command = [python, __file__, job, "--side", side, "--mode", args.mode, "--rounds", str(args.rounds)]
    command += ["--precision", args.precision, "--steps", str(args.steps), "--options", args.options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired:
        return f"more than {args.limit:.0f} s"
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        return "failed"
    found = json.loads(done.stdout.splitlines()[-1])
    latency = f", {found['latency']:.2f} ms" if "latency" in found else ""
    return f"{found['images_per_second']:,.0f} ({found['compile_seconds']:.0f}){latency}"


if __name__ == "__main__":
    main()
