"""Everything of verl, Ray, vLLM and others that this project relies on and that is private or undocumented.

A mark stands where it is used: ``# upstream: MODULE:NAME(PARAMETER, ...)``, a class, function, method (``Class.a|b``)
or assigned attribute, with parameters that it must take; or ``# upstream: MODULE "TEXT"``, a text of the installed
source, blanks and lines aside. ``grep -rn "# upstream:" fspo recipe`` is the list to go through before an upgrade.
Installed sources are read as text, nothing is imported, so the test also says what moved when the new version cannot be
imported here. What our files import needs no mark: it is read from their code. Files without marks: NAMES and TEXTS.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from checking import check_all
from messages import holds

from recipe.runner import verl_patches

ROOT = Path(__file__).resolve().parents[2]
Check = tuple[str, Callable[[], None]]
PUBLIC = "public hook"
#: What our code imports of these is looked up.
WATCHED = ("verl", "vllm", "transfer_queue", "transformers", "hydra", "ray")

_BASE = "verl.trainer.ppo.v1.trainer_base"
_SEPARATE = "verl.trainer.ppo.v1.trainer_separate_async"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_AGENTS = "verl.experimental.agent_loop.agent_loop"
_QUEUE = "verl.trainer.ppo.v1.agent_loop_tq"
_CORRECTION = "verl.trainer.ppo.rollout_corr_helper"
_WORKERS = "verl.workers.engine_workers"
_NAIVE = "verl.experimental.reward_loop.reward_manager.naive"
_TRACKING = "verl.utils.tracking"

#: By our file, ``module:name`` upstream, of a class, function, method (``Class.method``, or several: ``Class.a|b``) or
#: attribute that the module assigns, and what it is used for. ``(a, b)``: parameters that must be among those of the
#: function; ``as x``: our file names it so, and not by the last part of its name.
NAMES: dict[str, dict[str, str]] = {
    "recipe/runner/hooks.py": {
        f"{_BASE}:PPOTrainer.init|on_init_end|on_train_begin|on_step_begin|on_step_end": PUBLIC,
        f"{_BASE}:PPOTrainer.on_sample_begin|on_sample_end|on_validate_begin|on_validate_end": PUBLIC,
        f"{_BASE}:PPOTrainer.fit(agent_loop_manager)": PUBLIC,
        f"{_BASE}:PPOTrainer._rollout_server_managers": "reseeds vLLM on CPUs",
        "verl.workers.rollout.llm_server:LLMServerManager.get_replicas": "the same",
        f"{_BASE}:PPOTrainer._build_replay_buffer": "the poll interval has no setting",
        f"{_BUFFER}:ReplayBuffer.poll_interval": "set after construction",
        f"{_BASE}:PPOTrainer._init_dataloader": "the only place that knows how many prompts are left",
        f"{_BASE}:PPOTrainer._init_resource_pool_mgr": "a bounded wait for resources",
        "verl.experimental.reward_loop.reward_loop:RewardLoopManager.reward_loop_worker_handles": (
            "asked for what a reward raised, which verl only logs"
        ),
        f"{_BASE}:PPOTrainer._val_metrics_update": "how many responses of a validation are missing",
        f"{_BASE}:PPOTrainer._save_checkpoint": "room for it, and what is removed before it",
        f"{_BASE}:PPOTrainer._load_checkpoint": "its files are read whole before it is loaded",
        "verl.checkpoint_engine.base:CheckpointEngineManager.abort_replicas|sleep_replicas": "before a save of ours",
        f"{_SEPARATE}:PPOTrainerSeparateAsync.switch_to_trainer": "the same",
        f"{_SEPARATE}:HybridEngineMode.ROLLOUT": "the same",
        f"{_BASE}:PPOTrainer._update_actor(batch, metrics)": "no hook before the update",
        f"{_BASE}:PPOTrainer._balance_batch(batch, metrics)": "balances the rollout batch, not its mini-batches",
        "verl.single_controller.ray.base:RayWorkerGroup.workers": "each rank reads its own shards whole",
        "verl.single_controller.base.worker_group:WorkerGroup._dispatch_info": "which ranks get data of their own",
        "transfer_queue.metadata:KVBatchMeta.reorder": "order of a batch",
        f"{_TRACKING}:Tracking.logger": "the run folder is added to verl's loggers",
        f"{_QUEUE}:logger": "a worker's log alone has what an agent loop raised",
        f"{_BUFFER}:ReplayBuffer._wait_for_next_poll(partition_id, last_debug_time)": "notes progress; counts its rows",
    },
    "recipe/fspo/rollout_batch.py": {
        "transfer_queue.client:TransferQueueClient.kv_retrieve_meta(keys, partition_id)": "which columns are tensors",
    },
    "recipe/fspo/audit.py": {
        f"{_WORKERS}:TrainingWorker.set_loss_fn(loss_fn)": "wrapped: what verl hands to its loss has no hook",
        f"{_WORKERS}:TrainingWorker.train_batch(data)": "wrapped: where a mini-batch begins and ends",
    },
    "recipe/fspo/trainer.py": {
        f"{_BASE}:PPOTrainer.on_init_end": PUBLIC,
        f"{_BASE}:PPOTrainer._compute_old_log_prob(batch, metrics)": "padding stands in for rows without a gradient",
        f"{_BASE}:PPOTrainer._compute_ref_log_prob(batch, metrics)": "only at steps that validate",
        f"{_BASE}:PPOTrainer._compute_advantage(batch, metrics)": "A is not exactly 0 where all rewards are equal",
        f"{_BASE}:PPOTrainer._balance_batch(batch, metrics)": "rewards are known, ranks not balanced yet",
        f"{_BASE}:PPOTrainer._step_once": "padding rows go",
        f"{_BASE}:PPOTrainer._init_resource_pool_mgr": "our worker class",
        f"{_BASE}:PPOTrainer._fetch_one_gen_batch": "the data loader's order of prompts",
        f"{_BASE}:PPOTrainer._build_replay_buffer": "the buffer writes down what it evicts",
        f"{_BASE}:PPOTrainer._update_actor(batch, metrics)": "no hook before and after the update",
        f"{_BASE}:PPOTrainer._save_checkpoint": "our state must be complete before verl names it",
        f"{_BASE}:PPOTrainer._load_checkpoint": "our state is restored with the weights",
        f"{_BASE}:register_trainer(name)": PUBLIC,
    },
    "recipe/fspo/replay_buffer.py": {
        f"{_BUFFER}:ReplayBuffer._evict_terminal_groups(global_steps, partition_id, eviction_reasons)": (
            "why removed; the order of the reasons"
        ),
        f"{_BUFFER}:ReplayBuffer._select_prompt_uids(partition_id, sampleable_keys, batch_size)": (
            "verl's order among prompts of one step is that of a set"
        ),
        f"{_BUFFER}:ReplayBuffer._clear_groups(partition_id, uids)": "surplus",
        f"{_BUFFER}:ReplayBuffer._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)": (
            "responses missing in a batch; verl orders groups by random ids"
        ),
        "transfer_queue.metadata:KVBatchMeta.reorder": "order of a batch",
    },
    "recipe/fspo/worker.py": {
        f"{_WORKERS}:ActorRolloutRefWorker.actor_worker_cls": "class attribute made for it",
        f"{_WORKERS}:TrainingWorker.train_batch(data)": "where a mini-batch begins and ends; around it a bad update",
        f"{_WORKERS}:TrainingWorker.load_checkpoint": "brings back the optimizer's settings with its state",
        f"{_WORKERS}:TrainingWorker.set_loss_fn(loss_fn)": "columns that verl does not hand to a loss",
    },
    "recipe/fspo/plugin.py": {
        f"{_BASE}:get_trainer_cls(name)": "wrapped: imports the trainers where one of them is asked for",
        "verl.trainer.constants_ppo:get_ppo_ray_runtime_env(config)": "what the driver asks for before it starts Ray",
    },
    "fspo/verl.py": {
        "verl.trainer.ppo.core_algos:register_policy_loss(name)": PUBLIC,
    },
    "recipe/fspo/sqrt_rejection.py": {
        "verl.trainer.ppo.rollout_corr_helper:compute_rollout_rejection_mask"
        "(log_ratio, response_mask, rollout_rs, rollout_rs_threshold)": "wrapped: one rule more",
    },
    "recipe/runner/reward_manager.py": {
        f"{_NAIVE}:NaiveRewardManager.run_single(data)": "verl keeps the response's length in tokens to itself",
    },
    "recipe/runner/ray_worker.py": {
        "verl.trainer.constants_ppo:get_ppo_ray_runtime_env(config)": "what Ray's workers do first",
    },
    "recipe/runner/launch/checks.py": {
        f"{_AGENTS}:_agent_loop_registry": "the loops that a worker knows",
    },
}

#: By our file, ``module: text``, text of a source upstream that our code looks for or a value that it repeats, and why.
TEXTS: dict[str, dict[str, str]] = {
    "recipe/runner/hooks.py": {
        f"{_QUEUE}: exc_info=(type(error), error, error.__traceback__)": "what is logged of a session",
        f"{_AGENTS}: self.agent_loop_workers = []": "the workers' handles",
        f'{_TRACKING}: os.environ.get("TENSORBOARD_DIR"': "where it writes",
        f'{_TRACKING}: os.environ.get("MLFLOW_TRACKING_URI"': "the same",
        f'{_TRACKING}: os.environ.get("SWANLAB_LOG_DIR"': "the same",
        "ray.actor: def __ray_call__(": "runs a function in a rank's process, whatever its class; public in Ray",
        "verl.utils.dataset.rl_dataset: self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)": "rows",
        f"{_SEPARATE}: self.current_mode = HybridEngineMode.ROLLOUT": "whether vLLM is awake beside the trainer",
        f"{_SEPARATE}: flush=True": "a message that its logger cannot format",
    },
    "recipe/fspo/rollout_batch.py": {
        f'{_QUEUE}: {{uid}}_{{session_id}}_{{i}}"': "keys of responses",
        f"{_QUEUE}: reward_extra_info": "what a reward returned",
        'transfer_queue.metadata: "is_non_tensor": not is_tensor': "which columns are tensors",
        'verl.workers.engine.fsdp.transformer_impl: micro_batch.get("multi_modal_inputs"': "the others are tensors",
    },
    "recipe/fspo/plugin.py": {
        "verl.trainer.main_ppo: from verl.trainer.ppo.v1 import get_trainer_cls": "looked up when it is called",
    },
    "recipe/runner/reward_manager.py": {
        "ray.actor: def __ray_call__(": "asks a reward worker; Ray's DeveloperAPI",
    },
    "recipe/runner/launch/checks.py": {
        f"{_BASE}: async_save": "with it the tracker is not written",
    },
    "recipe/runner/ray_worker.py": {
        "ray.runtime_env.runtime_env: worker_process_setup_hook": "Ray calls it experimental",
        "ray._private.workers.default_worker: load_and_execute_setup_hook(": "before tasks",
    },
    "recipe/runner/launch/machine.py": {
        "ray._private.ray_constants: RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "Ray's address is 127.0.0.1",
        "ray._private.services: if not ray_constants.ENABLE_RAY_CLUSTER:": "the same",
    },
}


def names() -> Iterator[Check]:
    """A check of each name in :data:`NAMES`."""
    for file, entries in NAMES.items():
        for text, why in entries.items():
            match = re.fullmatch(r"([\w.]+):([\w.|]+)(?:\((.*)\))?(?: as (.+))?", text)
            assert match, text
            module, several, takes, seen_as = match.groups()
            owner, _, last = several.rpartition(".")
            for name in last.split("|"):
                whole = f"{owner}.{name}" if owner else name
                yield f"{file} ({why})", partial(check_name, file, module, whole, takes, seen_as or name)


def texts() -> Iterator[Check]:
    """A check of each text in :data:`TEXTS`."""
    for file, entries in TEXTS.items():
        for text, why in entries.items():
            yield f"{file} ({why})", partial(check_text, file, *text.split(": ", 1))


def marks() -> Iterator[tuple[str, str, str, str | None]]:
    """File and line, module upstream, name or text in quotes, and parameters of each mark."""
    for path in sorted([*(ROOT / "recipe").rglob("*.py"), *(ROOT / "fspo").rglob("*.py")]):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if "# upstream:" in line:
                match = re.search(r"# upstream: ([\w.]+)(?::([\w.|]+)(?:\((.*)\))?| (\".*\"))$", line)
                assert match, f"{path}:{number}: no mark as above"
                yield f"{path.relative_to(ROOT)}:{number}", match[1], match[2] or match[4], match[3]


def check_mark(module: str, what: str, takes: str | None) -> None:
    if what.startswith('"'):
        flat = " ".join(source_of(module).read_text(encoding="utf-8").split())
        assert what[1:-1] in flat, f"{module} no longer has {what}"
        return
    owner, _, last = what.rpartition(".")
    for name in last.split("|"):
        check_definition(module, f"{owner}.{name}" if owner else name, takes)


def imports() -> Iterator[Check]:
    """A check of each module and name of a watched package that our code imports."""
    pairs = {
        (module, name)
        for path in (ROOT / "recipe").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for module, name in imported_by(node)
        if module.partition(".")[0] in WATCHED and module != "ray._raylet"  # which is compiled
    }
    return (("an import", partial(check_import, *pair)) for pair in sorted(pairs))


def imported_by(node: ast.AST) -> list[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "", alias.name) for alias in node.names]
    return [(alias.name, "") for alias in node.names] if isinstance(node, ast.Import) else []


@functools.cache
def source_of(module: str) -> Path:
    """The file of an installed module; only its top package may be imported to find it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    assert spec is not None and spec.submodule_search_locations, f"{top} is not installed"
    path = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    raise AssertionError(f"the module {module} is gone")


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module).read_text(encoding="utf-8"))


def attributes_of(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """What a module or class defines: functions, classes, assignments, and ``self.name = ...`` in ``__init__``."""
    attributes: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            attributes[node.name] = node
            if node.name == "__init__":
                for target in ast.walk(node):
                    if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                        attributes.setdefault(target.attr, target)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    attributes[target.id] = node
        elif isinstance(node, ast.ImportFrom):
            attributes |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.If | ast.Try):
            attributes |= attributes_of(node.body)
    return attributes


def definition(module: str, name: str) -> ast.AST:
    """Where an installed module defines a name, with dots for members of classes."""
    body = tree_of(module).body
    node: ast.AST = ast.Module()
    for part in name.split("."):
        members = attributes_of(body)
        assert part in members, f"{module} no longer defines {name}"
        node = members[part]
        body = node.body if isinstance(node, ast.ClassDef) else []
    return node


def check_definition(module: str, name: str, takes: str | None) -> None:
    node = definition(module, name)
    if takes is not None:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), f"{name} is no function"
        taken = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        assert set(filter(None, takes.split(", "))) <= taken, f"{name} takes {sorted(taken)} now"


def check_name(file: str, module: str, name: str, takes: str | None, seen_as: str) -> None:
    check_definition(module, name, takes)
    assert seen_as in (ROOT / file).read_text(encoding="utf-8"), f"the file no longer uses {name}"


def check_text(file: str, module: str, text: str) -> None:
    assert text in source_of(module).read_text(encoding="utf-8"), f"{module} no longer has {text!r}"
    assert (ROOT / file).is_file()


def check_import(module: str, name: str) -> None:
    path = source_of(module)
    if path.name != "__init__.py":
        assert not name or definition(module, name)
        return
    # A package hands out what stands in its files, by statements of several kinds.
    assert (path.parent / name).is_dir() or any(
        file.stem == name or re.search(rf"\b{name}\b", file.read_text(encoding="utf-8"))
        for file in path.parent.glob("*.py")
    ), f"{module} no longer has {name}"


def test_what_is_used_of_other_projects_is_still_there() -> None:
    marked = [(place, partial(check_mark, module, what, takes)) for place, module, what, takes in marks()]
    assert len(marked) > 40
    check_all([*marked, *names(), *texts(), *imports()])


def test_each_patch_of_verl_marks_what_is_wrong_in_it() -> None:
    """A text that is gone is good news: the patch can go."""
    texts = {place.partition(":")[0] for place, _, what, _ in marks() if what.startswith('"')}
    for path in (ROOT / "recipe/runner/verl_patches").glob("[!_]*.py"):
        assert str(path.relative_to(ROOT)) in texts and f"``{path.stem}``" in (verl_patches.__doc__ or "")


def test_a_name_that_moves_is_named() -> None:
    with pytest.raises(AssertionError, match=holds("trainer_base", "PPOTrainer._no_such_method")):
        definition(_BASE, "PPOTrainer._no_such_method")
    with pytest.raises(AssertionError, match=holds("verl.trainer.nowhere")):
        source_of("verl.trainer.nowhere")
    with pytest.raises(
        pytest.fail.Exception, match=holds("one.py", "NoSuchConfig", "two.py", "no_such_text", "three.py", "four.py")
    ):
        check_all(
            [
                ("one.py", partial(check_import, "verl.workers.config", "NoSuchConfig")),
                ("three.py", partial(check_mark, _BASE, '"no such line"', None)),
                ("four.py", partial(check_mark, _BASE, "PPOTrainer.fit", "no_such_parameter")),
                ("two.py", partial(check_text, "README.md", "verl.trainer.main_ppo", "no_such_text")),
            ]
        )
