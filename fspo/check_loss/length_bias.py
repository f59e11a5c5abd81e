"""What a policy loss does to responses of different lengths: by its normalisation, and by its clip. Defined here.

Nothing of it is right or wrong; it is measured, on the gradient alone, so that any loss can be compared with any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from fspo.acceptance import acceptance_counts, stack_sums
from fspo.check_loss.call import Batch, LossError, PolicyLoss, synthetic_batch
from fspo.check_loss.token_kinds import TokenKinds
from fspo.fairness import LengthReweightingError, equal_mass_starts
from fspo.kept import UnclippedWeight, kept_output
from fspo.records import Array, read_sequences
from fspo.sums import FINE_LENGTH_EDGES, SequenceSums

#: The views of acceptance that are computed of what a loss keeps (fspo.acceptance.VIEWS).
VIEWS: Final = ("symmetric", "active", "mass")
LENGTHS: Final = (4, 16, 64, 256)
#: Of synthetic log-ratios, in nats per sqrt(token): about that of the demo, and one at which clips of tokens act.
DISPERSIONS: Final = (0.03, 0.1)
_MINI_BATCHES, _RESPONSES, _LONGEST = 40, 128, 512
_PROBED, _TOKENS, _PROBE = 5, 12, 1e-4
_NEWTON_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Gradient on policy by length, with A = 1, times the number of responses.

    Attributes:
        per_token: Mean over the tokens of a response of LENGTHS tokens.
        per_response: Sum over its tokens.
        exponent: a in ``per_token ~ L**a``: 0 if every token counts alike, -1 if every response does.
    """

    per_token: tuple[float, ...]
    per_response: tuple[float, ...]
    exponent: float


def normalisation(loss: PolicyLoss) -> Normalisation:
    """How the gradient of a response grows with its length, on policy."""
    batch = synthetic_batch(LENGTHS, (0.01,) * len(LENGTHS), (1.0,) * len(LENGTHS)).on_policy()
    gradient_BT, _ = loss.gradient(batch)
    whole = [-float(row.sum()) * len(LENGTHS) for row in gradient_BT]
    mean = [each / length for each, length in zip(whole, LENGTHS, strict=True)]
    exponent = math.nan
    if min(mean) > 0:
        exponent = float(np.polyfit(np.log(LENGTHS), np.log(mean), 1)[0])
    return Normalisation(tuple(mean), tuple(whole), exponent)


def find_weight(loss: PolicyLoss) -> UnclippedWeight | None:
    """By what the loss weighs a token near the policy that sampled, found by moving one log-ratio at a time.

    ``token`` if the gradient of a token grows with its own ratio, ``prefix`` if with those up to it, ``sequence`` or
    ``length_normalised`` if with all of its response, ``none`` if with none; None if it does something else.
    """
    batch = synthetic_batch((_TOKENS,) * 4, (0.01,) * 4, (1.0,) * 4, seed=3).on_policy()
    noise_BT = 1e-6 * torch.linspace(-1, 1, 4 * _TOKENS, dtype=torch.float64).reshape(4, _TOKENS)
    near = dataclasses.replace(batch, log_prob_BT=batch.old_log_prob_BT + noise_BT)
    moved_BT = near.log_prob_BT.clone()
    moved_BT[:, _PROBED] += _PROBE
    before_BT, after_BT = (
        loss.gradient(each)[0].abs() for each in (near, dataclasses.replace(near, log_prob_BT=moved_BT))
    )
    response_T = ((after_BT.log() - before_BT.log()) / _PROBE).median(dim=0).values
    if not bool(torch.isfinite(response_T).all()):
        return None
    earlier, own, later = response_T[:_PROBED], float(response_T[_PROBED]), response_T[_PROBED + 1 :]

    def all_near(values: torch.Tensor, value: float) -> bool:
        return bool(((values - value).abs() < 0.02).all())

    if all_near(response_T, 0.0):
        return "none"
    if all_near(response_T, 1 / _TOKENS):
        return "length_normalised"
    if all_near(response_T, own):
        return "sequence"
    if all_near(earlier, 0.0) and abs(own - 1) < 0.02:
        return "token" if all_near(later, 0.0) else "prefix" if all_near(later, 1.0) else None
    return None


@dataclass(frozen=True, slots=True)
class Clip:
    """What a loss keeps, by length.

    Attributes:
        kept: Mean over the responses of the share of its weight that each keeps, with its own A.
        errors: LRE of each of VIEWS.
        starts: Shortest length of each bin.
        kept_J: Mean share kept in each bin.
    """

    kept: float
    errors: dict[str, LengthReweightingError]
    starts: tuple[int, ...]
    kept_J: tuple[float, ...]


def clip_by_length(loss: PolicyLoss, weight: UnclippedWeight, samples: Sequence[Batch]) -> Clip:
    """What the loss keeps of the responses of several mini-batches, by length bins of equal mass.

    Args:
        loss: The loss.
        weight: What it weighs by without its clip.
        samples: Mini-batches: the intervals resample them.
    """
    parts = []
    for batch in samples:

        def gradient(log_prob_BT: torch.Tensor, advantages_BT: torch.Tensor, batch: Batch = batch) -> torch.Tensor:
            changed = dataclasses.replace(batch, log_prob_BT=log_prob_BT, advantages_BT=advantages_BT)
            return loss.gradient(changed)[0]

        output = kept_output(
            gradient, batch.log_prob_BT, batch.old_log_prob_BT, batch.advantages_BT, batch.mask_BT, weight
        )
        parts.append(SequenceSums.zeros().add_(output))
    sums_MKF = stack_sums(parts)
    starts = equal_mass_starts(acceptance_counts(sums_MKF).total.sum(0))
    errors = {view: acceptance_counts(sums_MKF, view).error(starts) for view in VIEWS}
    active = errors["active"]
    lengths = tuple(int(edge) for edge in FINE_LENGTH_EDGES[torch.from_numpy(starts)])
    return Clip(active.rate, errors, lengths, tuple(float(rate) for rate in active.rate_K))


def synthetic(sigma: float) -> list[Batch]:
    """Mini-batches of responses of 4 to 512 tokens, A independent of S; sigma: dispersion of S, nats per sqrt(token).

    Tokens have two outcomes (:class:`~fspo.check_loss.token_kinds.TokenKinds`), half of them nearly certain, so
    that E_old[exp S] = 1 and probabilities are those of the log-ratios; float32.
    """
    rng = np.random.default_rng(0)
    kinds = TokenKinds.random(sigma, rng)
    found = []
    for _ in range(_MINI_BATCHES):
        length_B = np.exp(rng.uniform(np.log(4), np.log(_LONGEST + 1), _RESPONSES)).astype(np.int64)
        log_prob_BT, old_log_prob_BT, mask_BT = kinds.log_probs(length_B, _LONGEST, rng)
        advantage_B = torch.from_numpy(rng.choice([-1.0, 1.0], _RESPONSES))
        batch = Batch(log_prob_BT, old_log_prob_BT, advantage_B[:, None].expand_as(log_prob_BT), mask_BT)
        found.append(batch.padding(0.0).to(torch.float32))
    return found


def recorded(path: Path) -> list[Batch]:
    """The recorded mini-batches of runs, without responses with A = 0; the tokens are drawn, S, L and A are recorded.

    Records hold one S for each response. Its tokens are drawn from :class:`~fspo.check_loss.token_kinds.TokenKinds` of
    the dispersion of S / sqrt(L), and the logits of a response are moved together until they give its S. What a loss of
    sequences keeps is therefore that of the records; of a loss of tokens it depends on the drawn tokens too.

    Args:
        path: A run folder with ``sequences.jsonl`` (``fspo.record_sequences=true``), a folder of such, or an archive
            of either.

    Raises:
        LossError: If no run there has recorded sequences.
    """
    with contextlib.ExitStack() as stack:
        folder = path
        if path.is_file():
            try:
                archive = stack.enter_context(tarfile.open(path))
            except (tarfile.TarError, OSError) as error:
                raise LossError(f"{path} is no folder and no archive ({error}): give a run folder") from None
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            archive.extractall(folder, filter="data")
        runs = [read_sequences(each.parent) for each in sorted(folder.rglob("sequences.jsonl"))]
    pairs = [
        (s[a != 0], length[a != 0].astype(np.int64), a[a != 0])
        for run in runs
        if run is not None
        for s, length, a in zip(run.s, run.length, run.advantage, strict=True)
        if (a != 0).any()
    ]
    if not pairs:
        raise LossError(
            f"{path} has no sequences.jsonl with responses after the first mini-batch: record some with "
            "fspo.record_sequences=true, and give the run folder"
        )
    rng = np.random.default_rng(0)
    dispersion = float(np.std(np.concatenate([s / np.sqrt(length) for s, length, _ in pairs])))
    kinds = TokenKinds.random(dispersion, rng)
    return [_with_tokens(s, length, a, kinds, rng) for s, length, a in pairs]


def samples_with(records: Path | None) -> dict[str, list[Batch]]:
    """The mini-batches on which a command judges a clip, by name: synthetic ones, and those of ``--records``.

    Raises:
        LossError: If ``records`` is given, and has none.
    """
    if records is not None and not records.exists():
        raise LossError(f"--records {records} does not exist: give a run folder")
    found = {f"synthetic log-ratios of {sigma:g} a token": synthetic(sigma) for sigma in DISPERSIONS}
    if records is not None:
        found[f"the responses of {records}, tokens drawn"] = recorded(records)
    return found


def _with_tokens(s_B: Array, length_B: np.ndarray, a_B: Array, kinds: TokenKinds, rng: np.random.Generator) -> Batch:
    """Drawn tokens; their logits are moved by one amount per response, the new up and the old down, to give its S."""
    new_BT, old_BT, mask_BT = kinds.log_probs(length_B, int(length_B.max()), rng)
    new_logit_BT, old_logit_BT = (each - torch.log(-torch.expm1(each.clamp(max=-1e-12))) for each in (new_BT, old_BT))
    move_B1, target_B1 = torch.zeros(len(s_B), 1, dtype=torch.float64), torch.from_numpy(s_B)[:, None]
    for _ in range(_NEWTON_STEPS):
        new_BT = torch.nn.functional.logsigmoid(new_logit_BT + move_B1 / 2)
        old_BT = torch.nn.functional.logsigmoid(old_logit_BT - move_B1 / 2)
        slope_BT = (1 - (new_BT.exp() + old_BT.exp()) / 2) * mask_BT
        miss_B1 = target_B1 - ((new_BT - old_BT) * mask_BT).sum(-1, keepdim=True)
        move_B1 = move_B1 + miss_B1 / slope_BT.sum(-1, keepdim=True)
    new_BT = torch.nn.functional.logsigmoid(new_logit_BT + move_B1 / 2)
    old_BT = torch.nn.functional.logsigmoid(old_logit_BT - move_B1 / 2)
    advantages_BT = torch.from_numpy(a_B)[:, None].expand_as(new_BT)
    return Batch(new_BT, old_BT, advantages_BT, mask_BT).padding(0.0).to(torch.float32)
