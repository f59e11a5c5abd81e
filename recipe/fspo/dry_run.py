"""What ``dry_run=true`` says: in ten lines, what the command would train. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from typing import Any, Final

from omegaconf import DictConfig
from recipe.fspo.config import policy_loss_settings
from recipe.runner.launch.check_data import last_step, rows_to_try, splits_to_write, training_rows
from recipe.runner.launch.run_folder import Start
from recipe.runner.launch.trials import scores_of_the_usual_forms

from fspo.audit.expected import shares_outside
from fspo.files import INFO_FILE, read_object
from fspo.losses import LOSSES
from fspo.types import NO_CLIP, SequenceLossSettings

#: A usual standard deviation of S, nats per square root of a token.
_SIGMA: Final = 0.04


def said(start: Start) -> Iterator[str]:
    """The lines."""
    config = start.config
    actor, loss = config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.policy_loss
    folder, advantages = Path(config.trainer.default_local_dir), config.algorithm.adv_estimator
    yield f"algorithm: {start.facts['algo']}, with the loss {loss.loss_mode} and advantages by {advantages}"
    if (settings := policy_loss_settings(loss)) is not None:
        yield from _clip_values(start, settings)
    batch, rows = config.data.train_batch_size, training_rows(config.data)
    last = last_step(config, rows)
    steps = "the number of steps is not known" if last is None else f"{last} steps"
    epochs = f" are {last * batch / rows:.2g} epochs" if rows and last else ""
    yield (
        f"data: {'its rows cannot be counted here' if rows is None else f'{rows} rows'}; a step takes {batch} prompts "
        f"with {config.actor_rollout_ref.rollout.n} responses each, in {batch // actor.ppo_mini_batch_size} "
        f"mini-batches; {steps}{epochs}"
    )
    if examples := _examples(config):
        yield f"first prompt, as the model sees it: {_prompt(config, examples[0][1])!r}"
    try:
        scores = scores_of_the_usual_forms(config, examples)
        by_form = ", ".join(f"{form} {score:g}" for form, score in scores.items())
    except Exception as error:  # also of rows that are not written yet, which no trial has seen
        by_form = f"{type(error).__name__}: {error}"
    if by_form:
        yield f"reward of the right answer to it, by how a response writes it: {by_form}"
    if start.checkpoint is not None and last is not None and start.step >= last and not config.evaluate:
        yield f"no step is left: the run ends with step {last}, and {start.checkpoint} has done step {start.step}"
    elif start.checkpoint is not None:
        what = f"evaluates step {start.step}" if config.evaluate else f"begins with step {start.step + 1}"
        yield f"{what}: it loads {start.checkpoint}"
    for note in start.notes:
        yield f"note: {note}"
    keeps = f"keeps {config.trainer.max_actor_ckpt_to_keep or 'all its'} checkpoints"
    does = keeps if config.trainer.save_freq > 0 else "saves none"
    place = next(place for place in (folder, *folder.parents) if place.exists())
    yield f"folder: {folder}; the run {does}, and {disk_usage(place).free / 2**30:.0f} GiB are free"
    for problem in start.unsettled:
        yield f"to be seen on the machine of the run: {problem}"
    yield "not checked: memory, time, and what the workers load"


def _clip_values(start: Start, settings: SequenceLossSettings) -> Iterator[str]:
    """Where the clip values come from, and what they leave outside."""
    config, loss = start.config, LOSSES[start.config.actor_rollout_ref.actor.policy_loss.loss_mode]
    if min(settings.c_low, settings.c_high) >= NO_CLIP:
        yield "clip values: none, nothing is clipped"
        return
    is_published = (settings.c_low, settings.c_high) == (loss.settings.c_low, loss.settings.c_high)
    whose, what = loss.source if is_published else "given", "clip values, which stay as they are"
    if config.fspo.clip_values == "measured":
        info = read_object(start.checkpoint.folder.parent / INFO_FILE) if start.checkpoint else {}
        if known := [one for one in info.get("clip_values_measured", ()) if one["after_step"] <= start.step]:
            settings = replace(settings, c_low=known[-1]["c_low"], c_high=known[-1]["c_high"])
            whose, what = f"measured up to step {known[-1]['after_step']}", "clip values, with which the run goes on"
        else:
            inside = f"{config.fspo.accept:.0%} of the responses with a gradient lie inside"
            yield f"clip values: none at first; the first ten rollout batches set them so that {inside}"
            what = "for comparison"
    lengths = [max(1, config.data.max_response_length // 8), config.data.max_response_length]
    shares = zip(shares_outside(_SIGMA, lengths, settings), lengths, strict=True)
    outside = " and ".join(f"{share:.1%} of the responses of {length} tokens" for share, length in shares)
    yield (
        f"{what}: c_low={settings.c_low:g} c_high={settings.c_high:g} nats per token^{settings.exponent:g} ({whose}) "
        f"leave {outside} outside, where S has a deviation of {_SIGMA} nats per sqrt(token)"
    )


def _examples(config: DictConfig) -> list[tuple[str, Any]]:
    """A row of each data source, with its place."""
    if "train" in splits_to_write(config.data).values():
        from recipe.math.data.offline_task import rows

        return [("row 0", rows(1, config.data.offline_task.seed, "train")[0])]
    return rows_to_try(config.data, 1)


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
