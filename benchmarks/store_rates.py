"""What reading from a bucket costs: tar shards on the disk, from an empty cache, and from a filled one.

    python benchmarks/store_rates.py FOLDER s3://bucket/set      # the same files; credentials from the environment

Every image is read once in the order of an epoch, as training reads it. Prints images per second of processor time (of
this process, all threads) and of the clock.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))


def main() -> None:
    folder, address = sys.argv[1:3]
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    for turn in range(3):
        for what, place in (("disk", folder), ("bucket, nothing here", address), ("bucket, all here", address)):
            if what.endswith("nothing here"):
                os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
                forget()
            print(json.dumps({"turn": turn, "what": what, **rate(place)}), flush=True)


def forget() -> None:
    from headrace.data.sets import mirror
    from headrace.data.sets.stored_place import stand_in

    stand_in.cache_clear()
    mirror._mirrors.clear()


def rate(place: str) -> dict[str, float]:
    from headrace.config.load import config_from
    from headrace.config.schema import Augment
    from headrace.data.dataset import open_dataset
    from headrace.data.feeding.block_reader import BlockReader, feed_options
    from headrace.data.feeding.order import epoch_order

    config = config_from({"dataset": "auto", "dataset_path": place, "image_size": 224, "decode_once": "off"})
    began, cpu = time.perf_counter(), time.process_time()
    found = open_dataset(config.data, 0)
    opened, opened_cpu = time.perf_counter() - began, time.process_time() - cpu
    reader = BlockReader(found.train, feed_options(config.data, found.info, 0, 1, Augment()), train=True)
    order = epoch_order(0, 1, len(found.train), True)
    began, cpu = time.perf_counter(), time.process_time()
    for first in range(0, len(order), 128):
        reader.read(order[first : first + 128], 1)
    clock, spent = time.perf_counter() - began, time.process_time() - cpu
    reader.close()
    return {
        "images": len(order),
        "open s": round(opened, 2),
        "open cpu s": round(opened_cpu, 2),
        "img/s": round(len(order) / clock),
        "img/s of processor": round(len(order) / spent),
    }


if __name__ == "__main__":
    main()
