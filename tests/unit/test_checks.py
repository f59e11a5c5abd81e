"""What is wrong with commands that train, by one function in both commands and by the runner's rules in one of them."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from composing import ALGOS, completed, composed, here, of_verl
from hydra.utils import instantiate
from messages import holds

from fspo.losses import ALGORITHMS
from fspo.table import FOLDER
from recipe.fspo import checks as method
from recipe.fspo.config import FspoSettings, complete
from recipe.runner import SUPPORTED_VERL
from recipe.runner.launch import checks
from recipe.runner.launch.check_values import value_problems
from recipe.runner.launch.settings import MachineProblem
from recipe.runner.launch.trials import loss_problem

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LOSS, OPTIM = f"{ACTOR}.policy_loss", f"{ACTOR}.optim"
CORRECTION, REWARD = "algorithm.rollout_correction", "reward.custom_reward_function"
OURS = f"{LOSS}._target_=fspo.verl.SequencePolicyLossConfig"
VERLS = f"{LOSS}._target_=verl.workers.config.PolicyLossConfig"
DATA = "data.train_files=foreign.jsonl data.val_files=foreign.jsonl"
ROWS = "data.train_files=rows.jsonl data.val_files=rows.jsonl"
STALENESS = "trainer.v1.sampler.max_off_policy_threshold"
#: A right command of verl's own with a trainer and a loss of this recipe.
PLAIN = (
    *("trainer.v1.trainer_mode=fspo", "algorithm.adv_estimator=grpo", f"{LOSS}.loss_mode=fspo", f"{ROLLOUT}.n=4"),
    *(OURS, f"{ROLLOUT}.name=vllm", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_mini_batch_size=256"),
)

Row = tuple[str, ...]
#: Words beside ``experiment=demo``, or in verl's own command beside :data:`PLAIN`, and what the sentence that refuses
#: them must hold; in both commands, and in ours alone. tests/promises/test_commands.py has others.
BOTH: dict[str, tuple[Row, ...]] = {
    "the loss": (
        (f"{MODEL}.external_lib=nowhere", "external_lib=nowhere ", "nowhere"),
        (f"++{LOSS}.clip=1", f"{LOSS}: ", "'clip'"),
        ("+fspo.acept=0.5", "fspo.acept: ", "accept"),
        ("++fspo.accept=85", "accept=85 ", "0.85"),
        (f"++{LOSS}.loss_mode=vanilla", "loss_mode='vanilla'"),
        (f"++{LOSS}.c_low=0", "c_low=0 ", "clip nearly every"),
        (f"{VERLS} {LOSS}.loss_mode=gspo {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=null", "clip_ratio=0.2 "),
        ("++fspo=true", "fspo=True ", "dictionary"),
        (f"++{LOSS}.grad_scale=1", f"""'{LOSS}.grad_scale="1"'"""),
        (f"{OPTIM}.lr_scheduler_type=linear", f"{ACTOR}: ", OPTIM),
    ),
    "advantages, corrections, sampling": (
        ("algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9", "=reinforce_plus_plus ", "gamma=0.9"),
        (f"{ROLLOUT}.temperature=0.6 ++{ROLLOUT}.logprobs_mode=raw_logprobs", "raw_logprobs ", "processed_logprobs"),
        (f"{ROLLOUT}.logprobs_mode=processed_logits", "processed_logits ", "processed_logprobs"),
    ),
    "weights, rewards, tools, types": (
        ("trainer.use_v1=false", "use_v1=false ", "leave it out"),
        ("reward.reward_model.enable=true", "enable=true without a model"),
        ("custom_reward_function.path=mine.py", "custom_reward_function.path=mine.py: ", "reward."),
        (f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml {DATA}", "tools.yaml: ", "default_agent_loop=tool_agent"),
        ("++fspo.accept=much", "fspo.accept=much ", "number"),
        ("++fspo.accept=null", "fspo.accept=null ", "number"),
        (f"{ROLLOUT}.n=null", "rollout.n=null ", "integer"),
        (f"{ROLLOUT}.temperature=null", "temperature=null ", "number"),
        (f"{MODEL}.path=null", "model.path=null ", "string"),
        ("trainer.default_local_dir=null", "default_local_dir=null ", "string"),
        ("trainer.save_freq=null", "save_freq=null ", "integer"),
        (f"{MODEL}.path=${{oc.env:NOPE}}", "model.path=", "NOPE"),
        ("data.train_batch_size=0", "train_batch_size=0 ", "greater than 0"),
        (f"data.max_response_length=0 ++{LOSS}.exponent=0.3", "max_response_length=0 ", "greater than 0"),
        (f"{ACTOR}.ppo_epochs=0", "ppo_epochs=0 ", "greater than 0"),
        ("++fspo.clip_values=mine", "fspo.clip_values=mine ", "measured"),
    ),
}
MAIN: dict[str, tuple[Row, ...]] = {
    "sizes, names, lost work, wrong numbers": (
        (f"trainer.n_gpus_per_node=4 {ACTOR}.fsdp_config.fsdp_size=3", "n_gpus_per_node=4:", "fsdp_size=3 "),
        (f"{ROLLOUT}.max_model_len=128", "= 272 ", "max_model_len = 128"),
        ("reward.reward_manager.source=register reward.reward_manager.name=niave", "name=niave ", "naive"),
        (f"{ROLLOUT}.response_length=32", "rollout.response_length=32 ", "data.max_response_length=256"),
        (f"{ROLLOUT}.prompt_length=4", "rollout.prompt_length=4 ", "data.max_prompt_length=16"),
        (f"{ACTOR}.checkpoint.save_contents=[modle]", "save_contents=['modle'] ", "[model,optimizer,extra]"),
        (f"{ACTOR}.checkpoint.load_contents=[extra]", "load_contents=['extra'] ", "[model,optimizer,extra]"),
        ("algorithm.adv_estimator=foo", "adv_estimator=foo ", "grpo"),
        ("trainer.logger=[tensorboard,clearml]", "clearml ", "pip install clearml"),
        (f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=full", "kl_loss_type=full"),
        (f"{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=0", "rollout_is=sequence", "positive"),
        (f"{ROLLOUT}.agent.agent_loop_config_path=/no/such", "agent_loop_config_path=/no/such ", "correct"),
        ("+ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=my.hook", "setup_hook=my.hook ", "leave it out"),
        (f"{ROLLOUT}.full_determinism=true", "full_determinism=true ", "advantages 0"),
        ("algorithm.kl_ctrl.kl_coef=0.05", "kl_coef=0.05 ", "use_kl_in_reward=true"),
        (f"{OPTIM}.lr_warmup_steps=10 {OPTIM}.lr_warmup_steps_ratio=0.05", "steps_ratio=0.05 ", "-1"),
        (f"{OPTIM}.min_lr_ratio=0.1", "min_lr_ratio=0.1 ", "cosine"),
    ),
    "model, data, reward": (
        (f"{MODEL}.path=/no/such/model", "model.path='/no/such/model' ", "config.json"),
        ("data.val_files=foreign.jsonl", "data.val_files: ", "foreign.jsonl", "no column prompt"),
        ("data.val_files=text.jsonl", "data.val_files: ", "text.jsonl", "row 1: reward_model"),
        ("data.val_files=untrue.jsonl", "data.val_files: ", "untrue.jsonl", "row 1: reward_model", "ground_truth"),
        ("data.val_files=none.parquet", "data.val_files: ", "none.parquet", "exist"),
        ("data.train_max_samples=8", "data.train_files: ", "8 rows", "32"),
        (f"{REWARD}.path=ends.py", "ends.py", " 7"),
        (f"{REWARD}.path=acc.py {ROWS} data.train_batch_size=1", "acc.py", "'yes'"),
    ),
}
_ROW = '{"prompt": [{"content": "?"}], "data_source": "x", "reward_model": {"ground_truth": "1"}}\n'
FILES = {
    "foreign.jsonl": '{"question": "1 + 1"}',
    "rows.jsonl": _ROW,
    "text.jsonl": _ROW + _ROW.replace('{"ground_truth": "1"}', '"1"'),
    "untrue.jsonl": _ROW + _ROW.replace("ground_truth", "truth"),
    "reward.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n",
    "narrow.py": "def compute_score(solution_str):\n    return 0.0\n",
    "acc.py": "def compute_score(**_): return {'score': 1.0, 'acc': 'yes'}\n",
    "ends.py": "import os\nos._exit(7)\n",
}
#: Taken without a word.
RIGHT = (
    f"{ROLLOUT}.n=2 {ROLLOUT}.temperature=0.01 {STALENESS}=1",
    f"{CORRECTION}.rollout_rs=seq_sqrt_k1 {CORRECTION}.rollout_rs_threshold=3 {ROLLOUT}.calculate_log_probs=true",
    f"{CORRECTION}.bypass_mode=true {ROLLOUT}.calculate_log_probs=true",
    f"++{LOSS}.c_low=0.05 ++{LOSS}.exponent=0.43",
    f"{LOSS}.loss_mode=luspo",
    f"trainer.v1.trainer_mode=fspo_separate_async {MODEL}.lora_rank=8 {MODEL}.lora.merge=true {ROLLOUT}.nnodes=1",
    f"{ACTOR}.use_kl_loss=true algorithm.use_kl_in_reward=true",
    f"+data.of_mine=true trainer.total_training_steps=null {ACTOR}.clip_ratio_low=null {STALENESS}=null",
)


def in_main(*words: str) -> list[str]:
    """What this recipe's command refuses."""
    config = composed(*words)
    if wrong := list(value_problems(config, {"fspo": FspoSettings})):
        return wrong
    config = here(config)
    return [*method.problems(config), *checks.problems(config)]


def unlike(problems: list[str], row: Row) -> str | None:
    """What a row lacks in the problems; None if one sentence has all its parts."""
    found = any(re.search(holds(*row[1:]), problem) for problem in problems)
    return None if found else f"{row[0]}: {problems}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("group", [*BOTH, *MAIN])
@pytest.mark.usefixtures("place")
def test_a_mistake_is_refused_in_both_commands_or_in_ours(group: str) -> None:
    missing = []
    for row in (BOTH | MAIN)[group]:
        missing.append(unlike(in_main(*row[0].split()), row))
        if group in BOTH:  # by the same words
            missing.append(unlike(method.problems(of_verl(*PLAIN, *row[0].split())), row))
    assert list(filter(None, missing)) == []


@pytest.mark.parametrize("words", RIGHT)
def test_a_right_command_is_taken_in_both(words: str) -> None:
    assert in_main(*words.split()) == [] and method.problems(of_verl(*PLAIN, *words.split())) == []


@pytest.mark.parametrize("algo", ALGOS)
def test_what_is_shipped_is_taken(algo: str) -> None:
    assert in_main(f"algo={algo}") == []


@pytest.mark.parametrize("words", ["experiment=qwen3_8b mode=separate_async", "mode=colocate_async"])
def test_what_is_shipped_has_values_of_their_types(words: str) -> None:
    """Of the 8B job no more can be asked here."""
    assert list(value_problems(composed(*words.split()), {"fspo": FspoSettings})) == []


def test_two_trainings_in_one_table_are_refused(tmp_path: Path) -> None:
    """A table of a training that is not resumed."""
    config = of_verl(*PLAIN, f"trainer.default_local_dir={tmp_path}")
    assert method.problems(config) == []
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "responses-run-00000-000000001.parquet").touch()
    (problem,) = method.problems(config)
    assert str(tmp_path) in problem


ONE_UPDATE = f"{ACTOR}.ppo_mini_batch_size"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((f"{ONE_UPDATE}=1024",), ("mini_batch_size=1024 ", "nothing is ever clipped")),
        ((f"{ONE_UPDATE}=1024", "trainer.v1.trainer_mode=sync"), ("mini_batch_size=1024 ",)),
        ((f"{ONE_UPDATE}=1024", f"{ACTOR}.ppo_epochs=2"), ()),
        ((f"{ONE_UPDATE}=1024", "algorithm.rollout_correction.bypass_mode=true"), ()),
        (("trainer.v1.trainer_mode=fspo_colocate_async",), ("rollout_rs=null ", "seq_sqrt_k1")),
        (("trainer.v1.trainer_mode=fspo_colocate_async", "algorithm.rollout_correction.bypass_mode=true"), ()),
        (("+actor_rollout_ref.rollout.repetition_penalty=1.1",), ("repetition_penalty=1.1 ", "nothing")),
        ((), ()),
    ],
)
def test_notes(words: tuple[str, ...], says: tuple[str, ...]) -> None:
    """Whichever command."""
    notes = list(method.notes(of_verl(*PLAIN, *words)))
    assert len(notes) == bool(says) and all(part in note for note in notes for part in says)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        *((f"algo={algo}", "") for algo in ("fspo", "fspo_v1", "gspo", "rloo", "luspo")),
        *((f"algo={algo}", None) for algo in ("gspo_verl", "grpo")),
        *(("algo=unclipped", "c_low"), ("evaluate=true", "evaluate=true"), ("++fspo.clip_values=published", None)),
        (f"++{LOSS}.c_low=0.05", "c_low=0.05"),
        (f"++{LOSS}.c_high=0.05 ++fspo.clip_values=measured", "c_high=0.05"),
    ],
)
def test_clip_values_are_measured_unless_they_are_given(words: str, note: str | None) -> None:
    """In both commands; with a note only of a loss that would have measured them."""
    of_both = [composed(*words.split())] + ([of_verl(*PLAIN, *words.split())] if "++" in words else [])
    for config in of_both:
        notes = [line for line in complete(config) if line.startswith("clip values are not measured")]
        assert config.fspo.clip_values == ("measured" if note == "" else "published")
        assert len(notes) == bool(note) and all(str(note) in line for line in notes)


def test_room_is_needed_for_the_checkpoints_that_are_kept(tmp_path: Path) -> None:
    words = (f"trainer.default_local_dir={tmp_path}", "trainer.max_actor_ckpt_to_keep=9999999")
    (problem,) = checks.room_problems(here(composed(*words)), {})
    (with_lora,) = checks.room_problems(here(composed(*words, "actor_rollout_ref.model.lora_rank=8")), {})
    hybrid = ("trainer.n_gpus_per_node=8", f"{ACTOR}.fsdp_config.fsdp_size=2")
    (replicated,) = checks.room_problems(here(composed(*words, *hybrid)), {})
    needed = [float(re.search(r"need ([\d.]+) GiB", text)[1]) for text in (problem, with_lora, replicated)]
    assert needed[2] == pytest.approx(4 * needed[0], rel=1e-3), "each of four replicas is written"
    assert needed[0] == pytest.approx(3 * needed[1], rel=1e-3), "only the adapters have moments"
    assert str(tmp_path) in problem and list(checks.room_problems(here(composed(words[0])), {})) == []


def test_another_release_of_verl_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = composed("experiment=qwen3_8b").actor_rollout_ref.model
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "0.8.0")
        assert re.search(holds("verl 0.8.0 ", SUPPORTED_VERL), next(checks.package_problems(model)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problems = list(checks.package_problems(model))
    assert all(isinstance(problem, MachineProblem) for problem in problems)  # a dry run may be for another machine
    assert [problem.split()[2] for problem in problems] == ["vllm", "transfer_queue", "flash_attn_2_cuda"]


@pytest.mark.parametrize(
    ("address", "variable", "prepared"),
    [
        (None, None, "local"),  # by itself Ray would join what the temp folder names
        ("local", "10.0.0.1:6379", "local"),
        (None, "10.0.0.1:6379", None),
        ("auto", None, "auto"),
    ],
)
def test_a_run_starts_a_ray_of_its_own_unless_told_a_cluster(
    address: str | None, variable: str | None, prepared: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    key = "ray_kwargs.ray_init.address"
    override = f"~{key}" if address is None else f"{key}={address}"  # no experiment but the demo has it
    ray_init = here(composed(f"trainer.default_local_dir={tmp_path}", override)).ray_kwargs.ray_init
    assert ray_init.get("address") == prepared
    starts = prepared == "local"
    assert ("num_cpus" in ray_init) == ("num_gpus" in ray_init) == starts, "ray.init refuses both where it joins"


def test_a_run_names_every_setting_of_its_loss() -> None:
    """Also where one key turns a loss of verl's into one of the library's."""
    for words, algo, given in (
        (("algo=grpo", f"{LOSS}.loss_mode=fspo"), "fspo", {}),
        (("algo=rloo", f"{LOSS}.c_high=0.3"), "seq_rloo", {"c_high": 0.3}),
    ):
        policy_loss = completed(*words).actor_rollout_ref.actor.policy_loss
        assert dataclasses.asdict(instantiate(policy_loss).settings()) == dataclasses.asdict(ALGORITHMS[algo]) | given


def test_a_quantised_checkpoint_is_no_policy() -> None:
    (problem,) = checks.setting_problems(here(composed()), {"quantization_config": {"quant_method": "fp8"}})
    assert re.search(holds("model.path=", "quantization_config", "=fp8"), problem)


@pytest.fixture
def tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward is tried without a process of its own, which would import verl; ``ends.py`` is tried in one."""
    module = sys.modules[checks.reward_problems.__module__]
    monkeypatch.setattr(module, "_asked", module.tried)


@pytest.mark.usefixtures("place", "tried_here")
@pytest.mark.parametrize(
    ("words", "says", "of_a_call"),
    [
        ("path=reward.py name=compute_scor", ("path=", "name=compute_scor:", "AttributeError", "correct"), False),
        ("path=/no/such.py", ("path=/no/such.py,", "correct"), False),
        ("path=imports.py", ("path=", "imports.py,", "not_installed", "correct"), False),
        ("path=pkg://not_installed.reward", ("path=pkg://", "No module named 'not_installed'", "install"), False),
        ("path=narrow.py", ("data_source",), True),
        ("path=reward.py reward_kwargs.overlong_bufer=64", ("overlong_bufer",), True),
    ],
)
def test_only_a_call_of_a_reward_may_need_the_run_s_machine(words: str, says: tuple[str, ...], of_a_call: bool) -> None:
    Path("imports.py").write_text("import not_installed\n")
    config = here(composed(*(f"++{REWARD}.{word}" for word in words.split()), *ROWS.split()))
    (problem,) = checks.reward_problems(config)
    assert isinstance(problem, MachineProblem) == of_a_call == ("Traceback" in problem)
    assert re.search(holds(*says), problem), problem
    assert not [of_path for of_path in checks.path_problems(config) if "reward" in of_path], "said once"


def test_a_tokenizer_of_any_format_is_one_and_has_a_chat_template(tmp_path: Path) -> None:
    model = composed(f"++actor_rollout_ref.model.tokenizer_path={tmp_path}").actor_rollout_ref.model
    model.path = here(composed()).actor_rollout_ref.model.path
    key = f"model.tokenizer_path='{tmp_path}' "
    (problem,) = checks.model_problems(model)
    assert re.search(holds(key, "tokenizer.json"), problem)
    (tmp_path / "tiktoken.model").touch()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (problem,) = checks.model_problems(model)
    assert re.search(holds(key, "chat_template.jinja"), problem)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert list(checks.model_problems(model)) == []


LOSS_MODULE = """
from verl.trainer.ppo.core_algos import register_policy_loss
@register_policy_loss("needs_more")
def needs_more(rollout_is_weights, **given):
    return None + 1
@register_policy_loss("takes_less")
def takes_less(log_prob, old_log_prob):
    return log_prob.sum(), {}
register_policy_loss("is_compiled")(__import__("torch").add)
"""


def test_a_loss_is_refused_for_its_arguments_and_not_for_what_it_may_lack_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loss_of_two.py").write_text(LOSS_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = "actor_rollout_ref.model.external_lib=loss_of_two", f"{LOSS}.loss_mode="
    for name, says in (("needs_more", "NoneType"), ("is_compiled", "add()")):  # a compiled one tells no arguments
        assert loss_problem(composed(words[0], f"{words[1]}{name}", "algo=grpo")) is None
        assert says in capsys.readouterr().err
    problem = loss_problem(composed(words[0], f"{words[1]}takes_less", "algo=grpo"))
    assert problem and re.search(holds("takes_less ", "unexpected keyword"), problem)
