"""The job scripts on a real SLURM: three emulated nodes of this machine, installed and started by the test itself."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from real_stack import SMALL
from slurm_cluster import REPOSITORY, Cluster, tail, why_not

from recipe.runner.faults import node

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
Submit = Callable[..., tuple[str, Path, Path]]
PRIVATE = node.private_path(Path("/tmp"))

#: A job that runs one command on the launcher.
BARE_JOB = """\
#!/usr/bin/env bash
#SBATCH --job-name=bare --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append
exec bash "$SLURM_SUBMIT_DIR/slurm/launch.sh" "$@"
"""
#: What a bare job runs: it prints the nodes of its Ray and ends with status 7.
LOOK = """\
import os, ray, stat, sys
path = os.environ["RAY_AUTH_TOKEN_PATH"]
assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
ray.init(address="auto", log_to_driver=False)
print("NODES", *sorted(node["NodeName"] for node in ray.nodes() if node["Alive"]), flush=True)
print("TOKEN LENGTH", len(open(path).read()))
sys.exit(7)
"""
#: Ends with status 1 when a node is gone, as a run does, and with 0 after a while.
WATCH = """\
import ray, sys, time
ray.init(address="auto", log_to_driver=False)
for _ in range(20):
    time.sleep(1)
    if len([node for node in ray.nodes() if node["Alive"]]) < 2:
        sys.exit("a node of Ray is gone")
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
    """Submits a job script; the job's id, its log and its run folder. What is left of it ends with the test."""

    def submit(*arguments: str, **environment: str) -> tuple[str, Path, Path]:
        log, run_dir = tmp_path / "job.out", tmp_path / "run"
        variables = {
            "FSPO_VENV": sys.prefix,
            "FSPO_RUN_DIR": str(run_dir),
            "FSPO_RAY_CPUS": "16",
            "FSPO_RAY_OPTIONS": "--object-store-memory=200000000",
            **environment,
        }
        jobs.append(cluster.sbatch(f"--output={log}", *arguments, **variables))
        return jobs[-1], log, run_dir

    jobs: list[str] = []
    yield submit
    cluster.run("scancel", *jobs, check=False)  # of a test that failed: the next one's machine is not to be shared


def wait_for(text: str, cluster: Cluster, job: str, log: Path, timeout: float, times: int = 1) -> None:
    """Return once the job's log has ``text`` so many times."""
    limit = time.monotonic() + timeout
    while not log.exists() or log.read_text(errors="replace").count(text) < times:
        state = cluster.job(job)["JobState"]
        if state in ("FAILED", "COMPLETED", "TIMEOUT") or time.monotonic() > limit:
            cluster.run("scancel", job, check=False)
            pytest.fail(f"{text!r} did not appear (job {state}, limit {timeout} s):\n{tail(log)}")
        time.sleep(0.5)


def steps(run_dir: Path) -> list[int]:
    """Steps in the order in which they were logged."""
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_nothing_left(cluster: Cluster, job: str, run_dir: Path) -> None:
    assert cluster.left_behind() == []
    assert list(PRIVATE.glob(f"{job}-*")) == []
    assert list(run_dir.rglob(".ray_token")) == []


def bare_job(folder: Path) -> str:
    script = folder / "bare.sh"
    script.write_text(BARE_JOB)
    return str(script)


#: Stands for Apptainer, which Debian does not have: notes its arguments and runs the command without a container.
APPTAINER = """\
#!/usr/bin/env bash
echo "$*" >>"$APPTAINER_CALLS"
while [[ $1 != image.sif ]]; do shift; done
shift
exec "$@"
"""


def test_two_jobs_on_the_same_nodes_run_in_containers_and_end_with_their_commands_status(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    look, program, calls = tmp_path / "look.py", tmp_path / "bin" / "apptainer", tmp_path / "calls"
    look.write_text(LOOK)
    program.parent.mkdir()
    program.write_text(APPTAINER)
    program.chmod(0o755)
    program.with_name("singularity").symlink_to(program)
    container = {"FSPO_CONTAINER": "image.sif", "FSPO_MOUNTS": "/data:/data", "APPTAINER_CALLS": str(calls)}
    container["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    jobs = []
    for name, runtime in (("a", "apptainer"), ("b", "singularity")):
        (tmp_path / name).mkdir()
        command = ("--overcommit", f"--output={tmp_path}/{name}.out", bare_job(tmp_path), "python", str(look))
        jobs.append(submit(*command, FSPO_RUN_DIR=str(tmp_path / name), FSPO_CONTAINER_RUNTIME=runtime, **container)[0])
    ports = set()
    for name, job in zip(("a", "b"), jobs, strict=True):
        log, run_dir = tmp_path / f"{name}.out", tmp_path / name
        ended = cluster.wait_for_end(job, 240, log)
        assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "7:0"), tail(log)
        assert "NODES node1 node2\nTOKEN LENGTH 64" in log.read_text()
        ports.add((run_dir / "slurm" / f"{job}-restart-0" / "ray_address").read_text().rpartition(":")[2])
        mounts = f"{REPOSITORY}:{REPOSITORY},{run_dir}:{run_dir},/data:/data"
        bind = f"exec --bind {mounts} --pwd {REPOSITORY} image.sif bash "
        steps = [line.removeprefix(bind).split()[:2] for line in calls.read_text().splitlines() if bind in line]
        script = f"{REPOSITORY}/slurm/node.sh"
        assert sorted(steps) == [[script, "ray"], [script, "ray"], [script, "run"], [script, "run"]]
        assert_nothing_left(cluster, job, run_dir)
    assert len(ports) == 2


@pytest.mark.nightly
def test_a_missing_node_is_named(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    setup = tmp_path / "setup.sh"
    setup.write_text("[[ $SLURMD_NODENAME != node2 ]] || sleep 300\n")
    job, log, run_dir = submit(bare_job(tmp_path), "true", FSPO_SETUP=str(setup), FSPO_READY_TIMEOUT="90")
    ended = cluster.wait_for_end(job, 300, log)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), tail(log)
    assert "error: node2 did not join Ray within 90 s (FSPO_READY_TIMEOUT)" in log.read_text()
    assert_nothing_left(cluster, job, run_dir)


@pytest.mark.nightly
def test_a_node_on_which_ray_ends_costs_a_requeue(cluster: Cluster, submit: Submit) -> None:
    job, log, run_dir = submit("slurm/demo_cpu.sh", *SMALL, "trainer.save_freq=1", "trainer.total_training_steps=6")
    wait_for("step 2/6", cluster, job, log, 500)
    raylet = next(
        process
        for process in psutil.process_iter()
        if process.name() == "raylet" and f"{PRIVATE}/{job}-1/" in " ".join(process.cmdline())
    )
    raylet.kill()
    wait_for("Ray ended on node node2; see ", cluster, job, log, 120)
    ended = cluster.wait_for_end(job, 600, log)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), tail(log)
    # A step that was saved and not yet logged is the only one that may be missing; none is there twice.
    assert steps(run_dir) == sorted(set(steps(run_dir))) and len(steps(run_dir)) >= 5 and steps(run_dir)[-1] == 6
    assert {path.name for path in (run_dir / "slurm").iterdir()} == {f"{job}-restart-0", f"{job}-restart-1"}
    assert_nothing_left(cluster, job, run_dir)


def test_a_dead_node_costs_a_requeue_and_three_without_a_checkpoint_are_the_last(
    cluster: Cluster, submit: Submit, tmp_path: Path
) -> None:
    """Two jobs side by side, because both wait for SLURM and Ray most of the time."""
    watch = tmp_path / "watch.py"
    watch.write_text(WATCH)
    job, log, run_dir = submit("--no-kill", bare_job(tmp_path), "python", str(watch))
    hopeless_log, hopeless_dir = tmp_path / "hopeless.out", tmp_path / "hopeless"
    words = ("--nodes=1", "--nodelist=node3", f"--output={hopeless_log}", bare_job(tmp_path), "bash", "-c", "exit 75")
    wait_for("Ray is up on 2 node(s)", cluster, job, log, 180)
    hopeless, *_ = submit(*words, FSPO_RUN_DIR=str(hopeless_dir))
    cluster.lose("node2")
    try:
        wait_for("requeueing job", cluster, job, log, 120)
    finally:
        cluster.bring_back("node2")
    ended = cluster.wait_for_end(job, 300, log)
    text = log.read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), tail(log)
    # Ray itself may lose a node once more on a busy machine: that costs another requeue, and the job still ends.
    assert int(ended["Restarts"]) >= 1 and text.count("Ray is up on 2 node(s)") >= 2
    assert "node node2 does not answer" in text or "Ray ended on node node2" in text
    ended = cluster.wait_for_end(hopeless, 600, hopeless_log)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "3"), tail(hopeless_log)
    text = hopeless_log.read_text()
    assert text.count("requeueing job") == 3 and "restart 3: " in text and "--time" in text
    shutil.rmtree(PRIVATE / f"{job}-1", ignore_errors=True)  # the dead node's
    assert_nothing_left(cluster, job, run_dir)
    assert_nothing_left(cluster, hopeless, hopeless_dir)


def test_two_nodes_train_and_a_warning_a_preemption_and_scancel_save(cluster: Cluster, submit: Submit) -> None:
    """After the first two the run goes on. At a preemption all processes of the steps, Ray's too, get TERM."""
    overrides = ("trainer.total_training_steps=1000", "trainer.save_freq=1000", "algo=fspo_quantile")
    job, log, run_dir = submit("slurm/demo_cpu.sh", *SMALL, *overrides)
    wait_for("step 1/1000", cluster, job, log, 500)
    newest = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    for times in (1, 2):
        if times == 1:
            cluster.run("scancel", "--batch", "--signal=USR2", job)
        else:
            cluster.preempt(job)
        wait_for("requeueing job", cluster, job, log, 200, times)
        saved = int(newest.read_text())
        assert steps(run_dir) == list(range(1, saved + 1))
        assert json.loads((run_dir / "run.json").read_text())["status"] == "preempted"
        assert f"preempted after step {saved}" in log.read_text()
        wait_for(f"step {saved + 1}/1000", cluster, job, log, 500)
        assert f"resumed from {run_dir}/checkpoints/global_step_{saved}" in log.read_text()
    cluster.run("scancel", job)
    ended = cluster.wait_for_end(job, 180, log)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "2"), tail(log)
    assert int(newest.read_text()) > saved
    assert steps(run_dir) == list(range(1, int(newest.read_text()) + 1))
    assert log.read_text().count("Ray is up on 2 node(s)") == 3
    starts = sorted((run_dir / "slurm").glob("*-restart-*"))
    assert [path.name for path in starts] == [f"{job}-restart-{number}" for number in range(3)]
    # An FSDP rank on each node: its output is in that node's own Ray logs.
    for logs, host in itertools.product(starts, ("node1", "node2")):
        assert any("WorkerDict" in file.read_text(errors="replace") for file in logs.glob(f"ray-{host}/worker-*.out"))
    assert_nothing_left(cluster, job, run_dir)


def test_the_end_of_the_time_limit_is_seen_without_a_warning(cluster: Cluster, submit: Submit) -> None:
    limit = ("--time=4", "--signal=B:CONT@1")  # which nothing heeds; the run sees the end two minutes before
    overrides = ("trainer.total_training_steps=1000", "trainer.save_freq=1000")
    job, log, run_dir = submit("--nodes=1", *limit, "slurm/demo_cpu.sh", *SMALL, *overrides)
    newest = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    for start, next_limit in enumerate((6, 8, 8), 1):  # a start in which a slow machine does no step saves nothing
        wait_for("requeueing job", cluster, job, log, 60 * next_limit, times=start)
        if newest.exists():
            break
        cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={next_limit}")
    saved, text = int(newest.read_text()), log.read_text()
    cluster.run("scancel", job)
    assert steps(run_dir) == list(range(1, saved + 1))
    assert "the job ends in" in text and f"preempted after step {saved}" in text and "warning signal" not in text
    assert cluster.wait_for_end(job, 180, log)["JobState"] == "CANCELLED"
    assert_nothing_left(cluster, job, run_dir)


def test_an_array_compares_algorithms_side_by_side(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    """Two of the three tasks that this grid has: one more shows nothing new."""
    job, *_ = submit(
        "--array=1-2", "--gpus-per-node=1", f"--output={tmp_path}/%a.out", "slurm/compare.sh", *SMALL,
        FSPO_EXPERIMENT="demo", FSPO_SEEDS="3", FSPO_COMPARE_DIR=str(tmp_path / "compare"), FSPO_RAY_GPUS="1",
    )  # fmt: skip
    for task, algo in ((1, "rloo"), (2, "gspo")):
        log = tmp_path / f"{task}.out"
        ended = cluster.wait_for_end(f"{job}_{task}", 900, log)
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), tail(log)
        run_dir = tmp_path / "compare" / "measured" / algo / "seed3"
        info = json.loads((run_dir / "run.json").read_text())
        assert (info["algo"], info["seed"], info["status"]) == (algo, 3, "finished")
        assert steps(run_dir) == [1, 2]
    grid = json.loads((tmp_path / "compare" / "grid.json").read_text())
    assert [cell["path"] for cell in grid["runs"]] == [f"measured/{algo}/seed3" for algo in ("fspo", "rloo", "gspo")]
    assert cluster.left_behind() == []
