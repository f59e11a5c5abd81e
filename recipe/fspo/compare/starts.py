"""The runs of a grid as processes, one after another."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from typing import Any, Final

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Starts:
    """Starts commands one after another, passes on what ends the current one, and lets none start after that."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: set[int] = set()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Starts:
        for signum in _ENDING:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                self._handlers[signum] = signal.signal(signum, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _pass_on(self, signum: int, _: object) -> None:
        self._signals.add(signum)
        if self._process is not None:
            self._process.send_signal(signum)

    @property
    def ended_by(self) -> int | None:
        """The signal that asked for the end of the grid."""
        return min(self._signals, default=None)

    def run(self, command: Sequence[str]) -> int:
        """Run one command to its end; its exit status, -N if signal N ended it.

        Raises:
            KeyboardInterrupt: if a signal asked for the end, before the command or in it. A command that is in its last
                step then still ends with 0.
        """
        self._end()
        # In a group of its own: a terminal's Ctrl-C reaches it once, from here.
        self._process = subprocess.Popen(command, process_group=0)
        for signum in tuple(self._signals):
            self._process.send_signal(signum)
        try:
            code = self._process.wait()
        finally:
            self._process = None
        self._end()
        return code

    def _end(self) -> None:
        if self.ended_by is not None:
            raise KeyboardInterrupt
