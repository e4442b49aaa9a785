"""What XLA makes of a network's step for a GPU, on a machine without one: its kernels, and the bytes that they move.

    pip install --no-deps jax-cuda13-plugin==V jax-cuda13-pjrt==V          # V: the version of jaxlib here
    python benchmarks/gpu_kernels.py efficientnet_b0:256 [--blocks block2a block3a] [--show 20] [--excess]

A job is NETWORK:BATCH[:SIZE]. Forward and backward pass are compiled for an H200 that is described and not there, so
that nothing is timed or tuned; what XLA fuses with what, and which arrays it stores, is what it does there.
Convolutions and matrix products are not counted. `--blocks` are the first and the last block, `--excess` allows XLA's
excess precision.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""
KERNEL = re.compile(r"\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<shape>\(.*?\)|\S+) fusion\(.*kind=(?:kLoop|kInput)")


def absent_gpu() -> Any:
    """Return a device to compile for."""
    import jax_plugins.xla_cuda13 as plugin  # pyright: ignore[reportMissingImports]

    # JAX has no public way to such a device.
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    library = Path(plugin.__path__[0]) / "xla_cuda_plugin.so"
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    topology = xla_client.make_c_api_device_topology(api, "1x1x1", target_config=H200, topology="1x1x1")
    return topology._make_compile_only_devices()[0]


def compiled_text(job: str, blocks: list[str], device: Any, excess: bool) -> str:
    """Return the program of some blocks' forward and backward pass, as XLA would run it."""
    from headrace.config.load import config_from
    from headrace.model.context import Ctx, Draws
    from headrace.run.design import design_run

    name, batch, size = (*job.split(":"), "224")[:3]
    config = config_from(
        {"model": name, "dataset": "synthetic", "image_size": int(size), "num_classes": 1000, "num_samples": 1024}
    )
    net, num_images = design_run(config).network, int(batch)
    first, last = (net.block_names.index(block) for block in (blocks or [net.block_names[0], net.block_names[-1]]))
    samples = jnp.arange(num_images, dtype=jnp.int32)
    ctx = Ctx(train=True, compute_dtype=jnp.bfloat16, draws=Draws(0, jnp.int32(0), samples))
    weights = net.init(0)
    where = SingleDeviceSharding(device)

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)

    def forward(begin: int, end: int, weights: Any, x: Any) -> Any:
        params, stats = weights
        return net.apply_range(begin, end, params, stats, x, ctx)

    def step(params: Any, stats: Any, x: Any, dy: Any) -> Any:
        run = lambda params, x: forward(first, last + 1, (params, stats), x)  # noqa: E731
        _, back, new = jax.vjp(run, params, x, has_aux=True)
        return back(dy), new

    images = jax.ShapeDtypeStruct((num_images, *net.input_hwc), jnp.bfloat16)
    x = jax.eval_shape(lambda w, x: forward(0, first, w, x)[0], weights, images) if first else images
    names = net.block_names[first : last + 1]
    params, stats = ({name: tree[name] for name in names if name in tree} for tree in weights)
    y = jax.eval_shape(lambda w, x: forward(first, last + 1, w, x)[0], (params, stats), x)
    lowered = jax.jit(step).lower(shapes(params), shapes(stats), shapes(x), shapes(y))
    # Nothing can be tuned without the device.
    options = {"xla_gpu_autotune_level": 0, "xla_allow_excess_precision": excess}
    return lowered.compile(compiler_options=options).as_text() or ""


def main() -> None:
    """Print the largest kernels of each job, and what all of them move."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="NETWORK:BATCH[:SIZE]")
    parser.add_argument("--blocks", nargs=2, default=[], metavar=("FIRST", "LAST"))
    parser.add_argument("--show", type=int, default=10, help="kernels to print [%(default)s]")
    parser.add_argument("--excess", action="store_true")
    args = parser.parse_args()
    device = absent_gpu()
    jax.config.update("jax_platforms", "cpu")
    # The forms of operations are chosen by the backend, which here is not the one compiled for.
    jax.default_backend = lambda: "gpu"
    from headrace.engine.hlo_text import parse_program
    from headrace.ops import depthwise_kernels

    depthwise_kernels.compute_capability = lambda: "9.0"

    for job in args.jobs:
        text = compiled_text(job, args.blocks, device, args.excess)
        program, entry = parse_program(text), text[text.index("\nENTRY") :]
        found = [match for match in map(KERNEL.match, entry.splitlines()) if match]
        kernels = sorted(((program.num_bytes(match["name"]), match) for match in found), key=lambda pair: -pair[0])
        print(f"{job}: {sum(size for size, _ in kernels) / 1e9:.1f} GB in {len(kernels)} kernels")
        for size, match in kernels[: args.show]:
            print(f"  {size / 1e6:8.1f} MB  {match['name']:36} {match['shape'][:90]}")


if __name__ == "__main__":
    main()
