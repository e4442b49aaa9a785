"""Opening sets of ImageNet's size: time, memory and the next block's order, for shards on the disk and for a bucket.

    python benchmarks/store_sizes.py tar|tfrecord|bucket --millions 1.281

Entries are synthetic and tiny. The bucket is a server on the loopback that makes up its listing (1,000 classes; pages
of 1,000 names, as S3 has them) and answers every image with the same JPEG. Prints one line of JSON for each part.
"""

import argparse
import io
import json
import os
import resource
import struct
import sys
import tarfile
import tempfile
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

NUM_SHARDS, NUM_CLASSES, BATCH = 1024, 1000, 1024


def tiny_jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), 90, np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def write_tars(folder: Path, count: int) -> None:
    jpeg = tiny_jpeg()
    padded = jpeg + b"\0" * (-len(jpeg) % 512)
    for shard in range(NUM_SHARDS):
        with (folder / f"train-{shard:05d}.tar").open("wb") as file:
            for number in range(shard, count, NUM_SHARDS):
                info = tarfile.TarInfo(f"{number:09d}.jpg")
                info.size = len(jpeg)
                file.write(info.tobuf() + padded)
                label = str(number % NUM_CLASSES).encode()
                info = tarfile.TarInfo(f"{number:09d}.cls")
                info.size = len(label)
                file.write(info.tobuf() + label + b"\0" * (512 - len(label)))
            file.write(b"\0" * 1024)


def write_records(folder: Path, count: int) -> None:
    from headrace.data.sets.crc32c import masked_crc32c
    from headrace.data.sets.tf_example import write_example

    jpeg = tiny_jpeg()
    for shard in range(NUM_SHARDS):
        with (folder / f"train-{shard:05d}-of-{NUM_SHARDS:05d}").open("wb") as file:
            for number in range(shard, count, NUM_SHARDS):
                record = write_example(
                    {
                        "image/encoded": [jpeg],
                        "image/class/label": [number % NUM_CLASSES + 1],
                        "image/filename": [f"n{number % NUM_CLASSES:08d}_{number}.JPEG".encode()],
                    }
                )
                length = struct.pack("<Q", len(record))
                file.write(length + struct.pack("<I", masked_crc32c(length)) + record)
                file.write(struct.pack("<I", masked_crc32c(record)))


class Bucket(BaseHTTPRequestHandler):
    """A bucket `big` with `count` images in class folders."""

    protocol_version = "HTTP/1.1"
    count, jpeg, requests = 0, tiny_jpeg(), 0

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def do_GET(self) -> None:
        Bucket.requests += 1
        path, _, query = self.path.partition("?")
        if path.strip("/") != "big":
            return self._answer(206, self.jpeg, {"Content-Range": f"bytes 0-{len(self.jpeg) - 1}/{len(self.jpeg)}"})
        asked = dict(urllib.parse.parse_qsl(query))
        prefix = asked.get("prefix", "").strip("/")
        if prefix == "set":
            rows = [f"<CommonPrefixes><Prefix>set/n{n:08d}/</Prefix></CommonPrefixes>" for n in range(NUM_CLASSES)]
            text = "<ListBucketResult><IsTruncated>false</IsTruncated>" + "".join(rows) + "</ListBucketResult>"
            return self._answer(200, text.encode())
        label, first = int(prefix.rpartition("n")[2]), int(asked.get("continuation-token", 0))
        last = (self.count - label + NUM_CLASSES - 1) // NUM_CLASSES
        end = min(first + 1000, last)
        rows = [
            f"<Contents><Key>set/n{label:08d}/n{label:08d}_{n}.JPEG</Key><LastModified>2026-11-19T10:00:00.000Z</LastModified>"
            f"<ETag>&quot;0&quot;</ETag><Size>{len(self.jpeg)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for n in range(first, end)
        ]
        more = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < last else ""
        text = f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}" + "".join(rows)
        return self._answer(200, (text + "</ListBucketResult>").encode())

    def _answer(self, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body)), "ETag": '"0"'} | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def memory() -> dict[str, float]:
    """Return this process's memory in MB: now, without what is mapped from files, and the most ever."""
    status = Path("/proc/self/status").read_text()
    own = int(status.partition("RssAnon:")[2].split()[0]) / 1024
    return {"own_MB": round(own), "most_MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}


def measured(what: str, act):
    begin, cpu = time.perf_counter(), time.process_time()
    found = act()
    seconds = {"seconds": round(time.perf_counter() - begin, 2), "cpu": round(time.process_time() - cpu, 2)}
    print(json.dumps({"part": what, **seconds, **memory()}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("tar", "tfrecord", "bucket"))
    parser.add_argument("--millions", type=float, default=1.281)
    parser.add_argument("--folder", type=Path, help="where the set is made, or was made by an earlier call")
    args = parser.parse_args()
    count = round(args.millions * 1e6)
    folder = args.folder or Path(tempfile.mkdtemp())
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    place, pid = str(folder / "set"), 0
    if args.kind == "bucket":
        if not (pid := serve(count, folder)):
            return
        place = "s3://big/set"
    elif not (folder / "set").is_dir():
        (folder / "set").mkdir(parents=True)
        (write_tars if args.kind == "tar" else write_records)(folder / "set", count)
    try:
        measure(place, count)
    finally:
        if pid:
            os.kill(pid, 15)


def serve(count: int, folder: Path) -> int:
    """Start the bucket in a process of its own, so that its memory and time are not counted; 0 in that process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    pid = os.fork()
    if not pid:
        Bucket.count = count
        server.serve_forever()
    server.server_close()
    return pid


def measure(place: str, count: int) -> None:
    from headrace.config.load import config_from
    from headrace.data.dataset import open_dataset
    from headrace.data.feeding.order import epoch_order

    data = config_from({"dataset": "auto", "dataset_path": place, "image_size": 8, "decode_once": "off"}).data
    print(json.dumps({"part": "imports", **memory()}), flush=True)
    found = measured("open, no index yet", lambda: open_dataset(data, 0))
    train = len(found.train)
    assert train + len(found.validation) == count, (train, len(found.validation))
    del found
    from headrace.data.sets import stored_place

    stored_place.stand_in.cache_clear()
    found = measured("open, index kept", lambda: open_dataset(data, 0))
    order = measured("order of an epoch", lambda: epoch_order(0, 3, train, True))
    # What a resume in the middle of epoch 3 reads first.
    some = order[train // 2 : train // 2 + BATCH]
    measured(f"read {BATCH} images in the middle", lambda: found.train.read(np.sort(some), 3))
    threading.Event().wait(0)


if __name__ == "__main__":
    main()
