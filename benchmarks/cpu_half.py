"""bfloat16 convolutions and both gradients on CPUs with AMX or AVX512_BF16: right, and how fast.

    JAX_PLATFORMS=cpu python benchmarks/cpu_half.py [--batch 32] [--rounds 7] [--products amx] [--correctness-only]

First every product that the processor has is compared with float64 sums of the same bfloat16 values (numpy, one window
position at a time). Then, for each convolution of ResNet-50: the gradients of weights and images as bfloat16 products,
beside the float32 kernel on float32 arrays ("float32"), and with the conversions around it that it needs in a network
("converted"). Milliseconds, best and median of rounds, in turns; the number in front says how often the network has the
convolution. Ends with 1 if anything is wrong.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from headrace.ops import native_conv, native_kernels
from headrace.ops.native_conv import _Wanted, gradients
from headrace.ops.native_kernels import HALF_PRODUCTS, find_window

# n, height, width, inputs, window, outputs, stride, padding
CHECKS = [
    (1, 1, 1, 1, 1, 1, 1, "SAME"), (3, 7, 5, 10, 1, 7, 1, "SAME"), (2, 21, 20, 20, 1, 40, 1, "SAME"),
    (2, 50, 50, 130, 1, 70, 1, "SAME"), (9, 21, 20, 260, 1, 800, 1, "SAME"), (70, 4, 4, 37, 1, 33, 2, "SAME"),
    (32, 7, 7, 512, 1, 512, 1, "SAME"), (5, 15, 14, 256, 1, 512, 2, "SAME"),
    (3, 9, 7, 16, 3, 32, 1, "SAME"), (1, 7, 7, 16, 3, 48, 1, "SAME"), (40, 7, 7, 20, 3, 17, 1, "SAME"),
    (1, 3, 40, 33, 3, 35, 1, "VALID"), (2, 33, 35, 160, 3, 144, 1, "SAME"), (64, 7, 7, 256, 3, 256, 1, "SAME"),
    (3, 9, 8, 5, 3, 6, 2, "SAME"), (2, 6, 5, 150, 3, 150, 2, "SAME"), (3, 60, 57, 18, 3, 33, 2, ((1, 1), (1, 1))),
    (16, 14, 14, 512, 3, 512, 2, ((1, 1), (1, 1))), (2, 10, 10, 4, 5, 6, 3, ((2, 2), (1, 2))),
    (2, 8, 9, 6, 2, 5, 2, "VALID"), (2, 7, 8, 20, 2, 36, 3, "SAME"),
    (2, 13, 12, 3, 7, 20, 2, ((3, 3), (3, 3))), (4, 75, 60, 3, 7, 64, 2, "SAME"),
    (2, 224, 224, 3, 7, 64, 2, ((3, 3), (3, 3))),
]  # fmt: skip
# count, size, inputs, window, outputs, stride: the stride is the 3x3 window's, as in torchvision's ResNet-50
RESNET50 = [
    (1, 224, 3, 7, 64, 2),
    (1, 56, 64, 1, 64, 1), (3, 56, 64, 3, 64, 1), (4, 56, 64, 1, 256, 1), (2, 56, 256, 1, 64, 1),
    (1, 56, 256, 1, 128, 1), (1, 56, 128, 3, 128, 2), (1, 56, 256, 1, 512, 2), (4, 28, 128, 1, 512, 1),
    (3, 28, 512, 1, 128, 1), (3, 28, 128, 3, 128, 1),
    (1, 28, 512, 1, 256, 1), (1, 28, 256, 3, 256, 2), (1, 28, 512, 1, 1024, 2), (6, 14, 256, 1, 1024, 1),
    (5, 14, 1024, 1, 256, 1), (5, 14, 256, 3, 256, 1),
    (1, 14, 1024, 1, 512, 1), (1, 14, 512, 3, 512, 2), (1, 14, 1024, 1, 2048, 2), (3, 7, 512, 1, 2048, 1),
    (2, 7, 2048, 1, 512, 1), (2, 7, 512, 3, 512, 1),
]  # fmt: skip


def definition(x, w, dy, window):
    """Return (y, dx, dw) in float64."""
    x, w, dy = (np.asarray(a).astype(np.float64) for a in (x, w, dy))
    (n, height, width, c), (kh, kw, _, o), (_, ho, wo, _), s = window.x, window.w, window.y, window.stride
    (top, _), (left, _) = window.pads
    rows, columns = max((ho - 1) * s + kh, top + height), max((wo - 1) * s + kw, left + width)
    padded = np.zeros((n, rows, columns, c))
    padded[:, top : top + height, left : left + width] = x
    y, dpadded, dw = np.zeros(window.y), np.zeros_like(padded), np.zeros(window.w)
    flat = dy.reshape(-1, o)
    for i in range(kh):
        for j in range(kw):
            place = np.s_[:, i : i + (ho - 1) * s + 1 : s, j : j + (wo - 1) * s + 1 : s]
            pixels = padded[place].reshape(-1, c)
            y += (pixels @ w[i, j]).reshape(y.shape)
            dpadded[place] += (flat @ w[i, j].T).reshape(n, ho, wo, c)
            dw[i, j] = pixels.T @ flat
    return y, dpadded[:, top : top + height, left : left + width], dw


def arrays(window, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.bfloat16)  # noqa: E731
    return draw(window.x), draw(window.w), draw(window.y)


def window_of(shape, window, outputs, stride, padding, dtype=jnp.bfloat16):
    x, w = jnp.zeros(shape, dtype), jnp.zeros((window, window, shape[3], outputs), dtype)
    found = find_window(x, w, stride, padding, 1, "no-winograd" if dtype == jnp.bfloat16 else "on")
    assert found is not None, shape
    return found


def half_weights(window):
    return jax.jit(lambda x, dy: gradients(window, _Wanted((), None), (dy, x, jnp.zeros(window.w, x.dtype)), None)[1])


def half_images(window):
    return jax.jit(lambda dy, w: gradients(window, _Wanted(None, ()), (dy, jnp.zeros(window.x, w.dtype), w), None)[0])


def check(products):
    wrong = 0
    for n, height, width, c, k, o, stride, padding in CHECKS:
        window = window_of((n, height, width, c), k, o, stride, padding)
        x, w, dy = arrays(window)
        y = jax.jit(lambda x, w: native_conv.convolve(x, w, window))(x, w)  # noqa: B023
        found = (y, half_images(window)(dy, w), half_weights(window)(x, dy))
        again = half_weights(window)(x, dy)
        line = []
        for name, value, wanted in zip(("y", "dx", "dw"), found, definition(x, w, dy, window), strict=True):
            error = np.abs(np.asarray(value).astype(np.float64) - wanted)
            # half a unit of bfloat16, and float32 sums
            excess = (error - 2.0**-8 * np.abs(wanted)).max() / np.abs(wanted).max()
            wrong += not excess <= 3e-5
            line.append(f"{name} {excess:8.1e}{'' if excess <= 3e-5 else ' WRONG'}")
        same = bool((np.asarray(found[2]).view(np.uint16) == np.asarray(again).view(np.uint16)).all())
        wrong += not same
        shape = f"{n}x{height}x{width}x{c} {k}x{k} {o} stride {stride}"
        print(f"{products:12} {shape:36} {'  '.join(line)}{'' if same else '  NOT THE SAME TWICE'}", flush=True)
    return wrong


def best_and_median(calls, rounds):
    """Return {name: (best, median)} in ms of calls that take turns."""
    times = {name: [] for name in calls}
    for function, arguments in calls.values():
        jax.block_until_ready(function(*arguments))
    for _ in range(rounds):
        for name, (function, arguments) in calls.items():
            jax.block_until_ready(function(*arguments))  # caches and threads as in a network, not of the side before
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: (min(each), statistics.median(each)) for name, each in times.items()}


def gradient(window, wants):
    """Return the float32 kernel's gradient of weights or images as a function of (dy, x, w)."""
    return jax.jit(lambda *given: next(a for a in gradients(window, wants, given, None) if a is not None))


def converted(window, wants):
    """Return the same for bfloat16 arrays."""
    run = gradient(window, wants)
    return jax.jit(lambda *given: run(*(a.astype(jnp.float32) for a in given)).astype(jnp.bfloat16))


def measure(batch, rounds):
    rows, totals = [], {}
    for count, size, c, k, o, stride in RESNET50:
        pads = ((k // 2, k // 2),) * 2
        half = window_of((batch, size, size, c), k, o, stride, pads)
        wide = window_of((batch, size, size, c), k, o, stride, pads, jnp.float32)
        x, w, dy = arrays(half)
        wx, ww, wdy = (a.astype(jnp.float32) for a in (x, w, dy))

        weights, images = _Wanted((), None), _Wanted(None, ())
        calls = {
            "dw half": (half_weights(half), (x, dy)),
            "dw float32": (gradient(wide, weights), (wdy, wx, ww)),
            "dw converted": (converted(wide, weights), (dy, x, w)),
        }
        if c > 3:  # the images themselves need no gradient
            calls["dx half"] = (half_images(half), (dy, w))
            calls["dx converted"] = (converted(wide, images), (dy, x, w))
        found = best_and_median(calls, rounds)
        flops = 2e-9 * np.prod(half.y) * k * k * c
        row = {"count": count, "shape": f"{size}x{size}x{c} {k}x{k} {o} stride {stride}", "gflop": float(flops)} | found
        rows.append(row)
        for name, (_, median) in found.items():
            totals[name] = totals.get(name, 0) + count * median
        text = "  ".join(f"{name} {best:7.2f} {median:7.2f}" for name, (best, median) in found.items())
        rate = flops / found["dw half"][0]
        print(f"{count} x {row['shape']:28} {text}  ({rate:5.2f} TFLOP/s)", flush=True)
    print("all, medians:", {name: round(total, 1) for name, total in totals.items()})
    return {"rows": rows, "totals": totals}


def main():
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--products", choices=HALF_PRODUCTS, help="check and measure these alone [all, the best]")
    parser.add_argument("--correctness-only", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    library, reason = native_kernels.load_kernels()
    if library is None:
        sys.exit(f"no kernels: {reason}")
    own = {value: name for name, value in HALF_PRODUCTS.items()}.get(library.half, "none")
    print(f"jax {jax.__version__}, kernels of {library.lanes} lanes, products of this machine: {own}")
    there = [name for name, value in HALF_PRODUCTS.items() if value <= max(library.half, 1)]
    chosen = [options.products] if options.products else there
    wrong = 0
    for name in chosen:
        native_kernels.load_kernels = lambda value=HALF_PRODUCTS[name]: (library._replace(half=value), "")
        wrong += check(name)
    print("everything is right" if not wrong else f"{wrong} results are WRONG")
    if not options.correctness_only:
        found = measure(options.batch, options.rounds)
        if options.json:
            what = {"products": chosen[-1], "batch": options.batch, "jax": jax.__version__}
            Path(options.json).write_text(json.dumps(found | what, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
