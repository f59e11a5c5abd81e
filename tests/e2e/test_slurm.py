"""The job scripts on a real SLURM: three emulated nodes of this machine, installed and started by the test itself."""

from __future__ import annotations

import itertools
import json
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_stack import LATER, SMALL, SOON, latest_step
from slurm_cluster import Cluster, tail, why_not

from fspo.files import read_lines
from recipe.runner.faults import node

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(4 * LATER)]
Submit = Callable[..., tuple[str, Path, Path]]
PRIVATE = node.private_path(Path("/tmp"))

#: A job script as those in slurm/.
JOB = """\
#!/usr/bin/env bash
#SBATCH --job-name=test --nodes=2 --ntasks-per-node=1 --time=120 --signal=B:USR1@300
#SBATCH --requeue --no-kill --open-mode=append
exec bash "$SLURM_SUBMIT_DIR/slurm/{script}" "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Submit]:
    """Submits a job by its name; the job's id, its log and its run folder. What is left of it ends with the test."""

    def submit(name: str, options: tuple[str, ...], script: str, *words: str) -> tuple[str, Path, Path]:
        job, log, run_dir = (tmp_path / f"{name}{end}" for end in (".sh", ".out", ""))
        job.write_text(JOB.format(script=script))
        variables = {
            "FSPO_VENV": sys.prefix,
            "FSPO_RUN_DIR": str(run_dir),
            "FSPO_RAY_CPUS": "16",  # logical, as Ray counts them: a GPU is an FSDP rank
            "FSPO_RAY_GPUS": "1",
            "FSPO_RAY_OPTIONS": "--object-store-memory=200000000",
        }
        jobs.append(cluster.sbatch(f"--output={log}", *options, str(job), *words, **variables))
        return jobs[-1], log, run_dir

    jobs: list[str] = []
    yield submit
    cluster.run("scancel", *jobs, check=False)  # of a test that failed


def wait_for(text: str, cluster: Cluster, job: str, log: Path, times: int = 1) -> None:
    """Return once the job's log has ``text`` so many times."""
    limit = time.monotonic() + LATER
    while not log.exists() or log.read_text(errors="replace").count(text) < times:
        state = cluster.job(job)["JobState"]
        if state in ("FAILED", "COMPLETED", "TIMEOUT") or time.monotonic() > limit:
            cluster.run("scancel", job, check=False)
            pytest.fail(f"{text!r} did not appear (job {state}):\n{tail(log)}")
        time.sleep(0.5)


def steps(run_dir: Path) -> list[int]:
    """Steps in the order in which they were logged."""
    return [record["step"] for record in read_lines(run_dir / "metrics.jsonl")]


def assert_nothing_left(cluster: Cluster, job: str, run_dir: Path) -> None:
    assert list(PRIVATE.glob(f"{job}-*")) == []
    assert list(run_dir.rglob(".ray_token")) == []


def test_two_nodes_train_are_warned_preempted_and_cancelled_beside_a_job_without_hope(
    cluster: Cluster, submit: Submit
) -> None:
    """A warning and a preemption save, and the next start resumes; scancel saves and ends; a job that asks for another
    start and never saves is requeued three times. At a preemption all processes of the steps, Ray's too, get TERM.
    """
    # Workers on two nodes import verl each by themselves, which takes a minute on two quiet cores.
    words = ("experiment=demo", *SMALL, "trainer.total_training_steps=1000", "trainer.save_freq=1000")
    words += ("run.hang_after_s=300",)
    job, log, run_dir = submit("run", ("--nodelist=node[1-2]",), "train.sh", *words)
    one = ("--nodes=1", "--nodelist=node3")
    hopeless, hopeless_log, hopeless_dir = submit("hopeless", one, "launch.sh", "bash", "-c", "exit 75")

    wait_for("step 1/1000", cluster, job, log)
    (token,) = run_dir.rglob(".ray_token")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64 and token.read_text() not in log.read_text()
    for times in (1, 2):
        if times == 1:
            cluster.run("scancel", "--batch", "--signal=USR2", job)  # as SLURM does, by --signal=B:USR2@300
        else:
            cluster.preempt(job)
        wait_for("requeueing job", cluster, job, log, times)
        saved = latest_step(run_dir)
        assert steps(run_dir) == [*range(1, saved + 1)]
        assert json.loads((run_dir / "run.json").read_text())["status"] == "preempted"
        wait_for(f"step {saved + 1}/1000", cluster, job, log)
        assert f"resumed from {run_dir}/global_step_{saved}\n" in log.read_text()

    cluster.run("scancel", job)
    ended = cluster.wait_for_end(job, LATER, log)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "2"), tail(log)
    assert latest_step(run_dir) == steps(run_dir)[-1] > saved, "a cancelled run saves what it has done"
    assert steps(run_dir) == [*range(1, len(steps(run_dir)) + 1)]
    assert log.read_text().count("Ray is up on 2 node(s)") == 3
    starts = sorted((run_dir / "slurm").glob("*-restart-*"))
    assert [path.name for path in starts] == [f"{job}-restart-{number}" for number in range(3)]
    # An FSDP rank on each node: its output is in that node's own Ray logs.
    for logs, host in itertools.product(starts, ("node1", "node2")):
        assert any("WorkerDict" in file.read_text(errors="replace") for file in logs.glob(f"ray-{host}/worker-*.out"))

    ended = cluster.wait_for_end(hopeless, LATER, hopeless_log)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "3"), tail(hopeless_log)
    assert hopeless_log.read_text().count("requeueing job") == 3
    assert cluster.left_behind(SOON) == []
    assert_nothing_left(cluster, job, run_dir)
    assert_nothing_left(cluster, hopeless, hopeless_dir)
