"""The job scripts as far as they go without SLURM; tests/e2e/test_slurm.py has the rest."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: In place of srun: notes its arguments, and the step ends at once with a reason in its output.
SRUN = """\
#!/bin/bash
echo "cpus of a step: ${SRUN_CPUS_PER_TASK-${SLURM_CPUS_PER_TASK-all}}" >>"$CALLS"
echo "variables of a step: ${SLURM_EXPORT_ENV-ALL}" >>"$CALLS"
for word in "$@"; do
    echo "$word" >>"$CALLS"
    [[ $word != --output=* ]] || echo "ray: command not found" >"${word#--output=}"
done
exit 127
"""
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_SUBMIT_DIR": str(ROOT)}


def install(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def bash(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV" and "FSPO" not in name}
    words = ["bash", str(ROOT / "slurm" / script), *arguments]
    return subprocess.run(words, env=kept | environment, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, "ROOT/.venv"),
        ({"VIRTUAL_ENV": "/active"}, "/active"),
        ({"VIRTUAL_ENV": "/active", "FSPO_VENV": "/given"}, "/given"),
        ({"VIRTUAL_ENV": "/active", "FSPO_VENV": ""}, None),
        ({"FSPO_CONTAINER": "image.sif"}, None),
        ({"CONDA_PREFIX": "/conda/envs/mine", "CONDA_DEFAULT_ENV": "mine"}, None),
        ({"CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base"}, "ROOT/.venv"),
    ],
)
def test_a_node_takes_the_active_environment_before_the_repositorys(
    tmp_path: Path, given: dict[str, str], used: str | None
) -> None:
    (tmp_path / ".venv").mkdir()
    done = bash("node.sh", "run", "/bin/bash", "-c", "echo $PATH", FSPO_ROOT=str(tmp_path), **given)
    path = os.environ["PATH"] if used is None else f"{used}/bin:{os.environ['PATH']}"
    assert done.stdout.strip() == path.replace("ROOT", str(tmp_path)), done.stderr


@pytest.mark.parametrize(
    ("setup", "first"),
    [
        ("export NCCL_DEBUG=INFO", "ROOT/.venv/bin"),
        ("export PATH=ROOT:$PATH", "ROOT"),
        ("export CONDA_PREFIX=/conda/envs/mine PATH=/conda/envs/mine/bin:$PATH", "/conda/envs/mine/bin"),
        ("export VIRTUAL_ENV=/theirs PATH=/theirs/bin:$PATH", "/theirs/bin"),
    ],
)
def test_an_environment_that_the_set_up_brings_comes_before_the_repositorys(
    tmp_path: Path, setup: str, first: str
) -> None:
    (tmp_path / ".venv").mkdir()
    install(tmp_path, ray="#!/bin/sh\n")
    (tmp_path / "setup.sh").write_text(setup.replace("ROOT", str(tmp_path)) + "\n")
    given = {"FSPO_ROOT": str(tmp_path), "FSPO_SETUP": str(tmp_path / "setup.sh"), "CONDA_PREFIX": ""}
    given["PATH"] = "/usr/bin:/bin"  # without a Ray
    done = bash("node.sh", "run", "/bin/bash", "-c", "echo $PATH", **given)
    assert done.stdout.split(":")[0] == first.replace("ROOT", str(tmp_path)), done.stderr


def test_a_set_up_may_use_what_is_not_set_and_its_failure_is_named(tmp_path: Path) -> None:
    setup = tmp_path / "setup.sh"
    setup.write_text('[ -z "$PS1" ] || echo shell\nfalse\nexport MINE=1\n')
    print_mine = ("node.sh", "run", "/bin/bash", "-c", "echo $MINE")
    done = bash(*print_mine, FSPO_ROOT=str(tmp_path), FSPO_SETUP=str(setup))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    setup.write_text("return 3\n")
    done = bash(*print_mine, FSPO_ROOT=str(tmp_path), FSPO_SETUP=str(setup))
    assert done.returncode == 1 and f"FSPO_SETUP={setup} ended with status 3" in done.stderr and not done.stdout


def test_kernels_are_kept_on_the_node_and_files_may_be_many(tmp_path: Path) -> None:
    names = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    print_all = ("node.sh", "run", "/bin/bash", "-c", f"echo {' '.join(f'${name}' for name in names)}; ulimit -Sn")
    done = bash(*print_all, FSPO_ROOT=str(tmp_path), FSPO_RAY_TMP=str(tmp_path), TRITON_CACHE_DIR="/mine")
    cache = tmp_path / f"fspo-cache-{os.getuid()}"
    paths, files = done.stdout.splitlines()
    assert paths == f"{cache}/vllm /mine {cache}", done.stderr
    assert cache.stat().st_mode & 0o777 == 0o700
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert int(files) == max(soft, min(hard, 65536))


@pytest.mark.parametrize(("on_node", "counted"), [("1", 1), ("1000", len(os.sched_getaffinity(0)))])
def test_ray_counts_the_cpus_that_its_step_may_use(tmp_path: Path, on_node: str, counted: int) -> None:
    install(tmp_path, ray='#!/bin/sh\necho "$@"\nexit 1\n')
    bash(
        "node.sh", "worker", "10.0.0.1:20000", FSPO_ROOT=str(tmp_path), FSPO_LOG_DIR=str(tmp_path),
        FSPO_RAY_TMP=str(tmp_path), SLURM_JOB_ID="7", SLURMD_NODENAME="node1", SLURM_CPUS_ON_NODE=on_node,
        OMP_NUM_THREADS="1", PATH=f"{tmp_path}:{os.environ['PATH']}",
    )  # fmt: skip
    assert f" --num-cpus={counted} " in (tmp_path / "ray-node1.log").read_text()


def test_the_log_that_has_the_reason_is_named_and_a_mount_is_absolute(tmp_path: Path) -> None:
    install(tmp_path, srun=SRUN, scontrol="#!/bin/sh\necho node1\n")
    run, calls = tmp_path / "run", tmp_path / "calls"
    container = {"FSPO_CONTAINER": "/image.sqsh", "FSPO_CONTAINER_RUNTIME": "pyxis"}
    done = bash(
        "launch.sh", "true", **SLURM, **container, CALLS=str(calls), SLURM_CPUS_PER_TASK="64",
        SLURM_EXPORT_ENV="NONE",
        FSPO_RUN_DIR=os.path.relpath(run, ROOT), PATH=f"{tmp_path}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 1 and f"see {run}/slurm/7-restart-0/ray.log" in done.stderr, done.stderr
    noted = calls.read_text().splitlines()
    assert f"--container-mounts={ROOT}:{ROOT},{run}:{run},/tmp:/tmp" in noted
    assert "cpus of a step: all" in noted and "variables of a step: ALL" in noted


def test_a_restart_within_a_job_takes_a_new_container(tmp_path: Path) -> None:
    """Ray ends on its node, which still answers, each time that it is up."""
    head = '*node.sh\\ head*) echo a:1 >"${@: -1}" ;; *container-name*) exec sleep 30 ;;'
    names = 'printf "%s\\n" "$@" | grep container-name >>"$CALLS"'
    install(
        tmp_path,
        srun=f'#!/bin/bash\n{names}\ncase "$*" in {head} esac\n',
        scontrol="#!/bin/sh\necho node1\n",
        squeue="#!/bin/sh\nexit 1\n",
    )
    done = bash(
        "launch.sh", "true", **SLURM, FSPO_CONTAINER="/image.sqsh", FSPO_CONTAINER_RUNTIME="pyxis", FSPO_RESTARTS="1",
        CALLS=str(tmp_path / "calls"), FSPO_RUN_DIR=str(tmp_path / "run"), PATH=f"{tmp_path}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 1 and "restarted 1 times" in done.stderr, done.stderr
    called = dict.fromkeys((tmp_path / "calls").read_text().split())
    assert list(called) == ["--container-name=fspo-7-0", "--container-name=fspo-7-0-2"]


def test_a_busy_slurm_keeps_no_job_from_being_requeued(tmp_path: Path) -> None:
    """srun runs each step, the command ends with status 75, and squeue does not answer."""
    run, calls = tmp_path / "run", tmp_path / "calls"
    head = '*node.sh\\ head*) echo a:1 >"${@: -1}"; exec sleep 30'
    steps = f'case "$*" in {head} ;; *resources*) exit 0 ;; *) exit 75 ;; esac'
    install(
        tmp_path,
        srun=f"#!/bin/bash\n{steps}\n",
        scontrol=f'#!/bin/sh\n[ "$1" != requeue ] || echo "$@" >>{calls}\necho node1\n',
        squeue="#!/bin/sh\nexit 1\n",
    )
    done = bash("launch.sh", "true", **SLURM, FSPO_RUN_DIR=str(run), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 75 and calls.read_text() == "requeue 7\n", done.stdout + done.stderr
