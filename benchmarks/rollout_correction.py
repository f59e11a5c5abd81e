"""What each rule of verl's rollout correction does by response length: ``python -m benchmarks.rollout_correction RUN``.

RUN is a run of the demo that kept its rollouts and a checkpoint of every step (docs/async.md has its command). The
responses of step t were sampled by vLLM from the weights after step t - 1. Their log-ratio to the weights after step
t - 1 + k, computed here in float32, is what the rules see of a response that is k versions old; k = 0 leaves the
difference between vLLM and the actor. Every rejection rule gets the threshold at which it removes the same share of all
responses, so that only lengths differ. Writes the tables into docs/async.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

from benchmarks.pages import markdown, write_section
from fspo.fairness import equal_mass_starts, length_reweighting_error, merge_bins
from fspo.sums import FINE_LENGTH_EDGES, length_bin

PAGE = Path(__file__).resolve().parents[1] / "docs" / "async.md"
#: verl's rules for whole responses, and the band of FSPO for comparison.
RULES = [f"seq_{over}_{k}" for over in ("sum", "mean", "max") for k in ("k1", "k2", "k3") if (over, k) != ("max", "k1")]
RULES.append("fspo")
STALENESS = (1, 4)
REJECTED, BINS = 0.15, 5


def load(checkpoint: Path) -> torch.nn.Module:
    """The policy of a checkpoint, in float32."""
    state = torch.load(checkpoint / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint / "actor" / "huggingface"))
    model.load_state_dict({name: getattr(value, "to_local", lambda v=value: v)() for name, value in state.items()})
    return model.float().eval()


@torch.no_grad()
def log_ratios(rollout: Path, model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """log pi - log pi_rollout of the tokens of each recorded response, [L]."""
    data = torch.load(rollout, weights_only=False)["tensordict"]
    columns = (data[name].unbind() for name in ("input_ids", "responses", "rollout_log_probs"))
    for tokens, response, sampled in zip(*columns, strict=True):
        logits = model(tokens[None]).logits[0, -len(response) - 1 : -1]
        yield logits.log_softmax(-1).gather(1, response[:, None])[:, 0] - sampled


def stale(run: Path, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios and mask, [B, T], of all responses that have weights k versions younger than their own."""
    rollouts = {int(path.parents[1].name): path for path in run.glob("rollouts/**/0/tq_batch.pt")}
    rows = []
    for step, path in sorted(rollouts.items()):
        checkpoint = run / "checkpoints" / f"global_step_{step - 1 + k}"
        if checkpoint.is_dir():
            rows += log_ratios(path, load(checkpoint))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)


def kept_at(rule: str, ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[str, np.ndarray]:
    """The threshold at which verl's ``rule`` removes REJECTED of the responses, and which it keeps, [B]."""
    if rule == "fspo":
        z_B = ratio_BT.sum(1).abs() / mask_BT.sum(1).sqrt()
        clip = float(z_B.quantile(1 - REJECTED))
        return f"c = {clip:.3g}", (z_B <= clip).numpy()
    _, over, k = rule.split("_")
    value_BT = {"k1": ratio_BT, "k2": ratio_BT**2 / 2, "k3": ratio_BT.exp() - 1 - ratio_BT}[k] * mask_BT
    value_B = {"sum": value_BT.sum(1), "mean": value_BT.sum(1) / mask_BT.sum(1), "max": value_BT.amax(1)}[over]
    bound = float(value_B.abs().quantile(1 - REJECTED))
    threshold = f"{np.exp(-bound):.6g}_{np.exp(bound):.6g}" if k == "k1" else f"{bound:.3g}"
    mask_BT, _ = compute_rollout_rejection_mask(ratio_BT, mask_BT, rule, threshold)
    return threshold, mask_BT.any(1).numpy()


def tables(run: Path) -> str:
    """All tables."""
    parts = []
    for k in (0, *STALENESS):
        ratio_BT, mask_BT = stale(run, k)
        length_B, s_B = mask_BT.sum(1).long(), ratio_BT.sum(1)
        fine_B = length_bin(length_B).numpy()
        size = len(FINE_LENGTH_EDGES) - 1
        total_K = np.bincount(fine_B, minlength=size).astype(float)
        starts = equal_mass_starts(total_K, BINS)
        bin_B = np.searchsorted(starts, fine_B, side="right") - 1
        edges = [int(FINE_LENGTH_EDGES[start]) for start in starts]

        def by_bin(values_B: np.ndarray, bin_B: np.ndarray = bin_B) -> list[str]:
            means = [float(values_B[bin_B == b].mean()) for b in range(BINS)]
            return [f"{x:.1e}" if max(means) < 0.01 else f"{x:.3f}" for x in means]

        head = [f"{k} versions old, {len(s_B)} responses", "threshold"]
        head += [f"L {edge}..." for edge in edges] + ["LRE, debiased"]
        rows = [["mean of \\|S\\|, nats", "", *by_bin(s_B.abs().numpy()), ""]]
        if k:
            for text in ("2.0", "0.5_2.0"):
                weight_BT, _ = compute_rollout_correction_weights(ratio_BT, mask_BT, "sequence", text)
                rows.append(["rollout_is=sequence: mean weight", text, *by_bin(weight_BT[:, 0].numpy()), ""])
            for rule in RULES:
                threshold, kept_B = kept_at(rule, ratio_BT, mask_BT)
                kept_K = np.bincount(fine_B, kept_B, size)
                error = length_reweighting_error(merge_bins(kept_K[None], starts), merge_bins(total_K[None], starts))
                lre = f"{error.debiased.value:.3f} [{error.debiased.low:.3f}, {error.debiased.high:.3f}]"
                rows.append([f"{'' if rule == 'fspo' else 'rollout_rs='}{rule}: kept", threshold, *by_bin(kept_B), lre])
        parts.append(markdown(head, rows))
    return "\n\n".join(parts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_correction", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder with rollouts/ and a checkpoint of each step")
    torch.set_num_threads(1)
    write_section(PAGE, "rollout correction", tables(parser.parse_args().run))


if __name__ == "__main__":
    main()
