"""Whether vLLM stops where the model's chat template ends a turn, and the stop token that it needs if it does not.

vLLM stops at the eos of its tokenizer and at those of generation_config.json; verl 0.9.1 gives it no other stop tokens.
A base model may have neither: Qwen3-8B-Base ends a turn with ``<|im_end|>``, and its eos is ``<|endoftext|>`` alone.
Its responses may run on into a turn of the user that the model invents, and rewards and lengths are of all that.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch import inputs
from recipe.runner.launch.values import MachineProblem, PreflightError

#: Tokens at which vLLM stops besides; in verl's group for settings of others. The server adds them to every request.
STOPS: Final = "actor_rollout_ref.rollout.custom.stop_token_ids"
_MODEL: Final = "actor_rollout_ref.model"
_SHOWN: Final = 40


def stop_tokens(
    engines: DictConfig, template_arguments: Any, before: Mapping[str, Any] | None, elsewhere: bool = False
) -> tuple[list[int], str]:
    """The stop tokens of a run, with the one that the chat template asks for; and a note that says so, or why not.

    The note is empty where vLLM stops at the end of a turn anyway, and a :class:`MachineProblem` where the model is
    ``elsewhere``. A run that goes on keeps its stop tokens.

    Args:
        engines: The group ``actor_rollout_ref``.
        template_arguments: ``data.apply_chat_template_kwargs``.
        before: Settings of the run that goes on, nested; None for one that begins.
        elsewhere: The run will be on another machine: nothing is downloaded.

    Raises:
        PreflightError: if the tokenizer cannot be loaded.
    """
    stops = list(OmegaConf.select(engines, STOPS.partition(".")[2]) or [])
    if any(inputs.model_problems(engines.model)):
        return stops, ""  # which is said by the checks
    kept: Any = before
    for name in STOPS.split("."):  # a file of somebody else's may hold anything there
        kept = kept.get(name) if isinstance(kept, Mapping) else None
    kept = [token for token in kept if type(token) is int] if isinstance(kept, list) else []
    stops = list(dict.fromkeys([*kept, *stops]))
    token, note = _missing_stop(engines, template_arguments, stops, elsewhere)
    if token is not None and before is None:
        stops.append(token)
        note += f": token {token} is added to {STOPS}, for training and validation"
    elif token is not None:
        note += ". The run began so, and goes on so; for another beginning give a new run.dir"
    return stops, note


def _missing_stop(
    engines: DictConfig, template_arguments: Any, stops: Sequence[int], elsewhere: bool
) -> tuple[int | None, str]:
    """The token that ends a turn, if vLLM does not stop at it, else None; and what there is to say."""
    from transformers import AutoTokenizer

    model, rollout = engines.model, engines.rollout
    place = model.get("tokenizer_path") or model.path
    if rollout.get("ignore_eos"):
        return None, ""  # responses are to have the full length
    if elsewhere and not (inputs.model_folder(place) and inputs.model_folder(model.path)):
        return None, MachineProblem(f"whether vLLM stops where the chat template of {place} ends a turn")
    trust = bool(model.get("trust_remote_code"))
    # verl gives vLLM the model's folder, whatever tokenizer_path says.
    of_vllm = OmegaConf.select(rollout, "engine_kwargs.vllm.tokenizer") or model.path
    try:
        tokenizer, eos = (AutoTokenizer.from_pretrained(name, trust_remote_code=trust) for name in (place, of_vllm))
        present = [stop for stop in (eos.eos_token_id, *generation_eos(model.path, trust), *stops) if stop is not None]
    except Exception as error:  # whatever a broken file, or a model's own code, raises
        folders = " or ".join(dict.fromkeys((repr(place), repr(of_vllm))))
        raise PreflightError(
            f"{_MODEL}: tokenizer or configuration of {folders} cannot be loaded, and vLLM and verl need both: "
            f"download them again, or give another folder ({type(error).__name__}: {error})"
        ) from error
    if not (template := model.get("custom_chat_template") or tokenizer.chat_template):
        return None, ""
    tokenizer.chat_template = template
    text, token = end_of_turn(tokenizer, template_arguments or {})
    if token in present:
        return None, ""
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in dict.fromkeys(present))
    only = f"vLLM stops at {names} only" if present else "vLLM stops at no token"
    if token is not None:
        return token, f"the chat template ends a turn with {text!r} ({token}), and {only}"
    return None, (
        f"{text}, and {only}. No stop token is added; if responses run on, give the token that ends yours: "
        f"++{STOPS}=[ID]"
    )


def end_of_turn(tokenizer: Any, arguments: Any) -> tuple[str, int | None]:
    """The special token that the chat template writes first after an assistant's content, blanks aside, and its id.

    Where there is none, a sentence that says what there is instead, and None.

    Args:
        tokenizer: With a chat template.
        arguments: Further ones of ``apply_chat_template``, as the run's prompts have them.
    """
    arguments = {**arguments, "tokenize": False, "add_generation_prompt": False}
    marker, refused = f"content{uuid.uuid4().hex}", ""
    # A template may want a system's message or refuse it, and want texts or lists of parts.
    for wrap in (str, lambda text: [{"type": "text", "text": text}]):
        for roles in (("user", "assistant"), ("system", "user", "assistant")):
            chat = [{"role": role, "content": wrap(marker if role == "assistant" else "1")} for role in roles]
            try:
                _, there, rest = tokenizer.apply_chat_template(chat, **arguments).rpartition(marker)
            except Exception as error:  # of Jinja, or whatever the template's own code raises
                refused = refused or f" ({type(error).__name__}: {error})"
                continue
            if there:
                return _first_token(tokenizer, rest.strip())
    return f"the chat template does not render an assistant's message{refused}", None


def _first_token(tokenizer: Any, rest: str) -> tuple[str, int | None]:
    if not rest:
        return "the chat template writes nothing after an assistant's content", None
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = tokenizer.added_tokens_decoder.items()
    special |= {token.content: number for number, token in added if token.special}
    if starts := [token for token in special if token and rest.startswith(token)]:
        return (longest := max(starts, key=len)), special[longest]
    return f"the chat template ends a turn with ordinary text, {rest[:_SHOWN]!r}", None


def generation_eos(model: str, trust_remote_code: bool) -> list[int]:
    """``eos_token_id`` of generation_config.json, or without that file of config.json, as vLLM reads them."""
    from transformers import AutoConfig, GenerationConfig

    try:
        settings = GenerationConfig.from_pretrained(model)
    except OSError:
        of_model = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        settings = GenerationConfig.from_model_config(of_model)
    eos = settings.eos_token_id
    return list(eos) if isinstance(eos, Iterable) else [] if eos is None else [eos]
