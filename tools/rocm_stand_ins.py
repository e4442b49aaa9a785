"""Make stand-ins for the libraries of ROCm, so that AMD's compiler can be loaded where ROCm is not installed.

`python tools/rocm_stand_ins.py FOLDER`, then LD_LIBRARY_PATH=FOLDER. jax-rocm7-pjrt is linked with eight libraries
that pip does not bring. Compiling for GPUs that are not there calls next to none of their functions: each function of a
stand-in returns an error. Nothing can run with them. It needs nm, readelf (binutils) and a C compiler.
"""

import re
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import files
from pathlib import Path

ERROR = 100  # HIP's for no device
# Functions without a version say by their names whose they are.
OWNERS = {
    "librocprofiler-sdk": "rocprofiler",
    "librccl": "nccl",
    "libhipblaslt": "hipblaslt|hipblasLt",
    "libhipfft": "hipfft",
    "libMIOpen": "miopen",
    "librocblas": "rocblas",
    "librocm_smi64": "rsmi",
    "libamdhip64": "hip",
}


def said(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(plugin: Path) -> dict[str, dict[str, list[str]]]:
    """Return {library: {version or "": its functions that the plugin calls}}."""
    libraries = re.findall(r"\[(\S+?)\]", said("readelf", "-d", str(plugin)))
    wanted = {name: {} for name in libraries if name.split(".")[0] in OWNERS}
    versions, library = {}, ""
    for line in said("readelf", "-V", str(plugin)).splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found.group(1)
        elif library and (found := re.search(r"Name: (\S+)", line)):
            versions[found.group(1)] = library
    functions: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in wanted}
    for line in said("nm", "-D", "--undefined-only", str(plugin)).splitlines():
        name, _, version = line.split()[-1].partition("@")
        if version:
            owner = versions.get(version.lstrip("@"), "")
        else:
            plain = next((key for key, pattern in OWNERS.items() if re.search(pattern, name)), "")
            owner = next((each for each in wanted if plain and each.startswith(f"{plain}.")), "")
        if owner in functions:
            functions[owner][version.lstrip("@")].append(name)
    return functions


def make(library: str, functions: dict[str, list[str]], folder: Path) -> None:
    """Compile one stand-in."""
    source, script = folder / f"{library}.c", folder / f"{library}.map"
    names = sorted({name for each in functions.values() for name in each})
    source.write_text("".join(f"int {name}(void) {{ return {ERROR}; }}\n" for name in names))
    script.write_text("".join(f"{key} {{ global: {'; '.join(own)}; }};\n" for key, own in functions.items() if key))
    command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", str(folder / library), str(source)]
    command += [f"-Wl,-soname,{library}"] + ([f"-Wl,--version-script={script}"] if any(functions) else [])
    subprocess.run(command, check=True)


def main() -> None:
    """Make all of them."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    found = [each for each in files("jax-rocm7-pjrt") or () if each.name == "xla_rocm_plugin.so"]
    for library, functions in needed(Path(str(found[0].locate()))).items():
        make(library, functions, folder)
        print(f"{library}: {sum(map(len, functions.values()))} functions")


if __name__ == "__main__":
    main()
