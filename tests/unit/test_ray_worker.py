"""What Ray's workers do first, and that verl and torch are changed in processes of a run of ours, and in no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from composing import composed

from recipe.fspo import plugin
from recipe.runner.faults import processes
from recipe.runner.faults.preemption import STOP_VARIABLE
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.ray_worker import BEGIN, HOOK, have_workers_begin

LIGHT = """
import os, sys
from recipe.runner.ray_worker import begin
begin()
heavy = {"torch", "verl", "ray", "vllm", "transfer_queue", "zmq"} & set(sys.modules)
assert not heavy, heavy
print(os.environ["FSPO_PRIVATE"], os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def test_a_worker_imports_nothing_too_early(tmp_path: Path) -> None:
    """And that it signs: test_frames.py."""
    set_by_it = ("FSPO_PRIVATE", "TORCHINDUCTOR_CACHE_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in set_by_it}
    begun = {"env": kept | {"FSPO_RAY_TMP": str(tmp_path)}, "capture_output": True, "text": True, "timeout": 600}
    command = [sys.executable, "-W", "ignore", "-c", LIGHT]
    done = subprocess.run(command, **begun)  # type: ignore[call-overload]
    private = tmp_path / f"fspo-{os.getuid()}"
    assert done.stdout.split() == [str(private), f"{private}/inductor"], done.stderr[-2000:]
    private.chmod(0o777)
    done = subprocess.run(command, **begun)  # type: ignore[call-overload]
    assert done.returncode != 0 and f"{private} (drwxrwxrwx, " in done.stderr


def test_workers_begin_so_in_a_run_of_either_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ask verl for the environment of Ray's workers; what the job's variables say reaches a Ray of others.

    In verl's own command a trainer of ours makes the run's id, on which private sockets and signed messages hang: they
    must not stop in silence.
    """
    for name in (RUN_ID_VARIABLE, "SPT_NOENV"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    monkeypatch.setenv(STOP_VARIABLE, "/here/stop")
    processes.own_run_id.cache_clear()
    monkeypatch.setattr(plugin, "check", lambda config: None)
    constants = SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {"A": "1"}})
    have_workers_begin(constants)
    assert constants.get_ppo_ray_runtime_env() == {"env_vars": {"A": "1"}}
    monkeypatch.setenv(RUN_ID_VARIABLE, "7")
    asked = constants.get_ppo_ray_runtime_env()
    assert asked[HOOK] == BEGIN
    assert asked["env_vars"].items() >= {"A": "1", RUN_ID_VARIABLE: "7", STOP_VARIABLE: "/here/stop"}.items()
    monkeypatch.delenv(RUN_ID_VARIABLE)

    plugin.prepare_driver(constants)
    of_verl = composed("algo=gspo", f"trainer.default_local_dir={tmp_path}/other", "trainer.v1.trainer_mode=sync")
    assert HOOK not in constants.get_ppo_ray_runtime_env(of_verl) and not (tmp_path / "other").exists()
    (folder := tmp_path / "run").mkdir()
    (folder / "stop").touch()
    os.utime(folder / "stop", (1, 1))
    asked = constants.get_ppo_ray_runtime_env(composed("algo=gspo", f"trainer.default_local_dir={folder}"))
    assert asked[HOOK] == BEGIN and asked["env_vars"][RUN_ID_VARIABLE] == os.environ[RUN_ID_VARIABLE]
    assert not (folder / "stop").exists()


#: Says of each name whether what it stands for is of ours.
OURS = """
import sys, verl.trainer.main_ppo, verl.trainer.ppo.v1.trainer_base
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender
changed = (
    sys.modules["torch.distributed.rendezvous"].TCPStore,
    BucketedWeightReceiver.__init__, BucketedWeightSender.__init__,
    verl.trainer.main_ppo.pprint, verl.trainer.ppo.v1.trainer_base.Tracking,
)
print(*(getattr(value, "__globals__", {}).get("__name__", "").startswith("recipe.runner") for value in changed))
"""


@pytest.mark.slow  # two fresh processes that import verl's trainer
@pytest.mark.parametrize("run_id", ["", "1-test"])
def test_verl_is_changed_in_a_run_of_ours_only(run_id: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("FSPO_RUN_ID", "FSPO_AUDIT")}
    environment |= {"FSPO_RUN_ID": run_id} if run_id else {}
    command = [sys.executable, "-W", "ignore", "-c", OURS]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == [" ".join([str(bool(run_id))] * 5)], done.stderr[-2000:]
