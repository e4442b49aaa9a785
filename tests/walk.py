"""Run commands and write which files of src/headrace ran a function: `walk.py OUT WORDS ... -- WORDS ...`."""

import json
import sys
import threading
from itertools import groupby
from pathlib import Path

SRC = str(Path(__file__).parents[1] / "src" / "headrace") + "/"
FILES: dict[str, int] = {}


def note(frame, event, _argument):
    """Note the file of a function that is called; the body of a module or a class is none."""
    code = frame.f_code
    if event == "call" and code.co_flags & 0x2 and code.co_filename.startswith(SRC):  # CO_NEWLOCALS
        FILES.setdefault(code.co_filename.removeprefix(SRC), len(FILES))


if __name__ == "__main__":
    out, *words = sys.argv[1:]
    threading.setprofile(note)
    sys.setprofile(note)
    from headrace.cli.main import main

    codes = [main(list(line)) for is_end, line in groupby(words, "--".__eq__) if not is_end]
    sys.setprofile(None)
    Path(out).write_text(json.dumps(sorted(FILES, key=FILES.__getitem__)))
    sys.exit(max(codes))
