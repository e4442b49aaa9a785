"""Arrays in a `.npz` file from elsewhere: what their headers say, before any of them takes memory."""

import zipfile
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """What an array's header says, and where in the archive it is."""

    info: zipfile.ZipInfo
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def fits(self) -> bool:
        """Say whether the archive can hold it: NumPy would allocate it before it finds that the data is missing."""
        # As Python's numbers, since NumPy's wrap.
        size = int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize
        return not self.dtype.hasobject and size <= self.info.file_size

    def read(self, archive: zipfile.ZipFile) -> np.ndarray:
        """Return the array."""
        with archive.open(self.info) as file:
            return np.lib.format.read_array(file, allow_pickle=False)


def stored_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredArray:
    """Read the header of an array."""
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    return StoredArray(info=info, shape=shape, dtype=dtype)
