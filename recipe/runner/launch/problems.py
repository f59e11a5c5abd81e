"""What a start is refused for."""

from __future__ import annotations


class MachineProblem(str):
    """A problem that only the machine of the run can settle: a GPU, a package or a file that is not here."""


class Refused(ValueError):
    """Everything that is wrong with a command, one problem a line; nothing was started or written."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(f"error: {problem}" for problem in self.problems))
