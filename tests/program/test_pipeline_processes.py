"""pipeline() over several real processes: the weights of one process with as many replicas."""

from pathlib import Path

import numpy as np

from tests.job.processes import run_job

from . import pipeline_program


def test_two_processes_with_a_replica_each_give_the_weights_of_one(tmp_path: Path) -> None:
    program = [pipeline_program.__file__]
    codes = run_job(2, [tmp_path], tmp_path / "out", program=program)
    assert codes == [0, 0], [path.read_text() for path in (tmp_path / "out").iterdir()]
    for case in pipeline_program.CASES:
        one = pipeline_program.train(case)
        both = [np.load(tmp_path / f"{case}-{process}.npz") for process in range(2)]
        for found in both:  # every process has the whole result
            for name in ("first", "last", "state"):
                np.testing.assert_allclose(found[name], one[name], rtol=1e-5, atol=1e-6, err_msg=f"{case}: {name}")
        # The outfeed of a process has the rows of its replicas.
        losses = np.stack([found["losses"] for found in both], axis=1)
        np.testing.assert_allclose(losses, one["losses"], rtol=1e-5, err_msg=case)
        assert np.abs(one["first"] - pipeline_program.WEIGHTS[0]).max() > 0.02, case
