"""`kill -9` at any moment: the newest good checkpoint exists, and holds exactly what was written for its step."""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

import headrace.checkpoint
from headrace.checkpoint.store import load, newest_good

SOURCE = str(Path(headrace.checkpoint.__file__).parents[2])

# Both the process that is killed and the one that checks compute a state from its step in this way.
CONTENT = """
import numpy as np
def content(step):
    rng = np.random.default_rng(step)
    return {"params/w": rng.standard_normal(60_000).astype(np.float32), "step": np.array(step, np.int64)}
"""

SAVE_FOREVER = (
    CONTENT
    + """
import sys
from headrace.checkpoint.saver import Saver
from headrace.checkpoint.store import newest_good, step_of
path, damaged = newest_good(sys.argv[1])
assert not damaged, damaged
step = step_of(path) if path else 0
saver = Saver(sys.argv[1], keep_last=2)
while True:
    step += 1
    saver.save(content(step), {"step": step})
    saver.wait()
    print(step, flush=True)
"""
)

# Kills itself at the n-th operation on the file system, for every n, and looks at what is left each time.
KILL_AT_EVERY_OPERATION = (
    CONTENT
    + """
import os, signal, shutil, sys
from pathlib import Path
from headrace.checkpoint.saver import prune
from headrace.checkpoint.store import checkpoint_name, load, newest_good, save, step_of

def kill_at(number):
    count = 0
    def counted(real):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)
        return call
    os.fsync, os.open, os.close, os.rmdir, os.unlink = map(counted, (os.fsync, os.open, os.close, os.rmdir, os.unlink))
    Path.mkdir, Path.rename, Path.open = map(counted, (Path.mkdir, Path.rename, Path.open))

place = Path(sys.argv[1])
for step in (1, 2, 3):
    save(place, checkpoint_name(step), content(step), {"step": step})
rounds = killed = 0
while True:
    rounds += 1
    before = step_of(newest_good(place)[0])
    # every third round saves the newest step anew: a replacement
    after = before if rounds % 3 == 0 else before + 1
    child = os.fork()
    if child == 0:
        kill_at(1 + rounds // 3)
        save(place, checkpoint_name(after), content(after), {"step": after})
        prune(place, 2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    path, damaged = newest_good(place)
    assert not damaged, (rounds, damaged)
    assert step_of(path) in (before, after), (rounds, path)
    found = load(path)[0]
    for name, array in content(step_of(path)).items():
        assert np.array_equal(found[name], array), (rounds, name)
    if os.WIFSIGNALED(status):
        killed += 1
        quiet = 0
    else:
        quiet += 1
        if quiet == 3:
            break
print(killed)
"""
)


def start(code: str, directory: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(directory)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    scope: dict = {}
    exec(CONTENT, scope)
    rng = random.Random(2)
    steps = [0]
    for _ in range(12):
        process = start(SAVE_FOREVER, tmp_path)
        assert process.stdout is not None
        process.stdout.readline()  # the first save of this process is done: from here on it saves without a pause
        time.sleep(rng.uniform(0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        announced = [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        path, damaged = newest_good(tmp_path)
        assert damaged == []
        assert path is not None
        arrays, manifest = load(path)
        assert manifest["step"] >= max(announced, default=steps[-1] + 1)
        for name, array in scope["content"](manifest["step"]).items():
            np.testing.assert_array_equal(arrays[name], array)
        steps.append(manifest["step"])
    assert all(later > earlier for earlier, later in pairwise(steps))


def test_killed_at_every_file_operation(tmp_path: Path) -> None:
    process = start(KILL_AT_EVERY_OPERATION, tmp_path)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert int(output) > 30
