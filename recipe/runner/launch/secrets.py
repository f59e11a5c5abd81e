"""Secrets come by the environment: given literally they are refused, and a reference is written as it is.

Given as ``${oc.env:NAME}`` a value stays that text in all that a run writes, prints and hands to verl's loggers.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from recipe.runner.launch.settings import is_below, key_of, leaves, parsed, resolved

#: What makes a key a secret's, but for a column of a data set, one of a vocabulary or a number of tokens.
_SECRET: Final = re.compile(
    r"password|passwd|passphrase|secret|credential|(api|access|private)_?key|_keys?(_|\d*$)|tokens?(_|\d*$)"
)
_ORDINARY: Final = re.compile(
    "(^|_)(prompt|response|question|answer|images?|videos?|audios?|messages?|tools?|fn|teacher|data|source|label|text|"
    "input|output|target|group|sort|partition|primary|foreign|index|metric|cache|dict|value|column|reward|score|chosen|"
    "rejected|query|solution|problem|id|category|split|truth|model|thinking|num)_keys?(_|$)|"
    "(^|_)(bos|eos|pad|unk|sep|cls|mask|stop|start|end|special|added|image|video|audio|think|prompt|response|"
    "speculative|draft|format|eot|call|max|min|num|n|per|batched)_tokens?(_|$)|"
    "tokens?_(ids?|len|length|level|start|end|count|limit|budget|mean|sum|types?)(_|$)"
)
#: How a key ends of which a number, too, is a secret.
_OF_NUMBERS: Final = re.compile(r"(password|passwd|passphrase|secret|api[_-]?key)$", re.IGNORECASE)
#: With a password before the host.
_ADDRESS: Final = re.compile(r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://[^\s/'\"]+@", re.IGNORECASE)
_REFERENCE: Final = re.compile(r"\$\{oc\.env:\w+\}")
#: No literal: a missing value, or a reference to the environment, without a default, or to another key.
_IS_NONE: Final = re.compile(r"^\?\?\?$|\$\{(oc\.env:\w+|[\w.\[\]]+)\}")


def is_secret(key: str) -> bool:
    """Whether the value of a key is a secret by its name, or by that of a group above it.

    ``api_key``, ``HF_TOKEN``, ``dbPassword`` and ``client_secret`` are; ``max_tokens`` and ``prompt_key`` are not.
    """
    names = (re.sub("(?<=[a-z])(?=[A-Z])|-", "_", name).lower() for name in re.split(r"[.\[\]]", key))
    return any(_SECRET.search(name) and not _ORDINARY.search(name) for name in names)


def literal_problems(value: Any, key: str = "") -> Iterator[str]:
    """A sentence for every secret, or address with a password, that stands literally in plain containers.

    ``value`` has its references to the environment and to other keys; ``key`` is its own.
    """
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from literal_problems(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from literal_problems(part, f"{key}[{index}]")
    elif not (value is None or isinstance(value, bool) or _IS_NONE.search(str(value))) and (
        _ADDRESS.search(str(value)) or (is_secret(key) and (isinstance(value, str) or _OF_NUMBERS.search(key)))
    ):
        yield (
            f"{key}: a secret stands on the command line, where others can read it, or in a file: export NAME=VALUE, "
            f"and give {key}='${{oc.env:NAME}}', or leave it out if its reader knows the variable, which the run's "
            "processes inherit (docs/clusters.md#secrets)"
        )


def problems_of_words(words: Sequence[str]) -> Iterator[str]:
    """:func:`literal_problems` of the words of a command; those that are no overrides are Hydra's to name."""
    for word in words:
        with contextlib.suppress(HydraException, ValueError):
            (override,) = parsed([word])
            if not override.is_sweep_override():
                yield from literal_problems(override.value(), key_of(override))


def is_reference(value: Any) -> bool:
    """Whether a text, or a part of a value, is from the environment, as it is written."""
    return _REFERENCE.search(str(value)) is not None


def references(config: DictConfig) -> dict[str, Any]:
    """What stands in ``config``, not resolved yet, in place of each value with a text from the environment, by key.

    A variable that is not set has no reference: the value is the default in the file. Numbers are recorded as they are.
    """

    def reference(name: str, *default: Any) -> Any:
        return f"${{oc.env:{name}}}" if name in os.environ else oc.env(name, *default)

    given = dict[str, Any]()
    OmegaConf.register_new_resolver("oc.env", reference, replace=True)
    try:
        for key, _ in leaves(OmegaConf.to_container(config)):
            with contextlib.suppress(OmegaConfBaseException, ValueError, TypeError):  # it cannot be made of references
                given[key] = resolved(config, key)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    texts = {key: value for key, value in given.items() if is_reference(value)}
    return {key: text for key, text in texts.items() if not isinstance(OmegaConf.select(config, key), int | float)}


def as_given(config: DictConfig, references: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration in plain containers, with what :func:`references` gives of it in its places."""
    given = config.copy()
    for key, text in references.items():
        OmegaConf.update(given, key, text, force_add=True)
    return OmegaConf.to_container(given)  # type: ignore[return-value]


def printed_problems(references: Mapping[str, Any], joins: bool) -> Iterator[str]:
    """A sentence for every secret from the environment that vLLM or Ray would print, or write on a command line.

    Below ``env_vars`` every text from the environment is one. ``joins``: the run joins a cluster, in which Ray hands
    ``runtime_env.env_vars`` on by command lines.
    """
    printed = ["actor_rollout_ref.rollout.engine_kwargs", *(["ray_kwargs"] if joins else [])]
    for key in references:
        if is_below(key, printed) and (is_secret(key) or ".env_vars." in key):
            yield (
                f"{key}: its value would stand on command lines or in logs, which others can read; leave it out, and "
                "set the variable that its reader knows in the environment of the processes (docs/clusters.md#secrets)"
            )
