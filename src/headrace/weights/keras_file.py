"""Read Keras' `.h5` files of versions 2 and 3, weights alone or whole models, with h5py (extra `keras`).

HDF5 is a file system in a file: a dataset's bytes may come from any other file, and its shape may announce more than
there is memory. Every link, dataset and attribute is therefore inspected before it is read.
"""

import math
import mmap
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.tensor_file import read_safetensors, write_safetensors

_SAVE_AGAIN = "Save the weights again: model.save_weights('FILE.weights.h5')."
_MAX_REUSE = 4  # times that the tensors may use the file's bytes
_MAX_TEXT_BYTES = 1 << 30  # for the longest list of names, if each name were as long as the longest text
_MIN_SECONDS, _BYTES_PER_SECOND = 20, 20 << 20
_MIN_MEMORY = 4 << 30  # address space, of which the libraries take one before anything is read
_REFUSED = 3  # exit code
_NUMBERS = "fiub"  # kinds of NumPy's dtypes


class _Refused(ValueError):
    """The file holds something that Keras does not write."""


def read_keras_file(path: Path) -> dict[str, np.ndarray]:
    """Return {"layer/tensor": array}, such as `conv1_conv/kernel`. Memory: at most 4 times the file's size.

    HDF5's library loops for ever on some damaged files and crashes on others, so a separate process reads the file,
    with a limit on its time and memory.
    """
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Keras' file {path} needs the package h5py to be read.", remedy="pip install 'headrace[keras]'"
        ) from error
    seconds = _MIN_SECONDS + path.stat().st_size // _BYTES_PER_SECOND
    # -P and the same path: what the child imports is what this process would, and nothing from the current directory.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "headrace.weights.keras_file", str(path), str(seconds)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode == 0:
        return read_safetensors(done.stdout)[0]
    problem = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode < 0:
        too_long = -done.returncode == signal.SIGXCPU
        problem = f"HDF5 took over {seconds} s" if too_long else f"HDF5 crashed with signal {-done.returncode}"
    if done.returncode == _REFUSED:
        raise CheckpointError(
            f"{path} is refused: {problem}.",
            rule="A file of weights contains all its numbers: nothing is read from other files, or beyond its size.",
            remedy=_SAVE_AGAIN,
        )
    raise CheckpointError(f"{path} cannot be read as Keras' weights: {problem}.", remedy=_SAVE_AGAIN)


def read_in_process(path: Path) -> dict[str, np.ndarray]:
    """Read the file here and now; what is refused is a ValueError, damage may raise or do anything."""
    import h5py

    with h5py.File(path, "r") as file:
        reader = _KerasReader(h5py, _MAX_REUSE * path.stat().st_size, _longest_text(path))
        root = reader.group(file, "model_weights") if _has(file, "model_weights") else file
        if _has(root, "layers"):
            return _counted_layers(reader, reader.group(root, "layers"))
        return _named_layers(reader, root)


def main(path: Path, seconds: int) -> int:
    """Write the file's tensors to standard output as safetensors, or the problem to standard error."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    most = _MIN_MEMORY + 4 * _MAX_REUSE * path.stat().st_size  # the arrays, and the copies of them that writing makes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        arrays = read_in_process(path)
        native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in arrays.items()}
        sys.stdout.buffer.write(write_safetensors(native, {}))
    except Exception as error:  # whatever it is, the parent reports it as one kind of error
        print(error or type(error).__name__, file=sys.stderr)
        return _REFUSED if isinstance(error, _Refused) else 1
    return 0


def _longest_text(path: Path) -> int:
    """Return a bound for the texts in the file: the size of the largest heap ("GCOL", version, size) of such texts."""
    sizes = [0]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = -1
        while (at := data.find(b"GCOL", at + 1)) >= 0:
            size = int.from_bytes(data[at + 8 : at + 16], "little")
            sizes.append(size if size <= len(data) else 0)
    return max(sizes)


def _has(group: Any, name: str) -> bool:
    """Say whether a group has a link of that name, without following it."""
    return group.get(name, getlink=True) is not None


@dataclass
class _KerasReader:
    """Opens what is stored in the file itself, and counts the bytes."""

    h5py: Any
    bytes_left: int
    longest_text: int

    def group(self, parent: object, name: str) -> Any:
        """Return a group below another one."""
        return self._child(parent, name, self.h5py.Group)

    def array(self, parent: Any, name: str) -> np.ndarray:
        """Return the numbers of a dataset."""
        dataset = self._child(parent, name, self.h5py.Dataset)
        place = f"{parent.name}/{name}"[:120]
        layout = dataset.id.get_create_plist()
        if dataset.is_virtual or layout.get_external_count():
            raise _Refused(f"the numbers of {place} are stored in another file")
        if layout.get_nfilters():  # a filter is code that HDF5 may load from elsewhere, and inflates without bound
            raise _Refused(f"{place} is compressed, which Keras' files are not (h5repack -f NONE undoes it)")
        if dataset.dtype.kind not in _NUMBERS:
            raise _Refused(f"{place} holds {dataset.dtype}, not numbers")
        self._spend(place, dataset.shape, dataset.dtype.itemsize, dataset.id.get_storage_size())
        return np.asarray(dataset)

    def names(self, parent: Any, attribute: str) -> list[str]:
        """Return a list of names that is an attribute."""
        found = self._attribute(parent, attribute)
        if not isinstance(found, np.ndarray) or found.ndim != 1 or (found.size and found.dtype.kind not in "SO"):
            raise _Refused(f"the attribute {attribute} of {parent.name} is not a list of names")
        return [name.decode() if isinstance(name, bytes) else str(name) for name in found.tolist()]

    def name(self, parent: Any, attribute: str, default: str) -> str:
        """Return a name that is an attribute."""
        if attribute not in parent.attrs:
            return default
        found = self._attribute(parent, attribute)
        return found.decode() if isinstance(found, bytes) else str(found)

    def _child(self, parent: Any, name: str, kind: type) -> Any:
        """Follow a path downwards, by links that stay in the file."""
        found = parent
        for part in filter(None, name.split("/")):
            link = found.get(part, getlink=True) if isinstance(found, self.h5py.Group) else None
            if link is None:
                raise _Refused(f"{parent.name} has no {name[:120]}")
            if type(link) is not self.h5py.HardLink:
                raise _Refused(f"{found.name}/{part[:120]} is a link that leads elsewhere ({type(link).__name__})")
            found = found[part]
        if not isinstance(found, kind):
            raise _Refused(f"{parent.name}/{name[:120]} is not a {kind.__name__}")
        return found

    def _attribute(self, parent: Any, name: str) -> Any:
        if name not in parent.attrs:
            raise _Refused(f"{parent.name} has no attribute {name}")
        info = parent.attrs.get_id(name)
        # Texts of any length are pointers, and many can point to one long text.
        if self.h5py.check_string_dtype(info.dtype) is None and info.dtype.kind not in "S" + _NUMBERS:
            raise _Refused(f"the attribute {name} of {parent.name} holds {info.dtype}")
        if math.prod(info.shape or ()) * self.longest_text > _MAX_TEXT_BYTES:
            raise _Refused(f"the attribute {name} of {parent.name} is too long for names")
        self._spend(name, info.shape, info.dtype.itemsize, math.prod(info.shape) * info.dtype.itemsize)
        return parent.attrs[name]

    def _spend(self, place: str, shape: Any, item_bytes: int, stored: int) -> None:
        size = math.prod(shape or ()) * item_bytes
        self.bytes_left -= size
        if size > stored or self.bytes_left < 0:
            raise _Refused(f"{place} announces {size:,} bytes, more than are stored")


# Keras 3 counts the tensors of a layer, in this order; its groups are named after the layer's class.
_BY_CLASS = (
    ("batch_normalization", ("gamma", "beta", "moving_mean", "moving_variance")),
    ("depthwise_conv2d", ("depthwise_kernel", "bias")),
    ("conv2d", ("kernel", "bias")),
    ("dense", ("kernel", "bias")),
)


def _counted_layers(reader: _KerasReader, root: Any) -> dict[str, np.ndarray]:
    """Read the weights alone, as Keras 3 writes them (`FILE.weights.h5`)."""
    arrays = {}
    for group_name in root:
        tensors = next((names for kind, names in _BY_CLASS if group_name.startswith(kind)), ())
        group = reader.group(root, group_name) if tensors else None
        if group is None or not _has(group, "vars"):
            continue
        variables = reader.group(group, "vars")
        layer = reader.name(variables, "name", group_name)
        for number, tensor in enumerate(tensors):
            if _has(variables, str(number)):
                arrays[f"{layer}/{tensor}"] = reader.array(variables, str(number))
    return arrays


def _named_layers(reader: _KerasReader, root: Any) -> dict[str, np.ndarray]:
    """Read the weights of Keras 2, or a whole model of either version."""
    if "layer_names" not in root.attrs:
        raise ValueError("it names neither layers nor their tensors")
    arrays = {}
    for layer in reader.names(root, "layer_names"):
        group = reader.group(root, layer)
        for weight in reader.names(group, "weight_names"):
            tensor = weight.rsplit("/", 1)[-1].split(":")[0]
            array = reader.array(group, weight)
            if tensor == "kernel" and array.ndim == 4 and array.shape[3] == 1 < array.shape[2]:
                tensor = "depthwise_kernel"  # as Keras 2 named it
            arrays[f"{layer}/{tensor}"] = array
    return arrays


if __name__ == "__main__":  # in the process that reads a file of Keras
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
