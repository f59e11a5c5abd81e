"""Everything of verl, Ray, vLLM and others that this project relies on and that is private or undocumented.

This is the list to go through before an upgrade: for each of our files the names and texts upstream that it uses, what
they have to look like, and why no public way serves. Installed sources are read as text, nothing is imported, so the
test also says what moved when the new version cannot be imported here. Public hooks (the loss registry, the platform,
engine and trainer registries, Hydra's compose, worker extensions) are listed too, marked ``PUBLIC``. verl is about to
change its trainer and queue; its asynchronous modes override some of what is listed too.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = "public hook"
#: Packages whose names have to be listed when the recipe imports them.
WATCHED = ("verl", "vllm", "transfer_queue", "transformers", "hydra", "ray")

_HYDRA = "public, but Hydra keeps it out of its manual"
_AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
_BASE = "verl.trainer.ppo.v1.trainer_base"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_SEPARATE = "verl.trainer.ppo.v1.trainer_separate_async"
_WORKERS = "verl.workers.engine_workers"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_NAIVE = "verl.experimental.reward_loop.reward_manager.naive"
_DECORATOR = "verl.single_controller.base.decorator"
_ALGOS = "verl.trainer.ppo.core_algos"
_FACTORIALS = "sympy.functions.combinatorial.factorials"
_MOE = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
_SEPARATION = "verl.experimental.separation.engine_workers"
_CORRECTION = "verl.trainer.ppo.rollout_corr_helper"

#: By our file, ``module:name`` upstream, of a class, function, method (``Class.method``) or attribute that the module
#: assigns, and what it is used for. ``(a, b)``: parameters that must be among those of the function; ``as x``: our file
#: names it so, and not by the last part of its name.
NAMES: dict[str, dict[str, str]] = {
    "recipe/runner/launch/start.py": {
        "verl.trainer.main_ppo:run_ppo(config, task_runner_class)": PUBLIC,
        "verl.trainer.main_ppo:TaskRunnerV1.run": "its actor class is subclassed",
        "verl.utils.config:validate_config": "verl's own checks before Ray starts",
        "verl.trainer.ppo.utils:need_critic": "an argument of validate_config",
        "verl.trainer.ppo.utils:need_reference_policy": "the same",
    },
    "recipe/fspo/config.py": {
        f"{_CORRECTION}:compute_rollout_rejection_mask": "reads a threshold before the run does",
        f"{_CORRECTION}:compute_rollout_correction_weights": "the same",
        "verl.workers.config.actor:PolicyLossConfig": "subclassed for typed settings",
        "verl.workers.config.actor:FSDPActorConfig": "its defaults, to see what was set",
    },
    "recipe/runner/hooks.py": {
        "verl.trainer.ppo.v1:trainer_separate_async": "its logger: a log call fails",
        f"{_BASE}:PPOTrainer": "what is mixed into its subclasses",
        f"{_BASE}:PPOTrainer._rollout_server_managers": "reseeds vLLM on CPUs",
        f"{_BASE}:PPOTrainer.init": PUBLIC,
        f"{_BASE}:PPOTrainer.fit(agent_loop_manager)": PUBLIC,
        f"{_BASE}:PPOTrainer.on_train_begin": PUBLIC,
        f"{_BASE}:PPOTrainer.on_step_begin": PUBLIC,
        f"{_BASE}:PPOTrainer.on_step_end": PUBLIC,
        f"{_BASE}:PPOTrainer.on_sample_begin": PUBLIC,
        f"{_BASE}:PPOTrainer.on_sample_end": PUBLIC,
        f"{_BASE}:PPOTrainer.on_validate_begin": PUBLIC,
        f"{_BASE}:PPOTrainer.on_validate_end": PUBLIC,
        f"{_BASE}:PPOTrainer._build_replay_buffer": "the poll interval has no setting",
        f"{_BUFFER}:ReplayBuffer.poll_interval": "set after construction",
        f"{_BASE}:PPOTrainer._init_dataloader": "the only place that knows how many prompts are left",
        f"{_BASE}:PPOTrainer._val_metrics_update": "how many responses of a validation are missing",
        f"{_BASE}:PPOTrainer._save_checkpoint": "our state must be complete before verl names it",
        "verl.workers.rollout.llm_server:LLMServerManager.get_replicas": "reseeds vLLM on CPUs",
        "verl.workers.rollout.replica:RolloutReplica": "for the next",
        "verl.workers.rollout.replica:RolloutReplica.max_concurrency(self)": (
            "replaced: slots for all requests of an asynchronous run, which verl's number has no setting for"
        ),
        "verl.utils.tracking:Tracking.logger": "the run folder is added to verl's loggers",
        f"{_BASE}:PPOTrainer._init_resource_pool_mgr": "a bounded wait for resources",
        f"{_BASE}:PPOTrainer._update_actor(batch, metrics)": "no hook before the update",
        f"{_BASE}:PPOTrainer._load_checkpoint": "a recipe's state is restored with the weights",
        f"{_BASE}:PPOTrainer.on_init_end": PUBLIC,
        f"{_BUFFER}:ReplayBuffer._wait_for_next_poll(partition_id, last_debug_time)": (
            "notes progress; counts rows by partition and state"
        ),
    },
    "recipe/runner/trainer.py": {
        f"{_BASE}:register_trainer": PUBLIC,
        "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync": "subclassed; trainer_mode 'sync' is set",
    },
    "recipe/fspo/trainer.py": {
        f"{_BASE}:register_trainer": PUBLIC,
        "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync": "subclassed; trainer_mode 'sync' is set",
        "verl.trainer.ppo.v1.trainer_colocate_async:PPOTrainerColocateAsync": "subclassed",
        f"{_SEPARATE}:PPOTrainerSeparateAsync": "subclassed",
        f"{_BASE}:PPOTrainer._reissue_inflight_prompts": "verl forgets when a prompt was first issued",
        f"{_BASE}:PPOTrainer._compute_old_log_prob(batch, metrics)": "pi_old of the rollout",
        f"{_BASE}:PPOTrainer.on_init_end": PUBLIC,
        f"{_BASE}:PPOTrainer._init_resource_pool_mgr": "our worker class, and a bounded wait for resources",
        f"{_BASE}:PPOTrainer._fetch_one_gen_batch": "the data loader's order of prompts",
        f"{_BASE}:PPOTrainer._balance_batch(batch, metrics)": "verl orders groups by random ids",
        f"{_BASE}:PPOTrainer._update_actor(batch, metrics)": "no hook before and after the update",
        f"{_BASE}:PPOTrainer._load_checkpoint": "our state is restored with the weights",
        "verl.trainer.ppo.utils:Role": "the roles whose worker class is ours",
        "transfer_queue.metadata:KVBatchMeta": "keys, tags and reorder of a batch in TransferQueue",
        "transfer_queue.metadata:KVBatchMeta.reorder": "the same",
        "verl.experimental.reward_loop.reward_loop:RewardLoopManager.reward_loop_worker_handles": (
            "asked for what a reward raised, which verl only logs"
        ),
    },
    "recipe/fspo/accounting/replay_buffer.py": {
        f"{_BUFFER}:ReplayBuffer": "extended to count what it removes",
        f"{_BUFFER}:ReplayBuffer._evict_terminal_groups(global_steps, partition_id, eviction_reasons)": (
            "why a group is removed"
        ),
        f"{_BUFFER}:ReplayBufferAsync._terminal_eviction_reasons(global_steps, partition_id)": (
            "which groups are dropped; their order in what it returns"
        ),
        f"{_BUFFER}:ReplayBuffer._select_prompt_uids(partition_id, sampleable_keys, batch_size)": (
            "verl's order among prompts of one step is that of a set"
        ),
        f"{_BUFFER}:ReplayBuffer._clear_groups(partition_id, uids)": "surplus",
        f"{_BUFFER}:ReplayBuffer._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)": (
            "responses missing in a batch"
        ),
    },
    "recipe/runner/cpu/checkpoint_engine.py": {
        "verl.checkpoint_engine.base:CheckpointEngine": "subclassed",
        "verl.checkpoint_engine.base:CheckpointEngineRegistry": PUBLIC,
    },
    "recipe/fspo/worker.py": {
        f"{_SEPARATION}:DetachActorWorker": "mixed in for separate_async",
        f"{_SEPARATION}:DetachActorWorker.copy_handler": (
            "where the weights are on the host its copies are the weights themselves"
        ),
        f"{_SEPARATION}:DetachActorWorker.restore_handler": "writes to what verl's offloading may still copy to",
        "verl.utils.device:get_torch_device": "to wait for that",
        f"{_WORKERS}:ActorRolloutRefWorker": "subclassed",
        f"{_WORKERS}:ActorRolloutRefWorker.actor_worker_cls": "class attribute made for it",
        f"{_WORKERS}:TrainingWorker": "subclassed",
        f"{_WORKERS}:TrainingWorker.train_batch(data)": "where a mini-batch begins and ends",
        f"{_WORKERS}:TrainingWorker.load_checkpoint": "brings back the optimizer's settings with its state",
        f"{_WORKERS}:TrainingWorker.set_loss_fn(loss_fn)": "columns that verl does not hand to a loss",
        f"{_DECORATOR}:register": PUBLIC,
        f"{_DECORATOR}:Dispatch": PUBLIC,
        "verl.utils:tensordict_utils": "reads the metrics of a mini-batch",
    },
    "recipe/runner/validation.py": {
        "verl.trainer.ppo:metric_utils": "a function of it is replaced",
        "verl.trainer.ppo.metric_utils:bootstrap_metric(data, subset_size, reduce_fns)": (
            "replaced: 1,000 resamples of each number of each problem hold the GPUs for minutes"
        ),
    },
    "benchmarks/alignment/trainer.py": {
        f"{_BASE}:PPOTrainer._shutdown_dump_executor": "fit() is replaced there",
        f"{_BASE}:PPOTrainer.step(metrics, timing_raw)": "rollouts and advantages as in training",
        "verl.utils.skip.skip_manager:SkipManager": "fit() initialises it, and is replaced there",
        "transfer_queue.metadata:KVBatchMeta.select_keys": "the same",
        "verl.workers.utils.padding:response_from_nested": "as in verl's trainer",
    },
    "recipe/fspo/policy_loss.py": {
        f"{_ALGOS}:register_policy_loss(name)": PUBLIC,
        f"{_ALGOS}:POLICY_LOSS_REGISTRY": "verl's own are wrapped",
    },
    "recipe/runner/launch/checks.py": {
        f"{_ALGOS}:ADV_ESTIMATOR_REGISTRY": "the known names",
    },
    "benchmarks/alignment/worker.py": {
        f"{_DECORATOR}:dispatch_lazy_compute_data_proto": "as verl dispatches a mini-batch",
        "verl.workers.utils.padding:no_padding_2_padding": "as in verl's loss",
        "verl.workers.engine.base:BaseEngine.forward_backward_batch(data, loss_function, forward_only)": (
            "a gradient without the optimizer's step"
        ),
    },
    "recipe/fspo/reward_manager.py": {
        f"{_NAIVE}:NaiveRewardManager.run_single(data)": "verl keeps the response's length in tokens to itself",
        "verl.protocol:DataProto": PUBLIC,
        f"{_NAIVE}:NaiveRewardManager.compute_score": (
            "replaced after construction, to look at what the user's function returns"
        ),
    },
    "recipe/runner/export.py": {
        "transformers.models.auto.modeling_auto:AutoModelForCausalLM": PUBLIC,
    },
    "recipe/runner/plugin.py": {
        "ray.runtime_context:RuntimeContext.get_job_id()": "the run's id is added: sockets",
    },
    "recipe/runner/cpu/platform.py": {
        "verl.plugin.platform.platform_base:PlatformBase": PUBLIC,
        "verl.plugin.platform.platform_manager:PlatformRegistry": PUBLIC,
    },
    "recipe/runner/cpu/engine.py": {
        "verl.workers.engine.base:EngineRegistry": PUBLIC,
        f"{_ENGINE}:FSDPEngineWithLMHead": "registered for one more device",
    },
    "recipe/runner/cpu/patches.py": {
        f"{_AGENT_LOOP}:AgentLoopWorker._run_agent_loop(sampling_params, trajectory) as module.hydra": (
            "its module's Hydra, which makes the agent loop of every response"
        ),
        "verl.utils.torch_functional:logprobs_from_logits_v2(logits, labels)": "one call of logsumexp for many tokens",
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight)": (
            "packs weights that verl has to update"
        ),
        f"{_MOE}:CPUFusedMOE.check_grouped_gemm(layer)": "the same for the weights of experts",
        f"{_MOE}:CPUFusedMOE._pad_moe_intermediate_for_grouped_gemm(layer)": "the same",
    },
    "recipe/runner/cpu/vllm_worker.py": {
        "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension._update_weights(weights)": (
            "tensors are copied out of shared memory; recipe/runner/cpu/patches.py has the other departures"
        ),
    },
    "recipe/runner/rehearse/material.py": {
        "transformers.models.auto.configuration_auto:AutoConfig": PUBLIC,
        "transformers.models.auto.tokenization_auto:AutoTokenizer": PUBLIC,
    },
    "recipe/runner/cpu/attention.py": {
        "transformers.modeling_utils:AttentionInterface": PUBLIC,
        "transformers.masking_utils:AttentionMaskInterface": PUBLIC,
        "transformers.masking_utils:sdpa_mask": "called for padded batches",
        "transformers.integrations.sdpa_attention:sdpa_attention_forward": "called for each sequence of a pack",
    },
    "recipe/runner/cpu/fork_server.py": {
        "ray._private.workers.default_worker:parser as ray._private.workers.default_worker": "imported before a fork",
    },
    "tests/unit/engine_trace.py": {
        f"{_ENGINE}:FSDPEngine._build_module": "as verl builds the model",
        f"{_ENGINE}:FSDPEngine._build_fsdp_module": "as verl shards it",
        f"{_ENGINE}:FSDPEngine._get_packed_pad_size(packed_length)": "as verl pads a pack",
        f"{_ENGINE}:FSDPEngineWithLMHead.prepare_model_inputs(micro_batch)": "replaced: nested tensors",
        f"{_ENGINE}:FSDPEngineWithLMHead.forward_step(loss_function, forward_only)": "a micro-batch",
        f"{_ENGINE}:fsdp2_load_full_state_dict": "replaced: there are no weights",
        "verl.workers.engine.fsdp:transformer_impl": "the module, for the above",
        "verl.utils.model:get_hf_auto_model_class": "replaced: there are no weights",
        "verl.utils.config:omega_conf_to_dataclass": "verl's own reading of its configuration",
        "verl.utils.ulysses:set_ulysses_sequence_parallel_group": "as verl's modes of the engine do",
        "verl.models.transformers:monkey_patch": "the module, for the next",
        "verl.models.transformers.monkey_patch:_flash_attention_forward": "replaced: needs a GPU",
        "transformers.models.auto.modeling_auto:AutoModelForCausalLM": PUBLIC,
    },
    "tests/unit/cuda_contract.py": {
        "verl.workers.rollout.vllm_rollout:vllm_async_server": "the module, for the next",
        f"{_SERVER}:vLLMHttpServer.launch_server": "the arguments that verl passes to vLLM",
        f"{_SERVER}:vLLMHttpServer._validate_configs": "as in its __init__, which needs Ray",
        f"{_SERVER}:vLLMHttpServer._should_profile": "the same",
        "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config": "where the engine would start",
        "vllm.platforms:_current_platform": "replaced: there is no GPU",
        "vllm.platforms.cuda:NonNvmlCudaPlatform": "subclassed: an H100 without a driver",
        "vllm.platforms.interface:DeviceCapability": "its answer",
        "vllm.config.vllm:HAS_TRITON": "a GPU machine has it",
        "vllm.config.vllm:VllmConfig.use_v2_model_runner": "what vLLM has chosen",
    },
    "recipe/runner/launch/compose.py": {
        "hydra.compose:compose": PUBLIC,
        "hydra.initialize:initialize_config_dir": PUBLIC,
        "hydra.core.override_parser.overrides_parser:OverridesParser": _HYDRA,
        "hydra.errors:ConfigCompositionException": _HYDRA,
    },
    "recipe/runner/launch/run_settings.py": {
        "hydra.core.override_parser.types:Override": _HYDRA,
    },
    "recipe/runner/main.py": {
        "hydra.errors:HydraException": PUBLIC,
    },
    "recipe/fspo/own_loss.py": {
        "hydra.errors:InstantiationException": _HYDRA,
        "hydra.utils:instantiate": PUBLIC,
    },
    "fspo/rewards/limits.py": {
        "math_verify.parser:normalize_latex": "a response's text, before it is parsed",
        "math_verify.parser:latex2sympy": "imported there; the same",
        "math_verify.parser:parse_expr": "imported there; the same",
        "sympy.core.numbers:Integer._eval_power": "powers",
        "sympy.core.numbers:Rational._eval_power": "powers",
        "sympy.core.evalf:mpf_pow": "imported there; powers of floats",
        "sympy.core.evalf:mpf_pow_int": "the same",
        f"{_FACTORIALS}:factorial.eval": "large arguments",
        f"{_FACTORIALS}:factorial2.eval": "large arguments",
        f"{_FACTORIALS}:binomial.eval": "large arguments",
        "sympy.functions.combinatorial.numbers:harmonic.eval": "large arguments",
        "sympy.concrete.summations:eval_sum_direct": "long sums",
        "sympy.concrete.products:Product._eval_product_direct": "long products",
    },
    "recipe/runner/faults/errors.py": {
        "ray._private.worker:_global_node": "where this run's Ray keeps its logs",
        "ray._private.node:Node.get_logs_dir_path": "the same",
    },
    "recipe/runner/faults/watchdog.py": {
        "ray.util.scheduling_strategies:NodeAffinitySchedulingStrategy": PUBLIC,
    },
}

#: Our file, module upstream, text of its source that our code looks for or a value that it repeats, and why.
TEXTS = (
    (
        "recipe/runner/hooks.py",
        "verl.utils.dataset.rl_dataset",
        "self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)",
        "the rows that its filter has left",
    ),
    ("recipe/runner/hooks.py", _SERVER, "max_concurrency=self.max_concurrency", "a server's slots"),
    (
        "recipe/fspo/accounting/replay_buffer.py",
        _BUFFER,
        'self.max_off_policy_strategy == "drop"',
        "any other value than its two drops nothing and asserts nothing",
    ),
    (
        "recipe/fspo/worker.py",
        "verl.utils.fsdp_utils",
        "local_cpu_tensor = local_gpu_tensor.detach().cpu()",
        "no copy on CPUs",
    ),
    (
        "recipe/runner/validation.py",
        "verl.trainer.ppo.metric_utils",
        "reduce_fns_best_worst = [np.max, np.min]",
        "what it asks of the resampling",
    ),
    ("recipe/fspo/reward_manager.py", "ray.actor", "def __ray_call__(", "asks a reward worker; Ray's DeveloperAPI"),
    ("recipe/runner/cpu/patches.py", _ENGINE, "CPUOffloadPolicy(pin_memory=True)", "pinning needs an accelerator"),
    ("recipe/runner/cpu/patches.py", "verl.utils.distributed", "cpu:gloo", "names the device twice on a CPU"),
    (
        "recipe/runner/launch/compose.py",
        "hydra._internal.config_loader_impl",
        "Could not override '{override.key_or_group}'.",
        "what the mistyped key was",
    ),
    ("recipe/runner/faults/errors.py", "ray.exceptions", '\\tclass_name: {cause.class_name}"', "which actor died"),
    ("recipe/runner/faults/errors.py", "ray.exceptions", '\\tpid: {cause.pid}"', "its process"),
    ("recipe/runner/faults/errors.py", "vllm.v1.engine.utils", "Engine core initialization failed", "start-up"),
    ("recipe/runner/launch/loggers.py", "verl.utils.tracking", 'os.environ.get("TENSORBOARD_DIR"', "where it writes"),
    ("recipe/runner/launch/loggers.py", "verl.utils.tracking", 'os.environ.get("MLFLOW_TRACKING_URI"', "the same"),
    ("recipe/runner/launch/loggers.py", "verl.utils.tracking", 'os.environ.get("SWANLAB_LOG_DIR"', "the same"),
    ("recipe/runner/launch/loggers.py", "verl.utils.tracking", ".log(data=data, step=step)", "how it calls them"),
    (
        "recipe/fspo/accounting/outcomes.py",
        "verl.trainer.ppo.v1.agent_loop_tq",
        '{uid}_{session_id}_{i}"',
        "keys of responses",
    ),
    (
        "recipe/fspo/accounting/outcomes.py",
        "verl.trainer.ppo.v1.agent_loop_tq",
        "reward_extra_info",
        "what a reward returned",
    ),
    (
        "recipe/runner/checkpoints/integrity.py",
        "verl.utils.checkpoint.fsdp_checkpoint_manager",
        'f"extra_state_world_size_{self.world_size}_rank_{self.rank}.pt"',
        "names of a checkpoint's files",
    ),
    ("recipe/runner/checkpoints/integrity.py", _BASE, "latest_checkpointed_iteration.txt", "the tracker"),
    (
        "recipe/runner/launch/inputs.py",
        "verl.experimental.reward_loop.reward_loop",
        "config.custom_reward_function -> config.reward.custom_reward_function",
        "old keys, which main_ppo does not migrate",
    ),
    ("recipe/runner/launch/checks.py", _BASE, "async_save", "with it the tracker is not written"),
    (
        "recipe/runner/launch/server_slots.py",
        "verl.workers.rollout.router",
        "if request_id in self._request_id_to_server:",
        "a request stays with its server",
    ),
    ("recipe/runner/faults/resources.py", "verl.workers.rollout.replica", "max_colocate_count=2", "CPUs per rank"),
    ("recipe/runner/faults/resources.py", "verl.single_controller.ray.base", "max_colocate_count=3", "CPUs per rank"),
    ("recipe/runner/faults/processes.py", "ray._private.worker", "ray._raylet.setproctitle", "ray::CLASS"),
    (
        "recipe/runner/faults/processes.py",
        "vllm.v1.engine.core",
        "set_process_title(process_title)",
        "VLLM::EngineCore",
    ),
)


@dataclass(frozen=True)
class Name:
    """A name upstream, as :data:`NAMES` gives it."""

    file: str
    module: str
    name: str
    takes: frozenset[str] | None
    seen_as: str
    why: str

    @classmethod
    def of(cls, file: str, text: str, why: str) -> Name:
        match = re.fullmatch(r"([\w.]+):([\w.]+)(?:\((.*)\))?(?: as (.+))?", text)
        assert match, text
        module, name, takes, seen_as = match.groups()
        parameters = None if takes is None else frozenset(filter(None, takes.split(", ")))
        return cls(file, module, name, parameters, seen_as or name.rpartition(".")[2], why)

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


ALL = [Name.of(file, text, why) for file, entries in NAMES.items() for text, why in entries.items()]


@functools.cache
def source_of(module: str) -> Path:
    """The file of an installed module; only its top package may be imported to find it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    assert spec is not None, f"{top} is not installed"
    assert spec.submodule_search_locations, f"{top} is not a package"
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
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
            if node.name == "__init__":
                for target in ast.walk(node):
                    if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                        found.setdefault(target.attr, target)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.If | ast.Try):
            found |= attributes_of(node.body)
    return found


def definition(entry: Name) -> ast.AST:
    body = tree_of(entry.module).body
    node: ast.AST | None = None
    for part in entry.name.split("."):
        node = attributes_of(body).get(part)
        if node is None and not (source_of(entry.module).parent / f"{part}.py").is_file():
            raise AssertionError(f"{entry.module} no longer defines {entry.name}; {entry.file}: {entry.why}")
        body = node.body if isinstance(node, ast.ClassDef) else []
    return node or ast.Module()


@pytest.mark.parametrize("entry", ALL, ids=str)
def test_the_name_is_still_there(entry: Name) -> None:
    node = definition(entry)
    if entry.takes is not None:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        taken = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        assert entry.takes <= taken, f"{entry} takes {sorted(taken)} now; {entry.file}: {entry.why}"
    assert entry.seen_as in (ROOT / entry.file).read_text(encoding="utf-8"), f"{entry.file} no longer uses {entry}"


@pytest.mark.parametrize(("file", "module", "text", "why"), TEXTS)
def test_the_text_is_still_there(file: str, module: str, text: str, why: str) -> None:
    assert text in source_of(module).read_text(encoding="utf-8"), f"{file}: {why}"
    assert (ROOT / file).is_file()


def test_whatever_the_recipe_imports_is_listed() -> None:
    listed = {part for entry in ALL for part in (entry.module, *entry.name.split("."))}
    missing = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path in sorted((ROOT / "recipe").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in WATCHED
        for alias in node.names
        if alias.name not in listed
    ]
    assert missing == [], "add what is private or undocumented to NAMES, with the reason"


def test_a_name_that_moves_is_named() -> None:
    with pytest.raises(AssertionError, match=r"trainer_base no longer defines PPOTrainer\._no_such_method"):
        definition(Name.of("a file", f"{_BASE}:PPOTrainer._no_such_method", "a test"))
    with pytest.raises(AssertionError, match=r"the module verl\.trainer\.nowhere is gone"):
        source_of("verl.trainer.nowhere")
