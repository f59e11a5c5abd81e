"""What verl's own command says of a loss or a trainer of this recipe, before it starts Ray."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from composing import composed
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from messages import holds
from omegaconf import OmegaConf, open_dict

from fspo.table import FOLDER, TableWriter
from recipe.fspo import plugin
from recipe.fspo.job import JOB
from recipe.runner.faults.processes import RUN_ID_VARIABLE
from recipe.runner.launch.compose import parsed

LOSS = "actor_rollout_ref.actor.policy_loss"
TYPED = f"{LOSS}._target_=fspo.verl.SequencePolicyLossConfig"
N = "actor_rollout_ref.rollout.n"
NO_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=false"
CORRECTED = (
    "algorithm.rollout_correction.rollout_rs=seq_sqrt_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.9_1.1",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
)


@pytest.fixture(autouse=True)
def _checks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process starts no run."""
    monkeypatch.setattr(plugin, "prepare", lambda config: None)
    monkeypatch.delenv(RUN_ID_VARIABLE, raising=False)


@functools.cache
def _verls() -> bytes:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return pickle.dumps(compose("ppo_trainer"))


def ask(*overrides: str, loss: str = "fspo", mode: str = "fspo") -> dict[str, object]:
    """What verl's driver gets where it asks for the environment of Ray's workers."""
    constants = SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {}})
    plugin.prepare_driver(constants)
    own = (f"{LOSS}.loss_mode={loss}", f"trainer.v1.trainer_mode={mode}", "algorithm.adv_estimator=grpo")
    mini_batches = ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=256")
    own += ("actor_rollout_ref.actor.use_dynamic_bsz=true",)
    config = pickle.loads(_verls())
    ConfigLoaderImpl._apply_overrides_to_config(parsed([*own, *mini_batches, *overrides]), config)
    before = config.copy()
    environment: dict[str, object] = constants.get_ppo_ray_runtime_env(config)
    with open_dict(config), open_dict(before):
        completed = config.pop("fspo", None)
        before.pop("fspo", None)
    assert config == before, "the workers get the configuration that was given, and the trainer its own completed"
    assert completed is None or completed.skip_zero_advantage is not None
    return environment


@pytest.mark.parametrize(
    ("loss", "overrides"),
    [
        ("fspo", ()),
        ("fspo_v1", ()),
        ("fspo", (TYPED, f"+{LOSS}.drift=kl")),
        ("fspo", ("+fspo.accept=0.9", "+fspo.kl_to_start=true", "+fspo.clip_values=measured")),
        ("seq_gspo", ("+fspo.match_scale=native",)),
        ("fspo", ("+fspo.pi_old=rollout", "actor_rollout_ref.rollout.calculate_log_probs=true")),
        ("fspo", CORRECTED),
    ],
)
def test_what_is_measured_is_no_problem_and_needs_no_note(
    loss: str, overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(*overrides, loss=loss) == {"env_vars": {}}
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["fspo_colocate_async", "fspo_separate_async"])
def test_asynchronous_modes_need_a_rule_for_old_responses(mode: str) -> None:
    with pytest.raises(ValueError, match=holds("rollout_rs=null ", "seq_sqrt_k1", "fspo.allow_uncorrected=true")):
        ask(mode=mode)
    for enough in (CORRECTED, ("+fspo.allow_uncorrected=true",)):
        assert ask(*enough, mode=mode) == {"env_vars": {}}


@pytest.mark.parametrize("name", ["param_offload", "offload_policy"])
def test_weights_on_the_host_have_no_copy_in_separate_async(name: str) -> None:
    offload = (*CORRECTED, f"actor_rollout_ref.actor.fsdp_config.{name}=true")
    with pytest.raises(ValueError, match=holds("fspo_separate_async", name, "+fspo.pi_old=rollout")):
        ask(*offload, mode="fspo_separate_async")
    assert ask(*offload, mode="fspo_colocate_async") == {"env_vars": {}}


def test_the_table_of_another_training_is_not_replaced(tmp_path: Path) -> None:
    """verl's default folder is that of every command with the default names, and by default it saves nothing."""
    here = f"trainer.default_local_dir={tmp_path}"
    writer = TableWriter(tmp_path / FOLDER, {}, run="run")
    writer.append({"step": [1], "update": [0], "minibatch": [0], "S": [0.1], "L": [3]})
    for begins in ((), ("trainer.resume_mode=disable",)):
        with pytest.raises(ValueError, match=holds(here, "trainer.experiment_name")):
            ask(here, *begins)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert ask(here) == {"env_vars": {}}


def test_a_driver_without_verls_groups_is_left_alone() -> None:
    constants = SimpleNamespace(get_ppo_ray_runtime_env=lambda config=None: {"env_vars": {}})
    plugin.prepare_driver(constants)
    loss = {"policy_loss": {"loss_mode": "vanilla"}}
    config = OmegaConf.create({"actor_rollout_ref": {"actor": loss}, "trainer": {"use_v1": False}})
    assert constants.get_ppo_ray_runtime_env(config) == {"env_vars": {}}


@pytest.mark.parametrize(
    ("loss", "overrides", "says"),
    [
        (
            "vanilla",
            ("+fspo.clip_values=measured",),
            ("fspo.clip_values=measured", "vanilla", f"{LOSS}.loss_mode=fspo"),
        ),
        ("fspo", (TYPED, f"+{LOSS}.c_low=0.05", "+fspo.clip_values=measured"), ("measured", "c_low=0.05", "leave one")),
        ("fspo", ("+fspo.window=3",), ("fspo.window ", "window_steps")),
        ("fspo", ("+fspo.accept=1.5",), ("fspo.accept=1.5 ",)),
        ("fspo", ("+fspo.kl_to_start=maybe",), ("fspo.kl_to_start=maybe ",)),
        ("fspo", ("trainer.use_v1=false",), ("trainer.use_v1=false ", "trainer_mode=fspo")),
        ("fspo", ("actor_rollout_ref.rollout.top_p=0.9",), ("rollout.top_p=0.9 ", "top_p=1")),
        ("fspo", ("+fspo.pi_old=rollout", NO_LOG_PROBS), ("calculate_log_probs=false", "fspo.pi_old=rollout", "true")),
        ("fspo", ("algorithm.adv_estimator=gae",), ("adv_estimator=gae ",)),
        ("fspo", (TYPED, f"+{LOSS}.c_low=30.0"), (f"{LOSS}.c_low=30.0 ",)),
        ("nobody", (), (f"{LOSS}.loss_mode=nobody ", "external_lib", "seq_gspo")),
        ("fspo", ("+fspo=3",), ("fspo=3: ", "fspo.NAME=VALUE")),
        ("fspo", (f"{LOSS}=null",), (f"{LOSS}=null ", f"{LOSS}.NAME=VALUE")),
        ("fspo", ("trainer.default_local_dir=null",), ("trainer.default_local_dir=null ", "string")),
        ("fspo", ("trainer.default_local_dir=/dev/null",), ("trainer.default_local_dir=/dev/null: ", "another one")),
        *(("fspo", (f"{key}=abc",), (f"{key}=abc ", "integer")) for key in ("data.train_batch_size", N)),
        ("fspo", ("actor_rollout_ref.actor.ppo_mini_batch_size=null",), ("ppo_mini_batch_size=null ", "integer")),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_key_and_the_remedy(
    loss: str, overrides: tuple[str, ...], says: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=holds(*says)):
        ask(*overrides, loss=loss)


#: With verl's own trainer nothing is measured: what needs it is refused, and a band of one's own is not.
PLAIN = "sync"
MEASURED = "trainer.v1.trainer_mode=fspo"


@pytest.mark.parametrize(
    ("loss", "fields", "says"),
    [
        ("fspo_v1", "", ("loss_mode=fspo_v1 ", "loss_mode=fspo,", MEASURED)),
        ("fspo", "_target_ +drift=kl", ("drift=kl ", "leave it out", MEASURED)),
        ("seq_gspo", "+drift=kl", ("drift=kl ", "leave it out", MEASURED)),
        ("fspo", "_target_ +c_low=-1", ("c_low=-1 ",)),
        ("fspo", "_target_ +c_low=much", ("c_low=much ",)),
        ("fspo", "_target_ +exponent=3", ("exponent=3",)),
        ("fspo", "+c_low=0.05", ("_target_=verl.", "'c_low'", TYPED)),
        ("fspo", "_target_ +c_lwo=0.05", ("_target_=", "'c_lwo'")),
        ("fspo_2", "actor_rollout_ref.model.external_lib=my_losses", ()),  # registered in the workers
        ("fspo_2", "actor_rollout_ref.actor.policy_loss._target_=my_losses.Config", ()),
        ("fspo", "_target_ +exponent=0.43 +c_low=0.04 +c_high=0.04", ()),
        ("fspo_v1", "_target_ +drift=none", ()),
        ("fspo", "_target_ +c_low=0.05", ()),
        ("luspo", "", ()),
    ],
)
def test_a_band_that_verls_own_trainer_cannot_measure_is_refused(loss: str, fields: str, says: tuple[str, ...]) -> None:
    overrides = [TYPED if word == "_target_" else word.replace("+", f"+{LOSS}.") for word in fields.split()]
    if not says:
        assert ask(*overrides, loss=loss, mode=PLAIN) == {"env_vars": {}}
        return
    with pytest.raises(ValueError, match=holds(f"{LOSS}.{says[0]}", *says[1:])):
        ask(*overrides, loss=loss, mode=PLAIN)


LORA = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16")
ADAPTER = ("actor_rollout_ref.model.lora_adapter_path=/an/adapter",)
MERGED = "actor_rollout_ref.model.lora.merge=true"
TEMPERATURE, RAW = "actor_rollout_ref.rollout.temperature", "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"
STALENESS = "trainer.v1.sampler.max_off_policy_threshold"
ASYNC = (*CORRECTED, "+fspo.allow_uncorrected=true")


@pytest.mark.parametrize(
    ("mode", "overrides", "says"),
    [
        ("separate_async", LORA, ("model.lora_rank=8 ", MERGED, "mode=colocate_async")),
        ("fspo_separate_async", (*ASYNC, *LORA), ("model.lora_rank=8 ", MERGED)),
        ("separate_async", ADAPTER, ("model.lora_adapter_path=/an/adapter ", MERGED)),
        ("separate_async", (*LORA, MERGED), ()),
        ("fspo_colocate_async", (*ASYNC, *LORA), ()),
        ("separate_async", (f"{STALENESS}=0",), (f"{STALENESS}=0 ", "1", "null")),
        ("fspo_colocate_async", (*ASYNC, f"{STALENESS}=-1"), (f"{STALENESS}=-1 ",)),
        ("separate_async", (f"{STALENESS}=1",), ()),
        ("separate_async", (f"{STALENESS}=null",), ()),
        ("fspo", (f"{TEMPERATURE}=0.009",), (f"{TEMPERATURE}=0.009 ", "0.01")),
        (PLAIN, (f"{TEMPERATURE}=1e-6",), (f"{TEMPERATURE}=1e-06 ", "0.01")),
        (PLAIN, (f"{TEMPERATURE}=0.01",), ()),
        ("fspo", (f"{TEMPERATURE}=0.6", RAW), (f"{RAW} ", "temperature=0.6")),
        (PLAIN, (f"{TEMPERATURE}=0.6", RAW), (f"{RAW} ", "processed_logprobs")),
        (PLAIN, (RAW,), ()),
        ("fspo", (f"{TEMPERATURE}=0.6",), ()),
    ],
)
def test_weights_and_probabilities_that_are_not_the_trainer_s_are_refused(
    mode: str, overrides: tuple[str, ...], says: tuple[str, ...]
) -> None:
    if not says:
        assert ask(*overrides, mode=mode) == {"env_vars": {}}
        return
    with pytest.raises(ValueError, match=holds(*says)):
        ask(*overrides, mode=mode)


def test_another_release_refuses_our_trainers_and_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipe.fspo.plugin.version", lambda package: "0.9.0")
    assert ask(TYPED, f"+{LOSS}.c_low=-1.0", mode=PLAIN) == {"env_vars": {}}, "the class refuses it by itself"
    with pytest.raises(ValueError, match=holds("trainer_mode=fspo ", "verl 0.9.1", "0.9.0 is installed")):
        ask()


def test_a_folder_for_an_audit_that_cannot_be_written_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSPO_AUDIT", "/dev/null/audit")
    assert ask() == {"env_vars": {}}, "a trainer of this recipe keeps a table of its own"
    with pytest.raises(ValueError, match=holds("FSPO_AUDIT=/dev/null/audit: ", "another one")):
        ask(loss="gspo", mode=PLAIN)


@pytest.mark.parametrize("override", ["+algorithm.rollout_correction.rollout_is=token", "algorithm.adv_estimator=gae"])
def test_what_a_sequence_loss_cannot_use_is_refused_with_verls_own_trainer(override: str) -> None:
    assert ask(override, loss="vanilla", mode=PLAIN) == {"env_vars": {}}
    with pytest.raises(ValueError, match=override.rpartition(".")[2].rpartition("=")[2]):
        ask(override, mode=PLAIN)


ONE_UPDATE = "actor_rollout_ref.actor.ppo_mini_batch_size=1024"
PENALTY = "actor_rollout_ref.rollout.repetition_penalty"


@pytest.mark.parametrize(
    ("loss", "mode", "overrides", "says"),
    [
        ("vanilla", "fspo", (), ("loss_mode=vanilla ",)),
        ("fspo", "fspo", (TYPED, f"+{LOSS}.c_low=0.05"), (f"{LOSS} has c_low=0.05",)),
        *(
            ("fspo", mode, (ONE_UPDATE,), ("mini_batch_size=1024 ", "data.train_batch_size"))
            for mode in ("fspo", PLAIN)
        ),
        ("fspo", PLAIN, (ONE_UPDATE, "actor_rollout_ref.actor.ppo_epochs=2"), ()),
        ("fspo", "separate_async", (ONE_UPDATE,), ()),
        ("fspo", PLAIN, (), ()),
        ("gspo", PLAIN, (ONE_UPDATE,), ()),
        *(("fspo", mode, (f"+{PENALTY}=1.1",), (f"{PENALTY}=1.1 ", "nothing")) for mode in ("fspo", PLAIN)),
        ("fspo", PLAIN, (f"+{PENALTY}=1.0",), ()),
        ("fspo", "fspo", (TYPED, f"+{LOSS}.grad_multiplier=0.016"), (f"{LOSS}.grad_multiplier=0.016 ", "match_scale")),
        ("fspo", PLAIN, (TYPED, f"+{LOSS}.grad_multiplier=0.016"), ()),
    ],
)
def test_a_note_says_what_is_not_measured_and_what_never_clips(
    loss: str, mode: str, overrides: tuple[str, ...], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    ask(*overrides, loss=loss, mode=mode)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == bool(says) and all(text in note for note in notes for text in says)


def test_a_run_notes_a_penalty_that_verl_hands_to_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    for value, notes in (("1.1", 1), ("1.0", 0)):
        JOB.complete(composed(f"+{PENALTY}={value}"))
        assert capsys.readouterr().out.count(f"note: {PENALTY}={value} ") == notes
