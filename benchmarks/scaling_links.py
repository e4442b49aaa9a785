"""Steps of two and four processes on links of a known rate, beside what the model of scaling says of them.

`python benchmarks/scaling_links.py` (as root, on Linux with `ip` and `tc`): each process is on a host of its own, made
of namespaces, whose way out is limited to a rate by tc's token bucket. The links are so slow that the exchange is most
of a step: what is compared is the exchange, not this machine's processors.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from scaling_model import Cluster, exchange_seconds  # noqa: E402

from tests.job.namespaces import Hosts, why_not  # noqa: E402

STEPS, EPOCHS = 3, 3
LINE = (
    "train --config none --dataset generated --image-size 32 --num-classes 10 --model-name cifar_fastnet "
    "--micro-batch-size 4 --learning-rate 0.02 --no-checkpoints --no-validation --platform cpu --progress plain "
    "--run-name run --logs-per-epoch 1"
)


def step_seconds(hosts: Hosts, folder: Path) -> float:
    """Train on all hosts; return the median seconds of a step, without the first epoch."""
    count = len(hosts.hosts)
    words = [sys.executable, "-m", "headrace", *LINE.split(), "--num-replicas", str(count), "--log-dir", str(folder)]
    words += ["--num-samples", str(4 * count * STEPS), "--num-epochs", str(EPOCHS)]
    first = f"{next(iter(hosts.hosts))}:61440"
    more = {"HEADRACE_NUM_PROCESSES": str(count), "HEADRACE_COORDINATOR": first, "HEADRACE_SECRET": "links"}
    more |= {"PYTHONPATH": str(HERE.parent / "src"), "JAX_PLATFORMS": "cpu", "HEADRACE_SILENCE_SECONDS": "300"}
    folder.mkdir(parents=True)
    job: list[subprocess.Popen[bytes]] = []
    for number, host in enumerate(hosts.hosts.values()):
        job.append(host.start(words, folder / f"{number}.txt", more | {"HEADRACE_PROCESS": str(number)}))
    codes = [process.wait(1800) for process in job]
    if any(codes):
        raise SystemExit((folder / "0.txt").read_text())
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [line["images_per_second"] for line in lines if line.get("kind") == "train"][1:]
    return 4 * count / statistics.median(rates)


def measure(count: int, megabits: float | None, folder: Path) -> float:
    """Return the seconds of a step of so many processes, on links of so many million bits a second."""
    with Hosts([f"h{number}" for number in range(count)], folder / "hosts") as hosts:
        if megabits:
            for host in hosts.hosts.values():
                limit = f"rate {megabits}mbit burst 3kb limit 256kb".split()
                host.run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        return step_seconds(hosts, folder / "runs")


def main() -> None:
    """Print measured and expected seconds of the exchange."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabits", type=float, nargs="*", default=[20.0, 40.0])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--parameters", type=int, default=1_972_802, help="whose gradients are exchanged")
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for count in args.processes:
            free = measure(count, None, Path(place) / f"{count}-free")
            for megabits in args.megabits:
                shaped = measure(count, megabits, Path(place) / f"{count}-{megabits}")
                cluster = Cluster(per_machine=1, network_bytes=megabits * 1e6 / 8, network_latency=2e-4)
                rows.append({"processes": count, "megabits": megabits, "free": free, "shaped": shaped})
                expected = exchange_seconds(4 * args.parameters, count, cluster)
                print(
                    f"{count} processes, {megabits:g} Mbit/s: step {shaped:.3f} s, without limit {free:.3f} s, "
                    f"so the exchange {shaped - free:.3f} s; the model says {expected:.3f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
