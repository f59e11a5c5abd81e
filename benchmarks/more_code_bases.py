"""Policy losses of further code bases, as in :mod:`benchmarks.code_bases`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch

from benchmarks.checkouts import Call, Known, Source, adapted
from benchmarks.code_bases import GSPO, PPO, kl_of_samples, mean_of_samples
from fspo.check_loss.call import Config


def miles(source: Source) -> Iterator[Known]:
    """miles' losses, of lists of samples, each its mean over tokens; OPSM removes responses with A < 0."""
    names = ("_safe_clamp_log_ratio", "_safe_exp_neg_ppo_kl", "compute_policy_loss", "compute_gspo_kl")
    space = {"Namespace": SimpleNamespace, "_LOG_RATIO_EXP_CLAMP": 20.0}
    path = "miles/backends/training_utils/loss_hub/math_utils.py"
    losses = source.definitions(path, (*names, "compute_opsm_mask"), space)

    def known(name: str, dual: float | None = None, opsm: bool = False) -> Known:
        def loss(c: Call) -> Any:
            kl = kl_of_samples(losses, c, name)
            inside = c.mask.flatten()
            kl, a = (torch.where(inside, x, 0.0) for x in (kl, c.advantages.flatten()))
            terms, _ = losses.compute_policy_loss(kl, a, *(GSPO if name == "gspo" else PPO), dual)
            return mean_of_samples(losses, c, terms, opsm)

        return adapted(f"{name}{', dual clip' if dual else ''}{', OPSM' if opsm else ''}", loss)

    yield from (known("gspo"), known("gspo", opsm=True), known("grpo"), known("grpo", dual=3.0))


def agent_lightning(source: Source) -> Iterator[Known]:
    """agent-lightning's loss on verl, with one row for each rollout; it sums A that its trainer has divided."""

    def mean(x: Any, mask: Any) -> Any:
        return (x * mask).sum() / (mask.sum() + 1e-8)

    space = {"verl_F": SimpleNamespace(masked_mean=mean, masked_sum=lambda x, mask: (x * mask).sum())}
    names = ("normalize_advantages_by_rollout", "compute_policy_loss_per_rollout_mean")
    losses = source.definitions("agentlightning/verl/per_rollout_loss.py", names, space)

    def loss(c: Call) -> Any:
        rollouts, sizes = range(len(c.mask)), {"dp_size": c.ranks}
        a = losses.normalize_advantages_by_rollout(c.advantages, c.mask, rollouts, num_trained_rows=c.responses)
        low, high = PPO
        settings = Config(clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, global_batch_info=sizes)
        return losses.compute_policy_loss_per_rollout_mean(c.old, c.new, a, c.mask, config=settings)[0]

    yield adapted("per_rollout_mean", loss)


def easyr1(source: Source) -> Iterator[Known]:
    """EasyR1's losses; its actor weighs each micro-batch by its share of the tokens, whatever the averaging."""

    def mean(x: Any, mask: Any, dim: Any = None, eps: float = 1e-8) -> Any:
        return (x * mask).sum(dim) / (mask.sum(dim) + eps)

    space = {"VF": SimpleNamespace(masked_mean=mean)}
    losses = source.definitions("verl/trainer/core_algos.py", ("average_loss", "compute_policy_loss"), space)

    def known(kind: str, mode: str, clip: Sequence[float] = PPO) -> Known:
        def loss(c: Call) -> Any:
            bounds = {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1], "clip_ratio_dual": 3.0}
            more = {"tau_positive": 1.0, "tau_negative": 1.05, "loss_type": kind, "loss_avg_mode": mode}
            value, _ = losses.compute_policy_loss(c.old, c.new, c.advantages, c.mask, **bounds, **more)
            return value * c.mask.sum() * c.ranks / c.tokens

        return adapted(f"{kind}, {mode}", loss)

    for mode in ("token", "seq"):
        yield known("gspo", mode, GSPO)
    yield from (known("gspo_token", "seq", GSPO), known("default", "token"), known("cispo", "token", (0.2, 0.28)))
    yield known("sapo", "token")


def molt(source: Source) -> Iterator[Known]:
    """labs-molt's losses with the sizes of the mini-batch; corrections of the rollout with pi_old = pi."""
    space: dict[str, Any] = vars(source.definitions("molt/models/utils.py", ("masked_mean",)))
    names = [f"{name}_policy_loss" for name in ("ppo", "gspo", "cispo")]
    functions = source.definitions("molt/models/loss.py", names, space)
    space |= {"get_policy_loss": lambda name: getattr(functions, f"{name}_policy_loss")}
    module = source.definitions("molt/models/loss.py", ("masked_sum", "agg_loss", "PolicyLoss"), space).PolicyLoss

    def known(name: str, rollout: bool = False, **settings: Any) -> Known:
        function = module(**settings)

        def loss(c: Call) -> Any:
            old = c.new.detach() if rollout else c.old
            sizes = {"dp_size": c.ranks, "batch_num_tokens": c.tokens, "global_batch_size": c.responses}
            return function(c.new, old, c.advantages, c.mask, c.old if rollout else None, **sizes)[0]

        return adapted(name, loss)

    by_response = {"loss_agg_mode": "seq-mean-token-mean"}
    gspo = {"loss_mode": "gspo", "clip_eps_low": GSPO[0], "clip_eps_high": GSPO[1]}
    yield known("gspo, seq-mean-token-mean", **gspo, **by_response)
    yield known("gspo, token-mean", **gspo)
    yield known("ppo")
    yield known("cispo", loss_mode="cispo", clip_eps_high=1.2)
    geo = {"is_correction_level": "geo", "is_correction_threshold": [0.999, 1.002]}
    yield known("ppo, one update, geo", rollout=True, **geo)


def rlinf(source: Source) -> Iterator[Known]:
    """RLinf's actor loss, a mean over the tokens of a micro-batch, divided by the number of micro-batches."""
    names = ("_reduce_mean", "_reduce_sum", "masked_mean")
    space = vars(source.definitions("rlinf/utils/utils.py", names))
    space = {**space, "masked_mean_ratio": None}
    losses = source.definitions("rlinf/algorithms/losses.py", ("compute_ppo_actor_loss",), space)

    def known(name: str, dual: float | None = None) -> Known:
        def loss(c: Call) -> Any:
            new, old, a = (x.float() for x in (c.new, c.old, c.advantages))
            low, high = PPO
            value, _ = losses.compute_ppo_actor_loss(new, old, low, high, a, c.mask, dual)
            return value * len(c.mask) / c.responses * c.ranks

        return adapted(name, loss)

    yield from (known("grpo"), known("grpo, dual clip", 3.0))


def vespo(source: Source) -> Iterator[Known]:
    """The loss of VESPO's authors, a mean over the micro-batch, which their actor scales by its share of the rows."""

    def mean(x: Any, mask: Any, axis: Any = None) -> Any:
        return (x * mask).sum(axis) / (mask.sum(axis) + 1e-8)

    masked = SimpleNamespace(masked_mean=mean, masked_sum=lambda x, mask, axis=None: (x * mask).sum(axis))
    agg_loss = source.definitions("verl/trainer/ppo/core_algos.py", ("agg_loss",), {"verl_F": masked}).agg_loss
    path, name = "recipe/vespo/code/core_algos.py", "compute_policy_loss_vespo"
    function = source.definitions(path, (name,), {"agg_loss": agg_loss}).compute_policy_loss_vespo

    def known(mode: str) -> Known:
        def loss(c: Call) -> Any:
            settings = Config(policy_loss=Config())
            value, _ = function(c.old, c.new, c.advantages, c.mask, mode, settings)
            return value * len(c.mask) / c.responses * c.ranks

        return adapted(f"vespo, {mode}", loss)

    yield from (known("token-mean"), known("seq-mean-token-mean"))


def relax(source: Source) -> Iterator[Known]:
    """Relax's losses, of lists of samples, each its mean over tokens; OPSM removes responses with A < 0.

    Its trainer does not hand ``--eps-clip-c`` on, so there is no dual clip.
    """
    names = ("compute_policy_loss", "compute_gspo_kl", "compute_sapo_loss", "compute_opsm_mask")
    losses = source.definitions("relax/utils/training/ppo_utils.py", names, {"Namespace": SimpleNamespace})

    def known(name: str, opsm: bool = False) -> Known:
        def loss(c: Call) -> Any:
            kl = kl_of_samples(losses, c, name)
            if name == "sapo":
                terms, _ = losses.compute_sapo_loss(kl, c.advantages.flatten(), 1.0, 1.05)
            else:
                terms, _ = losses.compute_policy_loss(kl, c.advantages.flatten(), *(GSPO if name == "gspo" else PPO))
            return mean_of_samples(losses, c, terms, opsm)

        return adapted(f"{name}{', OPSM' if opsm else ''}", loss)

    yield from (known("gspo"), known("gspo", opsm=True), known("grpo"), known("grpo", opsm=True), known("sapo"))


class _SentBack:
    """Stands for the scale with which a trainer's method sends its loss back by itself, and keeps that loss."""

    loss: Any = None

    def __rmul__(self, loss: Any) -> _SentBack:
        self.loss = loss
        return self

    def backward(self) -> None:
        """Nothing: the checks take the gradient."""


def unirl(source: Source) -> Iterator[Known]:
    """UniRL's algorithms for text, a mean over the micro-batch, which its trainer scales by its share of the rows.

    They get packed responses without padding; masked tokens between counted ones stay in them, with ``loss_mask``.
    """
    folder = "unirl/algorithms/"
    space: dict[str, Any] = {"StageAlgorithm": object, "AlgorithmStepResult": SimpleNamespace}
    helpers = ["typed_conditions", "_grpo_clip_loss", "_resolve_clip_range_from_schedule"]
    helpers += ["rollout_replay_logp_absdiff", "rollout_replay_k3"]
    space |= vars(source.definitions(f"{folder}base.py", helpers, space))
    space |= vars(source.definitions(f"{folder}grpo.py", ("GRPO",), space))
    space |= vars(source.definitions(f"{folder}gspo.py", ("GSPO",), space))
    for name in ("cppo", "dppo"):
        space |= vars(source.definitions(f"{folder}{name}.py", (f"_{name}_mask", f"_{name}_loss", name.upper()), space))
    space |= vars(source.definitions(f"{folder}drpo.py", ("_drpo_loss", "DRPO"), space))

    def known(name: str, mode: str = "", **settings: Any) -> Known:
        stage = SimpleNamespace()
        settings |= {"loss_agg_mode": mode} if mode else {}
        algorithm = space[name.upper()](pipeline=SimpleNamespace(ar=stage), sampling_temperature=1.0, **settings)

        def loss(c: Call) -> Any:
            spans = [slice(int(on[0]), int(on[-1]) + 1) for row in c.mask if len(on := row.nonzero()[:, 0])]
            rows = [b for b, row in enumerate(c.mask) if row.any()]
            if not rows:
                return c.new[:, :1].sum() * 0.0

            def packed(values: Any) -> Any:
                return torch.cat([values[b, span] for b, span in zip(rows, spans, strict=True)])

            stage.replay = lambda *_, **__: packed(c.new)
            segment = SimpleNamespace(tokens=packed(c.mask), log_probs=packed(c.old), rollout_log_probs=None)
            segment.loss_mask, segment.lengths = packed(c.mask), torch.tensor([x.stop - x.start for x in spans])
            scale = _SentBack()
            algorithm.compute_loss_and_backward(
                conditions={}, segment=segment, advantages=c.of_response[rows], training_progress=0.0, loss_scale=scale
            )
            return scale.loss * len(rows) / c.responses * c.ranks

        return adapted(f"{name}{f', {mode}' if mode else ''}", loss)

    yield known("gspo", clip_range=GSPO[0], clip_range_high=GSPO[1])
    for mode in ("token-mean", "seq-mean-token-mean"):
        yield known("grpo", mode, clip_range=PPO[0], clip_range_high=PPO[1])
    for name in ("dppo", "cppo", "drpo"):
        yield known(name, "seq-mean-token-sum-norm")


#: Each code base by a file that only it has.
MORE_CODE_BASES: Final = {
    "miles": ("miles/backends/training_utils/loss_hub/math_utils.py", miles),
    "agent-lightning": ("agentlightning/verl/per_rollout_loss.py", agent_lightning),
    "EasyR1": ("verl/trainer/core_algos.py", easyr1),
    "labs-molt": ("molt/models/loss.py", molt),
    "RLinf": ("rlinf/algorithms/losses.py", rlinf),
    "Relax": ("relax/utils/training/ppo_utils.py", relax),
    "UniRL": ("unirl/algorithms/gspo.py", unirl),
    "VESPO": ("recipe/vespo/code/core_algos.py", vespo),
}
