"""Find out whether XLA's convolutions can be made to add in 16 bits on a GPU, and what that brings.

    python benchmarks/half_sums.py

A process with TF_FP16_CONV_USE_FP32_COMPUTE=1 and one with 0 (XLA reads it once) convolve float16 images, 3x3 over 256
channels and 1x1 over 1,024, and print as a line of JSON: the largest difference from float64 beside the largest sum,
and the milliseconds of a convolution, the least of five times of 50. Sums of 32 bits, rounded once, are within 2^-11 =
4.9e-4 of the sum; sums of 16 bits over 1,024 or more products are several times further off. bfloat16 stands beside
it.
"""

import json
import os
import subprocess
import sys
import time

SWITCH = "TF_FP16_CONV_USE_FP32_COMPUTE"
SHAPES = ((32, 28, 256, 3), (32, 14, 1024, 1))  # images, side, channels in and out, window


def measure(batch: int, side: int, channels: int, window: int, dtype: str) -> dict[str, object]:
    """Return the error and the time of one convolution."""
    import jax
    import numpy as np
    from jax import lax

    draw = np.random.default_rng(0)
    x = draw.uniform(0, 1, (batch, side, side, channels)).astype(np.float32)
    w = draw.uniform(0, 1, (window, window, channels, channels)).astype(np.float32) / 64
    x, w = (np.asarray(jax.numpy.asarray(each, dtype)) for each in (x, w))

    @jax.jit
    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    on_device = jax.device_put(x), jax.device_put(w)
    got = np.asarray(convolve(*on_device), np.float64)[0, 0, 0]
    exact = np.einsum("hwc,hwco->o", x[0, :window, :window].astype(np.float64), w.astype(np.float64))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(50):
            last = convolve(*on_device)
        jax.block_until_ready(last)
        best = min(best, (time.perf_counter() - begin) / 50)
    return {
        "dtype": dtype,
        "shape": f"{batch} x {side} x {side} x {channels}, {window}x{window}",
        "relative_error": float(np.max(np.abs(got - exact)) / np.max(exact)),
        "milliseconds": round(1e3 * best, 4),
    }


def main() -> None:
    """Measure in this process if the switch is set, else start one for each of its values."""
    if SWITCH in os.environ:
        import jax

        for shape in SHAPES:
            for dtype in ("float16", "bfloat16"):
                line = {SWITCH: os.environ[SWITCH], "device": jax.devices()[0].device_kind, "jax": jax.__version__}
                print(json.dumps(line | measure(*shape, dtype)), flush=True)
        return
    for value in ("1", "0"):
        subprocess.run([sys.executable, __file__], env={**os.environ, SWITCH: value}, check=True)


if __name__ == "__main__":
    main()
