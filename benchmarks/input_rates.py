"""Measure the host's input path beside other pipelines, in turns in one run: JPEG files, and a packed file of them.

    python benchmarks/input_rates.py --images FOLDER_OF_JPEGS --threads 1 2 4 8 16 --device-rate 7630 \\
        --peer 'torch=/path/to/python benchmarks/peer_input.py --peers input_peers.py --peer torch'

A peer is a command that takes `--images FOLDER --workers N --seconds S` and prints one line of JSON with
images_per_second and per_processor_second. The work is the same for all: a random resized crop (area 0.08 to 1) to 224
pixels, uint8. Ours runs `headrace data bench --parts block`: whole blocks as the feed makes them. Flips are not in it:
the device does them.

Every rate is given twice: images per second of the clock, and images per second of processor time (of all threads and
processes, start and imports left out). The latter says what the work costs on a machine that has other work too, where
the clock's rate mostly says how many threads a pipeline has.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def link_folders(images: Path, work: Path) -> Path:
    """Make class folders of links to the images; both splits have all of them."""
    files = sorted(path for path in images.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    for split in ("train", "val"):
        for number, path in enumerate(files):
            folder = work / "folders" / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / path.name).symlink_to(path.absolute())
    return work / "folders"


def make_sets(images: Path, work: Path) -> dict[str, Path]:
    """Make class folders of the images, and a packed file of those."""
    folders = link_folders(images, work)
    packed = work / "packed.hrp"
    words = [sys.executable, "-m", "headrace", "data", "pack", "--dataset-path", str(folders)]
    done = subprocess.run([*words, "--output", str(packed)], capture_output=True, text=True, check=True)
    print(f"# {done.stdout.strip()}", flush=True)
    return {"folder": folders, "packed": packed}


def our_command(place: Path, threads: int) -> list[str]:
    """Return the command that measures blocks of a set."""
    words = [sys.executable, "-m", "headrace", "data", "bench", "--dataset-path", str(place), "--image-size", "224"]
    return [*words, "--train-crop", "torchvision", "--parts", "block", "--json", "--threads", str(threads)]


def peer_command(command: str, images: Path, threads: int) -> list[str]:
    """Return the command that measures a peer."""
    return [*shlex.split(command), "--images", str(images), "--workers", str(threads)]


def measure(words: list[str], seconds: float) -> tuple[float, float]:
    """Return (images per second of the clock, images per second of processor time)."""
    environment = dict(os.environ)
    if "headrace" not in words:
        environment.pop("PYTHONPATH", None)
    words = [*words, "--seconds", str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    row = json.loads(done.stdout.splitlines()[-1])
    if "epochs" not in row:
        return row["images_per_second"], row["per_processor_second"]
    block = row["epochs"][0]
    return block["elements_per_second"], block["elements_processed"] / block["processor_seconds"]


def main() -> None:
    """Measure in turns, print a line of JSON for each measurement and a table of medians at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device-rate", type=float, help="images/s that a device takes: what share of it is fed")
    args = parser.parse_args()
    peers = dict(text.split("=", 1) for text in args.peer)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as work:
        sets = make_sets(args.images, Path(work))
        for number in range(args.rounds):
            for threads in args.threads:
                commands = {f"headrace, {name}": our_command(place, threads) for name, place in sets.items()}
                commands |= {name: peer_command(command, args.images, threads) for name, command in peers.items()}
                for name, words in commands.items():
                    rates = measure(words, args.seconds)
                    found.setdefault((name, threads), []).append(rates)
                    row = {"round": number, "what": name, "threads": threads, "load": round(os.getloadavg()[0], 1)}
                    row |= {"images_per_second": round(rates[0], 1), "per_processor_second": round(rates[1], 1)}
                    print(json.dumps(row), flush=True)
    share = f" share of {args.device_rate:,.0f} img/s |" if args.device_rate else ""
    print(f"| what | threads | img/s of the clock | img/s of processor time (lowest to highest) |{share}")
    print("|---|---|---|---|" + "---|" * bool(share))
    for (name, threads), rates in sorted(found.items(), key=lambda item: item[0][1]):
        clock, own = (sorted(rate[part] for rate in rates) for part in (0, 1))
        spread = f"{statistics.median(own):,.0f} ({own[0]:,.0f} to {own[-1]:,.0f})"
        fed = f" {statistics.median(clock) / args.device_rate:.0%} |" if args.device_rate else ""
        print(f"| {name} | {threads} | {statistics.median(clock):,.0f} | {spread} |{fed}")


if __name__ == "__main__":
    main()
