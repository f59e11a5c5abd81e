"""What ``dry_run=true`` says: in ten lines, what the command would train. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omegaconf import DictConfig
from recipe.fspo.config import policy_loss_settings
from recipe.runner.launch.check_data import last_step, read_some, rows_to_try, splits_to_write
from recipe.runner.launch.check_reward import scores_of_the_usual_forms
from recipe.runner.launch.settings import DATA, files_of

from fspo.audit.expected import shares_outside
from fspo.files import INFO_FILE, read_object
from fspo.types import SequenceLossSettings

if TYPE_CHECKING:
    from recipe.fspo.start import Start

#: A usual deviation of S, nats per square root of a token.
_SIGMA: Final = 0.04


def said(start: Start) -> Iterator[str]:
    """The lines."""
    config = start.config
    actor, loss = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    yield f"algorithm: {start.facts['algo']}, advantage {config.algorithm.adv_estimator}, loss {loss.loss_mode}"
    settings = policy_loss_settings(loss)
    if settings is not None:
        yield from _clip_values(start, settings)
    batch, last = config.data.train_batch_size, last_step(config)
    rows = _rows(config)
    epochs = "" if not (rows and last) else f", {last * batch / rows:.2g} epochs"
    yield (
        f"data: {rows if rows is not None else 'not known'} rows, {batch} x {config.actor_rollout_ref.rollout.n} "
        f"responses a step in {batch // actor.ppo_mini_batch_size} mini-batches, {last or 'not known'} steps{epochs}"
    )
    examples = _examples(config)
    if examples:
        yield f"first prompt, as the model sees it: {_prompt(config, examples[0][1])!r}"
    if scores := scores_of_the_usual_forms(config, examples):
        yield "its truth scores: " + ", ".join(f"{form} {score:g}" for form, score in scores.items())
    if start.checkpoint is not None and last is not None and start.step >= last and not config.evaluate:
        yield f"no step is left: the run ends with step {last}, and {start.checkpoint} has done step {start.step}"
    elif start.checkpoint is not None:
        what = f"evaluates step {start.step}" if config.evaluate else f"begins with step {start.step + 1}"
        yield f"{what}: it loads {start.checkpoint}"
    for note in start.notes:
        yield f"note: {note}"
    yield f"folder: {config.trainer.default_local_dir}"
    yield "not checked here: " + ("; ".join(start.unsettled) or "memory, time, and what the workers load")


def _clip_values(start: Start, settings: SequenceLossSettings) -> Iterator[str]:
    """Where the clip values come from, and what they leave outside."""
    config, whose = start.config, "these leave"
    if config.fspo.clip_values == "measured":
        info = read_object(start.checkpoint.folder.parent / INFO_FILE) if start.checkpoint else {}
        if known := [one for one in info.get("clip_values_measured", ()) if one["after_step"] <= start.step]:
            settings = replace(settings, c_low=known[-1]["c_low"], c_high=known[-1]["c_high"])
            yield f"clip values: {_values(settings)}, measured by the run up to step {known[-1]['after_step']}"
        else:
            inside = f"{config.fspo.accept:.0%} of the responses inside"
            yield f"clip values: none at first, then measured on the first ten rollout batches, {inside}"
            whose = f"the published {_values(settings)} would leave"
    else:
        yield f"clip values: {_values(settings)}, kept"
    shares = _outside(settings, config.data.max_response_length)
    yield f"at sigma {_SIGMA} nats per sqrt(token) {whose} outside: {shares}"


def _values(settings: SequenceLossSettings) -> str:
    return f"c_low={settings.c_low:g} c_high={settings.c_high:g} nats per token^{settings.exponent:g}"


def _outside(settings: SequenceLossSettings, longest: int) -> str:
    """Shares of responses outside the band at two lengths."""
    lengths = [max(1, longest // 8), longest]
    shares = shares_outside(_SIGMA, lengths, settings)
    return ", ".join(f"{share:.1%} at {length} tokens" for length, share in zip(lengths, shares, strict=True))


def _rows(config: DictConfig) -> int | None:
    """Rows of the training files; None if they cannot be read here."""
    try:
        if "train" in splits_to_write(config):
            return int(config.data.offline_task.n_train)
        return sum(read_some(Path(file), 1)[1] for file in files_of(config, DATA[0]))
    except (OSError, ValueError):
        return None


def _examples(config: DictConfig) -> list[tuple[str, Any]]:
    """A row of each data source, with its place."""
    if "train" in splits_to_write(config):
        from recipe.math.data.offline_task import rows

        return [("row 0", rows(1, config.data.offline_task.seed, "train")[0])]
    return rows_to_try(config, 1)


def _prompt(config: DictConfig, row: Any) -> str:
    """The prompt of a row in the model's chat template."""
    from transformers import AutoTokenizer

    model = config.actor_rollout_ref.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.get("tokenizer_path") or model.path, local_files_only=True)
        arguments = config.data.get("apply_chat_template_kwargs") or {}
        messages = row[config.data.get("prompt_key", "prompt")]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments))
    except Exception as error:
        return f"not known ({type(error).__name__})"
