"""Run a peer's input pipeline and count the processor time of all its processes while it runs.

    python peer_input.py --peers input_peers.py --peer torch --images FOLDER --workers 2 --seconds 10

`--peers` is a file with functions `NAME_batches(files, workers)` that yield batches of 64. One line of JSON is printed.
"""

import argparse
import importlib.util
import json
import os
import time
from pathlib import Path

BATCH = 64


def processor_seconds() -> float:
    """Return the processor time so far of this process, its threads and all processes below it."""
    parents, times = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)], times[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = {os.getpid()}
    for _ in range(4):
        mine |= {child for child, parent in parents.items() if parent in mine}
    return sum(times[process] for process in mine) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure one peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("peers", args.peers)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = sorted(str(path) for path in Path(args.images).iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    batches = getattr(module, f"{args.peer}_batches")(files, args.workers)
    for _ in range(4):
        next(batches)
    count, begin, spent = 0, time.perf_counter(), processor_seconds()
    while time.perf_counter() - begin < args.seconds:
        next(batches)
        count += BATCH
    elapsed, spent = time.perf_counter() - begin, processor_seconds() - spent
    print(json.dumps({"images_per_second": count / elapsed, "per_processor_second": count / spent}), flush=True)
    os._exit(0)  # workers need not be waited for


if __name__ == "__main__":
    main()
