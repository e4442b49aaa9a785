"""`headrace plan`: the arithmetic of a run on paper."""

import argparse
import json
from typing import Any

from headrace.cli.options import parse, print_remarks

DESCRIPTION = "Print the arithmetic of a run without touching a device: batches, steps, calls, events, memory."


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    resolved, own = parse(argv, "headrace plan", _add_arguments, DESCRIPTION)
    import jax

    # The learning rate is evaluated with JAX; without this it would open every accelerator to do so.
    jax.config.update("jax_platforms", "cpu")
    from headrace.plan.draw import draw_plan
    from headrace.run.design import design_run

    design = design_run(resolved.config)
    if own.json:
        heading = {"model": design.network.name, "dataset": design.info.name}
        print(json.dumps(heading | design.plan.to_dict() | {"learning_rate": _lr_points(design)}, indent=1))
        return 0
    print_remarks(resolved)
    print(f"{design.network.name} on {design.info.name}, precision {resolved.config.numerics.precision}")
    print(draw_plan(design.plan, tuple(_lr_points(design).items())))
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print the plan as JSON.")


def _lr_points(design: Any) -> dict[int, float]:
    """Return {step: learning rate} at the first step, the quarters and the last step of the run."""
    total = design.plan.steps.total_steps
    steps = {(total - 1) * quarter // 4 for quarter in range(5)} if total else set()
    return {step: float(design.lr_curve(step)) for step in sorted(steps)}
