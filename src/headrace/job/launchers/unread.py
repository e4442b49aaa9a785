"""Launchers that are known by their variables, but do not say all that joining their processes needs."""

from headrace.core.json_text import parse_json
from headrace.job.launchers.row import Unread, sized
from headrace.job.variables import Environ


def _sagemaker(environ: Environ) -> str:
    try:
        number = len(parse_json(environ["SM_HOSTS"]))
    except (KeyError, ValueError, TypeError):
        return ""
    return f"SM_HOSTS with {number} hosts" if number > 1 else ""


UNREAD = (
    Unread(name="MPICH or Intel MPI", others=sized("PMI_RANK", "PMI_SIZE")),
    Unread(name="MVAPICH", others=sized("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")),
    Unread(name="jsrun", others=sized("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")),
    Unread(name="Flux", others=sized("FLUX_TASK_RANK", "FLUX_JOB_SIZE")),
    Unread(name="Horovod", others=sized("HOROVOD_RANK", "HOROVOD_SIZE")),
    Unread(name="Volcano", others=sized("VC_TASK_INDEX", "VC_WORKER_NUM")),
    Unread(name="SageMaker", others=_sagemaker),
)
