"""Train as the reference's train.py does: `headrace train` with the option names and defaults of its applications."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # a clone works without being installed

from headrace_reference.program import run_script

if __name__ == "__main__":
    sys.exit(run_script("train"))
