"""Fuzz the C code under AddressSanitizer and UndefinedBehaviorSanitizer: `python -m tests.fuzz.native SECONDS [SEED]`.

The sources are compiled into a library of their own. The Python that loads it is started with the sanitizer's library
and with plain malloc, so that also buffers made by Python and NumPy have guarded ends; the decoder guards the gaps
inside its working buffer itself. What it takes is compared with libjpeg-turbo. It ends at the first finding; the file
that it was decoding is kept in `corpus`.
"""

import hashlib
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from headrace.data.decoding.image import BadImage
from headrace.data.decoding.jpeg import JpegDecoder, ThreadMemory
from headrace.data.decoding.resize import View
from tests.fuzz.harness import CORPUS, mutate
from tests.fuzz.structure import jpeg

NATIVE = Path(__file__).parents[2] / "src" / "headrace" / "native"
FLAGS = ("-O1", "-g", "-fwrapv", "-ffp-contract=off", "-fPIC", "-shared", "-fno-omit-frame-pointer")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", '-DHEADRACE_SOURCE_HASH="fuzz"')
_INSIDE = "HEADRACE_FUZZ_LIBRARY"


def good_images() -> list[bytes]:
    """Return small JPEGs of the kinds that the decoder knows, and one (progressive) that it must decline."""
    y, x = np.mgrid[0:37, 0:53]
    pixels = np.stack([5 * x + y, 255 - 3 * x, 40 + 4 * y], axis=2).astype(np.uint8)
    kinds = [{"subsampling": n, "quality": q} for n in (0, 1, 2) for q in (30, 95)]
    kinds += [{"progressive": True}, {"restart_marker_blocks": 2}, {"optimize": True}]
    found = []
    for mode in ("RGB", "L"):
        for kind in kinds:
            file = io.BytesIO()
            Image.fromarray(pixels).convert(mode).save(file, "JPEG", **kind)
            found.append(file.getvalue())
    return found


class ExactMemory(ThreadMemory):
    """Working memory that ends where the decoder's need ends."""

    def grow(self, size: int) -> None:
        """Replace the buffer with one of this size."""
        self.room = np.empty(size, np.uint8)
        self.room_at = self.room.ctypes.data


def whole_is_right(decoder: JpegDecoder, data: bytes, shape: tuple[int, int, int]) -> bool:
    """Decode the whole image; say whether that was possible. AssertionError: other pixels than libjpeg-turbo."""
    out = np.empty(shape, np.uint8)
    if not decoder.decode_into(data, View((0, 0, *shape[:2]), shape[:2]), out):
        return False
    try:
        kind = "RGB" if shape[2] == 3 else "GRAY"
        wanted = simplejpeg.decode_jpeg(data, kind, fastdct=True, fastupsample=True)
    except ValueError:  # libjpeg is stricter
        return True
    assert np.array_equal(out, wanted.reshape(shape)), "other pixels than those of libjpeg-turbo"
    return True


def decode_for(seconds: float, cases: int, seed: int, library: str, case: Path) -> None:
    """Decode damaged images for a time, or so many of them; a crash leaves the image in the file `case`."""
    rng, decoder, good = random.Random(seed), JpegDecoder(Path(library)), good_images()
    decoder.memory = ExactMemory(decoder.library.hr_tables_size())
    counts = {True: 0, False: 0}
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and (not cases or sum(counts.values()) < cases):
        data = rng.choice(good)
        data = mutate(data, rng) if rng.random() < 0.3 else jpeg(data, rng)
        case.write_bytes(data)
        try:
            header = decoder.header(data)
        except BadImage:
            header = None
        if header is None:
            counts[False] += 1
            continue
        decoder.memory.grow(0)
        channels = rng.choice((1, 3))
        if rng.random() < 0.3 and header.orientation == 1 and header.height * header.width < 100_000:
            decoded = whole_is_right(decoder, data, (header.height, header.width, channels))
        else:
            height, width = min(header.height, 3000), min(header.width, 3000)
            top, left = rng.randrange(height), rng.randrange(width)
            crop = (top, left, rng.randint(1, height - top), rng.randint(1, width - left))
            size = rng.choice((1, 7, 32))
            out = np.empty((size, size, channels), np.uint8)
            decoded = decoder.decode_into(data, View(crop, (size, size)), out, rng.choice((1, 2, 4, 8)))
        counts[decoded] += 1
    print(f"{sum(counts.values()):,} images: {counts[True]:,} decoded, {counts[False]:,} declined; no finding")


def main(seconds: float, seed: int, cases: int = 0, folder: Path = NATIVE, corpus: Path = CORPUS) -> int:
    """Compile the sources of a folder, and run the loop in a process of its own; return its exit code."""
    compiler = shutil.which("clang") or shutil.which("gcc")
    if compiler is None:
        print("neither clang nor gcc is installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as place:
        library, case = Path(place) / "decode.so", Path(place) / "case"
        shared = ("-shared-libasan",) if compiler.endswith("clang") else ()
        sources = sorted(map(str, folder.glob("*.c")))
        subprocess.run([compiler, *FLAGS, *SANITIZERS, *shared, *sources, "-lm", "-o", library], check=True)
        name = "libclang_rt.asan-x86_64.so" if shared else "libasan.so"
        # The C++ library, too, before any package that brings C++ code: else a sanitizer finds no exceptions to watch.
        preloaded = [
            subprocess.run(
                [compiler, f"-print-file-name={each}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for each in (name, "libstdc++.so.6")
        ]
        environ = {**os.environ, _INSIDE: str(library), "LD_PRELOAD": " ".join(preloaded), "PYTHONMALLOC": "malloc"}
        environ |= {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
        words = [sys.executable, "-m", "tests.fuzz.native", str(seconds), str(seed), str(cases), str(case)]
        code = subprocess.run(words, env=environ, check=False).returncode
        if code and case.exists():
            data = case.read_bytes()
            kept = corpus / f"image-{hashlib.sha256(data).hexdigest()[:12]}"
            kept.write_bytes(data)
            print(f"finding: {kept}", file=sys.stderr)
    return code


if __name__ == "__main__":
    given = [float(sys.argv[1]) if sys.argv[1:] else 60.0, int(sys.argv[2]) if sys.argv[2:] else 0]
    if os.environ.get(_INSIDE):
        decode_for(given[0], int(sys.argv[3]), int(given[1]), os.environ[_INSIDE], Path(sys.argv[4]))
    else:
        sys.exit(main(given[0], int(given[1])))
