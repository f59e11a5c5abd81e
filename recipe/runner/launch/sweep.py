"""``-m``: the runs of a sweep, one after another, each in a process of its own, because Ray and verl are global."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from recipe.runner.faults.preemption import ENDING, FAILED, PREEMPTED, STOP_VARIABLE, status_of
from recipe.runner.launch.run_folder import RUN, comparable, run_info
from recipe.runner.launch.settings import Refused, is_below, leaves, quoted

_GOES_ON: Final = "the same command goes on where this one stopped"


@dataclass(frozen=True)
class Arm:
    """One run as Hydra has composed it: its configuration, its words, those of Hydra among them, and a name."""

    config: DictConfig
    words: tuple[str, ...]
    name: str | None = None


@dataclass
class Sweep:
    """Starts runs one after another and passes on the signals that come, after which none starts."""

    module: str  #: What ``python -m`` starts.
    arms: Sequence[Arm]  #: In Hydra's order: the first swept word changes most slowly.
    of_the_loss: Sequence[str] = ()  #: Keys in which the arms are meant to differ.
    signals: list[signal.Signals] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _lock: Any = field(default_factory=threading.Lock)

    def take(self, signum: signal.Signals) -> None:
        """Pass a signal on to the current run; without one, this process ends at once."""
        with self._lock:
            if self._process is None:
                ENDING.how_far = lambda: f"while no run was going on; {_GOES_ON}"
                ENDING.take(signum)
            self.signals.append(signum)
            self._process.send_signal(signum)  # type: ignore[union-attr]

    def swept(self) -> list[list[str]]:
        """Of each arm the words that not all arms have."""
        count = Counter(word for arm in self.arms for word in arm.words)
        return [[word for word in arm.words if count[word] < len(self.arms)] for arm in self.arms]

    def folders(self) -> list[Path]:
        """The folder of each arm: named by all its swept words, so that no arm meets another's."""
        swept, places = self.swept(), []
        last = Counter(key.rpartition(".")[2] for key in {word.partition("=")[0] for words in swept for word in words})
        for arm, words in zip(self.arms, swept, strict=True):
            parts = (word.partition("=") for word in words)
            named = ((key, key.rpartition(".")[2], value) for key, _, value in parts)
            text = ",".join(f"{name if last[name] == 1 else key}={value}" for key, name, value in named) or "alone"
            name = re.sub(r"[^\w.,=+-]", "_", text)[:150]
            name += "" if name == text else f"-{hashlib.sha1(text.encode()).hexdigest()[:8]}"
            given = [word for word in arm.words if word.startswith(f"{RUN}=")]
            root = arm.config.trainer.default_local_dir if given or "FSPO_RUN_DIR" in os.environ else None
            places.append(Path(root or f"runs/compare/{arm.config.trainer.experiment_name}").absolute() / name)
        return places

    def differing(self) -> list[str]:
        """Settings beside the loss in which the arms differ, but for the swept ones."""
        swept = {word.partition("=")[0] for words in self.swept() for word in words}
        values: dict[str, set[str]] = {}
        for arm in self.arms:
            for key, value in leaves(OmegaConf.to_container(arm.config)):
                values.setdefault(key, set()).add(str(value))
        left_out = [*swept, *self.of_the_loss, RUN]
        return [key for key, different in values.items() if len(different) > 1 and not is_below(key, left_out)]

    def run(self, dry_run: bool) -> int:
        """Do what is not finished, and every evaluation; the exit status.

        75 (130 after Ctrl-C): the same command goes on, because this one was told to end, or a run ended that another
        start may finish. Raises Refused if a finished run had other words.
        """
        folders = self.folders()
        done = [
            (run_info(folder) or {}).get("status") == "finished" and not arm.config.get("evaluate")
            for arm, folder in zip(self.arms, folders, strict=True)
        ]
        for arm, folder, is_done in zip(self.arms, folders, done, strict=True):
            before = (run_info(folder) or {}).get("overrides", [])
            if is_done and comparable(before) != comparable(arm.words):
                other = sorted(set(comparable(before)) ^ set(comparable(arm.words)))
                raise Refused(f"{folder} holds a finished run of other words ({', '.join(other)}): give another {RUN}")
        if keys := self.differing():
            print(f"note: beside the loss the runs differ in {', '.join(keys)}", flush=True)
        codes = set[int]()
        for number, (arm, folder, is_done) in enumerate(zip(self.arms, folders, done, strict=True), 1):
            if self.signals or os.path.isfile(os.environ.get(STOP_VARIABLE, "")):
                codes.add(PREEMPTED)
                break
            print(f"run {number} of {len(self.arms)}: {folder}{': finished before' * is_done}", flush=True)
            if not is_done:
                codes.add(self._start(arm, folder))
        if not dry_run:
            print(f"report: python -m fspo.report {folders[0].parent} --out DIR", flush=True)
        if codes <= {0}:
            return 0
        if not dry_run:
            print(f"not finished: {_GOES_ON}", file=sys.stderr)
        if self.signals:
            return status_of(self.signals)
        return PREEMPTED if PREEMPTED in codes else min(codes - {0}) if dry_run else FAILED

    def _start(self, arm: Arm, folder: Path) -> int:
        """Run one arm to its end; its exit status, -N if signal N ended it."""
        words = [word for word in arm.words if not word.startswith(f"{RUN}=")]
        command = [sys.executable, "-m", self.module, *words, f"{RUN}={quoted(folder)}"]
        with self._lock:  # a signal that comes now waits for the process
            # In a group of its own: a terminal's Ctrl-C reaches it once, from here.
            self._process = subprocess.Popen(command, process_group=0)
        code = self._process.wait()
        self._process = None
        return code
