"""TFRecord files: each record is its length, a checksum of that, its bytes, and a checksum of them."""

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import DataError
from headrace.data.sets.crc32c import masked_crc32c

# Around a record: its length (8 bytes) with a checksum, and the checksum of its data.
HEADER, FOOTER = 12, 4


class Extent(NamedTuple):
    """Where a record's bytes are in its file."""

    offset: int
    length: int


def write_records(path: Path, records: Iterable[bytes]) -> int:
    """Write a file of records, whole or not at all; return how many."""
    count = 0
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for record in records:
                length = struct.pack("<Q", len(record))
                file.write(length + struct.pack("<I", masked_crc32c(length)))
                file.write(record)
                file.write(struct.pack("<I", masked_crc32c(record)))
                count += 1
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def walk_records(path: Path, view: memoryview) -> Iterator[Extent]:
    """Yield the extents of a file's records; a file that is cut short or damaged is a DataError with the byte."""
    place, end, number = 0, len(view), 0
    while place < end:
        if place + HEADER > end:
            raise _damaged(path, place, f"record {number:,} is cut short inside its header")
        header = bytes(view[place : place + HEADER])
        length, crc = struct.unpack("<QI", header)
        # Before the length is believed: a damaged one would lead anywhere in the file.
        if masked_crc32c(header[:8]) != crc:
            raise _damaged(path, place, f"the checksum of record {number:,}'s length is wrong")
        stop = place + HEADER + length + FOOTER
        if stop > end:
            raise _damaged(path, place, f"record {number:,} of {length:,} bytes is cut short: the file ends before")
        yield Extent(place + HEADER, length)
        place, number = stop, number + 1


def checksum_is_right(record: bytes, footer: bytes) -> bool:
    """Say whether a record's bytes are those that were written."""
    return struct.unpack("<I", footer)[0] == masked_crc32c(record)


def _damaged(path: Path, place: int, problem: str) -> DataError:
    return DataError(
        f"{path}, byte {place:,}: {problem}.",
        rule="Records follow each other without gaps; each has its length and two checksums.",
        remedy="Fetch or build this file again; `headrace data verify` names all damaged ones.",
    )
