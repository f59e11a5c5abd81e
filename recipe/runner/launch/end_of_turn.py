"""Whether vLLM stops where the model's chat template ends a turn, and the stop token that it needs if it does not.

vLLM stops at the eos of its tokenizer, and at ``eos_token_id`` of a generation_config.json: the model's, or that of the
folder which ``engine_kwargs.vllm.generation_config`` names. A base model may have neither: Qwen3-8B-Base ends a turn
with ``<|im_end|>``, and its eos is ``<|endoftext|>`` alone. Its responses may run on into a turn of the user that the
model invents, and rewards and lengths are of all that. Such a run gets a file of its own, in its folder. It holds
``eos_token_id`` alone, because vLLM would take sampling settings from it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.launch.checks import model_folder
from recipe.runner.launch.run_folder import GENERATION_FILE
from recipe.runner.launch.settings import Refused

#: The folder whose generation_config.json vLLM reads; without it that of the model.
SETTING: Final = "actor_rollout_ref.rollout.engine_kwargs.vllm.generation_config"
#: How a person gives a stop token.
REMEDY: Final = (
    f"If responses run on, name a folder with a {GENERATION_FILE} whose eos_token_id lists the token that ends yours: "
    f"++{SETTING}=FOLDER"
)


def add_stop_token(config: DictConfig, of_run: Mapping[str, Any] | None, elsewhere: bool) -> tuple[list[int], str]:
    """Let vLLM stop where the chat template ends a turn, by ``SETTING`` of the resolved ``config``, in place.

    ``of_run`` are the settings of the run that goes on, which keeps its file. ``elsewhere`` nothing is said of files
    that are not on this machine. Returns ``eos_token_id`` of the file that the run's folder gets, and a note; both are
    empty where vLLM stops at the end of a turn. Raises Refused if tokenizer or stop tokens cannot be loaded.
    """
    from transformers import AutoTokenizer

    kept = OmegaConf.select(OmegaConf.create(dict(of_run or {})), SETTING)
    if kept is not None and OmegaConf.select(config, SETTING) is None:
        OmegaConf.update(config, SETTING, kept, force_add=True)
    model = config.actor_rollout_ref.model
    trust, named = bool(model.get("trust_remote_code")), OmegaConf.select(config, SETTING)
    source = model.path if named in (None, "auto", "vllm") else named
    places = (model.get("tokenizer_path") or model.path, model.path, source)
    if elsewhere and not all((folder := model_folder(place)) and any(folder.iterdir()) for place in places):
        return [], ""
    try:
        # verl gives vLLM the model's folder, whatever tokenizer_path says.
        tokenizer, of_vllm = (AutoTokenizer.from_pretrained(place, trust_remote_code=trust) for place in places[:2])
        present = [stop for stop in (of_vllm.eos_token_id, *generation_eos(source, trust)) if stop is not None]
    except Exception as error:  # whatever a broken file, or a model's own code, raises
        keys = ("actor_rollout_ref.model.tokenizer_path", "actor_rollout_ref.model.path", SETTING)
        given = ", ".join(f"{key}={value}" for key in keys if (value := OmegaConf.select(config, key)))
        raise Refused(
            f"{given}: a tokenizer or configuration of these cannot be loaded: download it again, or give another "
            f"folder ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    tokenizer.chat_template = model.get("custom_chat_template") or tokenizer.chat_template
    if not tokenizer.chat_template:  # on the hub; else the checks refuse the run
        return [], ""
    token = end_of_turn(tokenizer, config.data.get("apply_chat_template_kwargs") or {})
    if token in present:
        return [], ""
    stops = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in dict.fromkeys(present)) or "no token"
    if token is None:
        return [], f"the chat template ends a turn with no special token, and vLLM stops at {stops}. {REMEDY}"
    OmegaConf.update(config, SETTING, config.trainer.default_local_dir, force_add=True)
    text = tokenizer.convert_ids_to_tokens(token)
    return [*dict.fromkeys(present), token], (
        f"the chat template ends a turn with {text!r} ({token}), and vLLM stops at {stops}: token {token} is added in "
        f"{config.trainer.default_local_dir}/{GENERATION_FILE}, for training and validation"
    )


def end_of_turn(tokenizer: Any, arguments: Any) -> int | None:
    """The special token that the chat template writes first after an assistant's content, blanks aside.

    ``arguments``: of ``apply_chat_template``, as the run's prompts have them.
    """
    marker = "content7f3a9c51d2e84b06"  # in no template
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": marker}]
    try:
        text = tokenizer.apply_chat_template(chat, **{**arguments, "tokenize": False, "add_generation_prompt": False})
    except Exception:  # of Jinja, or whatever the template's own code raises
        return None
    rest = text.rpartition(marker)[2].strip() if marker in text else ""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    special |= {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    starts = [token for token in special if rest.startswith(token)]
    return special[max(starts, key=len)] if starts else None


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
