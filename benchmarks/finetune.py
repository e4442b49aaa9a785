"""Fine-tuning in Headrace and in plain PyTorch (torch_job.py): the same weights, images, epochs, batches, augmentation.

    python benchmarks/finetune.py --cifar DATA --photos ants_bees --scratch WORK --torch-python PYTHON
    python benchmarks/finetune.py --table finetune.jsonl

The weights are those of a CIFAR ResNet-8 trained here on six classes of CIFAR-10 and exported under PyTorch's names, so
that both sides start from one file. Tasks: the four other classes with 50 images each, and photographs of 64 pixels.
All have the same epochs in all, SGD with Nesterov momentum 0.9, a warm-up of a tenth and a cosine to 0. Times are those
of the processors, for the whole process, so that other work on the machine does not count. What is in WORK already
(images, weights, rows of the results) is not made again.
"""

import argparse
import json
import resource
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from whole_jobs import PEER, export_arrays, run

SIX, FOUR = range(6), range(6, 10)
NETWORK = "--model cifar_resnet8 --model-dialect torchvision --shortcut pad-end"
QUIET = "--no-report --progress plain --validations-per-epoch 0 --ckpts-per-epoch 0"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One set of images to fine-tune on."""

    headrace: str
    torch: str
    epochs: int
    batch: int = 16
    rate: float = 0.05  # what Headrace chooses for this batch

    @property
    def warmup(self) -> float:
        return self.epochs / 10


TASKS = {
    "four": Task(
        headrace="--dataset-path {scratch}/four --image-size 32 --train-augmentation flip-crop",
        torch="--arrays {scratch}/four.npz --augment flip-crop",
        epochs=20,
    ),
    "photos": Task(
        headrace="--dataset-path {photos} --image-size 64 --train-crop torchvision",
        torch="--folder {photos} --image-size 64",
        epochs=15,
    ),
}
# A side and what it is given for each part of its epochs: (share of the epochs, options). {rate} is the chosen one.
ARMS: dict[str, tuple[str, tuple[tuple[float, str], ...]]] = {
    "from nothing": ("headrace", ((1, ""),)),
    "chosen: last layer at the full rate, others at a tenth": ("headrace", ((1, "--weights {weights}"),)),
    "head first, then all at a tenth": (
        "headrace",
        ((0.25, "--weights {weights} --freeze backbone"), (0.75, "--weights {before} --learning-rate {small}")),
    ),
    "all layers at a tenth": ("headrace", ((1, "--weights {weights} --learning-rate {small}"),)),
    "all layers at the full rate": ("headrace", ((1, "--weights {weights} --learning-rate {rate}"),)),
    "PyTorch, from nothing": ("torch", ((1, "--lr {rate}"),)),
    "PyTorch, all layers at a tenth": ("torch", ((1, "--lr {small} --init-from {weights}"),)),
    "PyTorch, all layers at the full rate": ("torch", ((1, "--lr {rate} --init-from {weights}"),)),
    "PyTorch, last layer full, others a tenth": (
        "torch",
        ((1, "--lr {rate} --init-from {weights} --backbone-rate 0.1"),),
    ),
}


def write_images(batches: Path, to: Path, classes: range, num_train: int, num_val: int) -> None:
    """Write the first images of some classes of CIFAR-10 (binary batches) as PNG files in class folders."""
    files = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "val": ["test_batch.bin"]}
    names = (batches / "batches.meta.txt").read_text().split() if (batches / "batches.meta.txt").exists() else None
    for split, count in (("train", num_train), ("val", num_val)):
        rows = np.concatenate([np.fromfile(batches / name, np.uint8).reshape(-1, 3073) for name in files[split]])
        for label in classes:
            folder = to / split / (names[label] if names else str(label))
            folder.mkdir(parents=True)
            for number, row in enumerate(rows[rows[:, 0] == label][:count]):
                Image.fromarray(row[1:].reshape(3, 32, 32).transpose(1, 2, 0)).save(folder / f"{number:04d}.png")


def headrace(words: str, scratch: Path, name: str) -> Path:
    """Train; return the run directory."""
    directory = scratch / "runs" / name
    if directory.exists() and '"kind": "validation"' in (directory / "metrics.jsonl").read_text():  # it is at the end
        return directory
    shutil.rmtree(directory, ignore_errors=True)  # it was interrupted
    words = f"{sys.executable} -m headrace train {NETWORK} {QUIET} {words} --output {directory}"
    _, status = run(words.split(), {}, 3600, scratch / f"{name}.log")
    if status:
        raise SystemExit(f"{words}\n{(scratch / f'{name}.log').read_text()[-2000:]}")
    return directory


def prepare(args: argparse.Namespace) -> Path:
    """Write images and arrays, and train and export the weights; return the file."""
    scratch, weights = args.scratch, args.scratch / "six.pth"
    scratch.mkdir(parents=True, exist_ok=True)
    for name, classes, counts in (("six", SIX, (2000, 300)), ("four", FOUR, (50, 500))):
        if not (scratch / name).exists():
            write_images(args.cifar / "cifar-10-batches-bin", scratch / name, classes, *counts)
    options = {"dataset": "auto", "dataset_path": str(scratch / "four"), "image_size": 32}
    options |= {"train_augmentation": "flip-crop"}  # otherwise the training images would be crops of the recipe
    if not (scratch / "four.npz").exists():
        export_arrays(options, scratch / "four.npz")
    if not weights.exists():
        words = f"--dataset-path {scratch}/six --image-size 32 --train-augmentation flip-crop --num-epochs 8 --seed 0"
        trained = headrace(words, scratch, "six")
        words = f"{sys.executable} -m headrace export {trained} --format torch-names --out {weights}"
        assert run(words.split(), {}, 600, scratch / "export.log")[1] == 0, (scratch / "export.log").read_text()
    return weights


def measure(name: str, arm: str, seed: int, values: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm of a task; return its accuracy at the end and the processor time that it took."""
    begun = cpu_seconds()
    top1 = train(name, arm, seed, values, args)
    return {"top1": top1, "cpu_seconds": round(cpu_seconds() - begun, 1)}


def cpu_seconds() -> float:
    """Return the processor time of all processes that were run and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def train(name: str, arm: str, seed: int, values: dict[str, Any], args: argparse.Namespace) -> float:
    """Train one arm of a task; return its accuracy at the end."""
    task, (side, parts) = TASKS[name], ARMS[arm]
    values |= {"rate": task.rate, "small": task.rate / 10, "scratch": args.scratch, "photos": args.photos}
    label = f"{name}-{list(ARMS).index(arm)}-{seed}"
    if side == "torch":
        words = (
            f"{args.torch_python} {PEER} --model resnet8 {task.torch} {parts[0][1]} --l2 1e-4 --label-smoothing 0.1 "
        )
        words += f"--epochs {task.epochs} --batch {task.batch} --warmup-epochs {task.warmup} --workers 0 --seed {seed} "
        words += f"--cosine-epochs {task.epochs - task.warmup} --validate end --save {args.scratch}/torch.pth"
        log = args.scratch / f"{label}.log"
        if run(words.format(**values).split(), {}, 3600, log)[1]:
            raise SystemExit(log.read_text()[-2000:])
        return json.loads(log.read_text().splitlines()[-1])["top1"]
    top1 = 0.0
    for number, (share, options) in enumerate(parts):
        epochs = round(share * task.epochs)
        words = f"{task.headrace} {options} --num-epochs {epochs} --batch-size {task.batch} --seed {seed} "
        words += f"--warmup-epochs {epochs / 10}"
        values["before"] = headrace(words.format(**values), args.scratch, f"{label}-{number}")
        records = [json.loads(line) for line in (values["before"] / "metrics.jsonl").read_text().splitlines()]
        top1 = next(record["top1"] for record in reversed(records) if record["kind"] == "validation")
    return top1


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = ["| task | | top-1 | mean | CPU time |", "|---|---|---|---|---|"]
    for task, arm in dict.fromkeys((row["task"], row["arm"]) for row in rows):
        found = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
        top1 = [100 * row["top1"] for row in found]
        each = ", ".join(f"{value:.1f}" for value in top1)
        seconds = statistics.median(row["cpu_seconds"] for row in found)
        lines.append(f"| {task} | {arm} | {each} % | {statistics.mean(top1):.1f} % | {seconds:.0f} s |")
    return "\n".join(lines)


def missing(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[tuple[str, str, int]]:
    """Yield (task, arm, seed) of what was not measured yet, all arms with one seed before the next."""
    known = {(row["task"], row["arm"], row["seed"]) for row in done}
    for task in args.tasks:
        for seed in range(args.seeds):
            for arm in (arm for number, arm in enumerate(ARMS) if not args.arms or number in args.arms):
                if (task, arm, seed) not in known:
                    yield task, arm, seed


def main() -> None:
    """Measure, or print the table of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, default=Path(), help="folder that has cifar-10-batches-bin")
    parser.add_argument("--photos", type=Path, default=Path("ants_bees"), help="class folders")
    parser.add_argument("--scratch", type=Path, default=Path("finetune"))
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter of the environment with PyTorch")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--arms", nargs="+", type=int, help="numbers of the arms, from 0 [all]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="results [SCRATCH/finetune.jsonl]")
    parser.add_argument("--table", type=Path, help="print the table of these results and stop")
    args = parser.parse_args()
    output = args.table or args.output or args.scratch / "finetune.jsonl"
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    if not args.table:
        weights = prepare(args)
        for task, arm, seed in missing(args, rows):
            found = measure(task, arm, seed, {"weights": weights}, args)
            rows.append({"task": task, "arm": arm, "seed": seed} | found)
            with output.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
