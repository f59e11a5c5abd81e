"""Policy losses of other code bases, called as each code base's trainer calls them, from checkouts.

The functions of a loss are read from their file and run by themselves: nothing of a code base is imported, and nothing
of it is kept here. What their file imports is given by name: torch, numpy, typing, and what the wrapper names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch

from benchmarks.checkouts import Call, Known, Source, adapted, not_run
from fspo.check_loss.call import Config

#: GSPO's clip values, from its authors (verl#2775), and PPO's.
GSPO: Final = (3e-4, 4e-4)
PPO: Final = (0.2, 0.2)


def verl(source: Source) -> Iterator[Known]:
    """verl's losses by their own signature, with verl's default averaging, token-mean."""
    masked = source.definitions("verl/utils/torch_functional.py", ("masked_sum", "masked_mean"))
    names = ("gspo", "vanilla", "sapo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "gpg", "clip_cov", "kl_cov", "dro")
    functions = [f"compute_policy_loss_{name}" for name in names]
    space = {"ActorConfig": Config, "AlgoConfig": type("AlgoConfig", (), {}), "verl_F": masked}
    losses = source.definitions("verl/trainer/ppo/core_algos.py", ("agg_loss", *functions), space)
    settings = {
        "gspo": dict(zip(("clip_ratio_low", "clip_ratio_high"), GSPO, strict=True)),
        "clip_cov": {f"policy_loss.clip_cov_{key}": x for key, x in (("ratio", 2e-4), ("lb", 1.0), ("ub", 5.0))},
        "kl_cov": {"policy_loss.kl_cov_ratio": 2e-4, "policy_loss.ppo_kl_coef": 1.0},
        "dro": {"policy_loss.dro_beta": 0.1},
    } | {name: {"clip_ratio_c": 20.0} for name in ("dppo_tv", "dppo_kl")}
    for name in names:
        yield Known(f"{name}, token-mean", getattr(losses, f"compute_policy_loss_{name}"), settings.get(name, {}))
    yield not_run("bypass_mode", "imports the rest of its package")


def trl(source: Source) -> Iterator[Known]:
    """``_compute_loss`` of four trainers, with as many accumulation steps as micro-batches of the size.

    TRL's micro-batches have one size, so the number of steps is right there and a stand-in for others. Its means count
    responses whose tokens are all masked; the wrapper cannot show that.
    """
    names = ("_compute_loss", "get_gamma_weights", "get_off_policy_mask")
    space = {"nanmin": torch.min, "nanmax": torch.max}
    methods = source.definitions("trl/trainer/grpo_trainer.py", [f"GRPOTrainer.{name}" for name in names], space)
    others = {
        "sequence_token": ("trl/experimental/gspo_token/grpo_trainer.py", "GRPOTrainer"),
        "gmpo": ("trl/experimental/gmpo/gmpo_trainer.py", "GMPOTrainer"),
        "rloo": ("trl/trainer/rloo_trainer.py", "RLOOTrainer"),
    }
    computes = {
        name: source.definitions(path, (f"{owner}._compute_loss",), space)._compute_loss
        for name, (path, owner) in others.items()
    }

    def known(name: str, level: str, low: float, high: float, delta: Any = None, **more: Any) -> Known:
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

        def loss(c: Call) -> Any:
            rows = int(c.mask.any(-1).sum()) if name == "bnpo" else len(c.mask)  # those that its mean counts
            trainer = SimpleNamespace(
                **settings,
                accelerator=SimpleNamespace(num_processes=c.ranks, gather=lambda x: x, reduce=lambda x, reduction: x),
                current_gradient_accumulation_steps=c.responses / max(rows, 1) / c.ranks,
                _metrics={"train": defaultdict(list)},
                _get_per_token_logps_and_entropies=lambda *_, **__: (c.new, c.new.detach(), None),
            )
            ids = torch.zeros_like(c.mask, dtype=torch.long)
            batch = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ids)
            batch |= {"completion_mask": c.mask.to(c.new.dtype), "advantages": c.of_response}
            batch |= {"old_per_token_logps": c.old, "num_items_in_batch": torch.tensor(c.tokens)}
            batch |= {"old_logps": (c.old * c.mask).sum(-1)}
            compute = computes.get(name) or computes.get(level) or methods._compute_loss
            unscaled = trainer.current_gradient_accumulation_steps if name == "rloo" else 1.0  # transformers divides
            return compute(trainer, None, batch) / unscaled

        mask = ", off-policy mask" if "off_policy_mask_threshold" in more else ""
        return adapted(f"{name}, {level}{f', delta {delta:g}' if delta else ''}{mask}", loss)

    yield known("grpo", "sequence", *GSPO)
    yield known("grpo", "sequence_token", *GSPO)
    for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "luspo"):
        yield known(name, "token", *PPO)
    yield known("luspo", "sequence", *GSPO)
    yield known("luspo", "sequence", *GSPO, delta=2.0)
    yield known("grpo", "sequence", *GSPO, off_policy_mask_threshold=0.05)
    yield known("vespo", "token", *PPO)
    yield known("cispo", "token", 0.2, 5.0)
    yield known("gmpo", "sequence", 0.4, 0.4)
    yield known("rloo", "sequence", *PPO)


def skyrl(source: Source) -> Iterator[Known]:
    """SkyRL's losses: sums, of advantages that its trainer has divided by the sizes of the mini-batch."""
    path = "skyrl/backends/skyrl_train/utils/"
    space: dict[str, Any] = {"apply_off_policy_correction": lambda loss, old, rollout, mask, config: (loss, mask, {})}
    space |= vars(source.definitions(f"{path}torch_utils.py", ("masked_mean", "safe_exp_delta")))
    functions = [f"{name}_policy_loss" for name in ("gspo", "ppo", "sapo", "dppo", "rollout_is")]
    functions += [f"compute_policy_loss_{name}" for name in ("cispo", "clip_cov", "kl_cov")]
    losses = source.definitions(f"{path}ppo_utils.py", ("reduce_loss", "importance_sampling_loss", *functions), space)

    def known(
        name: str, function: str, by_response: bool = False, kind: str = "", clip: Sequence[float] = PPO
    ) -> Known:
        settings = SimpleNamespace(
            **{"policy_loss_type": name, "eps_clip_low": clip[0], "eps_clip_high": clip[1], "clip_ratio_c": 3.0},
            **{"loss_reduction": "sequence_mean", "off_policy_correction": None},
            sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
            dppo=SimpleNamespace(dppo_type=kind, delta_low=0.2, delta_high=0.2),
            cispo=SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0),
            clip_cov=SimpleNamespace(clip_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0),
            kl_cov=SimpleNamespace(kl_cov_frac=0.2, ppo_kl_coef=1.0),
        )

        def loss(c: Call) -> Any:
            size = c.responses * c.mask.sum(-1, keepdim=True).clamp(min=1) if by_response else c.tokens
            rollout = {"rollout_logprobs": c.old} if name == "rollout_is" else {}
            scaled = c.advantages / size * c.ranks
            return getattr(losses, function)(c.new, c.old, scaled, settings, c.mask, **rollout)[0]

        return adapted(f"{name}{f', {kind}' if kind else ''}", loss)

    yield known("gspo", "gspo_policy_loss", by_response=True, clip=GSPO)
    for name in ("regular", "dual_clip"):
        yield known(name, "ppo_policy_loss")
    yield known("sapo", "sapo_policy_loss", by_response=True)
    yield known("cispo", "compute_policy_loss_cispo")
    yield known("rollout_is", "rollout_is_policy_loss")
    for kind in ("binary_tv", "binary_kl"):
        yield known("dppo", "dppo_policy_loss", kind=kind)
    yield known("importance_sampling", "importance_sampling_loss")
    for name in ("clip_cov", "kl_cov"):
        yield known(name, f"compute_policy_loss_{name}")


def slime(source: Source) -> Iterator[Known]:
    """slime's losses, of lists of samples, each its mean over tokens; OPSM removes responses with A < 0."""
    functions = ("compute_policy_loss", "compute_gspo_kl", "compute_cispo_loss", "compute_opsm_mask")
    losses = source.definitions("slime/utils/ppo_utils.py", functions, {"Namespace": SimpleNamespace})

    def known(name: str, dual: float | None = None, opsm: bool = False) -> Known:
        def loss(c: Call) -> Any:
            new, old, _, mask = c.lists
            kl = losses.compute_gspo_kl(new, old, new, mask) if name == "gspo" else (c.old - c.new).flatten()
            if name == "cispo":
                terms, _ = losses.compute_cispo_loss(kl, c.new.flatten(), c.advantages.flatten(), 1.0, 0.2)
            else:
                clip = GSPO if name == "gspo" else PPO
                terms, _ = losses.compute_policy_loss(kl, c.advantages.flatten(), *clip, dual)
            if opsm:
                terms = terms * losses.compute_opsm_mask(SimpleNamespace(opsm_delta=1e-4), *c.lists)[0]
            means_B = (terms.view_as(c.new) * c.mask).sum(-1) / c.mask.sum(-1).clamp(min=1)
            return means_B.sum() / c.responses * c.ranks

        return adapted(f"{name}{', dual clip' if dual else ''}{', OPSM' if opsm else ''}", loss)

    yield from (known("gspo"), known("gspo", opsm=True), known("grpo"), known("grpo", opsm=True))
    yield from (known("grpo", dual=3.0), known("cispo"))


def prime_rl(source: Source) -> Iterator[Known]:
    """prime-rl's losses, of lists of samples: sums over tokens, divided by the tokens of the mini-batch."""
    names = ("compute_importance_ratio_and_mismatch_kl", "_safe_mean", "default_loss_fn", "ipo_loss_fn")
    losses = source.definitions("src/prime_rl/trainer/rl/loss.py", names, {"LossOutputs": SimpleNamespace})
    settings = SimpleNamespace(adv_tau=1.0, kl_tau=1e-3, dppo_mask_low=0.2, dppo_mask_high=0.2, ipo_threshold=0.1)

    def known(name: str) -> Known:
        def loss(c: Call) -> Any:
            total = c.new[0].sum() * 0.0
            for new, old, advantages, mask in zip(*c.lists, strict=True):
                inputs = SimpleNamespace(trainer_logprobs=new, inference_logprobs=old, advantages=advantages)
                inputs.loss_mask, inputs.loss_weights = mask, None
                total = total + getattr(losses, f"{name}_loss_fn")(inputs, settings).loss
            return total / c.tokens * c.ranks

        return adapted(name, loss)

    for name in ("default", "ipo"):
        yield known(name)


#: Each code base by a file that only it has.
CODE_BASES: Final = {
    "verl": ("verl/trainer/ppo/core_algos.py", verl),
    "TRL": ("trl/trainer/grpo_trainer.py", trl),
    "SkyRL": ("skyrl/backends/skyrl_train/utils/ppo_utils.py", skyrl),
    "slime": ("slime/utils/ppo_utils.py", slime),
    "prime-rl": ("src/prime_rl/trainer/rl/loss.py", prime_rl),
}
