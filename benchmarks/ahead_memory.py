"""The memory that the plan expects beside the compiler's, for networks of all families, on machines that are not here.

`python benchmarks/ahead_memory.py --target h200x1 --out rows.jsonl` runs `headrace plan --target` for each network, one
process each, and appends what it says; networks that the file has for this target and batch are left out, so that it
goes on where it was stopped. `--table rows.jsonl ...` prints the table of docs/explanation/planning.md.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# network -> images at once, pixels, classes
NETWORKS: dict[str, tuple[int, int, int]] = {
    "cifar_resnet20": (512, 32, 10),
    "cifar_resnext29": (256, 32, 10),
    "cifar_fastnet": (512, 32, 10),
    "efficientnet_cifar": (256, 32, 10),
    "resnet18": (256, 224, 1000),
    "resnet50": (128, 224, 1000),
    "resnet50d": (128, 224, 1000),
    "resnext50": (128, 224, 1000),
    "seresnet50": (128, 224, 1000),
    "squeezenet": (256, 224, 1000),
    "mobilenet_v2": (128, 224, 1000),
    "mobilenet_v3_large": (128, 224, 1000),
    "efficientnet_lite0": (128, 224, 1000),
    "efficientnet_b0": (128, 224, 1000),
    "efficientnet_v2_b0": (128, 224, 1000),
    "convnext_tiny": (128, 224, 1000),
    "regnet_x_800mf": (128, 224, 1000),
    "regnet_y_800mf": (128, 224, 1000),
    "densenet121": (64, 224, 1000),
    "vgg11_bn": (64, 224, 1000),
    "resnet101": (64, 224, 1000),
    "efficientnet_b4": (32, 380, 1000),
    "efficientnet_v2_s": (32, 384, 1000),
}


def command_of(network: str, target: str, more: str) -> list[str]:
    """Return the command for a network: training alone, half precision, SGD with momentum."""
    batch, pixels, classes = NETWORKS[network]
    options = (
        f"--config none --dataset synthetic --num-samples {8 * batch} --image-size {pixels} --num-classes {classes}"
    )
    options += f" --model {network} --micro-batch-size {batch} --precision 16.32"
    options += f" --validation False --target {target}"
    return [sys.executable, "-m", "headrace", "plan", "--json", *options.split(), *more.split()]


def row_of(network: str, target: str, more: str = "") -> dict[str, Any]:
    """Compile one network; return what the plan and the compiler say, or the error."""
    begin = time.perf_counter()
    done = subprocess.run(command_of(network, target, more), capture_output=True, text=True, check=False)
    row = {"network": network, "target": target, "batch": NETWORKS[network][0], "pixels": NETWORKS[network][1]}
    row |= {"options": more} if more else {}
    row["seconds"] = round(time.perf_counter() - begin)
    if done.returncode:
        return row | {"error": done.stderr.strip()[-500:]}
    said = json.loads(done.stdout)
    (program,) = said["compiled"]["programs"]
    plan = {each["name"]: each["bytes"] for each in said["memory"]["rows"]}
    kept = ("argument_bytes", "temporary_bytes", "output_bytes", "donated_bytes", "total_bytes")
    return row | {"compiler": said["compiled"]["compiler"], "plan": plan} | {name: program[name] for name in kept}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table for people."""
    lines = ["| network, px, batch | for | compiler, MiB | plan, MiB | |", "|---|---|---|---|---|"]
    for row in rows:
        name = f"{row['network']}, {row['pixels']}, {row['batch']}{' ' + row['options'] if 'options' in row else ''}"
        if "error" in row:
            lines.append(f"| {name} | {row['target']} | {row['error'].splitlines()[0]} | | |")
            continue
        plan, total = sum(row["plan"].values()), row["total_bytes"]
        mib = f"{total / 2**20:,.0f} | {plan / 2**20:,.0f}"
        lines.append(f"| {name} | {row['target']} | {mib} | {100 * (plan / total - 1):+.1f} % |")
    return "\n".join(lines)


def main() -> None:
    """Compile and append, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="h200x1")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--out", type=Path, default=Path("ahead_memory.jsonl"))
    parser.add_argument("--options", default="", help="more options of headrace plan, as one text")
    parser.add_argument("--table", nargs="*", type=Path)
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for path in args.table for line in path.read_text().splitlines()]))
        return
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    there = {(row["network"], row["target"], row["batch"], row.get("options", "")) for row in map(json.loads, lines)}
    for network in args.networks:
        if (network, args.target, NETWORKS[network][0], args.options) in there:
            continue
        row = row_of(network, args.target, args.options)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(table([row]).splitlines()[-1], f"{row['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
