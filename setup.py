"""Build the C and C++ code in src/headrace/native. Everything else about the package is in pyproject.toml.

The extensions are optional: where there is no compiler, installing succeeds and Headrace decodes with libjpeg and
Pillow, and leaves convolutions on the CPU to XLA; `headrace --version` says so. The kernels for those need the headers
that come with jaxlib, a build requirement. All are plain shared libraries without Python's API (see native/library.py),
so that no Python headers are needed to build them, and one wheel serves every Python version.
"""

import copy
import importlib.util
import os
import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/headrace/native")
LIBRARY = runpy.run_path(str(FOLDER / "library.py"))
# These flags come after CFLAGS and win, also over the -O2 of a distribution; but quick builds for tests stay quick.
LEVEL = "-O0" if "-O0" in os.environ.get("CFLAGS", "").split() else "-O3"
# Integers wrap, and a product is rounded before it is added to: the results are the bits that Python computes.
FLAGS = [LEVEL, "-g0", "-fwrapv", "-ffp-contract=off"]
# A wheel must run everywhere, so -march=native is out. Baseline x86-64 code takes over twice as long to decode, and
# this no slower than -march=native; library.py chooses when it loads.
VARIANTS = {LIBRARY["PORTABLE"]: []}
# The kernels need no exact bits, but NaN and infinity as they are: none of -ffast-math. Loops begin with a cache line:
# the products' took 3 to 6 % longer where chance put them across one line more.
KERNEL_FLAGS = [LEVEL, "-g0", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-falign-loops=64"]
KERNEL_VARIANTS = {"kernels": []}
if platform.machine() in ("x86_64", "AMD64"):
    VARIANTS[LIBRARY["AVX2"]] = ["-mavx2", "-mbmi", "-mbmi2"]
    avx2 = ["-mavx2", "-mfma", "-mbmi", "-mbmi2"]
    avx512 = ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mprefer-vector-width=512"]
    KERNEL_VARIANTS = {"kernels_avx2": avx2, "kernels_avx512": [*avx2, *avx512]}


class BuildLibraries(build_ext):
    """Builds files that are not named like Python modules, several at a time."""

    def finalize_options(self) -> None:
        """Take all processors, unless a number is given."""
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extension(self, ext: Extension) -> None:
        """Build in a folder of its own.

        Variants are made of the same sources: where two builds shared a folder, a library for AVX2 was once linked with
        what the other had compiled for AVX-512.
        """
        alone = copy.copy(self)
        alone.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildLibraries, alone).build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of a library inside the package."""
        return fullname.replace(".", "/") + LIBRARY["SUFFIX"]


def extension(name: str, flags: list[str], suffixes: tuple[str, str], headers: list[str]) -> Extension:
    """Return one variant of a library; all variants are made of the same sources, with these suffixes."""
    source, header = suffixes
    return Extension(
        f"headrace.native.{name}",
        sources=[path.as_posix() for path in sorted(FOLDER.glob(f"*{source}"))],
        depends=[path.as_posix() for path in sorted(FOLDER.glob(f"*{header}"))],
        define_macros=[("HEADRACE_SOURCE_HASH", f'"{LIBRARY["source_hash"](FOLDER, suffixes)}"')],
        extra_compile_args=[*flags, *(f"-isystem{folder}" for folder in headers)],
        libraries=["m"],
        optional=True,
    )


def xla_headers() -> list[str]:
    """Return the folder of jaxlib's FFI headers, which the kernels need; nothing where the build has no jaxlib."""
    found = importlib.util.find_spec("jaxlib")
    folders = [Path(place, "include") for place in found.submodule_search_locations or ()] if found else []
    return [str(folder) for folder in folders if (folder / "xla/ffi/api/ffi.h").is_file()]


HEADERS = xla_headers()
EXTENSIONS = [extension(name, [*FLAGS, *flags], LIBRARY["C_SOURCES"], []) for name, flags in VARIANTS.items()]
if HEADERS:
    EXTENSIONS += [
        extension(name, [*KERNEL_FLAGS, *flags], LIBRARY["KERNEL_SOURCES"], HEADERS)
        for name, flags in KERNEL_VARIANTS.items()
    ]


setup(
    cmdclass={"build_ext": BuildLibraries},
    ext_modules=EXTENSIONS,
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # one wheel for Python 3.11 and all later versions
)
