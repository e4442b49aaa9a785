"""What a step would take on 8 to 1,024 devices: a model with its assumptions, no measurement.

`python benchmarks/scaling_model.py` prints a table. Nothing of it was run on more than one GPU; what is measured goes
in (a step of one device, bytes of a program compiled ahead, rates of decoding and saving), the rest are assumptions,
all of them fields of `Cluster` and `Job`. `scaling_links.py` checks the exchange with processes on slow links.

A step is the computation of the slowest device, and what of the exchange it does not hide; it is no faster than images
come, and saving stops it now and then.
"""

import argparse
import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines with fast links inside and a network between; bytes and seconds."""

    per_machine: int = 8
    link_bytes: float = 360e9  # a second, of a device in its machine: NVLink 4 at 80 % of 450 GB/s
    link_latency: float = 3e-6
    network_bytes: float = 40e9  # a second, of a device, to other machines: a 400 Gbit/s card for each, at 80 %
    network_latency: float = 8e-6


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, as far as it scales. Its batch on a device stays; the global batch grows with the devices."""

    step_seconds: float = 0.0326  # of one device: ResNet-50, 256 images of 224 px, 7,852 images/s on an H200
    images: int = 256  # of one device, in a step
    gradient_bytes: float = 97.7 * 2**20  # as the program compiled for h200x8 exchanges
    hidden: float = 0.0  # share of the exchange beside the backward pass
    spread: float = 0.005  # a device's step differs by this share of it (standard deviation), each time anew
    decode: float = 8593.0  # images a second that a machine decodes: 16 cores, random crops; 0: no JPEGs
    cores_factor: float = 12.0  # a machine with 192 cores
    saved_bytes: float = 205e6  # weights and momentum
    save_seconds_per_byte: float = 1 / 5e9  # from a device to the host, which a call waits for
    save_every: float = 180.0  # seconds


def exchange_seconds(num_bytes: float, devices: int, cluster: Cluster) -> float:
    """Return how long adding up takes: in each machine, between machines a share each, in each machine again.

    Rings: each device sends 2 (n - 1) / n of the bytes, in 2 (n - 1) messages; between machines each device has its own
    part. Many machines take a tree (NCCL does): 2 log2 n messages.
    """
    inside = min(devices, cluster.per_machine)
    machines = math.ceil(devices / cluster.per_machine)
    seconds = 2 * (inside - 1) * (num_bytes / inside / cluster.link_bytes + cluster.link_latency)
    if machines > 1:
        sent = 2 * (machines - 1) / machines * num_bytes / inside / cluster.network_bytes
        seconds += sent + 2 * min(machines - 1, math.log2(machines) * 2) * cluster.network_latency
    return seconds


def slowest(devices: int, spread: float) -> float:
    """Return how much longer the slowest of so many takes than one: the expected largest of normal values."""
    if devices < 2:
        return 1.0
    # Blom's approximation of the largest of n.
    return 1.0 + spread * _quantile((devices - 0.375) / (devices + 0.25))


def _quantile(share: float) -> float:
    """Return the value below which a share of normal values is."""
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < share else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A job on so many devices."""

    devices: int
    compute: float
    exchange: float  # in all
    step: float
    images_per_second: float
    efficiency: float
    bound: str


def scaled(job: Job, devices: int, cluster: Cluster) -> Scaled:
    """Return what the model says."""
    compute = job.step_seconds * slowest(devices, job.spread)
    exchange = exchange_seconds(job.gradient_bytes, devices, cluster) if devices > 1 else 0.0
    step = compute + (1 - job.hidden) * exchange
    machines = math.ceil(devices / cluster.per_machine)
    needed = devices * job.images / (job.decode * job.cores_factor * machines) if job.decode else 0.0
    bound = "input" if needed > step else "compute"
    step = max(step, needed)
    step *= 1 + job.saved_bytes * job.save_seconds_per_byte / job.save_every
    rate = devices * job.images / step
    return Scaled(
        devices=devices,
        compute=compute,
        exchange=exchange,
        step=step,
        images_per_second=rate,
        efficiency=rate / devices / (job.images / job.step_seconds),
        bound=bound,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=float, default=Job.hidden, help="share of the exchange that is hidden")
    parser.add_argument("--spread", type=float, default=Job.spread)
    parser.add_argument("--network-gigabits", type=float, default=400.0, help="of a device, to other machines")
    parser.add_argument("--cores", type=int, default=192, help="of a machine")
    args = parser.parse_args()
    cluster = Cluster(network_bytes=0.8 * args.network_gigabits * 1e9 / 8)
    job = replace(Job(), hidden=args.hidden, spread=args.spread, cores_factor=args.cores / 16)
    print("| devices | compute, ms | exchange, ms | step, ms | images/s | of ideal | bound by |")
    print("|---|---|---|---|---|---|---|")
    for devices in (1, 8, 16, 32, 64, 128, 256, 512, 1024):
        row = scaled(job, devices, cluster)
        times = " | ".join(f"{1000 * each:.2f}" for each in (row.compute, row.exchange, row.step))
        print(f"| {devices:,} | {times} | {row.images_per_second:,.0f} | {row.efficiency:.1%} | {row.bound} |")


if __name__ == "__main__":
    main()
