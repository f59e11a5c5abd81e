"""When a checkpoint is saved, vLLM sleeps: the order in which verl's own loop, in each mode, asks for both."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from composing import composed
from messages import holds
from transfer_queue import KVBatchMeta
from verl.checkpoint_engine import CheckpointEngineManager, base
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutReplica

from recipe.runner import hooks
from recipe.runner.faults.phase import FIRST_SYNC, Phase, read_phase, write_phase
from recipe.runner.faults.preemption import STOP_FILE, UNSAVED_VARIABLE, Preempted
from recipe.runner.launch.end_of_turn import SETTING
from recipe.runner.progress import Progress

HYBRID = ("actor_rollout_ref.hybrid_engine=true", "trainer.v1.separate_async.hybrid_rollout.enable_switch=true")
#: The 8B job with one update a step and a regular save at step 2.
WORDS = (
    *("experiment=qwen3_8b", "trainer.save_freq=2", "trainer.test_freq=1", "trainer.total_training_steps=6"),
    *("trainer.val_before_train=false", "trainer.logger=[]", "trainer.v1.separate_async.parameter_sync_step=1"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
)


class Machine:
    """The GPUs that train, with a replica of vLLM, its manager and the ranks as verl calls them; notes the calls.

    As on a GPU, vLLM's memory can be freed only if it is there, and not under a request.
    """

    def __init__(self, stuck_after: int | None = None) -> None:
        self.calls: list[str] = []
        self.syncs: list[str] = []  # the phase of each transfer of weights
        self.phase = lambda: ""
        self.awake = self.generates = False
        self._stuck_after = stuck_after

    async def sleep(self) -> None:
        assert self.awake and not self.generates
        if self.calls.count("sleep") == self._stuck_after:
            raise RuntimeError("it does not answer")
        self.awake = False
        self.calls.append("sleep")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.generates = False
        self.calls.append("abort")

    async def resume_generation(self) -> None:
        self.generates = True

    def update_weights(self, **_: Any) -> None:
        assert not self.awake
        self.awake = True
        self.syncs.append(self.phase())
        self.calls.append("wake")

    def save_checkpoint(self, path: str, remote: None, step: int, **_: Any) -> None:
        self.calls.append(f"save {step} {'beside' if self.awake else 'without'} vLLM")


Train = Callable[..., list[str]]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Train:
    """Runs verl's ``fit`` without what a step and a validation do, asked to stop in ``step N`` or ``validation N``."""

    def train(machine: Machine, mode: str, stop_in: str, *overrides: str, ends: str = "after step 3") -> list[str]:
        config = composed(f"mode={mode}", f"trainer.default_local_dir={tmp_path}", *WORDS, *overrides)
        monkeypatch.setattr(trainer_base, "tq", Mock())
        monkeypatch.setattr(base, "ray", SimpleNamespace(get=lambda result: result))
        monkeypatch.setattr(hooks, "PROGRESS", Progress())
        monkeypatch.setattr(hooks, "_LOGGERS", {})  # of the whole process
        monkeypatch.setattr(RolloutReplica, "max_concurrency", 1016)  # a trainer replaces it

        class Trainer(hooks.RunnerHooks, trainer_base.get_trainer_cls(mode)):  # type: ignore[misc]
            verl_mode = mode

            def _step_once(self, *_: Any) -> KVBatchMeta:
                self.on_sample_begin()
                self.on_sample_end()
                if stop_in == f"step {self.global_steps}":
                    (tmp_path / STOP_FILE).touch()
                return KVBatchMeta(partition_id="train", keys=[], tags=[])

            def _validate(self) -> dict[str, float]:
                if stop_in == f"validation {self.global_steps}":
                    (tmp_path / STOP_FILE).touch()
                    if self.global_steps == 0:
                        self.replay_buffer._wait_for_next_poll("val", 0.0)
                        pytest.fail("the validation waits on")
                return {"accuracy": 0.0}

            def _nothing(self, *_: Any, **__: Any) -> dict[str, Any]:
                return {}

            _compute_metrics = _open_run_log = _add_async_warmup_batches = _reissue_inflight_prompts = _nothing
            _add_batch_to_generate = _shutdown_dump_executor = _reseed_sampling = raise_failure = _nothing
            add_replicas_to_balancer = remove_replicas_from_balancer = clear_sticky_cache = _nothing

        (unsaved := tmp_path / "unsaved").touch()  # of a job script, which counts starts that have saved nothing
        monkeypatch.setenv(UNSAVED_VARIABLE, str(unsaved))
        write_phase(tmp_path, Phase(0, "start-up"))
        trainer: Any = Trainer(config)
        # vLLM's servers take the requests of two steps of an asynchronous mode at once.
        assert (RolloutReplica.max_concurrency > 2 * 512 * 16) == (mode != "sync")
        trainer.actor_rollout_wg, engine = machine, CheckpointEngineConfig(backend="naive")
        trainer.checkpoint_manager = CheckpointEngineManager(engine, machine, [machine])
        trainer.train_dataloader = SimpleNamespace(state_dict=dict)
        trainer.steps_per_epoch, trainer.total_training_steps = 100, 6
        if mode == "separate_async":
            sync = SimpleNamespace(update_weights=lambda step: machine.syncs.append(machine.phase()))
            trainer.standalone_checkpoint_manager, trainer.replay_buffer = sync, Mock(poll_interval=1.0)
            trainer.replay_buffer.get_sampleable_count.return_value = 0
            trainer.replay_buffer.wait_for_sampleable.return_value = (None, {})
            # What verl's init() sets, with the processes.
            lent = trainer._enable_hybrid_replicas
            trainer.current_mode = HybridEngineMode.ROLLOUT if lent else HybridEngineMode.TRAINER
            trainer._wait_seconds, trainer._wait_samples = 1e9, 1  # so long that lending these GPUs always pays
        machine.phase = lambda: read_phase(tmp_path).phase
        trainer.on_init_end()
        with pytest.raises(Preempted, match=ends):
            trainer.fit(None)
        return machine.calls

    return train


ONCE, TWICE = "wake abort sleep", "wake abort sleep wake abort sleep"


@pytest.mark.parametrize(
    ("mode", "overrides", "stop_in", "between"),
    [
        ("sync", [], "step 3", "wake sleep wake sleep"),
        ("sync", [], "validation 3", "wake sleep wake sleep"),
        ("colocate_async", [], "validation 3", TWICE),
        ("separate_async", [], "step 3", ""),  # these GPUs hold no vLLM
        ("separate_async", HYBRID[:1], "step 3", ONCE),  # awake for the validation of step 2, but not after step 3
        ("separate_async", HYBRID, "step 3", TWICE),  # verl lends these GPUs to the generation after every step
    ],
)
def test_vllm_sleeps_while_a_checkpoint_is_saved(
    train: Train, tmp_path: Path, mode: str, overrides: list[str], stop_in: str, between: str
) -> None:
    """The loop saves step 2, and the warning step 3; ``between`` is what is asked of vLLM between both."""
    calls = train(machine := Machine(), mode, stop_in, *overrides)
    assert not (tmp_path / "unsaved").exists()
    saves = [call for call in calls if call.startswith("save")]
    assert saves == ["save 2 without vLLM", "save 3 without vLLM"]
    first, last = map(calls.index, saves)
    assert calls[first + 1 : last] == between.split() and calls[last + 1 :] == []
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    if not overrides:  # the first sync of separate_async has a limit of its own
        first_sync = FIRST_SYNC if mode == "separate_async" else "start-up"
        assert machine.syncs == [first_sync, *["weight sync"] * 3]


def test_a_save_after_a_warning_does_not_depend_on_vllm(train: Train, tmp_path: Path) -> None:
    calls = train(Machine(stuck_after=3), "sync", "step 3")  # the sleeps of three steps
    assert calls[-2:] == ["wake", "save 3 beside vLLM"]
    assert re.search(holds("vLLM does not sleep", "it does not answer"), (tmp_path / "progress.log").read_text())


def test_a_stop_in_the_first_validation_saves_nothing(train: Train) -> None:
    first = "trainer.val_before_train=true"
    assert train(Machine(), "sync", "validation 0", first, ends="nothing saved") == ["wake"]


@pytest.mark.parametrize(("left_s", "after"), [(299.0, 3), (300.0, 4)])
def test_a_run_saves_before_the_end_of_its_job_s_time(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_s: float, after: int
) -> None:
    """The longest step takes 140 s, the longest save 40 s, and the margin is 120 s; ``left_s``: before step 4."""

    class Slow(Machine):
        now = 0.0

        def update_weights(self, **more: Any) -> None:  # at the end of the start-up and of each step
            self.now += 100
            super().update_weights(**more)

        def save_checkpoint(self, path: str, remote: None, step: int, **more: Any) -> None:
            self.now += 40 * (step == 2)
            super().save_checkpoint(path, remote, step, **more)

    machine = Slow()
    monkeypatch.setattr(hooks, "time", SimpleNamespace(monotonic=lambda: machine.now))
    monkeypatch.setattr(hooks, "time_left_s", lambda: 440 + left_s - machine.now)
    calls = train(machine, "sync", "", ends=f"after step {after}")
    assert [call for call in calls if call.startswith("save")][-1] == f"save {after} without vLLM"
    assert " 300 s" in (tmp_path / "progress.log").read_text()


def test_cut_and_missing_responses_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hooks, "PROGRESS", progress := Progress())
    progress.write_to(tmp_path)
    assert not hooks.warn_of_cut([64, 64, 63, 1], 64, 3) and not hooks.warn_of_cut([], 64, 3)
    hooks.warn_of_missing(64, 64, "step 4")
    assert not (tmp_path / "progress.log").exists(), "half of them"
    assert hooks.warn_of_cut([64, 64, 70, 1], 64, 3)
    hooks.warn_of_missing(61, 64, "step 4")
    cut, missing = (tmp_path / "progress.log").read_text().splitlines()
    assert re.search(holds(" 75% ", " step 3 ", "data.max_response_length=64", f"++{SETTING}="), cut)
    assert re.search(holds("step 4 ", "61 of 64 ", "AgentLoopWorker"), missing)


def test_the_last_failure_of_an_agent_loop_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl writes it to the worker's log and to nobody else."""
    monkeypatch.setattr(hooks.ray, "get", lambda answers, timeout: answers)
    logger = hooks.agent_loop_tq.logger
    monkeypatch.setattr(logger, "filters", [*logger.filters])
    workers = [SimpleNamespace(), SimpleNamespace()]
    for worker in workers:
        worker.__ray_call__ = SimpleNamespace(remote=lambda function, worker=worker: function(worker))
    assert hooks.last_failure(workers) == ""
    hooks.keep_failures(workers[1:])
    try:
        raise RuntimeError("of a tool")
    except RuntimeError as error:
        logger.exception("Error in _run_prompt: %s", error)
    logger.error("another line")
    assert "RuntimeError: of a tool" in hooks.last_failure(workers)
