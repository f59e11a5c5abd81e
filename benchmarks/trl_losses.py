"""TRL's policy losses, called as its trainers call them, from a folder in which TRL is installed.

verl does not start where TRL 1.x can be imported. So the methods that make up a loss are read from their file and run
by themselves, without decorators; what their file imports is given by name.
"""

from __future__ import annotations
import __future__

import ast
import math
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

Loss = Callable[..., Any]
GSPO, PPO = (3e-4, 4e-4), (0.2, 0.2)


def methods_of(file: Path, owner: str, names: Sequence[str], space: Mapping[str, Any]) -> SimpleNamespace:
    """Methods of a class as functions, run with ``space``, torch, math and typing."""
    classes = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    (found,) = (node for node in classes if node.name == owner)
    nodes = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in nodes:
        node.decorator_list = []
    namespace: dict[str, Any] = {"torch": torch, "math": math, **vars(typing), **space}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([*nodes], []), str(file), "exec", flags, True), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


def trl(site: Path) -> Iterator[tuple[str, Loss]]:
    """``_compute_loss`` of three trainers, with as many accumulation steps as micro-batches of the size.

    TRL's micro-batches have one size, so the number of steps is right there and a stand-in for others. Its means count
    responses whose tokens are all masked; the wrapper cannot show that.
    """
    names = ("_compute_loss", "get_gamma_weights", "get_off_policy_mask")
    space = {"nanmin": torch.min, "nanmax": torch.max}
    methods = methods_of(site / "trl/trainer/grpo_trainer.py", "GRPOTrainer", names, space)
    others = {
        "gmpo": ("trl/experimental/gmpo/gmpo_trainer.py", "GMPOTrainer"),
        "rloo": ("trl/trainer/rloo_trainer.py", "RLOOTrainer"),
    }
    computes = {
        name: methods_of(site / path, owner, ("_compute_loss",), space)._compute_loss
        for name, (path, owner) in others.items()
    }

    def known(name: str, level: str, low: float, high: float, delta: Any = None, **more: Any) -> tuple[str, Loss]:
        args = SimpleNamespace(
            delta=delta, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
            vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        )  # fmt: skip
        settings = {"loss_type": name, "importance_sampling_level": level, "epsilon_low": low, "epsilon_high": high}
        settings |= {"args": args, "beta": 0.0, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0}
        settings |= {"max_completion_length": 512, "model": SimpleNamespace(training=True), "use_vllm": False}
        settings |= dict.fromkeys(("aux_loss_enabled", "_entropy_bonus_enabled"), False) | more
        settings |= {"get_gamma_weights": torch.no_grad()(methods.get_gamma_weights)}
        settings |= {"get_off_policy_mask": methods.get_off_policy_mask}

        def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
            info, mask = config.global_batch_info, response_mask
            rows = int(mask.any(-1).sum()) if name == "bnpo" else len(mask)  # those that its mean counts
            steps = info["global_batch_size"] / max(rows, 1) / info["dp_size"]
            args.steps_per_generation = steps  # a mini-batch is a generation
            trainer = SimpleNamespace(
                **settings,
                accelerator=SimpleNamespace(
                    num_processes=info["dp_size"], gather=lambda x: x, reduce=lambda x, reduction: x
                ),
                current_gradient_accumulation_steps=steps,
                _metrics={"train": defaultdict(list)},
                _get_per_token_logps_and_entropies=lambda *_, **__: (log_prob, log_prob.detach(), None),
            )
            ids = torch.zeros_like(mask, dtype=torch.long)
            batch = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ids)
            batch |= {"advantages": (advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)}
            batch |= {"completion_mask": mask.to(log_prob.dtype), "old_per_token_logps": old_log_prob}
            batch |= {"num_items_in_batch": torch.tensor(info["batch_num_tokens"])}
            batch |= {"old_logps": (old_log_prob * mask).sum(-1)}
            compute = computes.get(name, methods._compute_loss)
            unscaled = steps if name == "rloo" else 1.0  # transformers divides
            return compute(trainer, None, batch) / unscaled

        masked = ", off-policy mask" if "off_policy_mask_threshold" in more else ""
        return f"{name}, {level}{f', delta {delta:g}' if delta else ''}{masked}", loss

    yield known("grpo", "sequence", *GSPO)
    for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "luspo"):
        yield known(name, "token", *PPO)
    yield known("luspo", "sequence", *GSPO)
    yield known("luspo", "sequence", *GSPO, delta=2.0)
    yield known("grpo", "sequence", *GSPO, off_policy_mask_threshold=0.05)
    yield known("vespo", "token", *PPO)
    yield known("cispo", "token", 0.2, 5.0)
    yield known("gmpo", "sequence", 0.4, 0.4)
    yield known("rloo", "sequence", *PPO)
