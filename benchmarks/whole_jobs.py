"""Whole jobs in Headrace and in PyTorch (torch_job.py): wall time from the start of the process, its split, accuracy.

    python benchmarks/whole_jobs.py --data DATA --jobs c e --seeds 3 --output results.jsonl
    python benchmarks/whole_jobs.py --table results.jsonl

Both sides have the same data, epochs, batch size, augmentation, learning rates and validations, and save the weights at
the end. The first seed of each side begins with empty compilation caches, the others find what it compiled. DATA has
`cifar-10-batches-bin` (c, e) and the class folders `ants_bees` (a1, b) and `photos` (a2). Job b starts from WEIGHTS.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIDES = ("headrace", "torch", "torch-compiled")
PEER = Path(__file__).with_name("torch_job.py")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job: what both sides are told; a side without arguments does not take part."""

    title: str
    headrace: str
    torch: str = ""
    arrays: str = ""  # the dataset that is handed to PyTorch as arrays
    platform: str = ""


_IMAGES = (
    "--config images --train-crop torchvision --precision 16.32 --image-size {size} --batch-size {batch} "
    "--num-epochs {epochs} --warmup-epochs 3 --ckpts-per-epoch 0"
)
_TORCH_IMAGES = (
    "--model resnet50 --image-size {size} --batch {batch} --epochs {epochs} --warmup-epochs 3 --l2 1e-4 "
    "--label-smoothing 0.1 --amp"
)
_SMALL = {"size": 224, "batch": 32, "epochs": 30}
_LARGE = {"size": 128, "batch": 64, "epochs": 10}
_DIGITS = (
    "--config default --num-epochs 12 --ema-decay 0 --weight-decay 0 --l2-regularization 0.0005 --ckpts-per-epoch 0"
)
JOBS: dict[str, Job] = {
    "a1": Job(
        title="photographs: 245 ants and bees, ResNet-50, 224 px, 30 epochs",
        headrace=_IMAGES.format(**_SMALL) + " --dataset-path {data}/ants_bees",
        torch=_TORCH_IMAGES.format(**_SMALL) + " --folder {data}/ants_bees",
    ),
    "a2": Job(
        title="photographs: 9,600 in 16 class folders (links), ResNet-50, 128 px, 10 epochs",
        headrace=_IMAGES.format(**_LARGE) + " --dataset-path {data}/photos",
        torch=_TORCH_IMAGES.format(**_LARGE) + " --folder {data}/photos",
    ),
    "b": Job(
        title="fine-tuning of ResNet-50 on 245 ants and bees, 224 px, 30 epochs",
        headrace=_IMAGES.format(**_SMALL)
        + " --dataset-path {data}/ants_bees --init-from {weights} --model-dialect torchvision --learning-rate 0.005",
        torch=_TORCH_IMAGES.format(**_SMALL)
        + " --folder {data}/ants_bees --init-from {weights} --lr-per-image 0.00015625",
    ),
    "c": Job(
        title="CIFAR-10, ResNet-20, batch 256, 30 epochs",
        headrace="--config cifar10_resnet20 --dataset-path {data} --num-epochs 30 --validations-per-epoch 1 "
        "--ckpts-per-epoch 0 --bn-momentum 0.9",
        torch="--model resnet20 --epochs 30 --batch 256 --l2 5e-4 --warmup-epochs 5 --augment flip-crop --amp",
        arrays="cifar10",
    ),
    "d": Job(
        title="digits, ResNet-8, batch 32, 12 epochs, two CPU cores",
        headrace=_DIGITS,
        torch="--model resnet8 --epochs 12 --batch 32 --lr-per-image 0.003125 --warmup-epochs 2 --l2 5e-4 "
        "--augment {augment} --workers 0",
        arrays="digits",
        platform="cpu",
    ),
    "e": Job(title="CIFAR-10 to 94 %, recipe cifar10_fast", headrace="--config cifar10_fast --dataset-path {data}"),
}


def export_arrays(options: dict[str, Any], to: Path) -> str:
    """Write a dataset's arrays for the peer, as Headrace reads them; return its augmentation."""
    import numpy as np

    from headrace.config.load import config_from
    from headrace.data.dataset import open_dataset

    opened = open_dataset(config_from(options).data, 0)
    parts: dict[str, Any] = {"mean": np.array(opened.info.channel_mean), "std": np.array(opened.info.channel_std)}
    for source, (x, y) in ((opened.train, ("x", "y")), (opened.validation, ("xt", "yt"))):
        index = np.arange(len(source))
        parts |= {x: np.asarray(source.read(index, 0)), y: np.asarray(source.labels)[index].astype(np.uint8)}
    np.savez(to, **parts)
    return opened.info.augmentation


def run(words: Sequence[str], environment: dict[str, str], limit: float, log: Path) -> tuple[float, int]:
    """Run a process; return its wall time and exit status."""
    with log.open("w") as file:
        begun = time.perf_counter()
        try:
            status = subprocess.run(
                words, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
        return time.perf_counter() - begun, status


def measure(name: str, side: str, seed: int, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one job once; the caches of a side lie in `scratch` from seed to seed."""
    job, caches = JOBS[name], scratch / f"cache-{name}-{side}"
    cold, log = not caches.exists(), scratch / f"{name}-{side}-{seed}.log"
    values = {"data": args.data, "weights": args.weights}
    if job.arrays and side != "headrace":
        arrays = scratch / f"{job.arrays}.npz"
        if not arrays.exists():
            (scratch / f"{job.arrays}.txt").write_text(
                export_arrays({"dataset": job.arrays, "dataset_path": args.data}, arrays)
            )
        values |= {"augment": (scratch / f"{job.arrays}.txt").read_text()}
    caches.mkdir(exist_ok=True)
    if side == "headrace":
        runs = scratch / f"runs-{name}"
        words = [sys.executable, "-m", "headrace", "train", *job.headrace.format(**values).split(), "--seed", str(seed)]
        words += ["--log-dir", str(runs), "--run-name", str(seed), "--compilation-cache-dir", str(caches)]
        words += ["--platform", job.platform] if job.platform else []
        words += args.options.split()
    else:
        words = [args.torch_python, str(PEER), *job.torch.format(**values).split(), "--seed", str(seed)]
        words += ["--save", str(scratch / "model.pth")]
        words += ["--arrays", str(scratch / f"{job.arrays}.npz")] if job.arrays else []
        words += ["--compile", args.compile_mode] if side == "torch-compiled" else []
    # XLA and the CUDA driver cache kernels as well: each side has its own
    environment = {key: str(caches / key) for key in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")}
    wall, status = run(words, environment, args.limit, log)
    row = {"job": name, "side": side, "seed": seed, "cold": cold, "wall": round(wall, 2), "status": status}
    if status:
        return row | {"log": log.read_text()[-600:]}
    if side == "headrace":
        return row | _of_headrace(scratch / f"runs-{name}" / str(seed) / "metrics.jsonl", wall)
    found = json.loads(log.read_text().splitlines()[-1])
    seconds = found["seconds"] | {"imports": wall - found["wall_inside"]}
    return (
        row
        | {"top1": found["top1"], "best_top1": found["best_top1"], "seconds": _rounded(seconds)}
        | {"images_per_second": round(found["images_per_second"])}
    )


def _of_headrace(metrics: Path, wall: float) -> dict[str, Any]:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    end = next(record for record in records if record["kind"] == "run_end")
    valid = {record["weights"]: record["top1"] for record in records if record["kind"] == "validation"}
    return {
        "top1": valid.get("ema", valid["raw"]),
        "top1_by_weights": valid,
        "best_top1": end["best_top1"],
        "seconds": _rounded(end["seconds"] | {"imports": wall - end["wall_seconds"]}),
        "images_per_second": end["images_per_second"] and round(end["images_per_second"]),
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 2) for key, value in seconds.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown: one line for each job and side; runs beside others count for accuracy alone."""
    lines = [
        "| job | side | wall, cold | wall, caches filled | start | compile | train | wait | validate | top-1 (seeds) |",
        "|" + "---|" * 10,
    ]
    for job in dict.fromkeys(row["job"] for row in rows):
        for side in SIDES:
            good = [row for row in rows if (row["job"], row["side"]) == (job, side) and not row.get("status")]
            if good:
                lines.append(f"| {job} | {side} | {' | '.join(_cells(good))} |")
    return "\n".join(lines)


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    timed = [row for row in rows if "wall" in row]
    first, warm = timed[0], [row["wall"] for row in timed if not row["cold"]]

    def seconds(*parts: str) -> str:
        return f"{sum(first['seconds'].get(part, 0.0) for part in parts):.1f} s"

    top1 = [100 * row["top1"] for row in rows]
    spread = f" ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
    return [
        f"{first['wall']:.1f} s" if first["cold"] else "",
        f"{statistics.median(warm):.1f} s" if warm else "",
        seconds("imports", "start"),
        seconds("compile", "first_step"),
        seconds("train"),
        seconds("wait", "wait_validation"),
        seconds("validate"),
        f"{statistics.mean(top1):.2f}{spread} % ({len(top1)})",
    ]


def main() -> None:
    """Run the jobs, or print the table of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=".")
    parser.add_argument("--weights", default="resnet50.pth")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a run is ended")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter of the environment with PyTorch")
    parser.add_argument("--compile-mode", default="default")
    parser.add_argument("--options", default="", help="more options of headrace train, in one word")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("whole_jobs.jsonl"))
    parser.add_argument("--scratch", type=Path, help="directory for caches and runs; kept if given")
    parser.add_argument("--table", type=Path, help="print the table of these results and stop")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return
    scratch = args.scratch or Path(tempfile.mkdtemp(prefix="whole_jobs"))
    scratch.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.jobs:
        for side in args.sides:
            seeds = range(args.first_seed, args.first_seed + args.seeds)
            for seed in seeds if side == "headrace" or JOBS[name].torch else ():
                rows.append(measure(name, side, seed, scratch, args))
                with args.output.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if not args.scratch:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
