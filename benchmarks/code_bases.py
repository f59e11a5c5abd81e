"""Policy losses of other code bases, called as each code base's trainer calls them, from checkouts.

The functions of a loss are read from their file and run by themselves: nothing of a code base is imported, and nothing
of it is kept here. What their file imports is given by name: torch, numpy, typing, and what the wrapper names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
        "clip_cov": {
            f"policy_loss.clip_cov_{key}": value for key, value in (("ratio", 2e-4), ("lb", 1.0), ("ub", 5.0))
        },
        "kl_cov": {"policy_loss.kl_cov_ratio": 2e-4, "policy_loss.ppo_kl_coef": 1.0},
        "dro": {"policy_loss.dro_beta": 0.1},
    } | {name: {"clip_ratio_c": 20.0} for name in ("dppo_tv", "dppo_kl")}
    for name in names:
        yield Known(f"{name}, token-mean", getattr(losses, f"compute_policy_loss_{name}"), settings.get(name, {}))
    yield not_run("bypass_mode", "imports the rest of its package")


def verl_recipe(source: Source) -> Iterator[Known]:
    """Losses of recipes that are not verl's; scaled by the share of the responses, as their actors do.

    FlowRL with log Z = 0 and pi_ref = pi_old.
    """

    def mean(tensor: Any, mask: Any, axis: Any = None) -> Any:
        return (tensor * mask).sum(axis) / (mask.sum(axis) + 1e-8)

    masked = SimpleNamespace(masked_mean=mean, masked_sum=lambda tensor, mask, axis=None: (tensor * mask).sum(axis))
    space = {"ActorConfig": Config, "AlgoConfig": type("AlgoConfig", (), {}), "verl_F": masked}
    gspo = source.definitions("gvpo/gvpo_core_algos.py", ("agg_loss", "compute_policy_loss_gspo"), space)
    sppo = source.definitions("sppo/dp_actor.py", ("compute_sppo_loss",), space).compute_sppo_loss
    flowrl = source.definitions("flowrl/flowrl_actor.py", ("FlowRLActor.compute_flowrl",), space).compute_flowrl

    low, high = GSPO
    config = Config(clip_ratio_low=low, clip_ratio_high=high)

    def copied(c: Call) -> Any:
        return gspo.compute_policy_loss_gspo(c.old, c.new, c.advantages, c.mask, config=config)[0] * len(c.mask)

    def of_flowrl(c: Call) -> Any:
        settings, log_z = SimpleNamespace(flowrl_beta_coef=15.0), c.new.new_zeros(len(c.new), 1)
        return flowrl(settings, c.new, c.old, c.old, log_z, c.advantages, c.mask)[0] * len(c.mask)

    def of_sppo(c: Call) -> Any:
        return sppo(c.old, c.new, c.of_response, c.mask)[0] * c.mask.any(-1).sum()  # its mean leaves out the others

    for name, loss in (("gspo, copy in GVPO", copied), ("sppo", of_sppo), ("flowrl", of_flowrl)):
        yield adapted(name, lambda c, loss=loss: loss(c) / c.responses * c.ranks)  # type: ignore[misc]
    yield not_run("gvpo", "compares the responses of a prompt")


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
            **{
                "delta": delta,
                "use_bias_correction_kl": False,
                "sapo_temperature_pos": 1.0,
                "sapo_temperature_neg": 1.05,
            },
            **{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
        )
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
    functions = [
        "gspo_policy_loss",
        "ppo_policy_loss",
        "sapo_policy_loss",
        "dppo_policy_loss",
        "rollout_is_policy_loss",
    ]
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


def kl_of_samples(losses: Any, c: Call, name: str) -> Any:
    """log pi_old - log pi by token, of lists of samples; of ``gspo`` that of the whole response."""
    new, old, _, mask = c.lists
    return losses.compute_gspo_kl(new, old, new, mask) if name == "gspo" else (c.old - c.new).flatten()


def mean_of_samples(losses: Any, c: Call, terms: Any, opsm: bool) -> Any:
    """The mean over the responses of their means over tokens, of terms by token; OPSM removes responses with A < 0."""
    if opsm:
        terms = terms * losses.compute_opsm_mask(SimpleNamespace(opsm_delta=1e-4), *c.lists)[0]
    means_B = (terms.view_as(c.new) * c.mask).sum(-1) / c.mask.sum(-1).clamp(min=1)
    return means_B.sum() / c.responses * c.ranks


def slime(source: Source) -> Iterator[Known]:
    """slime's losses, of lists of samples, each its mean over tokens; OPSM removes responses with A < 0."""
    functions = ("compute_policy_loss", "compute_gspo_kl", "compute_cispo_loss", "compute_opsm_mask")
    losses = source.definitions("slime/utils/ppo_utils.py", functions, {"Namespace": SimpleNamespace})

    def known(name: str, dual: float | None = None, opsm: bool = False) -> Known:
        def loss(c: Call) -> Any:
            kl = kl_of_samples(losses, c, name)
            if name == "cispo":
                terms, _ = losses.compute_cispo_loss(kl, c.new.flatten(), c.advantages.flatten(), 1.0, 0.2)
            else:
                clip = GSPO if name == "gspo" else PPO
                terms, _ = losses.compute_policy_loss(kl, c.advantages.flatten(), *clip, dual)
            return mean_of_samples(losses, c, terms, opsm)

        return adapted(f"{name}{', dual clip' if dual else ''}{', OPSM' if opsm else ''}", loss)

    yield from (known("gspo"), known("gspo", opsm=True), known("grpo"), known("grpo", opsm=True))
    yield from (known("grpo", dual=3.0), known("cispo"))


def prime_rl(source: Source) -> Iterator[Known]:
    """prime-rl's losses, of lists of samples: sums over tokens, divided by the tokens of the mini-batch.

    ``seq_tis``, ``seq_mis`` and ``geo_mask`` are those of its open PR 3384, written from its description, with masks of
    0.999 to 1.001 on the mean ratio for ``seq_mis`` and ``geo_mask`` and at most 2 for ``seq_tis``.
    """
    names = ("compute_importance_ratio_and_mismatch_kl", "_safe_mean", "default_loss_fn", "ipo_loss_fn")
    losses = source.definitions("src/prime_rl/trainer/rl/loss.py", names, {"LossOutputs": SimpleNamespace})
    settings = SimpleNamespace(adv_tau=1.0, kl_tau=1e-3, dppo_mask_low=0.2, dppo_mask_high=0.2, ipo_threshold=0.1)

    def known(name: str) -> Known:
        def loss(c: Call) -> Any:
            total = c.new[0].sum() * 0.0
            for new, old, advantages, mask in zip(*c.lists, strict=True):
                inputs = SimpleNamespace(
                    trainer_logprobs=new,
                    inference_logprobs=old,
                    advantages=advantages,
                    loss_mask=mask,
                    loss_weights=None,
                )
                total = total + getattr(losses, f"{name}_loss_fn")(inputs, settings).loss
            return total / c.tokens * c.ranks

        return adapted(name, loss)

    def described(name: str, weigh: Callable[[Any, Any], Any]) -> Known:
        def loss(c: Call) -> Any:
            s_B1 = ((c.new - c.old).detach() * c.mask).sum(-1, keepdim=True)
            weight_B1 = weigh(s_B1, c.mask.sum(-1, keepdim=True).clamp(min=1))
            return -(weight_B1 * c.advantages * c.new * c.mask).sum() / c.tokens * c.ranks

        return adapted(f"{name}, as PR 3384 describes it", loss)

    def even(s_B1: torch.Tensor, length_B1: torch.Tensor) -> torch.Tensor:
        return (s_B1 / length_B1).abs() <= 1e-3

    for name in ("default", "ipo"):
        yield known(name)
    yield described("seq_tis", lambda s_B1, length_B1: s_B1.exp().clamp(max=2.0))
    yield described("seq_mis", lambda s_B1, length_B1: s_B1.exp() * even(s_B1, length_B1))
    yield described("geo_mask", even)


def openrlhf(source: Source) -> Iterator[Known]:
    """OpenRLHF's losses with the sizes of the mini-batch, and one without; ``tis`` types with pi_old = pi."""
    space = vars(source.definitions("openrlhf/models/utils.py", ("masked_mean",)))
    losses = source.definitions("openrlhf/models/loss.py", ("aggregate_loss", "PolicyLoss"), space)

    def known(name: str, sizes: bool = True, **settings: Any) -> Known:
        module = losses.PolicyLoss(**settings)

        def loss(c: Call) -> Any:
            more = {"dp_size": c.ranks, "batch_num_tokens": c.tokens, "global_batch_size": c.responses} if sizes else {}
            if "enable_vllm_is_correction" in settings:
                return module(c.new, c.new.detach(), c.advantages, c.mask, rollout_log_probs=c.old, **more)[0]
            return module(c.new, c.old, c.advantages, c.mask, **more)[0]

        return adapted(name, loss)

    gspo = {"policy_loss_type": "gspo", "clip_eps_low": GSPO[0], "clip_eps_high": GSPO[1]}
    yield known("gspo", **gspo)
    yield known("gspo, without the mini-batch's sizes", sizes=False, **gspo)
    yield known("ppo")
    yield known("ppo, dual clip", dual_clip=3.0)
    for kind, bounds in (("tis", [0.5, 5.0]), ("icepop", [0.5, 5.0]), ("seq-mask-tis", [0.999, 1.002])):
        settings = {"vllm_is_correction_type": kind, "vllm_is_truncated_threshold": bounds}
        yield known(f"ppo, one update, {kind}", enable_vllm_is_correction=True, **settings)


def nemo_rl(source: Source) -> Iterator[Known]:
    """NeMo-RL's ``ClippedPGLossFn`` on its data layout, which has a first column without a prediction; no KL term."""
    space = vars(source.definitions("nemo_rl/algorithms/utils.py", ("masked_mean", "calculate_kl")))
    kinds = source.definitions(
        "nemo_rl/algorithms/loss/interfaces.py", ("LossType", "MetricNormalizer", "LossInputType")
    )
    space = {**space, **vars(kinds), "LossFunction": object}
    losses = source.definitions("nemo_rl/algorithms/loss/loss_functions.py", ("ClippedPGLossFn",), space)

    def known(name: str, clip: Sequence[float] = PPO, one_update: bool = False, **settings: Any) -> Known:
        off = ("disable_ppo_ratio", "use_kl_in_reward", "use_on_policy_kl_approximation", "force_on_policy_ratio")
        off += ("use_cispo", "sequence_level_importance_ratios", "use_importance_sampling_correction")
        nothing = (
            "ratio_clip_c",
            "kl_input_clamp_value",
            "kl_output_clamp_value",
            "truncated_importance_sampling_type",
        )
        nothing += ("truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min")
        own = {"ratio_clip_min": clip[0], "ratio_clip_max": clip[1], "reference_policy_kl_type": "k3"}
        own |= {"reference_policy_kl_penalty": 0.0, "token_level_loss": True, "positive_example_nll_weight": 0.0}
        function = losses.ClippedPGLossFn(
            SimpleNamespace(**dict.fromkeys(off, False) | dict.fromkeys(nothing) | own | settings)
        )

        def loss(c: Call) -> Any:
            pad = partial(torch.nn.functional.pad, pad=(1, 0))
            data = {"token_mask": pad(c.mask.to(c.new.dtype)), "advantages": pad(c.advantages)}
            data |= {"prev_logprobs": pad(c.new.detach() if one_update else c.old), "generation_logprobs": pad(c.old)}
            data["sample_mask"] = c.mask.any(-1).to(c.new.dtype)
            return function(c.new, data, torch.tensor(c.responses), torch.tensor(c.tokens))[0] * c.ranks

        return adapted(name, loss)

    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    corrected = {"use_importance_sampling_correction": True, "one_update": True}
    yield known("gspo", GSPO, **gspo)
    yield known("gspo, one update, importance sampling", GSPO, **gspo, **corrected)
    yield known("grpo")
    yield known("grpo, by response", token_level_loss=False)
    yield known("grpo, dual clip", ratio_clip_c=3.0)
    yield known("cispo", use_cispo=True)
    yield known("reinforce", disable_ppo_ratio=True)
    masks = {"truncated_importance_sampling_ratio": 1.002, "truncated_importance_sampling_ratio_min": 0.999}
    yield known(
        "grpo, one update, seq-mask-tis", truncated_importance_sampling_type="seq-mask-tis", **masks, **corrected
    )


def areal(source: Source) -> Iterator[Known]:
    """AReaL's losses on packed tokens, weighed by the share of the tokens as its engine does, and once without."""
    names = ("_compute_sequence_level_ratio_and_advantages", "ppo_actor_loss_fn", "sapo_loss_fn")
    losses = source.definitions("areal/utils/functional/functional.py", names)
    m2po = source.definitions("areal/trainer/ppo/actor.py", ("_apply_m2po_masking", "_get_m2po_loss_mask"))

    def known(name: str, level: str, weighed: bool = True, m2: float | None = None, **settings: Any) -> Known:
        def loss(c: Call) -> Any:
            rows, width = c.mask.shape
            packed = {"importance_sampling_level": level, "cu_seqlens": torch.arange(rows + 1) * width}
            packed |= {"logprobs": c.new.flatten(), "old_logprobs": c.old.flatten()}
            packed |= {"advantages": c.advantages.flatten(), "loss_mask": c.mask.flatten()}
            if "eps_clip" in settings:
                packed["proximal_logprobs"] = packed["old_logprobs"]
            if m2:
                now, of_rollout = packed["logprobs"].detach(), packed["old_logprobs"]
                mask = m2po._apply_m2po_masking(of_rollout, now, packed["loss_mask"], m2)
                packed |= {"proximal_logprobs": now, "loss_mask": mask}
            function = losses.ppo_actor_loss_fn if "eps_clip" in settings else losses.sapo_loss_fn
            share = int(c.mask.sum()) / c.tokens * c.ranks if weighed else 1.0
            return function(**packed, **settings)[0] * share

        return adapted(name, loss)

    gspo = {"eps_clip": GSPO[0], "eps_clip_higher": GSPO[1]}
    yield known("gspo", "sequence", **gspo)
    yield known("gspo, without its engine's weights", "sequence", weighed=False, **gspo)
    yield known("grpo", "token", eps_clip=0.2)
    yield known("grpo, dual clip", "token", eps_clip=0.2, c_clip=3.0)
    yield known("grpo, one update, m2po", "token", m2=0.04, eps_clip=0.2)
    for level in ("token", "sequence"):
        yield known(f"sapo, {level}", level, tau_pos=1.0, tau_neg=1.05)


def roll(source: Source) -> Iterator[Known]:
    """ROLL's variants of its agentic worker, aggregated as its ``loss_agg_mode`` says; A is 0 on masked tokens there.

    ``segment`` has one ratio per turn, so that what is between turns counts by design. GSPO is its worker for
    verifiable rewards with ``importance_sampling=seq``.
    """
    names = ["agg_loss", "masked_mean", "masked_sum", "compute_approx_kl"]
    functionals = source.definitions("roll/utils/functionals.py", names)
    segments = source.definitions("roll/pipeline/agentic/utils.py", ("compute_segment_masked_mean",))
    scores = {"get_episode_scores": lambda advantages: advantages.amax(-1) + advantages.amin(-1)}
    space = {**vars(functionals), **scores, "current_platform": SimpleNamespace(device_type="cpu")}
    variants = ("ppo", "tis", "topr", "cispo", "kimi15", "vanilla")
    names = [f"ActorWorker._compute_{name}{'_pg' * (name == 'vanilla')}_loss" for name in variants]
    methods = source.definitions("roll/pipeline/agentic/agentic_actor_pg_worker.py", names, space)

    def known(name: str, mode: str = "seq-mean-token-mean", segment: bool = False) -> Known:
        def loss(c: Call) -> Any:
            pipeline = SimpleNamespace(pg_clip=0.2, use_pg_clip_range=False, dual_clip_loss=False, loss_agg_mode=mode)
            self = SimpleNamespace(
                **{"pipeline_config": pipeline, "_cached_metrics": {}, "_topr_sample_logged": True},
                **{"_cispo_config_logged": True, "_kimi15_config_logged": True},
                _get_or_cache_config=lambda key, default: default,
            )
            advantages, sizes = c.advantages * c.mask, ({"response_mask": c.tokens}, {"response_mask": c.responses})
            mask = c.mask.long()
            log_ratio = c.new - c.old
            ratio = (segments.compute_segment_masked_mean(log_ratio, mask) if segment else log_ratio).exp()
            arguments = {
                "ppo": (ratio, advantages, mask, *sizes),
                "tis": (ratio, c.new, c.old, mask, advantages, None, *sizes),
                "topr": (ratio, c.new, c.old, advantages, advantages),
                "kimi15": (ratio, c.new, c.old, advantages),
            }.get(name, (ratio, c.new, advantages))
            method = getattr(methods, f"_compute_{name}{'_pg' * (name == 'vanilla')}_loss")
            terms = method(self, *arguments)
            return functionals.agg_loss(terms, mask, mode, c.tokens, c.responses) * c.ranks

        return adapted(f"{name}, {mode}{', segment' if segment else ''}", loss)

    names = ["ActorWorker.loss_func", "ActorWorker.compute_sample_weights"]
    worker = source.definitions("roll/pipeline/rlvr/actor_worker.py", names, vars(functionals))

    def gspo(mode: str) -> Known:
        pipeline = SimpleNamespace(
            **{"importance_sampling": "seq", "loss_agg_mode": mode, "use_pg_clip_range": True, "rl_loss_coef": 1.0},
            **{"pg_clip_low": GSPO[0], "pg_clip_high": GSPO[1], "entropy_loss_coef": 0.0},
            **{"enable_old_logprobs_recompute": True, "dual_clip_loss": False, "use_kl_loss": False},
            **{"difficulty_loss_weight": False, "length_loss_weight": False},
            train_infer_correction=SimpleNamespace(is_weight=SimpleNamespace(enabled=False)),
        )

        def loss(c: Call) -> Any:
            sizes = {"batch_num_tokens": c.tokens, "global_valid_samples": c.responses}
            batch = {"response_mask": torch.nn.functional.pad(c.mask, (1, 0)), "advantages": c.advantages}
            batch |= dict.fromkeys(("ref_log_probs", "train_infer_is_weight", "input_ids"), c.old)
            data = SimpleNamespace(batch=batch, meta_info={k: {"response_mask": size} for k, size in sizes.items()})
            self = SimpleNamespace(
                pipeline_config=pipeline,
                strategy=SimpleNamespace(op_compute_log_probs=lambda **_: c.new),
                get_old_log_probs_with_cache=lambda *_: c.old,
            )
            self.compute_sample_weights = partial(worker.compute_sample_weights, self)
            return worker.loss_func(self, data, None)[0] * c.ranks

        return adapted(f"gspo, {mode}", loss)

    for mode in ("seq-mean-token-mean", "seq-mean-token-sum"):
        yield gspo(mode)
    for name in variants:
        yield known(name)
    yield known("ppo", "token-mean")
    yield known("tis", segment=True)
    yield known("ppo", segment=True)


def open_instruct(source: Source) -> Iterator[Known]:
    """open-instruct's losses, divided by the tokens of the mini-batch; ``rho`` with pi_old = pi."""
    path = "open_instruct/grpo_utils.py"
    names = ("GRPOLossType", "compute_rho_correction", "_sequence_level_mean", "_rho_drop_masks", "compute_grpo_loss")
    losses = source.definitions(path, names, {"RhoCorrection": SimpleNamespace})
    masked_mean = source.definitions("open_instruct/rl_utils.py", ("masked_mean",)).masked_mean

    def known(name: str, rho: bool = False) -> Known:
        kind = getattr(losses.GRPOLossType, name)
        settings = SimpleNamespace(
            **{"loss_fn": kind, "clip_lower": 0.2, "clip_higher": 0.272, "use_rho_correction": True},
            **{"rho_mask_sequence_level": True, "rho_mask_tv_divergence": False, "rho_mask_lower_bound": 0.999},
            **{"rho_mask_upper_bound": 1.001, "rho_clamp_lower_bound": 0.0, "rho_clamp_upper_bound": 2.0},
        )

        def loss(c: Call) -> Any:
            old = c.new.detach() if rho else c.old
            weights = torch.ones_like(c.new)
            if rho:
                weights = losses.compute_rho_correction(old, c.old, c.mask, c.advantages, settings).weights
            terms, _, _ = losses.compute_grpo_loss(c.new, (c.new - old).exp(), c.advantages, None, settings, weights)
            return masked_mean(terms, c.mask, None, c.tokens) * c.ranks

        return adapted(f"{name}{', one update, rho mask by response' if rho else ''}", loss)

    yield from (known("dapo"), known("dapo", rho=True), known("cispo"))


def tinker(source: Source) -> Iterator[Known]:
    """Tinker's losses, which run on its servers, written from its documentation; sums over the tokens of all responses.

    ``gspo`` from tinker-docs.thinkingmachines.ai/tinker/losses/gspo, ``sequence_ratio_mask`` being the response.
    """

    def summed(c: Call, terms_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(c.mask, terms_BT, 0.0).sum() * c.ranks

    def clipped(c: Call, ratio_BT: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return summed(c, -torch.min(ratio_BT * c.advantages, ratio_BT.clamp(1 - low, 1 + high) * c.advantages))

    def ratio(c: Call) -> torch.Tensor:
        return torch.where(c.mask, c.new - c.old, 0.0).exp()

    def gspo(c: Call) -> torch.Tensor:
        length_B1 = c.mask.sum(-1, keepdim=True).clamp(min=1)
        mean_B1 = torch.where(c.mask, c.new.detach() - c.old, 0.0).sum(-1, keepdim=True) / length_B1
        return clipped(c, (mean_B1 + c.new - c.new.detach()).exp(), *GSPO)

    yield adapted("gspo, as documented", gspo)
    yield adapted("importance_sampling, as documented", lambda c: summed(c, -ratio(c) * c.advantages))
    yield adapted("ppo, as documented", lambda c: clipped(c, ratio(c), *PPO))
    yield adapted(
        "cispo, as documented", lambda c: summed(c, -ratio(c).detach().clamp(0.0, 4.0) * c.advantages * c.new)
    )
    yield adapted("dro, as documented", lambda c: summed(c, 0.05 / 2 * (c.new - c.old) ** 2 - c.advantages * c.new))


#: Each code base by a file that only it has.
CODE_BASES: Final = {
    "verl": ("verl/trainer/ppo/core_algos.py", verl),
    "verl-recipe": ("gvpo/gvpo_core_algos.py", verl_recipe),
    "TRL": ("trl/trainer/grpo_trainer.py", trl),
    "SkyRL": ("skyrl/backends/skyrl_train/utils/ppo_utils.py", skyrl),
    "slime": ("slime/utils/ppo_utils.py", slime),
    "prime-rl": ("src/prime_rl/trainer/rl/loss.py", prime_rl),
    "OpenRLHF": ("openrlhf/models/loss.py", openrlhf),
    "NeMo-RL": ("nemo_rl/algorithms/loss/loss_functions.py", nemo_rl),
    "AReaL": ("areal/utils/functional/functional.py", areal),
    "ROLL": ("roll/pipeline/agentic/agentic_actor_pg_worker.py", roll),
    "open-instruct": ("open_instruct/grpo_utils.py", open_instruct),
    "Tinker": ("tinker_cookbook/rl/train.py", tinker),
}
