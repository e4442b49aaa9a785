"""`kill -9` at any moment: the newest good checkpoint exists, and holds exactly what was written for its step."""

import os
import subprocess
import sys
from pathlib import Path

import headrace.checkpoint

SOURCE = str(Path(headrace.checkpoint.__file__).parents[2])

# A state that follows from its step.
CONTENT = """
import numpy as np
def content(step):
    rng = np.random.default_rng(step)
    return {"params/w": rng.standard_normal(60_000).astype(np.float32), "step": np.array(step, np.int64)}
"""

# Kills copies of itself that save without a pause, and looks at what is left each time.
KILL_AT_RANDOM_MOMENTS = (
    CONTENT
    + """
import os, random, signal, sys, time
from headrace.checkpoint.saver import Saver
from headrace.checkpoint.store import load, newest_good, step_of

def save_for_ever(place, out):
    path, damaged = newest_good(place)
    assert not damaged, damaged
    step = step_of(path) if path else 0
    saver = Saver(place, keep_last=2)
    while True:
        step += 1
        saver.save(content(step), {"step": step})
        saver.wait()
        os.write(out, b"%d\\n" % step)

place, rng, last = sys.argv[1], random.Random(2), 0
for number in range(12):
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        save_for_ever(place, writes)
    os.close(writes)
    with open(reads) as printed:
        printed.readline()  # the first save of this process is done: from here on it saves without a pause
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        announced = [int(line) for line in printed.read().split()]
    os.waitpid(child, 0)
    path, damaged = newest_good(place)
    assert not damaged, damaged
    arrays, manifest = load(path)
    assert last < manifest["step"] >= max(announced, default=last + 1), (number, last, announced)
    last = manifest["step"]
    for name, array in content(last).items():
        assert np.array_equal(arrays[name], array), (number, name)
print(number + 1)
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


def output_of(code: str, directory: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_at_random_moments(tmp_path: Path) -> None:
    assert int(output_of(KILL_AT_RANDOM_MOMENTS, tmp_path)) == 12


def test_killed_at_every_file_operation(tmp_path: Path) -> None:
    assert int(output_of(KILL_AT_EVERY_OPERATION, tmp_path)) > 30
