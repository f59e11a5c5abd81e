"""A reward function, tried on rows of a run's data before the run: can a response earn anything on them?

``python -m recipe.runner.launch.reward_trial PATH NAME [KEYWORD ...]`` prints what is wrong with a reward function: a
JSON list of what stops a start, and of an :class:`Outcome`. Its settings and the rows to try it on, pickled,
come by standard input. Without them it is a class of a reward manager, which is not called. What the user's module
starts ends with that process.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from recipe.runner.launch.data_files import columns_and_rows, read_table, record_of, rows_of
from recipe.runner.launch.own_process import answer, asked
from recipe.runner.launch.reward_function import (
    IN_THREADS,
    BadReward,
    call,
    called,
    class_problem,
    describe,
    load,
    problem_of,
    result_problem,
)

#: Rows of each data source with which a reward is tried.
ROWS: Final = 10
#: No call is begun later; a judge that is asked over a network takes seconds for each.
LIMIT_S: Final = 60.0
#: Of one call.
CALL_LIMIT_S: Final = 60.0
#: What the manager adds to a row's extra_info.
_OF_A_RUN: Final = {"num_turns": 2, "rollout_reward_scores": {}}


@dataclass(frozen=True)
class TrialRow:
    """What a reward gets of a row, and its place in words."""

    place: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


class OutOfTimeError(Exception):
    """The time of a trial is over before a call."""


@dataclass
class Trial:
    """Calls of one reward function, whose results have to agree in their keys and kinds.

    Attributes:
        function, settings: The function, and what it gets besides the row.
        seconds: The longest call.
    """

    function: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    _keys: set[str] = field(default_factory=set)
    _kinds: dict[str, str] = field(default_factory=dict)
    _until: float = field(default_factory=lambda: time.monotonic() + LIMIT_S)

    def scores(self, row: TrialRow) -> tuple[float, float]:
        """The best score of the ground truth, written in the common ways, and that of an empty response.

        Raises:
            BadReward: a call that raises, or a result that cannot be used; the message begins with the row.
            OutOfTimeError: no further call is begun.
        """
        first, *others = responses(row.ground_truth)
        best, nothing = self._score(row, first), self._score(row, "")
        for response in others:
            if best > nothing:
                break
            best = max(best, self._score(row, response))
        return best, nothing

    def _values(self, row: TrialRow, response: str) -> tuple[Any, ...]:
        """The values of a call (:data:`recipe.runner.launch.reward_function.ARGUMENTS`). Raises OutOfTimeError."""
        if time.monotonic() > self._until:
            raise OutOfTimeError
        info = row.extra_info | _OF_A_RUN | {"response_length": len(response)}
        return row.data_source, response, row.ground_truth, info

    def _score(self, row: TrialRow, response: str) -> float:
        values = self._values(row, response)
        begun = time.monotonic()
        try:
            result = call(self.function, *values, settings=self.settings, limit_s=CALL_LIMIT_S)
            try:
                problem = result_problem(result, self._kinds)
            except Exception as error:
                raise BadReward(
                    f"it returned {type(result).__name__}, and reading that raised {describe(error)}"
                ) from error
            facts = result if isinstance(result, Mapping) else {"score": result}
            if problem is None and not 0 <= facts.get("acc", 0) <= 1:
                problem = f"it returned acc={facts['acc']!r}, which must lie between 0 and 1"
            here = set(map(str, facts)) if problem is None else set()
            if problem is None and here != (self._keys or here):
                problem = f"it returned the keys {sorted(here)}, and before {sorted(self._keys)}: return the same"
            if problem is not None:
                raise BadReward(problem)
        except BadReward as error:
            raise BadReward(f"{row.place} ({row.data_source}), response {response!r}: {error}") from error
        self._keys, self.seconds = here, max(self.seconds, time.monotonic() - begun)
        return float(facts["score"])

    def unearned(self, row: TrialRow) -> str:
        """That on rows of this data source, of which it is the first, no response has earned anything.

        Raises:
            BadReward: if one earns something in the main thread only: the function answers its failure with a number.
        """
        response = self._earns_here(row)
        with contextlib.suppress(OutOfTimeError):
            # Once more in a thread: a server may have warmed up since, or the score may be random.
            if response and self._score(row, response) <= self._score(row, ""):
                raise BadReward(
                    f"{row.place} ({row.data_source}), response {response!r}: it scores more than an empty response in "
                    f"the main thread only. {IN_THREADS}"
                )
        forms = ", ".join(repr(response) for response in responses(row.ground_truth)[:3])
        return (
            f"no response that holds the ground truth of data_source={row.data_source} has scored more than an empty "
            f"one ({row.place}: tried {forms}, ...): the reward may want another form, or cannot read these truths"
        )

    def _earns_here(self, row: TrialRow) -> str | None:
        """A response that scores more than an empty one in this thread, which is the main one; None without any."""
        nothing = None
        with contextlib.suppress(Exception, SystemExit):
            for response in ("", *responses(row.ground_truth)):
                result = called(self.function, *self._values(row, response), settings=self.settings)
                score = float(result["score"] if isinstance(result, Mapping) else result)
                nothing = score if nothing is None else nothing
                if score > nothing:
                    return response
        return None


def responses(truth: Any) -> list[str]:
    """A ground truth, or the first text in a record or list, as responses write it: alone, in a box, behind a sign."""
    if isinstance(truth, str) and truth[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):
            truth = json.loads(truth) or truth
    while isinstance(truth, Mapping | list | tuple) and truth:
        truth = next(iter(truth.values())) if isinstance(truth, Mapping) else truth[0]
    text = str(truth)
    return [text, f"\\boxed{{{text}}}", f"#### {text}", f"Answer: {text}", f"<answer>{text}</answer>"]


def first_rows(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """The first rows of each data source."""
    return [rows[index] for index in first_of_each([row.data_source for row in rows])]


def first_of_each(sources: Sequence[str], number: int = ROWS) -> list[int]:
    """Indices of the first rows of each data source, source by source."""
    by_source: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        by_source.setdefault(source, []).append(index)
    return [index for of_one in by_source.values() for index in of_one[:number]]


@dataclass(frozen=True)
class Outcome:
    """What a trial of a reward shows.

    Attributes:
        failure: How a call has failed; empty if none has.
        is_unknown: Whether that was NotImplementedError, which verl's own reward raises for an unknown data source.
        notes: What is not wrong, and strange.
    """

    failure: str = ""
    is_unknown: bool = False
    notes: Sequence[str] = ()


def tried(function: Callable[..., Any], settings: Mapping[str, Any], rows: Sequence[TrialRow]) -> Outcome:
    """Call a reward on the first rows of each source, of each until a call has failed."""
    trial = Trial(function, settings)
    failures: dict[str, tuple[bool, str]] = {}
    scores: list[tuple[str, float, float]] = []
    notes: list[str] = []
    for row in first_rows(rows):
        if row.data_source in failures:
            continue
        try:
            scores.append((row.data_source, *trial.scores(row)))
        except OutOfTimeError:
            break
        except BadReward as error:
            failures[row.data_source] = _is_unknown(error), str(error)
    is_unknown, failure = max(failures.values(), key=lambda pair: pair[0], default=(False, ""))
    if not failure:
        tried_rows, earned = len(scores), {source for source, best, nothing in scores if best > nothing}
        firsts: dict[str, TrialRow] = {}
        for row in first_rows(rows)[:tried_rows]:
            firsts.setdefault(row.data_source, row)
        try:
            notes = [trial.unearned(firsts[of]) for of in firsts if of not in earned]
        except BadReward as error:
            failure = str(error)
        if tried_rows < (number := len(first_rows(rows))):
            notes.append(f"{tried_rows} of {number} rows were tried: no call was begun after {LIMIT_S:.0f} s")
        if trial.seconds > 1:
            notes.append(f"a call took {trial.seconds:.1f} s, and a run calls it for every response")
    return Outcome(failure, is_unknown, notes)


def _is_unknown(error: BaseException | None) -> bool:
    return isinstance(error, NotImplementedError) or (error is not None and _is_unknown(error.__cause__))


def rows_of_file(path: Path) -> list[TrialRow]:
    """The first rows of each data source of a file. Raises ValueError or OSError for one that cannot be read so."""
    schema, _ = columns_and_rows(path)
    columns = [name for name in ("data_source", "reward_model", "extra_info") if name in schema.names]
    table = read_table(path, columns)
    chosen = sorted(first_of_each(table["data_source"].to_pylist()))
    if not chosen:
        return []
    return [
        TrialRow(
            f"row {number} of {path}",
            str(row["data_source"]),
            record_of(row["reward_model"]).get("ground_truth"),
            record_of(row.get("extra_info")),
        )
        for number, row in zip(chosen, rows_of(table.take(chosen)), strict=True)
    ]


def ask(path: str, name: str, further: Sequence[str] = (), rows: Any = None) -> tuple[str, Outcome]:
    """What stops a start with a function or a class, asked of a process of its own; and the outcome of its trial.

    Args:
        path, name, further: As for :func:`recipe.runner.launch.reward_function.problem_of`.
        rows: Of a function: its settings, and the rows to try it on.
    """
    given = b"" if rows is None else pickle.dumps(rows)
    answered, ended = asked(__name__, path, name, *further, given=given)
    problem, outcome = answered or (ended, {})
    return problem or "", Outcome(**outcome)


def _answer(path: str, name: str, *keywords: str) -> tuple[str | None, dict[str, Any]]:
    """What stops a start, and the fields of an :class:`Outcome`."""
    outcome = Outcome()
    if of_function := sys.stdin.buffer.read():
        settings, rows = pickle.loads(of_function)
        problem = problem_of(path, name, settings, keywords)
        if not problem and not keywords:  # further keywords are not known before the run
            outcome = tried(load(path, name), settings or {}, rows)
    else:
        problem = class_problem(path, name)
    return problem, asdict(outcome)


if __name__ == "__main__":
    answer(lambda: _answer(*sys.argv[1:]))
