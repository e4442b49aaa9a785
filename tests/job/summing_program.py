"""A small program of a job, for tests: it joins and sums over all processes until it is told to stop."""

import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.cli.main import print_error
from headrace.core.errors import HeadraceError
from headrace.core.files import write_atomic
from headrace.job import join_job
from headrace.job.process_info import ProcessInfo


def work(info: ProcessInfo, folder: Path, num_sums: int, raises: str) -> None:
    """Sum again and again; leave a file with the process's id when the first sum is right."""
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "replica"), mesh=mesh, in_specs=P("replica"), out_specs=P())
    )
    mine = np.full((1,), info.process + 1, np.float32)
    everybodys = jax.make_array_from_process_local_data(NamedSharding(mesh, P("replica")), mine)
    for number in range(num_sums):
        sys.stdout.write(f"sum {float(total(everybodys)[0])}\n")  # in one piece, whoever else writes
        sys.stdout.flush()
        write_atomic(folder / f"ready-{info.process}", str(os.getpid()).encode())
        if raises == str(info.process) and number == 5:
            raise HeadraceError("No more of this.")
        time.sleep(0.02)
    print("done", flush=True)


def main(folder: str, num_sums: str, raises: str) -> int:
    """Join the job and work."""
    try:
        with join_job() as info:
            assert info is not None
            work(info, Path(folder), int(num_sums), raises)
    except HeadraceError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
