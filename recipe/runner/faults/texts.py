"""Texts for people without secrets: those that this process knows, and the passwords of addresses."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Final, TextIO

MASK: Final = "***"
_ADDRESS: Final = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://)[^\s/'\"]+@", re.IGNORECASE)
#: Secrets of this process, added by :func:`recipe.runner.launch.masking.know`.
KNOWN: Final[set[str]] = set()


def masked_text(text: str, secrets: Collection[str] | None = None) -> str:
    """A text without these secrets, by default those that this process knows, and the passwords of addresses."""
    for secret in sorted(KNOWN if secrets is None else secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _ADDRESS.sub(rf"\1{MASK}@", text)


class _Masking:
    """A stream that writes :func:`masked_text`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(masked_text(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def masking(stream: TextIO) -> TextIO:
    """A stream through which no secret goes that this process knows."""
    return _Masking(stream)  # type: ignore[return-value]
