"""Packed files: all images of a set in one file, resized once so that later epochs and runs read them quickly.

    magic | images, one after the other | index (npz) | place, length and CRC-32 of the index | magic

Images are JPEGs resized to a chosen shorter side (smaller ones stay as they are), with a restart marker after each
row of blocks, so that a crop decodes only the rows it needs. Each has a CRC-32, checked whenever it is read. The file
is read with `pread`, which releases the interpreter lock; a memory map would hold the lock while waiting for the
disk.
"""

import io
import json
import os
import struct
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.core.errors import DataError
from headrace.core.json_text import parse_json
from headrace.data.decoding.image import BadImage, decode, decode_factor, encode_jpeg, read_header
from headrace.data.sets.indexed_samples import Index, StoredSamples, check_rows, read_npz
from headrace.data.sets.mirror import open_file
from headrace.data.sets.samples import Content, Samples

MAGIC, END = b"headrace pack 1\n", b"end of pack\n"
_TRAILER = struct.Struct("<QQI")
SUFFIX = ".hrp"
_COLUMNS = ("offset", "length", "labels", "crc")


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """An opened packed file."""

    class_names: tuple[str, ...]
    train: StoredSamples
    validation: StoredSamples
    shorter_side: int
    quality: int

    @property
    def split_by(self) -> str:
        """Return how it was made."""
        return f"packed at a shorter side of {self.shorter_side}, quality {self.quality}"


def open_pack(path: Path) -> PackedFile:
    """Open a packed file; one that is cut short or damaged is a DataError."""
    try:
        arrays, facts = _read_index(path)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise DataError(
            f"{path} is not a complete packed file: {error}.", remedy="Make it again with `headrace data pack`."
        ) from None
    count = facts["num_train"]

    def part(rows: slice) -> StoredSamples:
        crcs = arrays["crc"][rows]
        index = Index(
            file=np.zeros(len(crcs), np.int32),
            offset=arrays["offset"][rows],
            length=arrays["length"][rows],
            labels=arrays["labels"][rows],
        )

        def checked(data: bytes, sample: int) -> Content:
            if zlib.crc32(data) != crcs[sample]:
                raise BadImage("the checksum is wrong")
            return Content(data)

        return StoredSamples([path], index, checked, crcs=crcs)

    return PackedFile(
        class_names=tuple(facts["class_names"]),
        train=part(slice(0, count)),
        validation=part(slice(count, None)),
        shorter_side=facts["shorter_side"],
        quality=facts["quality"],
    )


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """The result of packing."""

    path: Path
    num_samples: int
    num_bytes: int
    before_bytes: int
    bad: tuple[str, ...]


def write_pack(
    path: Path,
    class_names: Iterable[str],
    splits: tuple[Samples, Samples],
    form: tuple[int, int],
    num_threads: int,
) -> PackReport:
    """Pack both splits; `form` is (shorter side, quality). Bad images are left out and listed in the report."""
    shorter_side, quality = form
    jobs = [(split, sample) for split, samples in enumerate(splits) for sample in range(len(samples))]
    rows: list[tuple[int, int, int, int, int]] = []
    bad: list[str] = []
    before = 0
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")

    def work(job: tuple[int, int]) -> tuple[bytes | None, int, str]:
        samples, sample = splits[job[0]], job[1]
        try:
            content = samples.content(sample)
            return repack(content.image, shorter_side, quality), content.num_bytes, ""
        except BadImage as error:
            return None, 0, f"{samples.name(sample)}: {error}"

    try:
        with temporary.open("wb") as file, ThreadPoolExecutor(num_threads) as pool:
            file.write(MAGIC)
            for start in range(0, len(jobs), 1024):  # limits how many encoded images wait in memory to be written
                some = jobs[start : start + 1024]
                for (split, sample), (data, size, problem) in zip(some, pool.map(work, some), strict=True):
                    if data is None:
                        bad.append(problem)
                        continue
                    rows.append((split, file.tell(), len(data), int(splits[split].labels[sample]), zlib.crc32(data)))
                    file.write(data)
                    before += size
            _write_index(
                file, rows, {"class_names": list(class_names), "shorter_side": shorter_side, "quality": quality}
            )
        # Only now under its name: an interrupted pack never looks like a complete one.
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return PackReport(
        path=path, num_samples=len(rows), num_bytes=path.stat().st_size, before_bytes=before, bad=tuple(bad)
    )


def repack(data: bytes | np.ndarray, shorter_side: int, quality: int) -> bytes:
    """Return an image as a JPEG whose shorter side is at most this, turned upright."""
    from PIL import Image

    if isinstance(data, np.ndarray):
        pixels = data[:, :, :3]  # a JPEG has no alpha channel, and training drops it too
    else:
        header = read_header(data)
        shrink = min(1.0, shorter_side / min(header.height, header.width))
        wanted = max(1, round(header.height * shrink)), max(1, round(header.width * shrink))
        pixels = decode(data, header, 3, decode_factor(header, (header.height, header.width), wanted))
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    # Again, from the decoded size: decoding at a fraction has done part of the shrinking.
    shrink = min(1.0, shorter_side / min(image.size))
    if shrink < 1:
        size = max(1, round(image.width * shrink)), max(1, round(image.height * shrink))
        image = image.resize(size, Image.Resampling.BILINEAR)
    # A marker after each row of blocks: crops then skip the rows above them.
    return encode_jpeg(image, quality, rows_between_markers=1)


def _write_index(file: io.BufferedWriter, rows: list[tuple[int, int, int, int, int]], facts: dict) -> None:
    columns = np.array(rows, np.int64).reshape(len(rows), 5).T
    facts = facts | {"num_train": int((columns[0] == 0).sum())}
    buffer = io.BytesIO()
    np.savez(
        buffer,
        offset=columns[1],
        length=columns[2],
        labels=columns[3].astype(np.int32),
        crc=columns[4].astype(np.uint32),
        facts=np.frombuffer(json.dumps(facts).encode(), np.uint8),
    )
    index = buffer.getvalue()
    place = file.tell()
    file.write(index + _TRAILER.pack(place, len(index), zlib.crc32(index)) + END)
    file.flush()
    # Before the rename, which may otherwise reach the disk earlier than the data.
    os.fsync(file.fileno())


def _read_index(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    with open_file(path) as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin like one")
        tail = _TRAILER.size + len(END)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - tail))
        trailer = file.read(tail)
        if trailer[-len(END) :] != END:
            raise ValueError("its end is missing")
        place, length, crc = _TRAILER.unpack(trailer[: _TRAILER.size])
        if place > size or length > size - place:
            raise ValueError("the place of its index is beyond its end")
        file.seek(place)
        index = file.read(length)
    if len(index) != length or zlib.crc32(index) != crc:
        raise ValueError("the checksum of its index is wrong")
    arrays = read_npz(index, (*_COLUMNS, "facts"))
    facts = parse_json(arrays.pop("facts").tobytes())
    _check_facts(facts, len(arrays["crc"]))
    check_rows(arrays | {"file": np.zeros(len(arrays["crc"]), np.int32)}, [size], len(facts["class_names"]))
    return arrays, facts


def _check_facts(facts: dict, count: int) -> None:
    numbers = [facts[name] for name in ("num_train", "shorter_side", "quality")]
    if not all(type(number) is int for number in numbers) or not 0 <= numbers[0] <= count:
        raise ValueError("its numbers are impossible")
    if not isinstance(facts["class_names"], list) or not all(isinstance(name, str) for name in facts["class_names"]):
        raise ValueError("its class names are not a list of names")
    if not facts["class_names"]:
        raise ValueError("it names no classes")
