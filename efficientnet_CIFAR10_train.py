"""Train EfficientNet-B0 on CIFAR-10 in four pipeline stages: `headrace train` with that recipe."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # a clone works without being installed

from headrace_reference.program import run_script

if __name__ == "__main__":
    sys.exit(run_script("efficientnet_CIFAR10_train"))
