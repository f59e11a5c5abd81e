"""``same_update.py FOLDER WORKER LOSS``: one batch, an update with it by one worker, in a process of its own.

WORKER is ``verl`` (its own), ``audit`` (the same under FSPO_AUDIT), ``recipe`` (the recipe's, as its command has it) or
``plain`` (the recipe's, as verl's own command has it with these words).
Prints a JSON object: losses, gradient norms, change of the weights, and rows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from batches import PROMPT, batch_of

from recipe.fspo.main import composed as compose
from recipe.runner.launch.machine import export_platform, verl_config

SEQUENCES, MINI_BATCH, LONGEST = 16, 8, 40
FOLDER = Path(sys.argv[1])
MODEL_FOLDER = Path(__file__).resolve().parents[2] / "recipe/math/data/assets/demo_model"
CONFIG = compose(
    [
        "experiment=demo",
        f"trainer.default_local_dir={FOLDER}",
        "actor_rollout_ref.actor.optim.total_training_steps=1",
        "actor_rollout_ref.model.external_lib=recipe.runner.cpu.engine",
    ]
)
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
PRECISION = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
#: The same job in the words of verl's own command.
PLAIN = [
    *("trainer.v1.trainer_mode=fspo", f"{ACTOR}.policy_loss.loss_mode=fspo", "algorithm.adv_estimator=grpo"),
    *("trainer.device=cpu", f"trainer.default_local_dir={FOLDER}", "data.train_batch_size=32"),
    *(f"{MODEL}.path={MODEL_FOLDER}", f"{MODEL}.external_lib=recipe.runner.cpu.engine"),
    *(f"{MODEL}.use_remove_padding=true", f"{MODEL}.enable_gradient_checkpointing=false"),
    *(f"+{MODEL}.override_config.attn_implementation=sdpa", f"{ACTOR}.ppo_mini_batch_size=8"),
    *(f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=2048", f"{ACTOR}.optim.lr=1e-4"),
    *(f"{ACTOR}.optim.total_training_steps=1", f"{ACTOR}.use_torch_compile=false", f"{ACTOR}.strategy=fsdp2"),
    *(f"{ACTOR}.fsdp_config.strategy=fsdp2", f"{ACTOR}.fsdp_config.use_torch_compile=false"),
    *(f"+{ACTOR}.fsdp_config.mixed_precision={PRECISION}", "actor_rollout_ref.rollout.name=vllm"),
    *("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=2048"),
]
export_platform(CONFIG.trainer)  # before verl is imported
if sys.argv[2:3] == ["audit"]:  # and this, too
    facts = {"run": "run", "calls": 1, "limit": LONGEST, "every_mini_batch": "no"}
    os.environ |= {"FSPO_AUDIT": f"{FOLDER}/audit", "FSPO_AUDIT_RUN": json.dumps(facts)}

from omegaconf import DictConfig  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.utils.padding import response_from_nested  # noqa: E402

from fspo.losses import ALGORITHMS  # noqa: E402
from fspo.table import read_table  # noqa: E402
from fspo.types import BandState  # noqa: E402
from recipe.fspo.recorder import ROWS, join_ranks  # noqa: E402
from recipe.runner.launch.settings import on_this_machine  # noqa: E402


def batch(worker: Any) -> TensorDict:
    """pi_old is the policy itself, moved a little, so that ratios mean something."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=generator).tolist()
    data = batch_of([torch.randint(4, 16, (PROMPT + length,), generator=generator) for length in lengths])
    question = data.clone()
    tu.assign_non_tensor(question, calculate_entropy=False, compute_loss=False, temperature=1.0)
    log_probs = response_from_nested(worker.compute_log_prob(question)["log_probs"], data["response_mask"])
    rows = [row + 0.02 * torch.randn(len(row), generator=generator) for row in log_probs.unbind()]
    data["old_log_probs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    numbers = [torch.tensor([row]) for row in range(SEQUENCES)]
    data[ROWS] = torch.nested.as_nested_tensor(numbers, layout=torch.jagged)
    size = {"global_batch_size": MINI_BATCH, "mini_batch_size": MINI_BATCH, "epochs": 1, "seed": 1}
    tu.assign_non_tensor(data, calculate_entropy=False, temperature=1.0, dataloader_kwargs={"shuffle": False}, **size)
    return data


def weights(worker: Any) -> torch.Tensor:
    parts = [parameter.detach() for parameter in worker.actor.engine.module.parameters()]
    whole = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]
    return torch.cat([part.to(torch.float64).flatten() for part in whole])


def of_verls_command() -> DictConfig:
    """What verl's own command gets, once its driver has asked the plugin."""
    from hydra import compose, initialize_config_dir

    from recipe.fspo.plugin import check

    with initialize_config_dir(str(verl_config()), version_base=None):
        config = compose("ppo_trainer", PLAIN)
    check(config)
    return config


def main() -> None:
    kind, loss = sys.argv[2:4]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if loss in ALGORITHMS:
        CONFIG.actor_rollout_ref.actor.policy_loss.loss_mode = loss
    else:
        settings = {"_target_": "verl.workers.config.PolicyLossConfig", "loss_mode": loss}
        CONFIG.actor_rollout_ref.actor.policy_loss = settings
        CONFIG.actor_rollout_ref.actor.update(clip_ratio_low=2e-3, clip_ratio_high=2e-3)
    on_this_machine(CONFIG)
    config = (of_verls_command() if kind == "plain" else CONFIG).actor_rollout_ref
    is_ours = kind in ("recipe", "plain")
    if is_ours:
        from recipe.fspo.worker import FSPOWorker as Worker
    else:
        from verl.workers.engine_workers import ActorRolloutRefWorker as Worker
    worker = Worker(config=config, role="actor")
    worker.init_model()
    data = batch(worker)
    if is_ours:
        worker.begin_run(str(FOLDER))
        worker.begin_update(BandState(clip_scale=3.0) if loss in ALGORITHMS else None, 3)
    before = weights(worker)
    metrics = worker.update_actor(data.clone())["metrics"]
    rows = []
    if is_ours:
        rows = [part.rows for part in join_ranks([worker.pop_mini_batches()])]
    elif kind == "audit":
        rows = [read_table(FOLDER / "audit").columns]
    names = ("S", "L", "A", "inside", "kept", "weight")
    joined = {name: [x for part in rows for x in part[name].tolist()] for name in names if rows and name in rows[0]}
    printed = {"loss": metrics["actor/pg_loss"], "grad_norm": metrics["grad_norm"], "rows": joined}
    print(json.dumps(printed | {"change": (weights(worker) - before).tolist()}), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
