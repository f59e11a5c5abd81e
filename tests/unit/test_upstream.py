"""Everything of verl, Ray, vLLM and others that this project relies on and that is private or undocumented.

This is the list to go through before an upgrade. Each entry says where the name stands upstream, what it has to look
like, which of our files uses it, and why no public way serves. Installed sources are read as text, nothing is imported,
so the test also says what moved when the new version cannot be imported here. Public hooks (the loss registry, the
platform, engine and trainer registries, Hydra's compose, worker extensions) are listed too, marked ``PUBLIC``.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = "public hook"
#: Packages whose names have to be listed when the recipe imports them.
WATCHED = ("verl", "vllm", "transfer_queue", "transformers", "hydra", "ray")

_BASE = "verl.trainer.ppo.v1.trainer_base"
_WORKERS = "verl.workers.engine_workers"
_HYDRA = "public, but Hydra keeps it out of its manual"


@dataclass(frozen=True)
class Name:
    """A class, function, method (``Class.method``) or attribute assigned in a module.

    Attributes:
        module: Where it is defined.
        name: Its name in the module.
        used_in: Our file, from the repository's root.
        why: What it is used for, and why nothing public serves; or :data:`PUBLIC`.
        takes: Parameters that must be among those of the function; None: any.
        seen_as: How our file names it, where not by the last part of ``name``.
    """

    module: str
    name: str
    used_in: str
    why: str
    takes: tuple[str, ...] | None = None
    seen_as: str | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Text:
    """Text of a source file upstream that our code looks for, or a value that it repeats."""

    module: str
    text: str
    used_in: str
    why: str

    def __str__(self) -> str:
        return f"{self.module}: {self.text[:40]}"


_TRAINER = "recipe/fspo/trainer.py"
_ALIGNMENT = "benchmarks/alignment/trainer.py"
_WORKER = "recipe/fspo/worker.py"
_OUTCOMES = "recipe/fspo/accounting/outcomes.py"
_REPLAY = "recipe/fspo/accounting/replay_buffer.py"
_CPU_WEIGHTS = "recipe/runner/cpu/checkpoint_engine.py"
_LIMITS = "fspo/rewards/limits.py"
_ENGINE, _TRACE = "verl.workers.engine.fsdp.transformer_impl", "tests/unit/engine_trace.py"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_CONTRACT = "tests/unit/cuda_contract.py"

NAMES = (
    # ---- the trainer: verl is about to change it and its queue; its asynchronous modes override some of these too
    Name("verl.trainer.main_ppo", "run_ppo", "recipe/runner/launch/start.py", PUBLIC, ("config", "task_runner_class")),
    Name("verl.trainer.main_ppo", "TaskRunnerV1.run", "recipe/runner/launch/start.py", "its actor class is subclassed"),
    Name(
        "verl.utils.config", "validate_config", "recipe/runner/launch/start.py", "verl's own checks before Ray starts"
    ),
    Name("verl.trainer.ppo.utils", "need_critic", "recipe/runner/launch/start.py", "an argument of validate_config"),
    Name("verl.trainer.ppo.utils", "need_reference_policy", "recipe/runner/launch/start.py", "the same"),
    Name(
        "verl.trainer.ppo.rollout_corr_helper",
        "compute_rollout_rejection_mask",
        "recipe/fspo/config.py",
        "reads a threshold before the run does",
    ),
    Name(
        "verl.trainer.ppo.rollout_corr_helper",
        "compute_rollout_correction_weights",
        "recipe/fspo/config.py",
        "the same",
    ),
    Name(_BASE, "register_trainer", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer", _TRAINER, "what is mixed into its subclasses"),
    Name("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync", _TRAINER, "subclassed; trainer_mode 'sync' is set"),
    Name("verl.trainer.ppo.v1.trainer_colocate_async", "PPOTrainerColocateAsync", _TRAINER, "subclassed"),
    Name("verl.trainer.ppo.v1.trainer_separate_async", "PPOTrainerSeparateAsync", _TRAINER, "subclassed"),
    Name(
        "verl.trainer.ppo.v1.trainer_separate_async", "PPOTrainerSeparateAsync._setup", _TRAINER, "its log call fails"
    ),
    Name(_BASE, "PPOTrainer._reissue_inflight_prompts", _TRAINER, "verl forgets when a prompt was first issued"),
    Name(_BASE, "PPOTrainer._compute_old_log_prob", _TRAINER, "pi_old of the rollout", ("batch", "metrics")),
    Name(_BASE, "PPOTrainer._rollout_server_managers", _TRAINER, "reseeds vLLM on CPUs"),
    Name("verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer", _REPLAY, "extended to count what it removes"),
    Name(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._evict_terminal_groups",
        _REPLAY,
        "why a group is removed",
        ("global_steps", "partition_id", "eviction_reasons"),
    ),
    Name(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBufferAsync._terminal_eviction_reasons",
        _REPLAY,
        "which groups are dropped; their order in what it returns",
        ("global_steps", "partition_id"),
    ),
    Name(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._select_prompt_uids",
        _REPLAY,
        "verl's order among prompts of one step is that of a set",
        ("partition_id", "sampleable_keys", "batch_size"),
    ),
    Name(
        "verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer._clear_groups", _REPLAY, "surplus", ("partition_id", "uids")
    ),
    Name(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._materialize_batch",
        _REPLAY,
        "responses missing in a batch",
        ("partition_id", "selected_prompt_uids", "partition_snapshot"),
    ),
    Name(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._wait_for_next_poll",
        _REPLAY,
        "notes progress; counts rows by partition and state",
        ("partition_id", "last_debug_time"),
    ),
    Name("verl.checkpoint_engine.base", "CheckpointEngine", _CPU_WEIGHTS, "subclassed"),
    Name("verl.checkpoint_engine.base", "CheckpointEngineRegistry", _CPU_WEIGHTS, PUBLIC),
    Name("verl.experimental.separation.engine_workers", "DetachActorWorker", _WORKER, "mixed in for separate_async"),
    Name(
        "verl.experimental.separation.engine_workers",
        "DetachActorWorker.copy_handler",
        _WORKER,
        "where the weights are on the host its copies are the weights themselves",
    ),
    Name(
        "verl.experimental.separation.engine_workers",
        "DetachActorWorker.restore_handler",
        _WORKER,
        "writes to what verl's offloading may still copy to",
    ),
    Name("verl.utils.device", "get_torch_device", _WORKER, "to wait for that"),
    Name(_BASE, "PPOTrainer.init", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer.fit", _TRAINER, PUBLIC, ("agent_loop_manager",)),
    Name(_BASE, "PPOTrainer.on_init_end", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer.on_train_begin", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer.on_step_begin", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer.on_step_end", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer.on_sample_begin", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer.on_sample_end", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer.on_validate_begin", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer.on_validate_end", _TRAINER, PUBLIC),
    Name(_BASE, "PPOTrainer._build_replay_buffer", _TRAINER, "the poll interval has no setting"),
    Name("verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer.poll_interval", _TRAINER, "set after construction"),
    Name(_BASE, "PPOTrainer._init_resource_pool_mgr", _TRAINER, "our worker class, and a bounded wait for resources"),
    Name(_BASE, "PPOTrainer._init_dataloader", _TRAINER, "the only place that knows how many prompts are left"),
    Name(_BASE, "PPOTrainer._fetch_one_gen_batch", _TRAINER, "the data loader's order of prompts"),
    Name(_BASE, "PPOTrainer._balance_batch", _TRAINER, "verl orders groups by random ids", ("batch", "metrics")),
    Name(_BASE, "PPOTrainer._update_actor", _TRAINER, "no hook before and after the update", ("batch", "metrics")),
    Name(_BASE, "PPOTrainer._val_metrics_update", _TRAINER, "how many responses of a validation are missing"),
    Name("verl.trainer.ppo", "metric_utils", "recipe/fspo/validation.py", "a function of it is replaced"),
    Name(
        "verl.trainer.ppo.metric_utils",
        "bootstrap_metric",
        "recipe/fspo/validation.py",
        "replaced: 1,000 resamples of each number of each problem hold the GPUs for minutes",
        ("data", "subset_size", "reduce_fns"),
    ),
    Name(_BASE, "PPOTrainer._save_checkpoint", _TRAINER, "our state must be complete before verl names it"),
    Name(_BASE, "PPOTrainer._load_checkpoint", _TRAINER, "our state is restored with the weights"),
    Name(_BASE, "PPOTrainer._shutdown_dump_executor", _ALIGNMENT, "fit() is replaced there"),
    Name(_BASE, "PPOTrainer.step", _ALIGNMENT, "rollouts and advantages as in training", ("metrics", "timing_raw")),
    Name("verl.utils.skip.skip_manager", "SkipManager", _ALIGNMENT, "fit() initialises it, and is replaced there"),
    Name("verl.trainer.ppo.utils", "Role", _TRAINER, "the roles whose worker class is ours"),
    Name("verl.workers.rollout.llm_server", "LLMServerManager.get_replicas", _TRAINER, "reseeds vLLM on CPUs"),
    Name("verl.workers.rollout.replica", "RolloutReplica", _TRAINER, "for the next"),
    Name(
        "verl.workers.rollout.replica",
        "RolloutReplica.max_concurrency",
        _TRAINER,
        "replaced: slots for all requests of an asynchronous run, which verl's number has no setting for",
        ("self",),
    ),
    Name("verl.utils.tracking", "Tracking.logger", _TRAINER, "the run folder is added to verl's loggers"),
    Name("transfer_queue.metadata", "KVBatchMeta", _TRAINER, "keys, tags and reorder of a batch in TransferQueue"),
    Name("transfer_queue.metadata", "KVBatchMeta.reorder", _TRAINER, "the same"),
    Name("transfer_queue.metadata", "KVBatchMeta.select_keys", _ALIGNMENT, "the same"),
    # ---- workers and losses
    Name("verl.trainer.ppo.core_algos", "register_policy_loss", "recipe/fspo/policy_loss.py", PUBLIC, ("name",)),
    Name("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY", "recipe/runner/launch/served.py", "the known names"),
    Name("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY", "recipe/fspo/policy_loss.py", "verl's own are wrapped"),
    Name("verl.workers.config.actor", "PolicyLossConfig", "recipe/fspo/config.py", "subclassed for typed settings"),
    Name("verl.workers.config.actor", "FSDPActorConfig", "recipe/fspo/config.py", "its defaults, to see what was set"),
    Name(_WORKERS, "ActorRolloutRefWorker", _WORKER, "subclassed"),
    Name(_WORKERS, "ActorRolloutRefWorker.actor_worker_cls", _WORKER, "class attribute made for it"),
    Name(_WORKERS, "TrainingWorker", _WORKER, "subclassed"),
    Name(_WORKERS, "TrainingWorker.train_batch", _WORKER, "where a mini-batch begins and ends", ("data",)),
    Name(_WORKERS, "TrainingWorker.load_checkpoint", _WORKER, "brings back the optimizer's settings with its state"),
    Name(_WORKERS, "TrainingWorker.set_loss_fn", _WORKER, "columns that verl does not hand to a loss", ("loss_fn",)),
    Name("verl.single_controller.base.decorator", "register", _WORKER, PUBLIC),
    Name("verl.single_controller.base.decorator", "Dispatch", _WORKER, PUBLIC),
    Name(
        "verl.single_controller.base.decorator",
        "dispatch_lazy_compute_data_proto",
        "benchmarks/alignment/worker.py",
        "as verl dispatches a mini-batch",
    ),
    Name("verl.utils", "tensordict_utils", _WORKER, "reads the metrics of a mini-batch"),
    Name("verl.workers.utils.padding", "no_padding_2_padding", "benchmarks/alignment/worker.py", "as in verl's loss"),
    Name("verl.workers.utils.padding", "response_from_nested", _ALIGNMENT, "as in verl's trainer"),
    Name(
        "verl.workers.engine.base",
        "BaseEngine.forward_backward_batch",
        "benchmarks/alignment/worker.py",
        "a gradient without the optimizer's step",
        ("data", "loss_function", "forward_only"),
    ),
    Name(
        "verl.experimental.reward_loop.reward_manager.naive",
        "NaiveRewardManager.run_single",
        "recipe/fspo/reward_manager.py",
        "verl keeps the response's length in tokens to itself",
        ("data",),
    ),
    Name("verl.protocol", "DataProto", "recipe/fspo/reward_manager.py", PUBLIC),
    Name(
        "verl.experimental.reward_loop.reward_manager.naive",
        "NaiveRewardManager.compute_score",
        "recipe/fspo/reward_manager.py",
        "replaced after construction, to look at what the user's function returns",
    ),
    Name(
        "verl.experimental.reward_loop.reward_loop",
        "RewardLoopManager.reward_loop_worker_handles",
        "recipe/fspo/trainer.py",
        "asked for what a reward raised, which verl only logs",
    ),
    Name(
        "verl.model_merger.base_model_merger", "ModelMergerConfig", "recipe/runner/export.py", "the merger as a library"
    ),
    Name("verl.model_merger.fsdp_model_merger", "FSDPModelMerger", "recipe/runner/export.py", "the same"),
    Name("transformers.models.auto.modeling_auto", "AutoModelForCausalLM", "recipe/runner/export.py", PUBLIC),
    Name(
        "ray.runtime_context",
        "RuntimeContext.get_job_id",
        "recipe/fspo/plugin.py",
        "the run's id is added: sockets",
        (),
    ),
    # ---- CPUs
    Name("verl.plugin.platform.platform_base", "PlatformBase", "recipe/runner/cpu/platform.py", PUBLIC),
    Name("verl.plugin.platform.platform_manager", "PlatformRegistry", "recipe/runner/cpu/platform.py", PUBLIC),
    Name("verl.workers.engine.base", "EngineRegistry", "recipe/runner/cpu/engine.py", PUBLIC),
    Name(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead",
        "recipe/runner/cpu/engine.py",
        "registered for one more device",
    ),
    Name(
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopWorker._run_agent_loop",
        "recipe/runner/cpu/patches.py",
        "its module's Hydra, which makes the agent loop of every response",
        ("sampling_params", "trajectory"),
        seen_as="module.hydra",
    ),
    Name(
        "verl.utils.torch_functional",
        "logprobs_from_logits_v2",
        "recipe/runner/cpu/patches.py",
        "one call of logsumexp for many tokens",
        ("logits", "labels"),
    ),
    Name(
        "verl.workers.rollout.vllm_rollout.utils",
        "vLLMColocateWorkerExtension._update_weights",
        "recipe/runner/cpu/vllm_worker.py",
        "tensors are copied out of shared memory; recipe/runner/cpu/patches.py has the other departures",
        ("weights",),
    ),
    Name(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        "recipe/runner/cpu/patches.py",
        "packs weights that verl has to update",
        ("layer", "remove_weight"),
    ),
    Name(
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
        "CPUFusedMOE.check_grouped_gemm",
        "recipe/runner/cpu/patches.py",
        "the same for the weights of experts",
        ("layer",),
    ),
    Name(
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
        "CPUFusedMOE._pad_moe_intermediate_for_grouped_gemm",
        "recipe/runner/cpu/patches.py",
        "the same",
        ("layer",),
    ),
    Name("transformers.models.auto.configuration_auto", "AutoConfig", "recipe/runner/rehearse/material.py", PUBLIC),
    Name("transformers.models.auto.tokenization_auto", "AutoTokenizer", "recipe/runner/rehearse/material.py", PUBLIC),
    Name("transformers.modeling_utils", "AttentionInterface", "recipe/runner/cpu/attention.py", PUBLIC),
    Name("transformers.masking_utils", "AttentionMaskInterface", "recipe/runner/cpu/attention.py", PUBLIC),
    Name("transformers.masking_utils", "sdpa_mask", "recipe/runner/cpu/attention.py", "called for padded batches"),
    Name(
        "transformers.integrations.sdpa_attention",
        "sdpa_attention_forward",
        "recipe/runner/cpu/attention.py",
        "called for each sequence of a pack",
    ),
    Name(
        "ray._private.workers.default_worker",
        "parser",
        "recipe/runner/cpu/fork_server.py",
        "imported before a fork",
        seen_as="ray._private.workers.default_worker",
    ),
    # ---- the memory trace: parts of verl's engine that need weights or a GPU are replaced
    Name(_ENGINE, "FSDPEngine._build_module", _TRACE, "as verl builds the model"),
    Name(_ENGINE, "FSDPEngine._build_fsdp_module", _TRACE, "as verl shards it"),
    Name(_ENGINE, "FSDPEngine._get_packed_pad_size", _TRACE, "as verl pads a pack", ("packed_length",)),
    Name(_ENGINE, "FSDPEngineWithLMHead.prepare_model_inputs", _TRACE, "replaced: nested tensors", ("micro_batch",)),
    Name(_ENGINE, "FSDPEngineWithLMHead.forward_step", _TRACE, "a micro-batch", ("loss_function", "forward_only")),
    Name(_ENGINE, "fsdp2_load_full_state_dict", _TRACE, "replaced: there are no weights"),
    Name("verl.workers.engine.fsdp", "transformer_impl", _TRACE, "the module, for the above"),
    Name("verl.utils.model", "get_hf_auto_model_class", _TRACE, "replaced: there are no weights"),
    Name("verl.utils.config", "omega_conf_to_dataclass", _TRACE, "verl's own reading of its configuration"),
    Name("verl.utils.ulysses", "set_ulysses_sequence_parallel_group", _TRACE, "as verl's modes of the engine do"),
    Name("verl.models.transformers", "monkey_patch", _TRACE, "the module, for the next"),
    Name("verl.models.transformers.monkey_patch", "_flash_attention_forward", _TRACE, "replaced: needs a GPU"),
    Name("transformers.models.auto.modeling_auto", "AutoModelForCausalLM", _TRACE, PUBLIC),
    # ---- the CUDA contract
    Name("verl.workers.rollout.vllm_rollout", "vllm_async_server", _CONTRACT, "the module, for the next"),
    Name(_SERVER, "vLLMHttpServer.launch_server", _CONTRACT, "the arguments that verl passes to vLLM"),
    Name(_SERVER, "vLLMHttpServer._validate_configs", _CONTRACT, "as in its __init__, which needs Ray"),
    Name(_SERVER, "vLLMHttpServer._should_profile", _CONTRACT, "the same"),
    Name("vllm.v1.engine.async_llm", "AsyncLLM.from_vllm_config", _CONTRACT, "where the engine would start"),
    Name("vllm.platforms", "_current_platform", _CONTRACT, "replaced: there is no GPU"),
    Name("vllm.platforms.cuda", "NonNvmlCudaPlatform", _CONTRACT, "subclassed: an H100 without a driver"),
    Name("vllm.platforms.interface", "DeviceCapability", _CONTRACT, "its answer"),
    Name("vllm.config.vllm", "HAS_TRITON", _CONTRACT, "a GPU machine has it"),
    Name("vllm.config.vllm", "VllmConfig.use_v2_model_runner", _CONTRACT, "what vLLM has chosen"),
    # ---- Hydra
    Name("hydra.compose", "compose", "recipe/runner/launch/compose.py", PUBLIC),
    Name("hydra.initialize", "initialize_config_dir", "recipe/runner/launch/compose.py", PUBLIC),
    Name("hydra.core.global_hydra", "GlobalHydra", "recipe/runner/launch/compose.py", "composing inside a Hydra job"),
    Name("hydra.core.hydra_config", "HydraConfig", "recipe/runner/launch/run_settings.py", PUBLIC),
    Name("hydra.core.override_parser.overrides_parser", "OverridesParser", "recipe/runner/launch/compose.py", _HYDRA),
    Name("hydra.core.override_parser.types", "Override", "recipe/runner/launch/run_settings.py", _HYDRA),
    Name("hydra.errors", "HydraException", "recipe/fspo/main.py", PUBLIC),
    Name("hydra.errors", "ConfigCompositionException", "recipe/runner/launch/compose.py", _HYDRA),
    Name("hydra.errors", "InstantiationException", "recipe/fspo/own_loss.py", _HYDRA),
    Name("hydra.utils", "get_class", "recipe/fspo/own_loss.py", PUBLIC),
    Name("hydra.utils", "instantiate", "recipe/fspo/own_loss.py", PUBLIC),
    Name("verl.utils.tracking", "Tracking.logger", _TRAINER, "the dictionary is replaced"),
    # ---- math-verify and SymPy: arithmetic without bounds is given limits
    Name("math_verify.parser", "normalize_latex", _LIMITS, "a response's text, before it is parsed"),
    Name("math_verify.parser", "latex2sympy", _LIMITS, "imported there; the same"),
    Name("math_verify.parser", "parse_expr", _LIMITS, "imported there; the same"),
    Name("sympy.core.numbers", "Integer._eval_power", _LIMITS, "powers"),
    Name("sympy.core.numbers", "Rational._eval_power", _LIMITS, "powers"),
    Name("sympy.core.evalf", "mpf_pow", _LIMITS, "imported there; powers of floats"),
    Name("sympy.core.evalf", "mpf_pow_int", _LIMITS, "the same"),
    Name("sympy.functions.combinatorial.factorials", "factorial.eval", _LIMITS, "large arguments"),
    Name("sympy.functions.combinatorial.factorials", "factorial2.eval", _LIMITS, "large arguments"),
    Name("sympy.functions.combinatorial.factorials", "binomial.eval", _LIMITS, "large arguments"),
    Name("sympy.functions.combinatorial.numbers", "harmonic.eval", _LIMITS, "large arguments"),
    Name("sympy.concrete.summations", "eval_sum_direct", _LIMITS, "long sums"),
    Name("sympy.concrete.products", "Product._eval_product_direct", _LIMITS, "long products"),
    # ---- Ray
    Name(
        "ray._private.worker", "_global_node", "recipe/runner/faults/errors.py", "where this run's Ray keeps its logs"
    ),
    Name("ray._private.node", "Node.get_logs_dir_path", "recipe/runner/faults/errors.py", "the same"),
    Name(
        "ray.util.scheduling_strategies", "NodeAffinitySchedulingStrategy", "recipe/runner/faults/watchdog.py", PUBLIC
    ),
)

TEXTS = (
    # ---- what verl's loggers read, and Hydra's words for an unknown key
    Text(
        "verl.utils.tracking", 'os.environ.get("TENSORBOARD_DIR"', "recipe/runner/launch/loggers.py", "where it writes"
    ),
    Text("verl.utils.tracking", 'os.environ.get("MLFLOW_TRACKING_URI"', "recipe/runner/launch/loggers.py", "the same"),
    Text("verl.utils.tracking", 'os.environ.get("SWANLAB_LOG_DIR"', "recipe/runner/launch/loggers.py", "the same"),
    Text("verl.utils.tracking", ".log(data=data, step=step)", "recipe/runner/launch/loggers.py", "how it calls them"),
    Text(
        "hydra._internal.config_loader_impl",
        "Could not override '{override.key_or_group}'.",
        "recipe/runner/launch/compose.py",
        "what the mistyped key was",
    ),
    # ---- layouts that we read
    Text(
        "verl.utils.dataset.rl_dataset",
        "self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)",
        _TRAINER,
        "the rows that its filter has left",
    ),
    Text(
        "verl.trainer.ppo.v1.replay_buffer",
        'self.max_off_policy_strategy == "drop"',
        _REPLAY,
        "any other value than its two drops nothing and asserts nothing",
    ),
    Text(
        "verl.trainer.ppo.v1.agent_loop_tq",
        '{uid}_{session_id}_{i}"',
        _OUTCOMES,
        "keys of responses",
    ),
    Text(
        "verl.trainer.ppo.v1.agent_loop_tq",
        "reward_extra_info",
        _OUTCOMES,
        "what a reward returned",
    ),
    Text(
        "verl.utils.checkpoint.fsdp_checkpoint_manager",
        'f"extra_state_world_size_{self.world_size}_rank_{self.rank}.pt"',
        "recipe/runner/checkpoints/integrity.py",
        "names of a checkpoint's files",
    ),
    Text(_BASE, "latest_checkpointed_iteration.txt", "recipe/runner/checkpoints/integrity.py", "the tracker"),
    Text("ray.actor", "def __ray_call__(", "recipe/fspo/reward_manager.py", "asks a reward worker; Ray's DeveloperAPI"),
    Text(
        "verl.experimental.reward_loop.reward_loop",
        "config.custom_reward_function -> config.reward.custom_reward_function",
        "recipe/runner/launch/reward_function.py",
        "old keys, which main_ppo does not migrate",
    ),
    Text(
        "verl.trainer.ppo.metric_utils",
        "reduce_fns_best_worst = [np.max, np.min]",
        "recipe/fspo/validation.py",
        "what it asks of the resampling",
    ),
    Text(_BASE, "async_save", "recipe/runner/launch/checks.py", "with it the tracker is not written"),
    # ---- where the replaced number of slots arrives
    Text(_SERVER, "max_concurrency=self.max_concurrency", _TRAINER, "a server's slots"),
    Text(
        "verl.workers.rollout.router",
        "if request_id in self._request_id_to_server:",
        "recipe/runner/launch/server_slots.py",
        "a request stays with its server",
    ),
    # ---- constants that we repeat, because verl waits without a limit
    Text("verl.workers.rollout.replica", "max_colocate_count=2", "recipe/runner/faults/resources.py", "CPUs per rank"),
    Text("verl.utils.fsdp_utils", "local_cpu_tensor = local_gpu_tensor.detach().cpu()", _WORKER, "no copy on CPUs"),
    Text(
        "verl.single_controller.ray.base", "max_colocate_count=3", "recipe/runner/faults/resources.py", "CPUs per rank"
    ),
    # ---- words of errors, from which a death is named
    Text("ray.exceptions", '\\tclass_name: {cause.class_name}"', "recipe/runner/faults/errors.py", "which actor died"),
    Text("ray.exceptions", '\\tpid: {cause.pid}"', "recipe/runner/faults/errors.py", "its process"),
    Text("vllm.v1.engine.utils", "Engine core initialization failed", "recipe/runner/faults/errors.py", "start-up"),
    # ---- titles of processes, by which they are named
    Text("ray._private.worker", "ray._raylet.setproctitle", "recipe/runner/faults/processes.py", "ray::CLASS"),
    Text(
        "vllm.v1.engine.core",
        "set_process_title(process_title)",
        "recipe/runner/faults/processes.py",
        "VLLM::EngineCore",
    ),
    Text(
        "verl.workers.engine.fsdp.transformer_impl",
        "CPUOffloadPolicy(pin_memory=True)",
        "recipe/runner/cpu/patches.py",
        "pinning needs an accelerator",
    ),
    Text("verl.utils.distributed", "cpu:gloo", "recipe/runner/cpu/patches.py", "names the device twice on a CPU"),
)


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
            raise AssertionError(
                f"{entry.module} no longer defines {entry.name}, which {entry.used_in} uses: {entry.why}"
            )
        body = node.body if isinstance(node, ast.ClassDef) else []
    return node or ast.Module()


@pytest.mark.parametrize("entry", NAMES, ids=str)
def test_the_name_is_still_there(entry: Name) -> None:
    node = definition(entry)
    if entry.takes is not None:
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        taken = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        assert set(entry.takes) <= taken, f"{entry} takes {sorted(taken)} now; {entry.used_in}: {entry.why}"
    own = (ROOT / entry.used_in).read_text(encoding="utf-8")
    assert (entry.seen_as or entry.name.rpartition(".")[2]) in own, f"{entry.used_in} no longer uses {entry}"


@pytest.mark.parametrize("entry", TEXTS, ids=str)
def test_the_text_is_still_there(entry: Text) -> None:
    assert entry.text in source_of(entry.module).read_text(encoding="utf-8"), f"{entry.used_in}: {entry.why}"
    assert (ROOT / entry.used_in).is_file()


def test_whatever_the_recipe_imports_is_listed() -> None:
    listed = {part for entry in NAMES for part in entry.name.split(".")} | {entry.module for entry in NAMES}
    missing = []
    for path in sorted((ROOT / "recipe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in WATCHED:
                missing += [
                    f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
                    for alias in node.names
                    if alias.name not in listed
                ]
    assert missing == [], "add what is private or undocumented to NAMES, with the reason"


def test_a_name_that_moves_is_named() -> None:
    gone = Name(_BASE, "PPOTrainer._no_such_method", _TRAINER, "a test")
    with pytest.raises(AssertionError, match=r"trainer_base no longer defines PPOTrainer\._no_such_method"):
        definition(gone)
    with pytest.raises(AssertionError, match=r"the module verl\.trainer\.nowhere is gone"):
        source_of("verl.trainer.nowhere")
