"""Secrets come by the environment: given literally they are refused, and a reference is written as it is.

A secret is the value of a key that says key, token, password or secret (:func:`is_secret`), of a variable of
``runtime_env.env_vars`` too, and what stands before the host of an address. Given as ``${oc.env:NAME}`` it stays that
text in all that a run writes, prints and hands to verl's loggers; so does any other text from the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from recipe.runner.launch.settings import key_of, leaves, parsed

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
#: Of the environment, without a default, or of another key.
_REFERS: Final = re.compile(r"\$\{(oc\.env:\w+|[\w.\[\]]+)\}")
#: With a password before the host.
_ADDRESS: Final = re.compile(r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://[^\s/'\"]+@", re.IGNORECASE)


def is_secret(key: str, number: bool = False) -> bool:
    """Whether the value of a key is a secret by its name, or by that of a group above it.

    ``api_key``, ``HF_TOKEN``, ``dbPassword`` and ``client_secret`` are; ``tokenizer``, ``max_tokens``, ``pad_token_id``
    and ``data.prompt_key`` are not. A number is none where it is one of tokens, or of what another word says
    (``token_penalty``, ``num_key_value_heads``).
    """
    above, _, name = _ENVIRONMENT.sub(".", key).rpartition(".")
    if above and is_secret(above, number):
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


def _is_variable(key: str) -> bool:
    """Whether a key names a variable of ``runtime_env.env_vars``."""
    return _ENVIRONMENT.search(key) is not None


def is_reference(value: Any) -> bool:
    """Whether a text, or one of a list, is from the environment, as it is written."""
    return any(map(is_reference, value)) if isinstance(value, list) else bool(_REFERENCE.search(str(value)))


def _is_literal(key: str, value: Any) -> bool:
    """Whether a leaf, as it is given, is a secret and no reference."""
    if isinstance(value, Mapping):
        return any(_is_literal(f"{key}.{name}", part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return any(_is_literal(f"{key}[{index}]", part) for index, part in enumerate(value))
    text = str(value)
    if value is None or isinstance(value, bool) or text == "???" or _REFERS.search(text):
        return False
    return _ADDRESS.search(text) is not None or is_secret(key, isinstance(value, int | float))


def literal_problems(given: Any, key: str = "") -> Iterator[str]:
    """A sentence for every secret that stands literally in plain containers, with their references."""
    for place, value in leaves(given, key):
        if _is_literal(place, value):
            yield (
                f"{place}: a secret stands on the command line, where others can read it, or in a file: export "
                f"NAME=VALUE, and give {place}='${{oc.env:NAME}}', or leave it out if its reader knows the variable, "
                "which the run's processes inherit (docs/clusters.md#secrets)"
            )


def problems_of_words(words: Sequence[str]) -> Iterator[str]:
    """:func:`literal_problems` of the words of a command; those that are no overrides are Hydra's to name."""
    for word in words:
        try:
            (override,) = parsed([word])
        except (HydraException, ValueError):
            continue
        if not override.is_sweep_override():
            yield from literal_problems(override.value(), key_of(override))


def as_given(value: Any, key: str = "", references: Mapping[str, str] | None = None) -> Any:
    """A value in plain containers with every text from the environment as the reference that it was given as.

    Args:
        value: Resolved.
        key: Its own, with those of the groups above it.
        references: By key, what :func:`references` gives.
    """
    if isinstance(value, Mapping):
        return {name: as_given(part, f"{key}.{name}" if key else str(name), references) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_given(part, f"{key}[{index}]", references) for index, part in enumerate(value)]
    return (references or {}).get(key, value)


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
        for key, value in leaves(OmegaConf.to_container(part, resolve=True), group):
            name, of_environment = key.rpartition(".")[2], _is_variable(key)
            if of_environment and not joins:
                continue  # handed on by the environment of Ray itself
            if _is_literal(key, value) or (of_environment and key in references):
                variable = name if of_environment else "the variable that its reader knows, such as HF_TOKEN,"
                yield (
                    f"{key}: its value would stand on command lines or in logs, which others can read; leave it out, "
                    f"and set {variable} in the environment of the processes (docs/clusters.md#secrets)"
                )
