"""What pipelines cost the host: the dispatcher against the device loop, on one device.

    PYTHONPATH=src python benchmarks/pipeline_overhead.py --config synthetic_resnet50 --micro-batch-size 64 \
        --gradient-accumulation-count 4 --pipeline-splits conv2_block3_out conv3_block4_out conv4_block4_out

All stages are put on device 0. `headrace` itself would run them as one program there; here the dispatcher is made to
run them, as it does when they are on devices of their own, so that its cost can be seen. Prints a line of JSON: ms per
step of the device loop and of the dispatcher, alternating, and the host's microseconds per action.

    PYTHONPATH=src python benchmarks/pipeline_overhead.py --tiny

measures launching alone, with four stages that compute next to nothing, on one device and on four (where the platform
has them): microseconds per action in all. On one device one thread does everything, so this bounds the time in which
an action holds the interpreter lock. (A thread that counts in Python beside the launches does not measure that: on
quiet cores the results went from -200 to 150 us.)

    PYTHONPATH=src python benchmarks/pipeline_overhead.py --lock

launches the same stages for some seconds under py-spy (which must be on the PATH), and tells the time in which some
thread held the interpreter lock from the time in which none did.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from headrace.cli.options import parse
from headrace.data.dataset import open_dataset
from headrace.data.feeding.block_reader import feed_options
from headrace.run.benchmarks import with_calls
from headrace.run.design import Design, design_run, starting_state
from headrace.run.training import make_executor, open_feed, step_spec

STEPS, ROUNDS = 10, 4
LOCK_SECONDS, SAMPLES_PER_SECOND = 10, 250
MAPPINGS = ([0, 0, 0, 0], [0, 1, 2, 3])
jax.config.update("jax_num_cpu_devices", 4)


class Side:
    """One way to run the steps, compiled, with its own state."""

    def __init__(self, design: Design, one_program: bool) -> None:
        self.design = replace(design, plan=replace(design.plan, one_program=one_program))
        config = design.config
        dataset = open_dataset(config.data, 0)
        options = feed_options(config.data, dataset.info, 0, 1, config.augment)
        spec = step_spec(self.design, options, dataset)
        executor = make_executor(self.design.plan, spec, jax.devices(), config.pipeline)
        self.state = executor.place(starting_state(self.design))
        self.feed = open_feed(self.design, dataset, options, executor, 0)
        self.block = self.feed.next()
        self.program: Any = executor.compile(self.state, self.feed.resident, self.block)

    def run(self) -> tuple[float, float]:
        """Return (seconds until the call was dispatched, seconds until it was done), per step."""
        begin = time.perf_counter()
        self.state, metrics = self.program(self.state, self.feed.resident, self.block, STEPS)
        dispatched = time.perf_counter() - begin
        jax.block_until_ready(metrics)
        return dispatched / STEPS, (time.perf_counter() - begin) / STEPS


def main(argv: list[str]) -> None:
    """Measure and print."""
    if argv[0] in ("--tiny", "--lock"):
        measure = measure_tiny if argv == ["--tiny"] else measure_lock
        for mapping in MAPPINGS:
            print(json.dumps(measure(mapping)))
        return
    if argv[0] == "--launch":
        print(f"us_per_action {launch_for_seconds([int(device) for device in argv[1]])}")
        return
    resolved, _ = parse([*argv, "--device-mapping", *"0000"[: 1 + len(_splits(argv))]], "pipeline_overhead")
    design = with_calls(design_run(resolved.config), STEPS, 2)
    sides = {"device loop": Side(design, True), "dispatcher": Side(design, False)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(ROUNDS + 1):
        for name, side in sides.items():
            times[name].append(side.run())
    pipeline = design.plan.pipeline
    assert pipeline is not None
    done = {name: 1e3 * statistics.median(total for _, total in runs[1:]) for name, runs in times.items()}
    num_actions = len(pipeline.table.cells)
    dispatched = statistics.median(first for first, _ in times["dispatcher"][1:])
    result = {
        "model": design.network.name,
        "micro_batch_size": design.plan.batch.micro_batch_size,
        "num_micros": design.plan.batch.gradient_accumulation_count,
        "num_stages": pipeline.num_stages,
        "recomputation": pipeline.recomputation,
        "device_loop_ms": round(done["device loop"], 2),
        "dispatcher_ms": round(done["dispatcher"], 2),
        "ratio": round(done["dispatcher"] / done["device loop"], 3),
        "actions_per_step": num_actions,
        "host_us_per_action": round(1e6 * dispatched / num_actions),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    print(json.dumps(result))


def tiny_pipeline(mapping: list[int], num_micros: int = 64, num_steps: int = 20) -> tuple[Callable[[], Any], int]:
    """Return a function that runs a pipeline of tiny stages once, compiled, and its number of actions."""
    import optax

    from headrace import OptimizerOutput, Outfeed, Stage, pipeline

    pipe = pipeline(
        [Stage(lambda p, x: x * p, 1.0) for _ in mapping],
        num_micros,
        optimizer_function=lambda y: OptimizerOutput(optax.sgd(0.0), y, apart=True),
        inputs=[1.0],
        outfeed=Outfeed(mode="LAST"),
        device_mapping=mapping,
        repeat_count=num_steps,
    )
    state = pipe(pipe.init())
    return lambda: jax.block_until_ready(pipe(state).weights), len(pipe.table.cells) * num_steps


def measure_tiny(mapping: list[int]) -> dict[str, Any]:
    """Return what an action of a pipeline of tiny stages costs the host."""
    run, num_actions = tiny_pipeline(mapping)
    return _row(mapping, us_per_action=1e6 * min(_timed(run) for _ in range(ROUNDS)) / num_actions)


def launch_for_seconds(mapping: list[int]) -> float:
    """Launch tiny stages for a while; return microseconds per action."""
    run, num_actions = tiny_pipeline(mapping)
    begin, runs = time.perf_counter(), 0
    while time.perf_counter() < begin + LOCK_SECONDS:
        run()
        runs += 1
    return 1e6 * (time.perf_counter() - begin) / (runs * num_actions)


def measure_lock(mapping: list[int]) -> dict[str, Any]:
    """Return the time per action in which the interpreter lock is held, and in which it is free."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "samples"
        command = ["py-spy", "record", "--gil", "--rate", str(SAMPLES_PER_SECOND), "--format", "raw", "-o", str(output)]
        command += ["--", sys.executable, __file__, "--launch", "".join(map(str, mapping))]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        # A line is a stack and how often it was seen with the lock; launching threads start at Run._guard.
        stacks = [line.rpartition(" ") for line in output.read_text().splitlines()]
    us = float(printed.partition("us_per_action ")[2].split()[0])
    seen = sum(int(count) for stack, _, count in stacks if "launch_for_seconds" in stack or "_guard" in stack)
    held = us * seen / (SAMPLES_PER_SECOND * LOCK_SECONDS)
    return _row(mapping, us_per_action=us, lock_held_us=held, lock_free_us=us - held)


def _row(mapping: list[int], **numbers: float) -> dict[str, Any]:
    rounded = {name: round(number, 1) for name, number in numbers.items()}
    return {"device_mapping": mapping, **rounded, "device": jax.devices()[0].device_kind, "jax": jax.__version__}


def _timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _splits(argv: list[str]) -> list[str]:
    start = argv.index("--pipeline-splits") + 1
    end = next((i for i in range(start, len(argv)) if argv[i].startswith("--")), len(argv))
    return argv[start:end]


if __name__ == "__main__":
    main(sys.argv[1:])
