"""One training step of a timm model in PyTorch on the CPU: a peer for cpu_step.py.

    python benchmarks/torch_step.py --model efficientnet_b0 --batch 8 --steps 3

Forward, backward and SGD with momentum, float32, channels last, eager, on a fixed random batch; the last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "weights"))
from torch_side import torchvision_models  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Parse, measure, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="efficientnet_b0")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--image-size", type=int, default=224)
    args = parser.parse_args()
    torchvision_models()  # timm needs it
    import timm  # pyright: ignore[reportMissingImports]

    model = timm.create_model(args.model).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(args.batch, 3, args.image_size, args.image_size).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (args.batch,))

    def step() -> None:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

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
