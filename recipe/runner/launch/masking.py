"""Secrets of a configuration, which are written nowhere: :func:`masked` stands before all that is written or printed.

Secret are the values of ``runtime_env.env_vars``, those of keys that say key, token, password or secret
(:func:`is_secret`), and what stands before the host of an address. They are written as ``***``; a reference
``${oc.env:NAME}`` is written as it is. So is any other text that comes from the environment. What is written is never
read for a value: a resumed run takes secrets from its command or its environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from recipe.runner.faults.texts import KNOWN, MASK, masked_text, masking
from recipe.runner.launch.compose import key_of, leaves, parsed, quoted, text_of

_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z][a-z0-9]*|\d+")
#: Words that make a key a secret's, wherever they stand in it.
_SECRET: Final = re.compile("passwords?|passwd|passphrase|secrets?|credentials?|apikeys?")
#: Before ``key`` and ``keys``: a column of a data set, or a key of a dictionary.
_OF_COLUMNS: Final = re.compile(
    "prompt|response|question|answer|images?|videos?|audios?|messages?|tools?|fn|teacher|data|source|label|text|input|"
    "output|target|group|sort|partition|primary|foreign|index|metric|cache|dict|value|column|reward|score|chosen|"
    "rejected|query|solution|problem|id|category|split|truth"
)
#: Before ``token`` and ``tokens``, and behind them: of a vocabulary, or a number of them.
_KINDS_OF_TOKENS: Final = re.compile(
    "bos|eos|pad|unk|sep|cls|mask|stop|start|end|special|added|image|video|audio|think|prompt|response|speculative|max|"
    "min|num|n|per|batched|draft|format|eot|call"
)
_OF_TOKENS: Final = re.compile("ids?|len|length|level|start|end|count|limit|budget|mean|sum|types?")
#: Of verl's distillation: which data source a model teaches.
_NO_SECRETS: Final = re.compile(r"(^|\.)teacher_models\.\w+\.key$")
_ENVIRONMENT: Final = re.compile(r"(^|\.)env_vars\.")
_REFERENCE: Final = re.compile(r"\$\{oc\.env:\w+\}")
#: Shorter texts are not looked for in messages, where they are words like any other.
_SHORTEST: Final = 6


def is_secret(key: str, number: bool = False) -> bool:
    """Whether the value of a key is a secret by its name, or by that of a group above it.

    ``api_key``, ``HF_TOKEN``, ``dbPassword`` and ``client_secret`` are; ``tokenizer``, ``max_tokens``, ``pad_token_id``
    and ``data.prompt_key`` are not. A number is none where it is one of tokens, or of what another word says
    (``token_penalty``, ``num_key_value_heads``).
    """
    above, _, name = key.rpartition(".")
    if is_variable(key) or (above and is_secret(above, number)):
        return True
    words = [word.lower().rstrip("0123456789") for word in _WORDS.findall(name)]
    for word, before, behind in zip(words, ["", *words], [*words[1:], ""], strict=False):
        if _SECRET.fullmatch(word):
            return True
        if number and (word == "tokens" or behind):
            continue
        if word in ("key", "keys") and not _OF_COLUMNS.fullmatch(before) and not _NO_SECRETS.search(key):
            return True
        if word in ("token", "tokens") and not (_KINDS_OF_TOKENS.fullmatch(before) or _OF_TOKENS.fullmatch(behind)):
            return True
    return False


def is_variable(key: str) -> bool:
    """Whether a key names a variable of ``runtime_env.env_vars``."""
    return _ENVIRONMENT.search(key) is not None


def is_plain_variable(key: str) -> bool:
    """Whether a key names such a variable, and no secret by its own name."""
    return is_variable(key) and not is_secret(_by_name(key))


def _by_name(key: str) -> str:
    return _ENVIRONMENT.sub(".", key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_reference(value: Any) -> bool:
    """Whether a text, or one of a list, is from the environment, as it is written."""
    return any(map(is_reference, value)) if isinstance(value, list) else bool(_REFERENCE.search(str(value)))


def masked(value: Any, key: str = "", references: Mapping[str, str] | None = None) -> Any:
    """A value as it may be written: containers by their keys, texts without the passwords of addresses.

    Args:
        value: In plain containers.
        key: Its own, with those of the groups above it.
        references: By key, what :func:`references` gives.
    """
    if isinstance(value, Mapping):
        return {name: masked(part, f"{key}.{name}" if key else str(name), references) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [masked(part, f"{key}[{index}]", references) for index, part in enumerate(value)]
    text = (references or {}).get(key, value)
    if is_secret(key, _is_number(value)):
        is_open = value is None or isinstance(value, bool) or (isinstance(text, str) and _REFERENCE.fullmatch(text))
        return text if is_open else MASK
    return masked_text(text) if isinstance(text, str) else text


def masked_word(word: str) -> str:
    """A word of a command as it may be written."""
    try:
        return masked_override(*parsed([word]))
    except (HydraException, OmegaConfBaseException):
        return masked_text(word)


def masked_override(override: Override) -> str:
    """An override as it may be written."""
    value, line = None if override.is_sweep_override() else override.value(), text_of(override)
    shown = masked(value, key_of(override))
    if shown == value or value != value:  # nan
        return line
    return f"{line.partition('=')[0]}={quoted(shown if isinstance(shown, str) else MASK)}"


def know(value: Any, key: str = "") -> None:
    """Look for the secrets of a configuration, or of a part of it, in every text from now on (:func:`masked_text`).

    Of ``env_vars`` only those whose names are a secret's: others are numbers, folders, words of any text.
    """
    if isinstance(value, Mapping):
        for name, part in value.items():
            know(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            know(part, f"{key}[{index}]")
    elif is_secret(_by_name(key), _is_number(value)) and value is not None and not isinstance(value, bool):
        names = _REFERENCE.findall(str(value))
        texts = [os.environ.get(name[len("${oc.env:") : -1], "") for name in names] or [str(value)]
        KNOWN.update(text for text in texts if len(text) >= _SHORTEST)


def references(config: DictConfig) -> dict[str, str]:
    """What stands in ``config`` in place of each text from the environment, by its key; entries of lists as ``key[0]``.

    ``config`` is not resolved yet. A variable that is not set has no reference: the value is the default in the file.
    Numbers are recorded as they are.
    """

    def reference(name: str, *default: Any) -> Any:
        return f"${{oc.env:{name}}}" if name in os.environ else oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", reference, replace=True)
    try:
        texts = {key: text for key, text in _texts(config) if _REFERENCE.search(text)}
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    return {key: text for key, text in texts.items() if isinstance(OmegaConf.select(config, key), str)}


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Key and text of every leaf that is one; a leaf that cannot be made of references has none."""
    names = node.keys() if OmegaConf.is_dict(node) else range(len(node))
    for name in names:
        below = f"{key}[{name}]" if OmegaConf.is_list(node) else f"{key}.{name}" if key else str(name)
        try:
            value = node[name]
        except (OmegaConfBaseException, ValueError, TypeError):
            continue
        if OmegaConf.is_config(value):
            yield from _texts(value, below)
        elif isinstance(value, str):
            yield below, value


def printed_problems(config: DictConfig, references: Mapping[str, str], joins: bool) -> Iterator[str]:
    """A sentence for every secret that Ray, vLLM or verl would print, or write on a command line.

    Args:
        config: Resolved.
        references: By key, what :func:`references` gives.
        joins: Whether the run joins a cluster, in which Ray hands ``runtime_env.env_vars`` on by command lines.
    """
    for group in ("ray_kwargs", "actor_rollout_ref.rollout.engine_kwargs"):
        if (part := OmegaConf.select(config, group)) is None:
            continue
        plain = OmegaConf.to_container(part, resolve=True)
        for key, value in leaves(plain, group):
            name, of_environment = key.rpartition(".")[2], is_variable(key)
            if of_environment and not joins:
                continue  # handed on by the environment of Ray itself
            if masked(value, name if of_environment else key) != value or (of_environment and key in references):
                variable = name if of_environment else "the variable that its reader knows, such as HF_TOKEN,"
                yield (
                    f"{key}={MASK}: its value would stand on command lines or in logs, which others can read; leave it "
                    f"out, and set {variable} in the environment of the processes (docs/clusters.md#secrets)"
                )


def masked_command_line() -> list[str]:
    """The words that this process was started with, as they may be written."""
    return list(map(masked_word, sys.orig_argv))


def mask_command_line() -> None:
    """Take secrets off this process's command line, which processes that it forks begin with, too."""
    if (shown := masked_command_line()) != sys.orig_argv:
        import setproctitle  # verl's, or Ray's own copy

        os.environ["SPT_NOENV"] = "1"  # else it wipes the environment
        setproctitle.setproctitle(" ".join(shown))


@contextlib.contextmanager
def masked_output(overrides: Iterable[Override]) -> Iterator[None]:
    """Within it this process prints none of the secrets in a command's overrides, nor what it knows besides."""
    for override in overrides:
        if not override.is_sweep_override():
            know(override.value(), key_of(override))
    with contextlib.redirect_stdout(masking(sys.stdout)), contextlib.redirect_stderr(masking(sys.stderr)):
        yield
