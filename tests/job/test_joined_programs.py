"""Programs that several processes run, started in the ways of others: `Model.fit` joins them and trains one model."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import headrace
from headrace.telemetry.records import RunEnd, RunStart
from tests.job.processes import PATIENCE, SRC

FIT = """
import jax
class Tell(hr.Callback):
    every_process = True
    def on_epoch_end(self, event):
        print("told", event.step, event.loss, flush=True)
        return "only the first process may stop a run" if jax.process_index() else None

model = hr.Model("cifar_resnet8")
run = model.fit("digits", epochs=2, validation=False, weight_updates_per_epoch=2, callbacks=[Tell()], {options})
report = model.evaluate("digits", steps=1)
print("fitted", run.directory.name, run.step, report["num_samples"], flush=True)
"""
PROGRAM = f"import headrace as hr\n{FIT}"
# as the workers of Ray's JaxTrainer do before the user's function runs
CONNECTED = f"""
import os, jax
import headrace as hr
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(os.environ["ADDRESS"], 2, int(os.environ["NUMBER"]))
{FIT}"""
TOO_LATE = f"import jax\nimport headrace as hr\njax.devices()\n{FIT}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(program: str, environs: list[dict[str, str]], folder: Path) -> list[tuple[int, str]]:
    """Run the program in a process for each environment, all in one folder; return exit codes and what was printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    common = clean | {"PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=folder,
            env=common | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environ in environs
    ]
    try:
        return [
            (process.wait(), text) for process in started for text in [process.communicate(timeout=2 * PATIENCE)[0]]
        ]
    finally:
        for process in started:
            process.kill()


def jax_variables() -> list[dict[str, str]]:
    place = f"127.0.0.1:{free_port()}"
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    return [dict(zip(names, (place, "2", str(number)), strict=True)) for number in range(2)]


@pytest.mark.parametrize("way", ["Kubeflow", "torchrun", "Ray"])
def test_two_processes_fit_one_model(way: str, tmp_path: Path) -> None:
    port = str(free_port())
    if way == "Kubeflow":
        environs, program = jax_variables(), PROGRAM
    elif way == "torchrun":
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        environs = [shared | {"RANK": number, "LOCAL_RANK": number} for number in ("0", "1")]
        program = PROGRAM
    else:
        shared = {"ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_CPU_DEVICES": "2"}
        environs = [shared | {"NUMBER": number} for number in ("0", "1")]
        program = CONNECTED
    ends = run_all(program.format(options="batch_size=64"), environs, tmp_path)
    assert [code for code, _ in ends] == [0, 0], ends
    (directory,) = (tmp_path / "runs").iterdir()  # one run, not one for each process
    for _, printed in ends:
        assert f"fitted {directory.name} 4 " in printed
    first, second = (printed for _, printed in ends)
    assert [line for line in first.splitlines() if line.startswith("told")] == [
        line for line in second.splitlines() if line.startswith("told")
    ]
    # where JAX is connected already, all of its devices are used
    assert f"({4 if way == 'Ray' else 2} replicas)" in first
    # what Headrace does not watch, it says so
    assert ("were connected by what started them" in first) == (way == "Ray")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torchrun comes with torch")
def test_torchrun_starts_one_job_and_starts_it_again(tmp_path: Path) -> None:
    """By the real program; process 1 is killed once, and --resume auto goes on."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--no-python"]
    (tmp_path / "child.sh").write_text(
        "#!/bin/sh\n"
        'if [ "$RANK" = 1 ] && [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then\n'
        "  (while ! ls runs/one/checkpoints/step_* >/dev/null 2>&1; do sleep 0.2; done; kill -9 $$) &\n"
        "fi\n"
        f'exec {sys.executable} -m headrace "$@"\n'
    )
    (tmp_path / "child.sh").chmod(0o755)
    options = [
        "--config",
        "none",
        "--model-name",
        "toy_model",
        "--dataset",
        "digits",
        "--num-epochs",
        "300",
        "--run-name",
        "one",
    ]
    options += [
        "--batch-size",
        "32",
        "--learning-rate",
        "0.01",
        "--no-validation",
        "--ckpts-per-epoch",
        "1",
        "--resume",
        "auto",
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path / "child.sh"), "train", *options],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=4 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    records = headrace.read_records(tmp_path / "runs" / "one")
    starts = [record for record in records if isinstance(record, RunStart)]
    assert [record.num_replicas for record in starts] == [2, 2]
    assert starts[0].step == 0 < starts[1].step
    ends = [record.outcome for record in records if isinstance(record, RunEnd)]
    assert ends[-1] == "finished"


def test_a_process_that_is_too_late_to_join_is_refused(tmp_path: Path) -> None:
    ((code, printed),) = run_all(TOO_LATE.format(options=""), jax_variables()[:1], tmp_path)
    assert code == 1
    assert "process 0 of 2, but this process has started its devices alone" in printed
    assert not (tmp_path / "runs").exists()


def test_a_process_that_cannot_join_is_refused(tmp_path: Path) -> None:
    ((code, printed),) = run_all(PROGRAM.format(options=""), [{"PMI_RANK": "1", "PMI_SIZE": "2"}], tmp_path)
    assert code == 1
    assert "MPICH or Intel MPI (PMI_RANK=1, PMI_SIZE=2)" in printed
    assert not (tmp_path / "runs").exists()
