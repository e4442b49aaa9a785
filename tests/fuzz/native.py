"""Fuzz the C code under AddressSanitizer and UndefinedBehaviorSanitizer: `python -m tests.fuzz.native SECONDS [SEED]`.

The sources are compiled into a library of their own. The Python that loads it is started with the sanitizer's library
and with plain malloc, so that also buffers made by Python and NumPy have guarded ends. It ends at the first finding;
the file that it was decoding is kept in `corpus`. Inside the one working buffer of the decoder there are no guards.
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
from PIL import Image

from headrace.data.decoding.image import BadImage
from headrace.data.decoding.jpeg import JpegDecoder, ThreadMemory
from headrace.data.decoding.resize import View
from tests.fuzz.harness import CORPUS, mutate

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


def decode_for(seconds: float, seed: int, library: str, case: Path) -> None:
    """Decode damaged images; each is first written to the file `case`, where a crash leaves it."""
    rng, decoder, good = random.Random(seed), JpegDecoder(Path(library)), good_images()
    decoder.memory = ExactMemory(decoder.library.hr_tables_size())
    counts = {True: 0, False: 0}
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        data = mutate(rng.choice(good), rng)
        case.write_bytes(data)
        try:
            header = decoder.header(data)
        except BadImage:
            header = None
        if header is None:
            counts[False] += 1
            continue
        height, width = min(header.height, 3000), min(header.width, 3000)
        top, left = rng.randrange(height), rng.randrange(width)
        crop = (top, left, rng.randint(1, height - top), rng.randint(1, width - left))
        size = rng.choice((1, 7, 32))
        decoder.memory.grow(0)
        out = np.empty((size, size, rng.choice((1, 3))), np.uint8)
        counts[decoder.decode_into(data, View(crop, (size, size)), out, rng.choice((1, 2, 4, 8)))] += 1
    print(f"{sum(counts.values()):,} images: {counts[True]:,} decoded, {counts[False]:,} declined; no finding")


def main(seconds: float, seed: int) -> int:
    """Compile, and run the loop in a process of its own; return its exit code."""
    compiler = shutil.which("clang") or shutil.which("gcc")
    if compiler is None:
        print("neither clang nor gcc is installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        library, case = Path(folder) / "decode.so", Path(folder) / "case"
        shared = ("-shared-libasan",) if compiler.endswith("clang") else ()
        sources = sorted(map(str, NATIVE.glob("*.c")))
        subprocess.run([compiler, *FLAGS, *SANITIZERS, *shared, *sources, "-lm", "-o", library], check=True)
        name = "libclang_rt.asan-x86_64.so" if shared else "libasan.so"
        asan = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        environ = {**os.environ, _INSIDE: str(library), "LD_PRELOAD": asan, "PYTHONMALLOC": "malloc"}
        environ |= {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
        words = [sys.executable, "-m", "tests.fuzz.native", str(seconds), str(seed), str(case)]
        code = subprocess.run(words, env=environ, check=False).returncode
        if code and case.exists():
            data = case.read_bytes()
            kept = CORPUS / f"image-{hashlib.sha256(data).hexdigest()[:12]}"
            kept.write_bytes(data)
            print(f"finding: {kept}", file=sys.stderr)
    return code


if __name__ == "__main__":
    given = [float(sys.argv[1]) if sys.argv[1:] else 60.0, int(sys.argv[2]) if sys.argv[2:] else 0]
    if os.environ.get(_INSIDE):
        decode_for(given[0], int(given[1]), os.environ[_INSIDE], Path(sys.argv[3]))
    else:
        sys.exit(main(given[0], int(given[1])))
