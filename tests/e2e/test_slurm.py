"""The job scripts on a real SLURM: three emulated nodes of this machine, installed and started by the test itself."""

from __future__ import annotations

import itertools
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_stack import LATER, SMALL, SOON, latest_step, marked_processes
from slurm_cluster import Cluster, tail, why_not
from waiting import wait_until

from fspo.files import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(4 * LATER)]
PRIVATE = Path(f"/tmp/fspo-{os.getuid()}")

#: A job script as those in slurm/.
JOB = """\
#!/usr/bin/env bash
#SBATCH --job-name=test --nodes=2 --ntasks-per-node=1 --time=120 --signal=B:USR1@300
#SBATCH --requeue --no-kill --open-mode=append
exec bash "$SLURM_SUBMIT_DIR/slurm/{script}" "$@"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    cluster = Cluster(tmp_path / "slurm", nodes=3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def submit(cluster: Cluster, folder: Path, options: tuple[str, ...], script: str, *words: str) -> tuple[str, Path]:
    """The id and the log of a job with this run folder."""
    job, log = (folder.with_suffix(end) for end in (".sh", ".out"))
    job.write_text(JOB.format(script=script))
    variables = {
        "FSPO_VENV": sys.prefix,
        "FSPO_RUN_DIR": str(folder),
        "FSPO_RAY_CPUS": "16",  # logical, as Ray counts them: a GPU is an FSDP rank
        "FSPO_RAY_GPUS": "1",
        "FSPO_RAY_OPTIONS": "--object-store-memory=200000000",
    }
    return cluster.sbatch(f"--output={log}", *options, str(job), *words, **variables), log


def wait_for(text: str, cluster: Cluster, job: str, log: Path) -> None:
    """Return once the job's log has ``text``."""
    limit = time.monotonic() + LATER
    while not log.exists() or text not in log.read_text(errors="replace"):
        state = cluster.job(job)["JobState"]
        if state in ("FAILED", "COMPLETED", "TIMEOUT") or time.monotonic() > limit:
            pytest.fail(f"{text!r} did not appear (job {state}):\n{tail(log)}")
        time.sleep(0.5)


def steps(run_dir: Path) -> list[int]:
    """Steps in the order in which they were logged."""
    return [record["step"] for record in read_lines(run_dir / "metrics.jsonl")]


#: Asks for another start once it is warned, and then in each start at once.
HOPELESS = "until [[ -e $FSPO_STOP || ${SLURM_RESTART_COUNT:-0} != 0 ]]; do sleep 0.2; done; exit 75"


def test_two_nodes_train_beside_a_job_without_hope(cluster: Cluster, tmp_path: Path) -> None:
    """A preemption saves, at which all processes of the steps, Ray's too, get TERM, and the next start resumes; scancel
    saves and ends. A job that is warned is requeued, and three times if it never saves.
    """
    # Workers on two nodes import verl each by themselves, which takes a minute on two quiet cores.
    words = ("experiment=demo", *SMALL, "trainer.total_training_steps=1000", "trainer.save_freq=1000")
    words += ("run.hang_after_s=300",)
    run_dir, hopeless_dir = tmp_path / "run", tmp_path / "hopeless"
    job, log = submit(cluster, run_dir, ("--nodelist=node[1-2]",), "train.sh", *words)
    one = ("--nodes=1", "--nodelist=node3")
    hopeless, hopeless_log = submit(cluster, hopeless_dir, one, "launch.sh", "bash", "-c", HOPELESS)
    wait_for("Ray is up", cluster, hopeless, hopeless_log)
    cluster.run("scancel", "--batch", "--signal=USR2", hopeless)  # as SLURM does, by --signal=B:USR2@300

    wait_for("step 1/1000", cluster, job, log)
    (token,) = run_dir.rglob(".ray_token")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64 and token.read_text() not in log.read_text()
    cluster.preempt(job)
    wait_for("requeueing job", cluster, job, log)
    saved = latest_step(run_dir)
    assert steps(run_dir) == [*range(1, saved + 1)]
    assert json.loads((run_dir / "run.json").read_text())["status"] == "preempted"
    wait_for(f"step {saved + 1}/1000", cluster, job, log)
    assert f"resumed from {run_dir}/global_step_{saved}\n" in log.read_text()
    cluster.run("scancel", job)
    ended = cluster.wait_for_end(job, LATER, log)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1"), tail(log)
    assert latest_step(run_dir) == steps(run_dir)[-1] > saved, "a cancelled run saves what it has done"
    assert steps(run_dir) == [*range(1, len(steps(run_dir)) + 1)]
    assert log.read_text().count("Ray is up on 2 node(s)") == 2
    starts = [run_dir / f"slurm/{job}-restart-{number}" for number in range(2)]
    # An FSDP rank on each node: its output is in that node's own Ray logs.
    for logs, host in itertools.product(starts, ("node1", "node2")):
        assert any("WorkerDict" in file.read_text(errors="replace") for file in logs.glob(f"ray-{host}/worker-*.out"))

    ended = cluster.wait_for_end(hopeless, LATER, hopeless_log)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "3"), tail(hopeless_log)
    assert [hopeless_log.read_text().count(text) for text in ("warning signal", "requeueing job")] == [1, 3]
    wait_until(lambda: not marked_processes(cluster.mark), SOON, 0.5, lambda: str(marked_processes(cluster.mark)))
    for name, folder in ((job, run_dir), (hopeless, hopeless_dir)):
        assert [*PRIVATE.glob(f"{name}-*"), *folder.rglob(".ray_token")] == [], "nothing is left"
