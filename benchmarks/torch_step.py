"""One training step of a timm model in PyTorch on the CPU: a peer for cpu_step.py.

    python benchmarks/torch_step.py --model efficientnet_b0 --batch 8 --steps 3

Forward, backward and SGD with momentum, float32, channels last, eager, on a fixed random batch; the last line is JSON.
"""

import argparse
import json
import statistics
import time

import torch  # pyright: ignore[reportMissingImports]
from torch_peer import build, fixed_batch, training_step


def main() -> None:
    """Parse, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="efficientnet_b0")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--image-size", type=int, default=224)
    args = parser.parse_args()
    model = build("timm", args.model).to(memory_format=torch.channels_last)
    step = training_step(model, model, fixed_batch(args.batch, args.image_size, 1000))
    step()
    wall, cpu = [], []
    for _ in range(args.steps):
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    figures = {"images_per_second": args.batch / statistics.median(wall), "torch": torch.__version__}
    print(json.dumps(figures | {"cpu_ms_per_image": 1000 * min(cpu) / args.batch}))


if __name__ == "__main__":
    main()
