"""Build the C code in src/headrace/native. Everything else about the package is in pyproject.toml.

The extensions are optional: where there is no compiler, installing succeeds and Headrace decodes with libjpeg and
Pillow. They are plain shared libraries without Python's API (see native/library.py), so neither Python's headers nor
another package is needed to build them, and one wheel serves every Python version.
"""

import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/headrace/native")
LIBRARY = runpy.run_path(str(FOLDER / "library.py"))
# Integers wrap, and a product is rounded before it is added to: the results are the bits that Python computes.
FLAGS = ["-O3", "-g0", "-fwrapv", "-ffp-contract=off"]
# A wheel must run everywhere, so -march=native is out. Baseline x86-64 code takes over twice as long to decode, and
# this no slower than -march=native; library.py chooses when it loads.
VARIANTS = {LIBRARY["PORTABLE"]: []}
if platform.machine() in ("x86_64", "AMD64"):
    VARIANTS[LIBRARY["AVX2"]] = ["-mavx2", "-mbmi", "-mbmi2"]


class BuildLibraries(build_ext):
    """Builds files that are not named like Python modules."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of a library inside the package."""
        return fullname.replace(".", "/") + LIBRARY["SUFFIX"]


def extension(name: str, flags: list[str]) -> Extension:
    """Return one variant of the library; all are made of the same sources."""
    return Extension(
        f"headrace.native.{name}",
        sources=[path.as_posix() for path in sorted(FOLDER.glob("*.c"))],
        depends=[path.as_posix() for path in sorted(FOLDER.glob("*.h"))],
        define_macros=[("HEADRACE_SOURCE_HASH", f'"{LIBRARY["source_hash"](FOLDER)}"')],
        extra_compile_args=[*FLAGS, *flags],
        libraries=["m"],
        optional=True,
    )


setup(
    cmdclass={"build_ext": BuildLibraries},
    ext_modules=[extension(name, flags) for name, flags in VARIANTS.items()],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # one wheel for Python 3.11 and all later versions
)
