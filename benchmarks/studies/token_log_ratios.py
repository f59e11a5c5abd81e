"""Token log-ratios of SmolLM2-135M on many responses, for the studies of masks and of clocks.

``python -m benchmarks.studies.token_log_ratios OUT MODEL TRAIN.parquet`` works outside verl: vLLM samples, transformers
computes log-probabilities and gradients, and the loss is :func:`fspo.losses.sequence_policy_loss` with AdamW as in a
run. So responses that no update uses are measured, at a tenth of what a run takes for them.

A round: the policy answers TRAIN prompts and those to measure, N responses each, and takes one update on the first
ones; the next round goes on from there. OUT/round-N.npz has, for every token of a measured response, ``old``, the
log-probability under the policy that wrote it (vLLM's, fp32), and less that: ``stale``, after the update (fp32);
``later``, the same for the first half of what round N - LAG measured; and for the first ``--half`` prompts
``mismatch``, before the update in bf16 (transformers' autocast of fp32 weights, as on GPUs). ``bf16`` is what the
update changes in bf16, ``logits32`` what it changes where the logits alone are fp32. Interrupted, the command goes on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.models.two_words import compute_score
from fspo.files import atomic_path
from fspo.losses import ALGORITHMS, sequence_policy_loss

N: Final = 4
#: Prompts of the update of a round.
TRAIN: Final = 8
#: ``later`` is measured after this many more updates.
LAG: Final = 3
LEARNING_RATE: Final = 1e-5
#: Tokens of one call of the model, padding included.
_BUDGET: Final = 4096

#: Token ids of a prompt, and of a response to it.
Pair = tuple[list[int], list[int]]
#: Token ids of a prompt, and the words it asks for.
Task = tuple[list[int], str]
#: Of the last LAG rounds: the responses to measure later, and their ``old``.
Past = list[tuple[list[Pair], np.ndarray]]


def rounds(folder: Path) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
    """Number and arrays of the rounds of a record, in order."""
    numbers = sorted(int(file.stem.removeprefix("round-")) for file in folder.glob("round-*.npz"))
    return ((number, np.load(folder / f"round-{number}.npz")) for number in numbers)


def packs(pairs: Sequence[Pair], budget: int) -> Iterator[list[int]]:
    """Indices of responses of like length; padded, at most ``budget`` tokens together, or one response."""
    rows: list[int] = []
    for row in sorted(range(len(pairs)), key=lambda row: len(pairs[row][0]) + len(pairs[row][1])):
        if rows and (len(rows) + 1) * (len(pairs[row][0]) + len(pairs[row][1])) > budget:
            yield rows
            rows = []
        rows.append(row)
    yield rows


def log_probs(model: Any, pairs: Sequence[Pair], bf16: bool = False) -> list[torch.Tensor]:
    """Log-probabilities of the responses' tokens, [T]; in bf16 [T, 2], the second ones of logits in fp32.

    Padding is on the right, where causal attention does not see it.
    """
    ids = [torch.tensor(prompt + response) for prompt, response in pairs]
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = model.model(pad_sequence(ids, batch_first=True)).last_hidden_state
        own = torch.cat([hidden[b, len(x) - 1 : len(x) + len(y) - 1] for b, (x, y) in enumerate(pairs)])
        heads = [model.lm_head(own).float()]
    if bf16:
        heads.append(own.bfloat16().float() @ model.lm_head.weight.bfloat16().float().T)
    token_T1 = torch.tensor([token for _, response in pairs for token in response])[:, None]
    chosen = torch.cat([logits.gather(1, token_T1) - logits.logsumexp(1, keepdim=True) for logits in heads], 1)
    return list((chosen if bf16 else chosen[:, 0]).split([len(response) for _, response in pairs]))


@torch.no_grad()
def measured(model: Any, pairs: Sequence[Pair], bf16: bool = False) -> np.ndarray:
    """Log-probabilities of all responses' tokens, one response after the other."""
    parts: dict[int, torch.Tensor] = {}
    for rows in packs(pairs, _BUDGET):
        parts |= zip(rows, log_probs(model, [pairs[row] for row in rows], bf16), strict=True)
    return torch.cat([parts[row] for row in range(len(pairs))]).numpy()


def update(model: Any, optimizer: Any, pairs: Sequence[Pair], old: Sequence[np.ndarray], advantage: np.ndarray) -> None:
    """One step on FSPO's loss, the mean over these responses."""
    optimizer.zero_grad()
    for rows in packs(pairs, _BUDGET // 4):
        new = log_probs(model, [pairs[row] for row in rows])
        new_BT, old_BT, mask_BT = (
            pad_sequence(list(values), batch_first=True)
            for values in (new, [torch.from_numpy(old[row]) for row in rows], [torch.ones(len(x)) for x in new])
        )
        advantage_BT = torch.from_numpy(advantage[rows]).float()[:, None].expand_as(new_BT)
        loss = sequence_policy_loss(new_BT, old_BT, advantage_BT, mask_BT, ALGORITHMS["fspo"])
        (loss.loss_B.sum() / len(pairs)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _round(
    engine: Any, model: Any, optimizer: Any, tasks: Sequence[Task], asked: argparse.Namespace, past: Past
) -> dict[str, np.ndarray]:
    """What OUT/round-N.npz holds; the first TRAIN tasks are those of the update."""
    from vllm import SamplingParams

    engine.apply_model(lambda sampler: sampler.load_weights(model.state_dict().items()))
    sampling = SamplingParams(n=N, temperature=1.0, max_tokens=asked.tokens, logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in tasks], sampling)
    pairs, reward, log_prob = [], [], []
    for (prompt, truth), output in zip(tasks, outputs, strict=True):
        for response in output.outputs:
            pairs.append((prompt, list(response.token_ids)))
            chosen = zip(response.logprobs, response.token_ids, strict=True)
            log_prob.append([position[token].logprob for position, token in chosen])
            reward.append(compute_score("two_words", response.text, truth))
    rewards = np.array(reward).reshape(-1, N)
    advantage = ((rewards - rewards.mean(1, keepdims=True)) * N / (N - 1)).ravel()  # leave one out, as algo=rloo has
    size = TRAIN * N
    held, length = pairs[size:], np.array([len(response) for _, response in pairs])
    own, old = [np.float32(values) for values in log_prob[:size]], np.concatenate(log_prob[size:])
    few, early = held[: asked.half * N], held[: len(held) // 2]
    old_few, old_early = (old[: sum(len(response) for _, response in part)] for part in (few, early))
    before_T2 = measured(model, few, bf16=True)
    update(model, optimizer, pairs[:size], own, advantage[:size])
    past.append((early, old_early))
    later = measured(model, past[0][0]) - past.pop(0)[1] if len(past) > LAG else np.zeros(0)
    bf16, logits32 = (measured(model, few, bf16=True) - before_T2).T
    return {
        "length": length[size:],
        "prompt": np.repeat(np.arange(len(tasks)), N)[size:],
        "advantage": advantage[size:].astype(np.float32),
        "reward": rewards.ravel()[size:].astype(np.float32),
        "truncated": length[size:] == asked.tokens,
        "old": old.astype(np.float16),
        "mismatch": (before_T2[:, 0] - old_few).astype(np.float16),
        "bf16": bf16.astype(np.float16),
        "logits32": logits32.astype(np.float16),
        "later": later.astype(np.float16),
        "stale": (measured(model, held) - old).astype(np.float16),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("data", type=Path, help="of benchmarks.models two-words")
    parser.add_argument("--rounds", type=int, default=8, help="(8)")
    parser.add_argument("--tokens", type=int, default=256, help="of a response, at most (256)")
    parser.add_argument("--measure", type=int, default=64, help="prompts to measure in a round (64)")
    parser.add_argument("--half", type=int, default=64, help="of them, those measured in bf16, too (64)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (0)")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    state = asked.out / "state.pt"
    sizes = {name: getattr(asked, name) for name in ("tokens", "measure", "half", "seed")}
    new = {"rounds": 0, "past": [], "sizes": sizes}
    saved: dict[str, Any] = torch.load(state, weights_only=False) if state.exists() else new
    if saved["sizes"] != sizes:
        parser.error(f"{state} was begun with {saved['sizes']}: give these, or another folder than {asked.out}")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM

    from recipe.runner.cpu.patches import keep_vllm_linear_weights

    keep_vllm_linear_weights()
    rows = pq.read_table(asked.data).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    tasks = list(zip(prompts, (row["reward_model"]["ground_truth"] for row in rows), strict=True))
    engine = LLM(
        str(asked.model),
        dtype="float32",
        max_model_len=max(map(len, prompts)) + asked.tokens,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=256,
    )
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    past = saved["past"]
    if saved["rounds"]:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for number in range(saved["rounds"], asked.rounds):
        seed = 1000 * asked.seed + number
        chosen = np.random.default_rng(seed).permutation(len(tasks))[: TRAIN + asked.measure]
        torch.manual_seed(seed)  # the sampler is in this process
        arrays = _round(engine, model, optimizer, [tasks[i] for i in chosen], asked, past)
        with atomic_path(asked.out / f"round-{number}.npz") as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)
        with atomic_path(state) as temporary:
            weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"rounds": number + 1, "past": past, "sizes": sizes, **weights}, temporary)
        print(f"round {number}: lengths {arrays['length'].mean():.0f} in the mean", flush=True)


if __name__ == "__main__":
    main()
