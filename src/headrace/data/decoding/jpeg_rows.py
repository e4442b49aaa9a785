"""Extract rows of a JPEG without decoding it, if it has a restart marker after each row of blocks.

Between restart markers a JPEG's rows are independent. So a smaller JPEG can be put together from the header, with the
height changed, and the wanted rows, with their markers renumbered; the decoder then skips all other rows.
"""

import re
import struct
from itertools import islice

from headrace.data.decoding.limits import segments

_RESTART = re.compile(rb"\xff[\xd0-\xd7]")  # inside a scan every other 0xff is followed by 0
_BASELINE, _INTERVAL, _SCAN, _END = 0xC0, 0xDD, 0xDA, b"\xff\xd9"
# Markers that begin a frame; C4 and CC are tables of codes, and C8 is reserved.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}


def cut_rows(data: bytes, top: int, bottom: int) -> tuple[bytes, int] | None:
    """Return (a JPEG that has at least the rows from `top` to `bottom`, its first row); None if that is impossible."""
    found = _header(data)
    if found is None:
        return None
    size_at, height, block, num_rows, scan_at = found
    if not 0 <= top < bottom <= height:
        return None
    first, last = top // block, -(-bottom // block)
    if last - first >= num_rows:
        return None
    # From the right: a thumbnail inside EXIF has an end marker of its own.
    end = data.rfind(_END)
    edges = [match.start() for match in islice(_RESTART.finditer(data, scan_at, end), num_rows)]
    # Then the file is damaged, and the decoder should see all of it.
    if len(edges) != num_rows - 1:
        return None
    starts, stops = [scan_at, *(edge + 2 for edge in edges)], [*edges, end]
    rows = [data[starts[row] : stops[row]] for row in range(first, last)]
    new_height = min(last * block, height) - first * block
    parts = [data[:size_at], struct.pack(">H", new_height), data[size_at + 2 : scan_at], rows[0]]
    for number, row in enumerate(rows[1:]):
        # Markers count from 0 to 7; a decoder that misses one takes the data for damaged.
        parts += [bytes((0xFF, 0xD0 + number % 8)), row]
    return b"".join([*parts, _END]), first * block


def _header(data: bytes) -> tuple[int, int, int, int, int] | None:
    """Return (place of the height, height, rows of pixels in a row of blocks, rows of blocks, place of the scan)."""
    interval = 0
    frame: tuple[int, int, int, int, int] | None = None
    try:
        for marker, place, length in segments(data):
            if marker == _INTERVAL:
                interval = struct.unpack_from(">H", data, place + 4)[0]
            elif marker == _BASELINE:
                frame = _frame(data, place)
            elif marker in _FRAMES:
                return None  # progressive: rows are spread over several scans
            elif marker == _SCAN:
                if frame is None or not interval or data[place + 4] != frame[4]:
                    return None
                size_at, height, block, across, _ = frame
                # Only where an interval is exactly a row of blocks do rows begin at markers.
                if interval != across:
                    return None
                return size_at, height, block, -(-height // block), place + 2 + length
    except (IndexError, struct.error):
        pass
    return None


def _frame(data: bytes, place: int) -> tuple[int, int, int, int, int]:
    """Return (place of the height, height, rows of a block, blocks in a row, components) of a frame header."""
    height, width, components = struct.unpack_from(">HHB", data, place + 5)
    factors = [data[place + 11 + 3 * number] for number in range(components)]
    if components == 1:
        factors = [0x11]  # a single component is not interleaved: its blocks are 8 x 8
    across, down = max(factor >> 4 for factor in factors), max(factor & 15 for factor in factors)
    return place + 5, height, 8 * down, -(-width // (8 * across)), components
