"""efficientnet_CIFAR10_inference.py under the name that document 004 gives it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # a clone works without being installed

from headrace_reference.program import run_script

if __name__ == "__main__":
    sys.exit(run_script("efficientnet_CIFAR10_inference"))
