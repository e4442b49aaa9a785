"""Read idx files (MNIST and similar datasets), plain or compressed: a magic number, the sizes, then one byte per value.

Offsets in messages count bytes of the uncompressed file.
"""

import gzip
import zlib
from pathlib import Path

import numpy as np

from headrace.data.sets.catalog import SetRow
from headrace.data.sets.file_problem import FileProblem, SplitPart, empty_part, label_problem

_UINT8 = 8  # the type byte of idx
_CHUNK = 1 << 20


def read_pair(images_path: Path | None, labels_path: Path | None, row: SetRow, num_samples: int) -> SplitPart:
    """Read the file of images and the file of labels of one split; a path that is None counts as empty."""
    height, width, channels = row.image_hwc
    assert channels == 1, "idx files hold grey images"
    pixels, found = _read(images_path, (num_samples, height, width))
    labels, found_labels = _read(labels_path, (num_samples,))
    findings = found + found_labels
    if labels_path is not None:
        findings += label_problem(labels_path, labels, row.num_classes, (8, 1))
    if images_path is None or labels_path is None:
        return empty_part(row.image_hwc, *findings)
    whole = min(len(pixels), len(labels))
    return SplitPart(
        images=pixels[:whole].reshape(whole, *row.image_hwc),
        labels=labels[:whole].astype(np.int32),
        findings=tuple(findings),
    )


def _read(path: Path | None, shape: tuple[int, ...]) -> tuple[np.ndarray, list[FileProblem]]:
    """Return the complete items in the file, and what is wrong with it."""
    nothing = np.zeros((0, *shape[1:]), np.uint8)
    if path is None:
        return nothing, []
    header = 4 + 4 * len(shape)
    data, findings = _bytes_of(path, header + int(np.prod(shape, dtype=np.int64)))
    if len(data) < header:
        problems = findings or [
            FileProblem(path=path, offset=len(data), problem=f"ends inside the header of {header} bytes")
        ]
        return nothing, problems
    problem = _magic_problem(data[:4], len(shape))
    if problem:
        return nothing, [*findings, FileProblem(path=path, offset=0, problem=problem)]
    sizes = tuple(int(size) for size in np.frombuffer(data[4:header], ">u4"))
    if sizes[1:] != shape[1:]:
        problem = f"images of {' x '.join(map(str, sizes[1:]))}, not {' x '.join(map(str, shape[1:]))}"
        return nothing, [*findings, FileProblem(path=path, offset=8, problem=problem)]
    if sizes[0] != shape[0]:
        findings.append(
            FileProblem(path=path, offset=4, problem=f"the header says {sizes[0]:,} items, not {shape[0]:,}")
        )
    item = int(np.prod(shape[1:], dtype=np.int64))
    expected = header + sizes[0] * item
    if len(data) != expected and not findings:
        problem = f"{len(data):,} bytes, but {sizes[0]:,} items and the header are {expected:,}"
        findings.append(FileProblem(path=path, offset=min(len(data), expected), problem=problem))
    whole = min((len(data) - header) // item, sizes[0], shape[0])
    return np.frombuffer(data, np.uint8, whole * item, header).reshape(whole, *shape[1:]), findings


def _magic_problem(magic: bytes, num_dims: int) -> str:
    wanted = bytes((0, 0, _UINT8, num_dims))
    if magic == wanted:
        return ""
    hint = "; this is gzip data, its name should end in .gz" if magic[:2] == b"\x1f\x8b" else ""
    return f"the magic number is 0x{magic.hex()}, not 0x{wanted.hex()}{hint}"


def _bytes_of(path: Path, expected: int) -> tuple[bytes, list[FileProblem]]:
    """Return the (uncompressed) bytes as far as they can be read, and not much more than are expected.

    The limit is there because a compressed file of a megabyte can expand to a gigabyte.
    """
    parts: list[bytes] = []
    most = expected + _CHUNK
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while most > 0 and (part := file.read(_CHUNK)):
                parts.append(part)
                most -= len(part)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        problem = f"the gzip data is damaged ({error})"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    else:
        return b"".join(parts), []
    data = b"".join(parts)
    return data, [FileProblem(path=path, offset=len(data), problem=problem)]
