"""The job scripts as far as they go without SLURM; tests/e2e/test_slurm.py has the rest."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from recipe.runner.faults.processes import is_alive

ROOT = Path(__file__).resolve().parents[2]
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_SUBMIT_DIR": str(ROOT)}


#: The scripts' waits, ten times as quick.
QUICK = {
    "sleep": "#!/bin/sh\nexec /bin/sleep 0.1\n",
    "tail": '#!/bin/sh\nexec /usr/bin/tail --sleep-interval=0.1 "$@"\n',
}


def install(folder: Path, **programs: str) -> None:
    for name, text in (QUICK | programs).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def on_path(folder: Path) -> str:
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def bash(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not re.search("VIRTUAL_ENV|FSPO|SLURM|HOST_IP", name)}
    words = ["bash", str(ROOT / "slurm" / script), *arguments]
    return subprocess.run(words, env=kept | environment, cwd=ROOT, capture_output=True, text=True, timeout=600)


def second_node(folder: Path, ray: str, **more: str) -> dict[str, str]:
    """The variables of Ray's step on the second node of a job, with a program in place of Ray."""
    install(folder, ray=ray)
    (folder / "ray_address").write_text("10.0.0.1:20000")
    return SLURM | {
        "FSPO_ROOT": str(folder), "FSPO_LOG_DIR": str(folder), "FSPO_VENV": "", "SLURMD_NODENAME": "node2",
        "SLURM_NODEID": "1", "SLURM_CPUS_ON_NODE": "1", "PATH": on_path(folder), **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "used"),
    [
        ({}, "ROOT/.venv/bin"),
        ({"FSPO_VENV": "/given"}, "/given/bin"),
        ({"FSPO_VENV": ""}, "/usr/bin"),
        ({"FSPO_CONTAINER": "image.sif"}, "/usr/bin"),
        ({"PATH": "ROOT:/usr/bin:/bin"}, "ROOT"),  # active where sbatch was called
        ({"FSPO_SETUP": "ROOT/setup.sh"}, "ROOT"),
    ],
)
def test_a_node_takes_a_ray_in_path_before_the_repository_s(
    tmp_path: Path, variables: dict[str, str], used: str
) -> None:
    install(tmp_path, ray="#!/bin/sh\n", **{"setup.sh": f"export PATH={tmp_path}:$PATH\n"})
    variables = {"FSPO_ROOT": "ROOT", "PATH": "/usr/bin:/bin"} | variables
    given = {name: value.replace("ROOT", str(tmp_path)) for name, value in variables.items()}
    done = bash("node.sh", "run", "/bin/bash", "-c", "echo $PATH", **given)
    assert done.stdout.split(":")[0] == used.replace("ROOT", str(tmp_path)), done.stderr


def test_nobody_else_may_enter_the_folder_of_ray_s_files(tmp_path: Path) -> None:
    """Ray lets everybody write to the folder that it makes, and the address of the job's Ray stands in a file there."""
    with tempfile.TemporaryDirectory() as short:  # pytest's own may be too long for a socket of Ray's
        of_ray = second_node(tmp_path, '#!/bin/sh\necho "$@"\nexit 1\n', FSPO_RAY_TMP=short)
        bash("node.sh", "ray", **of_ray)
        private, said = Path(short, f"fspo-{os.getuid()}"), (tmp_path / "ray-node2.log").read_text()
        assert {f"--temp-dir={private}/7-1", "--num-cpus=1", "--address=10.0.0.1:20000"} <= set(said.split())
        private.chmod(0o777)
        bash("node.sh", "ray", **of_ray)
    said = (tmp_path / "ray-node2.log").read_text()
    assert said.startswith("error: ") and str(private) in said and "--num-cpus" not in said
    (long := tmp_path / ("y" * 100)).mkdir()
    bash("node.sh", "ray", **of_ray | {"FSPO_RAY_TMP": str(long), "TMPDIR": str(long)})
    ray, vllm = (tmp_path / "ray-node2.log").read_text().splitlines()
    assert ray.startswith("error: ") and f"FSPO_RAY_TMP={long}: " in ray and f"TMPDIR={long}: " in vllm


@pytest.mark.parametrize("nodes", ["node1", "node1 node2"])
def test_ray_listens_on_the_loopback_of_a_job_s_only_node(nodes: str, tmp_path: Path) -> None:
    environment = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER GLOO_SOCKET_IFNAME VLLM_HOST_IP SLURM_JOB_END_TIME"
    srun = f'#!/bin/bash\nfor name in {environment}; do echo "$name=${{!name-}}" >>"$CALLS"; done\nexit 127\n'
    # A task of an array may have the array's own number.
    job = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"} if nodes == "node1" else {}
    scontrol = f"#!/bin/sh\nprintf '%s\\n' {nodes}\n"
    launch(tmp_path, steps=srun, scontrol=scontrol, GLOO_SOCKET_IFNAME="mine", TZ="UTC", **job)
    alone = nodes == "node1"
    seen = set((tmp_path / "calls").read_text().splitlines())
    assert f"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER={'0' if alone else ''}" in seen
    assert "SLURM_JOB_END_TIME=1893553445" in seen, "the command knows when its time ends"
    assert {"GLOO_SOCKET_IFNAME=mine", f"VLLM_HOST_IP={'127.0.0.1' if alone else ''}"} <= seen


#: In place of srun: Ray runs until launch.sh ends it. The command saves if it is told to ($SAVE) and ends with status
#: $COMMAND.
STEPS = """\
#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    *node.sh\\ ray) printf a:1 >"$FSPO_LOG_DIR/ray_address"; until [[ -s $FSPO_LOG_DIR/end ]]; do sleep 0.1; done ;;
    *resources*) until [[ -s $FSPO_LOG_DIR/ray_address ]]; do sleep 0.1; done ;;
    *node.sh\\ run\\ true) [[ -z ${SAVE:-} ]] || rm "$FSPO_UNSAVED"; [[ $RAY_ADDRESS == a:1 ]] && exit "$COMMAND" ;;
esac
"""
#: The process of launch.sh, from one that it has started.
UP = 'p=$PPID; while ps -o args= -p "$(ps -o ppid= -p $p)" | grep -q launch.sh; do p=$(ps -o ppid= -p $p); done'
WAIT_FOR_STOP = "until [[ -e $FSPO_STOP ]]; do sleep 0.1; done"
#: In place of squeue: the end of the job's time; of all tasks for the number of their array.
SQUEUE = """\
#!/bin/sh
case "$SLURM_ARRAY_JOB_ID $*" in "7 "*--jobs=7\\ *) echo 2029-01-02T03:04:05 ;; esac
echo 2030-01-02T03:04:05
"""
SCONTROL = '#!/bin/sh\n[ "$1" != requeue ] || echo "$2" >>"$CALLS.requeued"\necho node1\n'


def launch(folder: Path, steps: str = STEPS, scontrol: str = SCONTROL, **variables: str) -> tuple[int, str, list[str]]:
    """launch.sh's exit status and what it says, and the requeues that it has asked the stubs above for."""
    install(folder, srun=steps, scontrol=scontrol, squeue=SQUEUE)
    calls = {"CALLS": str(folder / "calls"), "FSPO_RUN_DIR": str(folder / "run"), "COMMAND": "75"}
    calls["PATH"] = on_path(folder)
    done = bash("launch.sh", "true", **SLURM | calls | variables)
    requeued = folder / "calls.requeued"
    return done.returncode, done.stdout + done.stderr, requeued.read_text().split() if requeued.exists() else []


#: In place of srun: notes its arguments, and the step ends at once with a reason in its output.
FAILS = """\
#!/bin/bash
printf "%s\\n" "cpus: ${SRUN_CPUS_PER_TASK-${SLURM_CPUS_PER_TASK-all}}" "export: ${SLURM_EXPORT_ENV-ALL}" \\
    "$@" >>"$CALLS"
for word in "$@"; do [[ $word != --output=* ]] || echo "ray: command not found" >"${word#--output=}"; done
exit 127
"""


def test_the_log_with_the_reason_is_named_and_a_mount_absolute(tmp_path: Path) -> None:
    run = tmp_path / "run"
    container = {"FSPO_CONTAINER": "/image.sqsh", "FSPO_CONTAINER_RUNTIME": "pyxis"}
    asked = {"SLURM_CPUS_PER_TASK": "64", "SLURM_EXPORT_ENV": "NONE", "FSPO_RUN_DIR": os.path.relpath(run, ROOT)}
    status, output, _ = launch(tmp_path, steps=FAILS, **container, **asked)
    assert status == 1 and f"see {run}/slurm/7-restart-0/ray.log" in output, output
    noted = {f"--container-mounts={ROOT}:{ROOT},{run}:{run},/tmp:/tmp", "--container-name=fspo-7-0"}
    assert noted | {"cpus: all", "export: ALL"} <= set((tmp_path / "calls").read_text().splitlines())


@pytest.mark.parametrize("script", ["fspo_8b.sh", "compare.sh"])
def test_job_scripts_ask_for_a_warning_and_a_requeue(script: str) -> None:
    text = (ROOT / "slurm" / script).read_text()
    assert re.search(r"^#SBATCH .*--signal=B:USR1@\d+.* --requeue\b", text, re.M)


@pytest.mark.parametrize(
    ("signal", "requeues"),
    [("USR1", ["7"]), ("USR2", ["7"]), ("XCPU", ["7"]), ("TERM", []), ("HUP", [])],
)
def test_a_signal_reaches_the_command_as_a_file(tmp_path: Path, signal: str, requeues: list[str]) -> None:
    """After TERM, of scancel or a preemption, the job is not requeued: SLURM itself requeues what it preempts."""
    steps = STEPS.replace('&& exit "$COMMAND" ;;', f"&& {UP}; kill -{signal} $p; {WAIT_FOR_STOP}; exit 75 ;;")
    assert steps != STEPS
    status, output, requeued = launch(tmp_path, steps=steps)
    assert (status, requeued) == (75, requeues), output
    assert (tmp_path / "run/slurm/7-restart-0/stop").exists()


def test_only_75_is_started_again_and_of_an_array_its_task(tmp_path: Path) -> None:
    for status in (0, 1, 2, 143):
        assert launch(tmp_path, COMMAND=str(status), SAVE="1")[::2] == (status, [])
    one_of_an_array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "1"}
    assert launch(tmp_path, **one_of_an_array)[::2] == (75, ["6_2"])
    status, output, _ = launch(tmp_path, scontrol='#!/bin/sh\n[ "$1" != requeue ] || exit 1\necho node1\n')
    assert status == 1 and f"FSPO_RUN_DIR={tmp_path}/run" in output, "SLURM refuses the requeue"


def test_a_task_of_an_array_is_a_cell_of_the_grid(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/train.sh").write_text('echo "$*"; echo "$FSPO_RUN_DIR"\n')
    cells = []
    for task in range(10):
        place = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": "6", "FSPO_ROOT": str(tmp_path)}
        cells.append(bash("compare.sh", "mine=1", **place).stdout.splitlines())
    order = [f"seed={seed} algo={algo}" for seed in (1, 2, 3) for algo in ("fspo", "rloo", "gspo")]
    assert len(cells.pop()) == 1, "beyond the grid"
    assert all(words.startswith(cell) for cell, (words, _) in zip(order, cells, strict=True))
    assert all(words.endswith(" mine=1") and "runs/compare/6/" in folder for words, folder in cells)
    assert len({folder for _, folder in cells}) == 9
    # Without its own words, a task would train one run beside the others.
    array = SLURM | {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "6", "SLURM_JOB_NAME": "x"}
    done = bash("train.sh", "experiment=demo", **array)
    assert done.returncode == 2 and "FSPO_RUN_DIR" in done.stderr and "compare.sh" in done.stderr


def test_a_lost_node_ends_the_start_at_once(tmp_path: Path) -> None:
    """Without waiting for Ray's step, whose other nodes do not take the TERM that SLURM sends them."""
    until_the_end = "until [[ -s $FSPO_LOG_DIR/end ]]; do sleep 0.1; done ;;"
    dies = 'until grep "run true" "$CALLS"; do sleep 0.1; done; echo "srun: error: node1: task 0: Killed" >&2; '
    steps = STEPS.replace(until_the_end, dies + until_the_end).replace('exit "$COMMAND" ;;', until_the_end)
    status, output, requeued = launch(tmp_path, steps=steps)
    assert (status, requeued) == (75, ["7"]) and "Ray ended on node node1" in output, output


#: In place of Ray, whose processes have handlers of their own.
RAY = """
import signal, subprocess, sys
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: sys.exit(3))
raylet = subprocess.Popen(["/bin/sleep", "600"])
print("begun", flush=True)
raylet.wait()
"""


def test_ray_outlives_slurm_s_signals_and_ends_by_a_file(tmp_path: Path) -> None:
    environment = os.environ | second_node(tmp_path, f"#!{sys.executable}\n{RAY}")
    log = tmp_path / "ray-node2.log"
    step = subprocess.Popen(["bash", str(ROOT / "slurm/node.sh"), "ray"], env=environment, start_new_session=True)
    try:
        wait_until(lambda: log.exists() and "begun" in log.read_text())
        processes = psutil.Process(step.pid).children(recursive=True)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # to all processes of the step
            os.killpg(step.pid, number)
        with pytest.raises(subprocess.TimeoutExpired):
            step.wait(2)
        (tmp_path / "end").write_text("now")
        assert step.wait(120) == 0, log.read_text()
        assert not [process for process in processes if is_alive(process.pid)]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(step.pid, signal.SIGKILL)
        step.wait()


def test_a_fourth_start_without_a_checkpoint_ends_at_once(tmp_path: Path) -> None:
    """A save, of the third start, counts them anew; without one: e2e/test_slurm.py."""
    for restart in range(7):
        status, output, requeued = launch(tmp_path, SLURM_RESTART_COUNT=str(restart), SAVE="1" if restart == 2 else "")
        assert (status, len(requeued)) == ((75, restart + 1) if restart < 6 else (1, 6)), output
    assert "restart 2: " not in output and all(f"restart {restart}: " in output for restart in range(3, 6))
    assert "3 starts" in output and f"FSPO_RUN_DIR={tmp_path}/run" in output and "Ray is up" not in output
    assert launch(tmp_path, SLURM_JOB_ID="8")[0] == 75, "another job in the folder is not to blame"
