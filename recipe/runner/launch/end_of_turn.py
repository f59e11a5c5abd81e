"""Whether vLLM stops where the model's chat template ends a turn, and the stop token that it needs if it does not.

vLLM stops at the eos of its tokenizer, and at ``eos_token_id`` of a generation_config.json: the model's, or that of the
folder which ``engine_kwargs.vllm.generation_config`` names. A base model may have neither: Qwen3-8B-Base ends a turn
with ``<|im_end|>``, and its eos is ``<|endoftext|>`` alone. Its responses may run on into a turn of the user that the
model invents, and rewards and lengths are of all that. Such a run gets a file of its own, in its folder. It holds
``eos_token_id`` alone, because vLLM would take sampling settings from it, too.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch import check_model
from recipe.runner.launch.problems import MachineProblem, Refused

#: The folder whose generation_config.json vLLM reads; without it that of the model.
SETTING: Final = "actor_rollout_ref.rollout.engine_kwargs.vllm.generation_config"
FILE: Final = "generation_config.json"
_MODEL: Final = "actor_rollout_ref.model"
_SHOWN: Final = 40


def add_stop_token(config: DictConfig, begun: bool, elsewhere: bool = False) -> tuple[list[int], str]:
    """Let vLLM stop where the chat template ends a turn, by ``SETTING``; in place.

    A run that has ``begun`` keeps its stop tokens: its settings name the file in its folder, or none.

    Returns:
        The ``eos_token_id`` of the file that the run's folder gets; empty if it gets none. And a note, empty where
        vLLM stops at the end of a turn, a :class:`MachineProblem` where the model is ``elsewhere``.

    Raises:
        Refused: if the tokenizer or a file of stop tokens cannot be loaded.
    """
    if any(check_model.model_problems(config.actor_rollout_ref.model)) or config.actor_rollout_ref.rollout.get(
        "ignore_eos"
    ):
        return [], ""  # the checks say what is wrong; or responses are to have the full length
    present, token, note = _missing_stop(config, elsewhere)
    if token is None:
        return [], note
    if begun:
        return (
            [],
            f"{note}. The run began so, and goes on so; for another beginning give a new trainer.default_local_dir",
        )
    OmegaConf.update(config, SETTING, config.trainer.default_local_dir, force_add=True)
    file = f"{config.trainer.default_local_dir}/{FILE}"
    return [*present, token], f"{note}: token {token} is added in {file}, for training and validation"


def keep_stop_tokens(config: DictConfig, settings: Mapping[str, Any]) -> None:
    """Take the file of stop tokens of a run with these settings, if the command names none; in place."""
    of_run: Any = settings
    for name in SETTING.split("."):
        of_run = of_run.get(name) if isinstance(of_run, Mapping) else None
    if of_run is not None and OmegaConf.select(config, SETTING) is None:
        OmegaConf.update(config, SETTING, of_run, force_add=True)


def _missing_stop(config: DictConfig, elsewhere: bool) -> tuple[list[int], int | None, str]:
    """The tokens at which vLLM stops; the one that ends a turn, if it is not among them; what there is to say."""
    from transformers import AutoTokenizer

    model = config.actor_rollout_ref.model
    place = model.get("tokenizer_path") or model.path
    if elsewhere and not (check_model.model_folder(place) and check_model.model_folder(model.path)):
        return [], None, MachineProblem(f"whether vLLM stops where the chat template of {place} ends a turn")
    trust, named = bool(model.get("trust_remote_code")), OmegaConf.select(config, SETTING)
    source = model.path if named in (None, "auto", "vllm") else named
    # verl gives vLLM the model's folder, whatever tokenizer_path says.
    of_vllm = OmegaConf.select(config, "actor_rollout_ref.rollout.engine_kwargs.vllm.tokenizer") or model.path
    try:
        tokenizer, eos = (AutoTokenizer.from_pretrained(name, trust_remote_code=trust) for name in (place, of_vllm))
        stops = (stop for stop in (eos.eos_token_id, *generation_eos(source, trust)) if stop is not None)
        present = list(dict.fromkeys(stops))
    except Exception as error:  # whatever a broken file, or a model's own code, raises
        folders = " or ".join(dict.fromkeys((repr(place), repr(of_vllm))))
        file = "" if source == model.path else f", or {SETTING}={source}"
        raise Refused(
            f"{_MODEL}: tokenizer or configuration of {folders}{file} cannot be loaded, and vLLM and verl need them: "
            f"download them again, or give another folder ({type(error).__name__}: {error})"
        ) from error
    if not (template := model.get("custom_chat_template") or tokenizer.chat_template):
        return present, None, ""
    tokenizer.chat_template = template
    text, token = end_of_turn(tokenizer, config.data.get("apply_chat_template_kwargs") or {})
    if token in present:
        return present, None, ""
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in present)
    only = f"vLLM stops at {names} only" if present else "vLLM stops at no token"
    if token is not None:
        return present, token, f"the chat template ends a turn with {text!r} ({token}), and {only}"
    return present, None, f"{text}, and {only}. If responses run on, {remedy()}"


def remedy() -> str:
    """How a person gives a stop token: the end of a sentence."""
    return f"name a folder with a {FILE} whose eos_token_id lists the token that ends yours: ++{SETTING}=FOLDER"


def end_of_turn(tokenizer: Any, arguments: Any) -> tuple[str, int | None]:
    """The special token that the chat template writes first after an assistant's content, blanks aside, and its id.

    Where there is none, a sentence that says what there is instead, and None.

    Args:
        tokenizer: With a chat template.
        arguments: Further ones of ``apply_chat_template``, as the run's prompts have them.
    """
    marker, refused = f"content{uuid.uuid4().hex}", ""
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": marker}]
    try:
        text = tokenizer.apply_chat_template(chat, **{**arguments, "tokenize": False, "add_generation_prompt": False})
    except Exception as error:  # of Jinja, or whatever the template's own code raises
        text, refused = "", f" ({type(error).__name__}: {error})"
    _, content, rest = text.rpartition(marker)
    rest = rest.strip()
    if not content:
        return f"the chat template does not render an assistant's message after a user's{refused}", None
    if not rest:
        return "the chat template writes nothing after an assistant's content", None
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    special |= {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if starts := [token for token in special if token and rest.startswith(token)]:
        return (longest := max(starts, key=len)), special[longest]
    return f"the chat template ends a turn with ordinary text, {rest[:_SHOWN]!r}", None


def generation_eos(folder: str, trust_remote_code: bool) -> list[int]:
    """``eos_token_id`` of generation_config.json, or without that file of config.json, as vLLM reads them."""
    from transformers import AutoConfig, GenerationConfig

    try:
        settings = GenerationConfig.from_pretrained(folder)
    except OSError:
        of_model = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        settings = GenerationConfig.from_model_config(of_model)
    eos = settings.eos_token_id
    return list(eos) if isinstance(eos, Iterable) else [] if eos is None else [eos]
