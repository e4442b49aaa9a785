"""A training step compiled with different options of XLA, one after the other in one process.

    python benchmarks/xla_options.py resnet50:64:128:60 --options "" --options full --options xla_gpu_enable_pdl=false

A job is NETWORK:BATCH:SIZE:STEPS, with as many steps in a call. Each set of options comes on top of those that Headrace
sets; an empty one is Headrace as it is. A word without a value in front of them is one of `--convolution-tuning`
(quick, full) or `--concurrent-kernels` (on, off). Prints images per second (median, lowest and highest of `--calls`
calls), milliseconds of a step, seconds to compile, GB on the device and the last loss. The first set of a job pays for
the tuning that XLA remembers for the others.
"""

import argparse
from typing import Any

import yaml

from headrace.config.load import resolve_code
from headrace.run import benchmarks, training

HEADRACE_OPTIONS = training.compiler_options


WORDS = {
    "quick": "convolution_tuning",
    "full": "convolution_tuning",
    "on": "concurrent_kernels",
    "off": "concurrent_kernels",
}


def parse_options(text: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return Headrace's options and XLA's of a set such as `quick,a=1`."""
    parts = [part.partition("=") for part in text.split(",") if part]
    headrace = {WORDS[name]: name for name, equals, _ in parts if not equals}
    return headrace, {name: yaml.safe_load(value) for name, equals, value in parts if equals}


def measure(job: str, text: str, num_calls: int, precision: str) -> str:
    """Return the figures of a job with a set of options."""
    model, batch, size, steps = job.split(":")
    headrace, options = parse_options(text)
    training.compiler_options = lambda compiler: HEADRACE_OPTIONS(compiler) | options
    resolved = resolve_code(
        {
            "model": model,
            "dataset": "synthetic",
            "micro_batch_size": int(batch),
            "image_size": int(size),
            "num_classes": 10 if int(size) < 224 else 1000,
            "num_samples": int(steps) * int(batch),
            "precision": precision,
            "compilation_cache_dir": "none",
        }
        | headrace
    )
    found = benchmarks.bench(resolved, steps_per_call=int(steps), num_calls=num_calls)
    rates = found.rates
    return (
        f"{rates.median:9,.0f} img/s ({min(rates.each):,.0f} to {max(rates.each):,.0f}) "
        f"{found.step_milliseconds:8.3f} ms "
        f"compile {found.conditions.compile_seconds:5.1f} s {found.conditions.device_bytes / 1e9:6.2f} GB "
        f"loss {found.final_loss:.4f}"
    )


def main() -> None:
    """Print a row for each job and set of options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="NETWORK:BATCH:SIZE:STEPS")
    parser.add_argument(
        "--options", action="append", default=[], metavar="NAME=VALUE,...", help="a set; may be repeated"
    )
    parser.add_argument("--calls", type=int, default=4, help="timed calls [%(default)s]")
    parser.add_argument("--precision", default="16.32")
    args = parser.parse_args()
    for job in args.jobs:
        for text in args.options or [""]:
            try:
                row = measure(job, text, args.calls, args.precision)
            except Exception as error:  # the next set may work
                row = f"failed: {type(error).__name__}: {str(error)[:300]}"
            print(f"{job:24} {row}  {text or '(as it is)'}", flush=True)


if __name__ == "__main__":
    main()
