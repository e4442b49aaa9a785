"""`headrace plan`: batches, steps, events and memory of a run, without a device."""

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.cli.options import check_output, parse, print_remarks
from headrace.cli.tables import print_fitted
from headrace.core.local_path import local_path

if TYPE_CHECKING:
    from headrace.config.load import Resolved
    from headrace.core.target import Target
    from headrace.plan.duration import Duration
    from headrace.plan.scaling import ScaleRow
    from headrace.run.ahead import Ahead
    from headrace.run.design import Design

DESCRIPTION = "Print the arithmetic of a run without using a device: batches, steps, calls, events, memory."


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    resolved, args = parse(argv, "headrace plan", _add_arguments, DESCRIPTION)
    if args.target is None:
        return _print_plan(resolved, args, None)
    from headrace.core.errors import ConfigError
    from headrace.engine.ahead import compiler_of, read_target
    from headrace.ops.tracing import made_for

    target = read_target(args.target)
    if args.num_devices is not None or args.num_processes != 1:
        raise ConfigError(
            "--target is given beside --num-devices or --num-processes.",
            rule="The target's name says how many devices and machines there are.",
            remedy="Name a larger or smaller target, or leave --target out to plan without compiling.",
        )
    compiler_of(target)  # before minutes of work, and before anything is printed
    with made_for(target):
        return _print_plan(resolved, args, target)


def _print_plan(resolved: "Resolved", args: argparse.Namespace, target: "Target | None") -> int:
    import jax

    from headrace.config.checks import check_start
    from headrace.config.section_compiler import BACKENDS, describe_without_effect
    from headrace.engine.visible import visible_devices
    from headrace.plan.draw.diagram import check_diagram_file, write_diagram
    from headrace.plan.image_sizes import describe_sizes
    from headrace.plan.plan import format_plan
    from headrace.plan.scaling import format_scale
    from headrace.run.ahead import planned_ahead
    from headrace.run.choices import settle, with_choices
    from headrace.run.design import design_run, scale_to_devices, uneven_remarks, with_set
    from headrace.run.expected_time import describe_expected, expected_time
    from headrace.run.profiling import with_measured_blocks

    if args.schedule_file:
        check_diagram_file(args.schedule_file)
        check_output(args.schedule_file, "--schedule-file")
    check_start(resolved)
    # With --num-devices the replicas follow from it, not from the devices of this machine.
    found = with_set(resolved.config, absent_ok=True)
    resolved = settle(resolved, found) if args.num_devices is None else with_choices(resolved, found)
    if not resolved.config.pipeline.measure_splits:
        # The learning rate is evaluated with JAX; without this it would open every accelerator to do so.
        jax.config.update("jax_platforms", "cpu")
    resolved = with_measured_blocks(resolved, found)
    resolved, rows = (
        scale_to_devices(resolved, args.num_devices, found) if args.num_devices is not None else (resolved, ())
    )
    num_processes = target.machines if target else args.num_processes
    design = design_run(resolved.config, found, num_processes, absent_ok=True)
    if args.schedule_file:
        write_diagram(args.schedule_file, _tables(design))
    platform = resolved.config.run.platform  # asked for by name, it need not be on this machine
    seen = visible_devices(platform)
    backend = target.platform if target else BACKENDS.get(platform) or seen.platform
    expected = expected_time(design, backend, seen.name)
    idle = describe_without_effect(resolved.config, backend, resolved.origins)
    said = f"expected time: not known, {seen.name or backend} was not measured; headrace bench measures a step"
    if expected is not None:
        said = f"expected time, roughly: {describe_expected(expected)}"
    resolved = replace(resolved, notes=(*resolved.notes, *idle, said))
    ahead = planned_ahead(design, target) if target else None
    if args.json:
        uneven = uneven_remarks(resolved.config, design.info)
        _print_json(design, rows, expected, (*resolved.warnings, *design.info.remarks, *uneven, *resolved.notes), ahead)
        return 0
    print_remarks(resolved)
    place = f" ({design.info.place})" if design.info.place else ""
    print_fitted(f"{design.network.name} on {design.info.name}{place}, precision {resolved.config.numerics.precision}")
    print_fitted(design.info.size_text)
    if args.num_devices is not None:
        print(format_scale(rows, args.num_devices))
    print_fitted(format_plan(design.plan, tuple(_lr_points(design).items())))
    for text in (*design.info.remarks, *uneven_remarks(resolved.config, design.info)):
        print_fitted(f"warning: {text}")
    if sizes := describe_sizes(design.sizes, design.network):
        print(sizes)
    for line in ahead.lines if ahead else ():
        print_fitted(line)
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print the plan as JSON.")
    parser.add_argument(
        "--num-devices",
        type=int,
        metavar="N",
        help="Plan for N devices: more or fewer replicas, the same global batch.",
    )
    parser.add_argument(
        "--num-processes",
        type=int,
        default=1,
        metavar="N",
        help="Plan for N processes, each with the same number of whole replicas [1].",
    )
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="Compile the run's programs for machines that are not here (h200x8, v5e-8), and print their memory.",
    )
    parser.add_argument(
        "--schedule-file",
        type=local_path,
        metavar="FILE",
        help="Plot the pipeline's schedule to a file: .svg, .png, .txt, or .json for a Chrome trace.",
    )


def _print_json(
    design: "Design",
    rows: "tuple[ScaleRow, ...]",
    expected: "Duration | None",
    remarks: tuple[str, ...],
    ahead: "Ahead | None",
) -> None:
    heading: dict[str, Any] = {
        "model": design.network.name,
        "dataset": design.info.name,
        "classes": design.info.num_classes,
    }
    if rows:
        heading["scaling"] = [row.to_dict() for row in rows]
    sizes = [{"first_step": span.first_step, "image_size": list(span.image_hw)} for span in design.sizes]
    tail = {"learning_rate": _lr_points(design), "image_sizes": sizes, "remarks": remarks}
    tail["expected_seconds"] = round(expected.seconds, 1) if expected else None
    tail |= {"compiled": ahead.to_dict()} if ahead else {}
    print(json.dumps(heading | design.plan.to_dict() | tail, indent=1))


def _tables(design: "Design") -> dict[str, Any]:
    """Return the schedule's tables by title: with equal stages, and as cut."""
    from headrace.core.errors import ConfigError

    pipeline = design.plan.pipeline
    if pipeline is None:
        raise ConfigError(
            "--schedule-file without pipeline stages.",
            rule="A schedule says in which order stages take the micro batches of a step.",
            remedy="Name stages with --pipeline-splits or --num-pipeline-stages.",
        )
    return {
        f"{pipeline.schedule}, if all stages took the same time": pipeline.table,
        "with the stages' times, from shapes or measured blocks": pipeline.expected_table(),
    }


def _lr_points(design: "Design") -> dict[int, float]:
    """Return {step: learning rate} at the first step, the quarters and the last step of the run."""
    total = design.plan.steps.total_steps
    steps = {(total - 1) * quarter // 4 for quarter in range(5)} if total else set()
    return {step: float(design.lr_curve(step)) for step in sorted(steps)}
