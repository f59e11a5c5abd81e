"""A real SLURM on this machine: Debian's packages, one controller, several nodes that share the host."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from real_stack import MARK, REPOSITORY, marked_processes

from recipe.runner.faults.processes import is_alive, kill

PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch", "srun", "scontrol", "squeue", "scancel")

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=90
MinJobAge=7200
EnforcePartLimits=ALL
MailProg=/bin/true
NodeName=DEFAULT CPUs=64 RealMemory=16000 Gres=gpu:1
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}]
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=240
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def why_not() -> str | None:
    """Why no SLURM can be set up on this machine; None if all programs are there (they are installed if need be)."""
    if os.geteuid() != 0:
        return "the emulated SLURM cluster needs root (slurmd starts jobs for their owner)"
    if not all(map(shutil.which, PROGRAMS)) and shutil.which("apt-get"):
        install = "apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge"
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["sh", "-c", install], capture_output=True, timeout=300, env=environment)
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"SLURM is not installed, nor could it be: there is no {', '.join(absent)}" if absent else None


def _free_ports(count: int) -> int:
    """First of ``count`` consecutive free ports below the range that Linux hands out by itself."""
    for first in range(17000, 19900, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no free ports for the emulated SLURM cluster")


#: Beginnings of environment variables that would reach into the cluster's jobs.
_NOT_PASSED_ON = ("SLURM_", "RAY_", "FSPO_", "VERL_", "OMP_")


@dataclass
class Cluster:
    """Daemons of one emulated cluster, and what a user does with it."""

    folder: Path
    nodes: int
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        host, port = socket.gethostname(), _free_ports(self.nodes + 1)
        for name in ("state", *(f"spool/node{i + 1}" for i in range(self.nodes))):
            (self.folder / name).mkdir(parents=True)
        conf, ports = self.folder / "slurm.conf", {"port": port, "first": port + 1, "last": port + self.nodes}
        conf.write_text(SLURM_CONF.format(host=host, folder=self.folder, nodes=self.nodes, **ports))
        # As many cores as the job scripts ask for (config_overrides), and a device that stands for a GPU.
        (self.folder / "gres.conf").write_text(f"NodeName=node[1-{self.nodes}] Name=gpu File=/dev/null\n")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)},
            "SLURM_CONF": str(conf),
            MARK: self.mark,
        }
        subprocess.run(["mungekey", "--create", "--keyfile", f"{self.folder}/munge.key"], check=True, timeout=60)
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
            f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged's socket", 30)
        self._daemon("slurmctld", "-D")
        for i in range(self.nodes):
            self._daemon("slurmd", "-D", "-N", f"node{i + 1}")
        idle = f"idle {self.nodes}"
        self._wait(lambda: self.run("sinfo", "-h", "-o", "%T %D", check=False) == idle, "idle nodes", 60)

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self.daemons)}.out").open("wb") as out:
            environment = {name: value for name, value in self.environment.items() if name != MARK}
            self.daemons.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))

    def _wait(self, is_true: Callable[[], bool], what: str, timeout: float) -> None:
        limit = time.monotonic() + timeout
        while not is_true():
            if time.monotonic() > limit:
                logs = "\n".join(path.read_text()[-1500:] for path in self.folder.glob("*.log"))
                pytest.fail(f"the emulated SLURM cluster has no {what} after {timeout} s:\n{logs}")
            time.sleep(0.3)

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Output of a SLURM command. Clients hang on a dead controller, hence the time limit."""
        how = {"cwd": REPOSITORY, "env": {**self.environment, **environment}, "capture_output": True, "text": True}
        run = subprocess.run(command, timeout=60, **how)
        assert not check or run.returncode == 0, f"{command}: {run.stderr}"
        return run.stdout.strip()

    def sbatch(self, *arguments: str, **environment: str) -> str:
        """Submit from the repository's root, as the documentation says; returns the job's id."""
        return self.run("sbatch", "--parsable", *arguments, **environment)

    def job(self, job: str) -> dict[str, str]:
        """Fields of ``scontrol show job``."""
        fields = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(entry.split("=", 1) for entry in fields if "=" in entry)

    def wait_for_end(self, job: str, timeout: float, log: Path) -> dict[str, str]:
        """The job's fields once it is over."""
        limit = time.monotonic() + timeout
        while (fields := self.job(job))["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
            if time.monotonic() > limit:
                pytest.fail(f"job {job} is {fields['JobState']} after {timeout} s; its log:\n{tail(log)}")
            time.sleep(1)
        return fields

    def preempt(self, job: str) -> str:
        """Submit a short job of the partition before which this one has to leave its nodes; its id."""
        nodes = f"--nodelist={self.job(job)['NodeList']}"
        return self.sbatch("--partition=urgent", "--exclusive", nodes, "--output=/dev/null", "--wrap=sleep 1")

    def left_behind(self, within: float) -> list[str]:
        """Processes of jobs that are still there after ``within`` seconds (zombies do not count)."""
        limit = time.monotonic() + within
        while (alive := marked_processes(self.mark)) and time.monotonic() < limit:
            time.sleep(0.5)
        return [f"{process.pid} {process.name()}" for process in alive if is_alive(process.pid)]

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            self.run("scancel", "--signal=KILL", "--full", "--user=root", check=False)
        kill([process.pid for process in marked_processes(self.mark)])
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()


def tail(log: Path, characters: int = 5000) -> str:
    """The end of a file that may not exist yet."""
    return log.read_text(errors="replace")[-characters:] if log.exists() else f"({log} does not exist)"
