"""Checkouts of other code bases, and functions of their losses under the signature of verl's registry."""

from __future__ import annotations
import __future__

import ast
import enum
import math
import subprocess
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

Loss = Callable[..., Any]


class Source:
    """The newest commit of a checkout, or a folder of installed packages such as site-packages."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self._installed = next(checkout.glob("*.dist-info"), None) is not None

    def version(self, code_base: str) -> tuple[str, str]:
        """Commit and date, or the version of the installed package."""
        if not self._installed:
            commit, date = self._git("log", "-1", "--format=%h %cs").split()
            return commit, date
        package = next(self.checkout.glob(f"{code_base.lower()}-*.dist-info"))
        return package.name.removesuffix(".dist-info").partition("-")[2], "installed"

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(self.checkout), *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def holds(self, path: str) -> bool:
        """Whether it has this file."""
        if self._installed:
            return (self.checkout / path).is_file()
        return bool(self._git("ls-tree", "--name-only", "HEAD", path).strip())

    def definitions(self, path: str, names: Sequence[str], space: Mapping[str, Any] | None = None) -> SimpleNamespace:
        """Functions, classes and ``CLASS.METHOD`` of a file, without decorators, run with ``space`` and torch."""
        text = (self.checkout / path).read_text("utf-8") if self._installed else self._git("show", f"HEAD:{path}")
        top = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        known = {node.name: node for node in top} | {
            f"{owner.name}.{node.name}": node
            for owner in top
            if isinstance(owner, ast.ClassDef)
            for node in owner.body
            if isinstance(node, ast.FunctionDef)
        }
        if missing := set(names) - known.keys():
            raise SystemExit(f"{self.checkout}: {path} has no {', '.join(sorted(missing))}")
        nodes = [known[name] for name in names]
        for node in nodes:
            node.decorator_list = []
        namespace: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "np": np, "math": math}
        namespace |= {"enum": enum, "dataclass": dataclass, "field": field, **vars(typing), **dict(space or {})}
        flags = __future__.annotations.compiler_flag
        exec(compile(ast.Module(nodes, []), path, "exec", flags, True), namespace)
        return SimpleNamespace(**{node.name: namespace[node.name] for node in nodes})


class Call(NamedTuple):
    """A micro-batch of a rank, and the sizes of the mini-batch: responses with a token, tokens, ranks."""

    new: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    responses: int
    tokens: int
    ranks: int

    @property
    def of_response(self) -> torch.Tensor:
        """A of each response: the mean over its tokens."""
        return (self.advantages * self.mask).sum(-1) / self.mask.sum(-1).clamp(min=1)

    @property
    def lists(self) -> list[list[torch.Tensor]]:
        """new, old, advantages and mask as lists of responses."""
        return [list(x) for x in (self.new, self.old, self.advantages, self.mask)]


class Known(NamedTuple):
    """A loss of a code base; ``settings`` of verl's configuration, for those that read it."""

    name: str
    loss: Loss
    settings: dict[str, Any]


def adapted(name: str, function: Callable[[Call], Any]) -> Known:
    """A loss of another signature; rollout weights are not handed to it."""

    def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, config: Any, **_: Any) -> Any:
        info = config.global_batch_info
        sizes = (info["global_batch_size"], info["batch_num_tokens"], info["dp_size"])
        return function(Call(log_prob, old_log_prob, advantages, response_mask, *sizes))

    return Known(name, loss, {})


def not_run(name: str, why: str) -> Known:
    """A loss that cannot be checked: calling it raises ``why``, which the table has in place of numbers."""

    def loss(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(why)

    return Known(name, loss, {})
