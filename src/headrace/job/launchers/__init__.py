"""The launchers, in order of precedence. A new one is a file here and its name in this tuple."""

from headrace.job.launchers.jax_variables import JAX_VARIABLES
from headrace.job.launchers.kubernetes import KUBERNETES
from headrace.job.launchers.open_mpi import OPEN_MPI
from headrace.job.launchers.own import HEADRACE
from headrace.job.launchers.row import Driver, Launcher
from headrace.job.launchers.skypilot import SKYPILOT
from headrace.job.launchers.slurm import SLURM
from headrace.job.launchers.tf_config import TF_CONFIG
from headrace.job.launchers.torchrun import TORCHRUN
from headrace.job.launchers.tpu import TPU

LAUNCHERS: tuple[Launcher, ...] = (
    *(TF_CONFIG, HEADRACE, JAX_VARIABLES, OPEN_MPI, TORCHRUN, SLURM, KUBERNETES, TPU, SKYPILOT),
)
DRIVERS: dict[str, Driver] = {row.driver.program: row.driver for row in LAUNCHERS if row.driver}
