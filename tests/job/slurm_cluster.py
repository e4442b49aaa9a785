"""A Slurm of two nodes, each a host made of namespaces: munged, slurmctld and slurmd, in one folder, without systemd.

    python -m tests.job.slurm_cluster FOLDER COMMAND...     run a command on the first node

Two nodes with four processors each (whatever the machine has). Jobs of the partition `high` preempt those of the
others, which are put back into the queue: those of `grace` after a time in which they may save and end by themselves.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.job.namespaces import Hosts, why_not

NODES = ("a", "b")
GRACE_SECONDS = 20
_DAEMONS = ("munged", "slurmctld", "slurmd")
_CONF = """\
ClusterName=test
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# What a machine without control groups and systemd can do.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
KillWait=10
# Quick decisions, so that tests need not wait.
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName={nodes} CPUs=4 State=UNKNOWN
PartitionName=low Nodes={nodes} Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE
PartitionName=grace Nodes={nodes} MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes={nodes} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def why_no_slurm() -> str:
    """Return why this machine cannot run such a cluster, "" if it can."""
    missing = [name for name in _DAEMONS if not _found(name)]
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm)" if missing else why_not()


def _found(name: str) -> str | None:
    return shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin")


class Cluster(Hosts):
    """The nodes of a Slurm, while the block runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(NODES, folder)
        self.folder = folder
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        super().__enter__()
        try:
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_daemons(self) -> None:
        nodes = ",".join(NODES)
        text = _CONF.format(first=NODES[0], folder=self.folder, nodes=nodes, grace=GRACE_SECONDS)
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(bytes(range(128)))
        key.chmod(0o400)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(exist_ok=True)
        munge = [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self._daemon(NODES[0], "munged", "--force", f"--socket={self.folder}/munge.socket", *munge)
        self._daemon(NODES[0], "slurmctld", "-i")
        for node in NODES:
            self._daemon(node, "slurmd", "-N", node)
        self.wait_for("sinfo --noheader --Node --format=%t", lambda text: set(text.split()) == {"idle"}, 60)

    def _daemon(self, node: str, name: str, *words: str) -> None:
        path = _found(name)
        assert path is not None
        done = self.call([path, *words], node)
        assert done.returncode == 0, (name, done.stdout, done.stderr)

    def call(self, words: list[str], node: str = NODES[0]) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end."""
        variables = [f"{name}={value}" for name, value in self.environ.items()]
        command = self[node].command(["env", *variables, *words])
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    def submit(self, script: str, *options: str) -> int:
        """Submit a script with sbatch; return the number of the job."""
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        done = self.call(["sbatch", "--parsable", f"--output={self.folder}/job-%j.txt", *options, str(path)])
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def state(self, job: int) -> str:
        """Return the states of a job (of all tasks of an array), such as RUNNING."""
        done = self.call(["scontrol", "--oneliner", "show", "job", str(job)])
        states = [word.removeprefix("JobState=") for word in done.stdout.split() if word.startswith("JobState=")]
        return ",".join(sorted(set(states)))

    def wait_for_state(self, job: int, *wanted: str, seconds: float = 120) -> str:
        """Wait until a job is in one of some states."""
        deadline = time.monotonic() + seconds
        while (found := self.state(job)) not in wanted:
            assert time.monotonic() < deadline, f"job {job} is {found}, not {wanted}\n{self.printed(job)}"
            time.sleep(0.5)
        return found

    def wait_for_requeue(self, job: int, seconds: float = 120) -> None:
        """Wait until a job was put back into the queue, and let it start soon, with more time.

        Slurm would wait for two minutes; and it may send the signal before a time limit up to a minute too early.
        """
        deadline = time.monotonic() + seconds
        while "Restarts=1" not in (shown := self.call(["scontrol", "show", "job", str(job)]).stdout):
            assert time.monotonic() < deadline, f"{shown}\n{self.printed(job)}"
            time.sleep(0.5)
        time.sleep(8)  # the nodes must have forgotten the first attempt: they refuse one that comes too early
        while "JobState=RUNNING" not in shown:
            assert time.monotonic() < deadline, f"{shown}\n{self.printed(job)}"
            self.call(["scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60"])
            time.sleep(1)
            shown = self.call(["scontrol", "show", "job", str(job)]).stdout

    def wait_for(self, command: str, happened: Callable[[str], bool], seconds: float) -> None:
        """Wait until the output of a command is as wanted."""
        deadline = time.monotonic() + seconds
        while not happened(found := self.call(command.split()).stdout):
            assert time.monotonic() < deadline, f"{command}: {found}"
            time.sleep(0.5)

    def printed(self, job: int) -> str:
        """Return what a job has printed so far."""
        path = self.folder / f"job-{job}.txt"
        return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    if reason := why_no_slurm():
        sys.exit(reason)
    with Cluster(Path(sys.argv[1]).resolve()) as cluster:
        ended = cluster.call(sys.argv[2:])
        print(ended.stdout, ended.stderr, sep="", end="")
        sys.exit(ended.returncode)
