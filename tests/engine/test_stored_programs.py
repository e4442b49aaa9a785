"""Programs on disk: who finds them, what makes them others, what is never stored, and that nothing wrong is loaded."""

import gc
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import headrace.engine
from headrace.checkpoint.store import list_checkpoints, load
from headrace.core.session import session
from headrace.engine import program_names, stored_programs
from headrace.engine.compiler import CONV_FUSION
from headrace.engine.devices import count_compilations, replica_mesh
from headrace.engine.forward import make_forward
from headrace.engine.program_names import source_digest
from headrace.engine.stored_programs import ProgramRequest

FOLDER = stored_programs.folder


@pytest.fixture(autouse=True)
def place(tmp_path):
    """Store in a folder of the test's own. JAX's cache stays where it was: once it is open, it cannot be moved."""
    own = mock.patch.object(headrace.engine, "multiplication", multiplication, create=True)
    with own, mock.patch.object(stored_programs, "folder", return_value=tmp_path / "programs"):
        yield tmp_path / "programs"
    session().programs.clear()


def multiplication(spec, _mesh):
    """Return a jitted program."""
    factor, donates = spec
    return jax.jit(partial(lax.mul, factor), donate_argnums=0 if donates else ())


multiplication.__module__ = "headrace.engine"  # and the fixture puts it there: what is not the package's has no name


def request(factor=None, *, shape=(), dtype: Any = np.float32, options=None, donates=True, devices=1):
    """Return the request for a program that multiplies; without a factor for one that no cache has seen."""
    mesh = replica_mesh(jax.devices()[:devices])
    factor = np.full(shape, random.random() if factor is None else factor, dtype)
    return ProgramRequest(
        make=multiplication,
        spec=(factor, donates),
        arguments=(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec())),),
        options=options or {},
        mesh=mesh,
    )


def obtain(wanted):
    """Return (program, what a run would say, seconds of tracing), as a new process would get them."""
    session().programs.clear()
    with count_compilations() as counts:
        programs = wanted.prepare().compile()
    return programs.compiled[0], str(counts), programs.trace_seconds


def files(place):
    """Return the files of names and those of programs."""
    found = sorted(place.iterdir(), key=lambda path: path.stat().st_size)
    return found[: len(found) // 2], found[len(found) // 2 :]


@pytest.mark.parametrize("options", [{}, {CONV_FUSION: True}])
def test_a_program_is_compiled_once_and_then_found_without_tracing(place, options):
    wanted = request(factor := random.random(), options=options)
    program, said, seconds = obtain(wanted)
    assert said == "compilation cache: 0 hits, 1 miss"
    assert seconds > 0
    expected = float(program(jax.device_put(np.float32(3), program.input_shardings[0][0])))
    names, programs = files(place)
    assert len(names) == len(programs) == 1
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (*names, *programs))

    program, said, seconds = obtain(request(factor, options=options))
    assert said == "compilation cache: 1 hit, 0 misses"
    assert seconds == 0
    given = jax.device_put(np.float32(3), program.input_shardings[0][0])
    assert float(program(given)) == expected == np.float32(3) * np.float32(factor)
    assert given.is_deleted()  # donated, as it was when the program was compiled
    memory = program.memory_analysis()
    assert memory
    assert memory.alias_size_in_bytes == 4


def test_a_second_run_of_the_process_reads_nothing():
    wanted = request()
    first = wanted.prepare().compile()
    with count_compilations() as counts, mock.patch.object(stored_programs, "_read") as read:
        second = wanted.prepare().compile()
    assert second.compiled[0] is first.compiled[0]
    assert second.trace_seconds == 0
    assert str(counts) == "kept from an earlier run"
    assert not read.called


def test_a_program_on_several_devices_is_found():
    wanted = request(devices=4)
    obtain(wanted)
    program, said, _ = obtain(wanted)
    assert said == "compilation cache: 1 hit, 0 misses"
    assert len(program(jax.device_put(np.float32(2), program.input_shardings[0][0])).sharding.device_set) == 4


def with_variable(name, value):
    return mock.patch.dict(os.environ, {name: value})


OTHERS = {
    "value": (request(0.5), request(0.25)),
    "shape": (request(0.5), request(0.5, shape=(2,))),
    "dtype": (request(0.5), request(0.5, dtype=np.int32)),
    "donation": (request(0.5), request(0.5, donates=False)),
    "devices": (request(0.5), request(0.5, devices=2)),
    "options": (request(0.5), request(0.5, options={CONV_FUSION: True})),
}
CONDITIONS = {
    "matmul precision": lambda: jax.default_matmul_precision("float32"),
    "random numbers": lambda: jax.threefry_partitionable(False),
    "NaN checks": lambda: jax.debug_nans(True),
    "XLA_FLAGS": lambda: with_variable("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "cuDNN": lambda: with_variable("CUDNN_LOGLEVEL_DBG", "3"),
    "version of JAX": lambda: mock.patch.object(program_names, "_versions", return_value=("jax 0.99",)),
    "source": lambda: mock.patch.object(stored_programs, "source_digest", return_value="0" * 64),
    "kernels": lambda: mock.patch.object(program_names, "load_kernels", return_value=("others", "")),
    "processors": lambda: mock.patch.object(program_names, "num_processors", return_value=3),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_program_has_another_name(what):
    one, other = OTHERS[what]
    assert one._name() is not None
    assert one._name() == one._name()
    assert other._name() not in (None, one._name())


@pytest.mark.parametrize("what", CONDITIONS)
def test_under_other_conditions_a_program_has_another_name(what):
    name = request(0.5)._name()
    with CONDITIONS[what]():
        assert request(0.5)._name() not in (None, name)
    assert request(0.5)._name() == name


def test_where_the_cache_is_and_what_is_logged_do_not_count():
    name = request(0.5)._name()
    with cache_directory("elsewhere"), jax.log_compiles(), with_variable("CUDA_VISIBLE_DEVICES", "1"):
        assert request(0.5)._name() == name


@contextmanager
def cache_directory(path):
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", path)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_names_are_those_of_another_process():
    """Nothing in them depends on addresses, on the seed of Python's hashes or on the order of a set."""
    code = (
        "import jax, numpy as np; jax.config.update('jax_compilation_cache_dir', '/nowhere')\n"
        "from tests.engine.test_stored_programs import network_request\n"
        "print(network_request()._name())"
    )
    names = set()
    for seed in ("1", "2"):
        environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", code]
        done = subprocess.run(
            words, env=environ, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
        )
        names.add(done.stdout.split()[-1])
    assert len(names) == 1
    assert len(names.pop()) == 64


def network_request():
    """Return the request for a network's forward pass."""
    from headrace.config.load import config_from
    from headrace.data.augmentation.preprocess import Preprocess
    from headrace.data.feeding.fetch import FetchSamples
    from headrace.engine.forward import EvalSpec, make_forward
    from headrace.engine.lr_curve import make_lr_curve
    from headrace.engine.optimizer import make_optimizer
    from headrace.model.zoo import build_network

    config, mesh = config_from({"model_name": "cifar_resnet8"}), replica_mesh(jax.devices()[:1])
    curve = make_lr_curve(config.learning, global_batch_size=8, updates_per_epoch=10, num_epochs=2)
    preprocess = Preprocess(
        augmentation="none", normalization="zero-one", mean=(), std=(), seed=0, image_hwc=(32, 32, 3)
    )
    fetch, optimizer = FetchSamples(preprocess, train=False), make_optimizer(config.learning, curve, 8)
    network = build_network(config.model, 10, (32, 32, 3))
    spec = EvalSpec(network=network, fetch=fetch, compute_dtype=np.float32, num_replicas=1)
    return ProgramRequest(make=make_forward, spec=spec, mesh=mesh, more=(optimizer,), arguments=(), options={})


def test_any_change_of_the_source_counts_but_one_that_no_program_sees(tmp_path):
    source_digest.cache_clear()
    for name in ("engine/step.py", "ops/conv.py", "cli/main.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x = 1\n")
        os.utime(tmp_path / name, (1e9, 1e9))
    digest = source_digest.__wrapped__
    before = digest(tmp_path)
    assert len(before) == 64
    (tmp_path / "cli" / "main.py").write_text("x = 2\n")
    assert digest(tmp_path) == before
    (tmp_path / "ops" / "conv.py").write_text("x = 2\n")
    os.utime(tmp_path / "ops" / "conv.py", (1e9, 1e9))  # the size and the time are those of before
    assert digest(tmp_path) != before
    (tmp_path / "ops" / "conv.py").write_text("x = 1\n")
    os.utime(tmp_path / "ops" / "conv.py", (later := time.time() + 5, later))
    assert digest(tmp_path) == ""  # this process may have imported what was there before


def test_a_change_of_the_source_that_changes_no_program_costs_one_tracing(place):
    wanted = request()
    obtain(wanted)
    with mock.patch.object(stored_programs, "source_digest", return_value="0" * 64):
        _, _, seconds = obtain(wanted)
        assert seconds > 0
        assert [len(part) for part in files(place)] == [1, 2]  # two names for one program
        _, said, seconds = obtain(wanted)
    assert said == "compilation cache: 1 hit, 0 misses"
    assert seconds == 0


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "changed":
        data[-1] ^= 1
    path.write_bytes({"truncated": data[:-7], "empty": b"", "format": b"x" + data[1:]}.get(how, data))
    if how == "writable":
        path.chmod(0o622)
    if how == "link":
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved"))
    if how == "directory":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("which", ["name", "program"])
@pytest.mark.parametrize("how", ["changed", "truncated", "empty", "format", "writable", "link", "directory"])
def test_a_file_that_is_not_what_was_written_is_not_used(place, which, how):
    wanted = request(factor := random.random())
    obtain(wanted)
    names, programs = files(place)
    damage(names[0] if which == "name" else programs[0], how)
    program, _, seconds = obtain(wanted)
    assert seconds > 0
    given = jax.device_put(np.float32(3), program.input_shardings[0][0])
    assert float(program(given)) == np.float32(3) * np.float32(factor)


def test_a_renamed_file_is_not_taken_for_another_program(place):
    one, other = request(0.5, shape=(3,)), request(random.random(), shape=(3,))
    obtain(other)
    (name,), _ = files(place)
    shutil.copy(name, place / str(one._name()))
    assert stored_programs._find(str(one._name()), one.devices) is None


def test_another_users_file_is_not_used(place):
    wanted = request()
    obtain(wanted)
    name = str(wanted._name())
    assert stored_programs._find(name, wanted.devices)
    with mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1):
        assert stored_programs._read(place, name) is None


def test_a_program_that_cannot_be_loaded_is_compiled_and_stored_no_more(place):
    wanted = request()
    obtain(wanted)
    name, program = (each[0].name for each in files(place))
    stored_programs._write(place, program, pickle.dumps(("nothing", None, None)))
    _, _, seconds = obtain(wanted)
    assert seconds > 0
    stored_programs._write(place, program, b"not a pickle")
    _, _, seconds = obtain(wanted)
    assert seconds > 0
    stored_programs._write(place, name, b"[1, 2]")
    assert obtain(wanted)[2] > 0


def own_program(spec, _mesh):
    return jax.jit(spec)


def test_what_a_user_wrote_is_never_stored(place):
    own = lambda x: 2 * x  # noqa: E731
    mesh = replica_mesh(jax.devices()[:1])
    wanted = ProgramRequest(make=own_program, spec=own, mesh=mesh, arguments=(np.float32(1),), options={})
    assert wanted._name() is None
    assert replace(wanted, make=make_forward)._name() is None
    assert replace(wanted, spec=None)._name() is None
    assert replace(wanted, make=make_forward, spec=None)._name()
    assert float(wanted.prepare().compile().compiled[0](np.float32(2))) == 4
    assert not place.exists()


def test_nothing_is_stored_while_functions_or_methods_of_the_package_are_replaced():
    from headrace.model.network import Network
    from headrace.ops import conv

    assert not program_names.is_patched()
    own = lambda *_: None  # noqa: E731
    with mock.patch.object(conv, "conv2d", own):
        assert request(0.5)._name() is None
    with mock.patch.object(Network, "apply_range", own):
        assert request(0.5)._name() is None
    assert request(0.5)._name()


def test_modules_that_are_imported_meanwhile_do_no_harm():
    """The garbage collector runs while the modules are looked at, and lets other threads import theirs."""
    added = (f"imported_meanwhile_{i}" for i in range(10_000))
    names: list[str] = []

    def import_one(*_: object) -> None:
        if (name := next(added, None)) is not None:  # a collection begins often, by how much was made before
            names.append(name)
            sys.modules[name] = sys

    before = gc.get_threshold()
    gc.callbacks.append(import_one)
    gc.set_threshold(1)
    try:
        assert not program_names.is_patched()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(import_one)
        for name in names:
            del sys.modules[name]
    assert names


def test_without_a_cache_and_in_jobs_of_several_processes_nothing_is_stored():
    with mock.patch.object(jax, "process_count", return_value=2):
        assert request(0.5)._name() is None
    with cache_directory("/somewhere"):
        assert FOLDER() == Path(f"/somewhere/headrace-{os.geteuid()}")
    with cache_directory(None):
        assert FOLDER() is None
    with mock.patch.object(stored_programs, "folder", return_value=None):
        assert request(0.5)._name() is None


def test_a_folder_that_cannot_be_written_is_harmless(place):
    place.write_text("a file, where the folder should be")
    for _ in range(2):
        _, said, seconds = obtain(request())
        assert seconds > 0
        assert "1 miss" in said


def test_a_program_that_cannot_be_written_is_harmless(place):
    with mock.patch("jax.experimental.serialize_executable.serialize", side_effect=ValueError("not on this backend")):
        assert obtain(request())[2] > 0
    assert not place.exists()


def test_what_came_from_jaxs_cache_is_not_written_again(place):
    wanted = request()
    obtain(wanted)
    shutil.rmtree(place)
    jax.clear_caches()
    _, said, seconds = obtain(wanted)
    assert said == "compilation cache: 1 hit, 0 misses"
    assert seconds > 0
    assert not place.exists()


def test_the_oldest_files_go_when_there_are_too_many(place):
    first, second = request(), request()
    obtain(first)
    for path in place.iterdir():
        os.utime(path, (1e9, 1e9))
    with mock.patch.object(stored_programs, "_MOST_BYTES", 1 + sum(each.stat().st_size for each in place.iterdir())):
        obtain(second)
    assert obtain(second)[2] == 0
    assert obtain(first)[2] > 0


# Whole runs, in processes of their own.


def start(folder: Path, cache: str | Path, **options: object) -> subprocess.Popen[str]:
    """Start a training run; its programs are compiled as those of a user."""
    given = {"model": "cifar_resnet8", "dataset": "digits", "micro-batch-size": 8} | options
    words = [sys.executable, "-m", "headrace", "train", "--config", "none", "--num-epochs", "1", "--dry-run-steps", "4"]
    words += [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += ["--log-dir", str(folder.parent), "--run-name", folder.name, "--compilation-cache-dir", str(cache)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[str, float, dict[str, np.ndarray]]:
    """Return (what was printed, seconds of tracing, the last checkpoint) of a run."""
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return printed, record["start"]["trace"], load(list_checkpoints(folder / "checkpoints")[-1])[0]


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_a_second_start_traces_nothing_and_ends_with_the_same_weights(tmp_path):
    results = {}
    for name, cache in {"first": "cache", "second": "cache", "none": "none"}.items():
        folder = tmp_path / "runs" / name
        results[name] = ended(start(folder, tmp_path / cache if cache != "none" else cache), folder)
    printed, traced, weights = results["first"]
    assert printed.count("compilation cache: 0 hits, 1 miss)") == 1  # training; validation has one or two programs
    assert traced > 0.01
    printed, traced, found = results["second"]
    assert "compilation cache: 1 hit, 0 misses)" in printed
    assert "miss)" not in printed
    assert traced == 0
    assert equal(found, weights)
    assert results["none"][1] > 0.01
    assert equal(results["none"][2], weights)
    assert not (tmp_path / "none").exists()


FINE_TUNING = {"layer-lr": "backbone=0.1", "weight-decay": 0.001, "weight-decay-exclude": "bn", "mixup-alpha": 0.2}


@pytest.mark.parametrize("options", [{}, FINE_TUNING])
def test_another_seed_rate_or_number_of_epochs_traces_nothing(tmp_path, options):
    """Fine-tuning and 32 of 67 recipes were never stored, and each seed and rate was traced anew."""
    # The statistics' momentum, chosen for the number of steps, and the optimizer's, which comes with a chosen rate, are
    # parts of the program.
    options = options | {"bn-momentum": 0.9, "learning-rate": 0.1}
    first = ended(start(tmp_path / "first", tmp_path / "cache", **options), tmp_path / "first")
    assert first[1] > 0.01
    other = options | {"seed": 7, "learning-rate": 0.03, "lr-schedule": "cosine", "num-epochs": 3}
    printed, traced, weights = ended(start(tmp_path / "other", tmp_path / "cache", **other), tmp_path / "other")
    assert traced == 0
    assert "miss)" not in printed
    # and draws its own numbers: the program that is found is that of a run without a cache
    alone = ended(start(tmp_path / "alone", "none", **other), tmp_path / "alone")
    assert equal(weights, alone[2])
    assert not equal(weights, first[2])


def test_two_runs_at_once_share_a_cache(tmp_path):
    folders = [tmp_path / "runs" / name for name in ("a", "b", "c")]
    both = [start(folder, tmp_path / "cache") for folder in folders[:2]]
    weights = [ended(process, folder)[2] for process, folder in zip(both, folders, strict=False)]
    _, traced, found = ended(start(folders[2], tmp_path / "cache"), folders[2])
    assert traced == 0
    assert equal(weights[0], weights[1])
    assert equal(found, weights[0])


OWN = """
import sys, jax, headrace
from headrace.engine.stored_programs import ProgramRequest
names, found = [], ProgramRequest._name
ProgramRequest._name = lambda self: names.append(found(self)) or names[-1]
ProgramRequest._name.__module__ = "headrace"
darker = lambda key, images, labels: images * 0.5
options = {"log_dir": sys.argv[1] + "/runs", "compilation_cache_dir": sys.argv[1] + "/cache", "progress": "none"}
model = headrace.Model("cifar_resnet8", dry_run_steps=1, micro_batch_size=8, **options)
model.fit("digits", epochs=1, augment=darker if sys.argv[2] == "own" else None)
print("names", names)
"""


@pytest.mark.parametrize("augments", ["own", "none"])
def test_a_run_with_a_function_of_its_user_is_never_stored(tmp_path, augments):
    words = [sys.executable, "-c", OWN, str(tmp_path), augments]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = done.stdout.rpartition("names [")[2].split("]")[0].split(", ")  # in any order: two threads compile
    assert names.count("None") == (augments == "own"), done.stdout
    assert len(names) > 1
    assert len(list((tmp_path / "cache").glob("headrace-*/*"))) >= (2 if augments == "none" else 0)
