"""Folders of small runs that have finished, as a report reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from library import ALGORITHMS, Audit, append_records

ACCURACY = "val-core/sums/acc/mean@1"


def drawn(exponent: float, sigma: float, drift: bool = False, batches: int = 30) -> dict[str, np.ndarray]:
    """Mini-batches of 256: S is normal with standard deviation sigma L**exponent, L log-uniform from 8 to 511."""
    draw = np.random.default_rng(0)
    length = np.exp(draw.uniform(np.log(8), np.log(512), batches * 256)).astype(int)
    std = sigma * length**exponent
    s = draw.normal(-(std**2) / 2 * drift, std)
    number = np.repeat(np.arange(batches), 256) + 1
    return {"S": s, "L": length, "A": draw.choice([-1.0, 0.0, 1.0], len(s)), "minibatch": number, "step": number}


def write_run(
    folder: Path, loss: str, data: int, accuracy: float | None = None, /, *,
    steps: int = 4, moves: float = 1.0, advantage: float = 1.0, **info: object,
) -> Path:  # fmt: skip
    """Metrics, responses whose S spreads like sqrt(L), and run.json, with these entries in it.

    Args:
        folder: The run's, which is made.
        loss: Its name in ``ALGORITHMS``.
        data: The seed of its responses, and of the run where ``info`` has no other.
        accuracy: Held-out, at the end; 0.2 and 0.5 at its two ends, and 0.01 more for each seed, if not given.
        steps: Of four mini-batches, the first before a weight has moved.
        moves: Factor of every log-ratio.
        advantage: Factor of every advantage.
        info: What ``run.json`` says beside, or instead.
    """
    folder.mkdir(parents=True)
    draw, metrics = torch.Generator().manual_seed(data), folder / "metrics.jsonl"
    settings = {"loss_mode": loss, "c_low": ALGORITHMS[loss].c_low, "c_high": ALGORITHMS[loss].c_high}
    finished = {"algo": loss.removeprefix("seq_"), "seed": data, "status": "finished", "loss": settings}
    (folder / "run.json").write_text(json.dumps(finished | info))
    audit = Audit(folder / "responses", ALGORITHMS[loss], loss=loss, run="run")
    append_records(metrics, [{"step": 0, "metrics": {ACCURACY: 0.2 + 0.01 * data if accuracy is None else 0.2}}])
    for step in range(1, steps + 1):
        for scale in (0.0, 0.03, 0.04, 0.04):
            length = (torch.rand(64, 1, generator=draw) * 180).long() + 1
            new = scale * moves * torch.randn(64, 181, generator=draw)
            a, uncut = advantage * torch.randn(64, generator=draw), torch.zeros(64, dtype=torch.bool)
            audit.add(new, torch.zeros_like(new), torch.arange(181) < length, a, truncated_B=uncut)
            audit.end_mini_batch(step)
        values = {"critic/rewards/mean": 0.1 * step, "response_length/mean": 90.0 + step}
        values |= {"fspo/clip_frac": 0.1, "fspo/lre_debiased": 0.02}
        append_records(metrics, [{"step": step, "metrics": values}])
    audit.close()
    last = 0.5 + 0.01 * data if accuracy is None else accuracy
    append_records(metrics, [{"step": steps, "metrics": {ACCURACY: last}}])
    return folder
