"""Train EfficientNet-B0 on CIFAR-10 with the whole network on one device: the script that document 004 starts from."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # a clone works without being installed

from headrace_reference.program import run_script

if __name__ == "__main__":
    sys.exit(run_script("efficientnet_CIFAR10_train_gpu"))
