"""``python -m recipe.runner.check_data FILE...``: are these files, and this reward, what a run needs?

verl leaves out a prompt that is too long or that the chat template refuses, and says so in a log. The part that a run
asks before it starts is :mod:`recipe.runner.launch.data_files`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fspo.files import local_path
from fspo.wording import tokens
from recipe.runner.launch.data_files import (
    MEDIA,
    NO_ROWS,
    column_problems,
    join_problems,
    media_columns,
    read_table,
    record_of,
    rows_of,
)
from recipe.runner.launch.model_files import media_problem
from recipe.runner.launch.own_process import end_in_time
from recipe.runner.launch.reward_function import (
    NOTE,
    BadReward,
    load,
    problem_of,
    recipes_reward,
    truth_reader,
)
from recipe.runner.launch.reward_trial import TrialRow, first_of_each, tried

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES: Final = ("system", "user", "assistant", "tool")
_NAMED = 5  # rows that a sentence names
_SHOWN = 3  # rows of each source whose scores are printed


@dataclass
class Findings:
    """The result of a check: ``lines`` to read, and ``problems`` that stop training or cost rows."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _Row:
    """A row, by its place in words."""

    def __init__(self, file: str, number: int, values: dict[str, Any]) -> None:
        self.place = f"row {number} of {file}"
        self.file = file
        prompt = values["prompt"] if isinstance(values["prompt"], list) else []
        self.messages: list[dict[str, Any]] = [message if isinstance(message, dict) else {} for message in prompt]
        self.source = values["data_source"]
        self.truth = record_of(values["reward_model"]).get("ground_truth")
        self.info = record_of(values.get("extra_info"))
        self.media = [values[column] for column in MEDIA.values() if values.get(column)]

    def problem(self) -> str | None:
        """Why training stops at the row, or learns nothing from it."""
        contents = [message.get("content") for message in self.messages]
        if any(content and not isinstance(content, str) for content in contents):
            return "a message whose content is not text: write it as text"
        if not contents or any(map(_is_empty, self.messages)):
            return "an empty prompt or message"
        roles = [message.get("role") for message in self.messages]
        if not set(roles) <= set(ROLES) or roles[-1] == "assistant":
            return f"a role that is not one of {', '.join(ROLES)}, or a last message of the assistant's"
        has_truth = str(self.truth).strip().lower() not in ("", "none", "nan", "null")  # 0 is one
        return None if str(self.source or "").strip() and has_truth else "no data_source or reward_model.ground_truth"

    def text(self) -> str:
        """The messages as they are compared, with calls of tools and images by their representation."""
        parts = [f"{message['role']}: {message.get('content')} {_calls(message) or ''}" for message in self.messages]
        return " ".join([*parts, *(hashlib.blake2b(repr(media).encode()).hexdigest() for media in self.media)])


def _calls(message: Mapping[str, Any]) -> Any:
    """The calls of tools in a message."""
    return message.get("tool_calls") or message.get("function_call")


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Whether a message says nothing; beside calls, and of a tool or a system, no text is usual."""
    text = str(message.get("content") or "").strip()
    return not (text or _calls(message) or message.get("role") in ("tool", "system"))


def _named(rows: Sequence[_Row]) -> str:
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return ", ".join(row.place for row in rows[:_NAMED]) + more


def _by(rows: Iterable[_Row], key: Callable[[_Row], Any]) -> dict[Any, list[_Row]]:
    """Rows grouped by ``key(row)``."""
    groups: dict[Any, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def check(
    files: Sequence[str], model: str | None = None, max_prompt_length: int | None = None, reward: str | None = None
) -> Findings:
    """Look at every row of ``files`` as one list.

    Args:
        files: Parquet, JSON or JSON lines.
        model: Folder, hub name or ``pkg://`` path of a model, whose tokenizer and chat template are applied.
        max_prompt_length: ``data.max_prompt_length`` of the run; verl leaves out what is longer.
        reward: ``FILE:FUNCTION`` or ``pkg://MODULE:FUNCTION``, the recipe's own if None; called with the ground truth
            as response, and with none.

    Raises:
        ValueError, OSError: a file, model or reward that cannot be read.
    """
    findings = Findings()
    schemas, rows = {}, []
    reward = recipes_reward() if reward is None else reward
    path, name = _named_function(reward)
    try:
        reader = truth_reader(path)
    except BadReward as error:
        findings.problems.append(f"--reward {reward}: {error}")
        return findings
    for file in dict.fromkeys(files):
        table = read_table(Path(file))
        schemas[file] = table.schema
        findings.lines.append(f"{file}: {table.num_rows} rows")
        wrong = list(column_problems(table.schema, text_truth=reader is not None))
        wrong += [] if table.num_rows else [NO_ROWS]
        if media := media_columns(Path(file)):
            findings.lines.append(
                f"note: {file} has {', '.join(media)}, which a model that takes text only cannot take"
            )
            if model and (problem := media_problem(Path(file), local_path(model), media)):
                wrong.append(problem)
        findings.problems += [f"{file} {problem}" for problem in wrong]
        if not wrong:
            rows += [_Row(file, number, values) for number, values in enumerate(rows_of(table))]
    findings.problems += join_problems(schemas)
    if findings.problems:
        findings.lines.append(f"note: --reward {reward} was not tried: the files are wrong, as the errors say")
        return findings
    bad = _by(rows, _Row.problem)
    good = bad.pop(None, [])
    findings.problems += [f"{len(which)} row(s) with {what}: {_named(which)}" for what, which in bad.items()]
    findings.lines += _duplicates(good)
    sources = _by(good, lambda row: row.source)
    prompts = {} if model is None else _prompts(good, model, findings)
    if long := [row for row, (_, length) in prompts.items() if max_prompt_length and length > max_prompt_length]:
        longer = f"longer than data.max_prompt_length={max_prompt_length} tokens, and verl leaves them out"
        findings.problems.append(f"{len(long)} of {len(good)} prompts {longer}: {_named(long)}")
    findings.lines += _sources(sources, prompts)
    if reader is not None:
        unread = _truths(good, reader, findings)
        good = [row for row in good if row not in unread]
    if not good:
        findings.lines.append(f"note: --reward {reward} was not tried: no row is good, as the errors say")
    else:
        rows_to_try = [TrialRow(row.place, row.source, row.truth, row.info) for row in good]
        problem = problem_of(path, name, {})
        outcome = None if problem else tried(load(path, name), {}, rows_to_try, judges_truths=reader is not None)
        if outcome is not None:
            findings.lines += _scores(outcome.scores, f"--reward {reward}")
            findings.lines += [f"note: --reward {reward}: {note}" for note in outcome.notes]
        if problem := problem or (outcome and outcome.failure):
            findings.problems.append(f"--reward {reward}: {problem}")
    return findings


def _duplicates(rows: Sequence[_Row]) -> Iterator[str]:
    repeated = [which for which in _by(rows, lambda row: " ".join(row.text().split())).values() if len(which) > 1]
    conflicting = [which for which in repeated if len({str(row.truth) for row in which}) > 1]
    # A test set is of other hands than a training set, which write the same problem otherwise.
    alike = _by(rows, lambda row: " ".join(tokens(row.text())))
    across = [which for words, which in alike.items() if words and len({row.file for row in which}) > 1]
    for which, what in (
        (repeated, "are there more than once"),
        (across, "are in several files, equal but for case, signs and formatting: such a test set may not be held out"),
        (conflicting, "have different ground truths"),
    ):
        if which:
            yield f"note: {len(which)} prompt(s) {what}, such as {_named(which[0])}"


def _prompts(rows: Sequence[_Row], model: str, findings: Findings) -> dict[_Row, tuple[str, int]]:
    """Each prompt as the model sees it, and its length in tokens, of those that the chat template takes."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(local_path(model))
    if not tokenizer.chat_template:
        raise ValueError(f"--model {model}: its tokenizer has no chat template, and prompts are lists of messages")
    prompts = {}
    refused: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        try:
            text = str(tokenizer.apply_chat_template(row.messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template may raise anything; verl leaves such a row out
            refused[f"{type(error).__name__}: {error}"].append(row)
        else:
            prompts[row] = (text, len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    findings.problems += [
        f"{len(which)} of {len(rows)} prompts that the chat template refuses ({why}): {_named(which)}"
        for why, which in refused.items()
    ]
    return prompts


def _sources(sources: Mapping[str, list[_Row]], prompts: Mapping[_Row, tuple[str, int]]) -> Iterator[str]:
    import numpy as np

    width = max(map(len, ["data_source", *sources]))
    yield f"\n{'data_source':{width}}  {'rows':>7}" + "  prompt tokens: min, median, 90%, 99%, max" * bool(prompts)
    for source, rows in sources.items():
        lengths = [prompts[row][1] for row in rows if row in prompts]
        quantiles = np.quantile(lengths, (0, 0.5, 0.9, 0.99, 1), method="higher").tolist() if lengths else []
        yield f"{source:{width}}  {len(rows):>7}  {', '.join(map(str, quantiles))}".rstrip()
    for source, (row, *_) in sources.items():
        if row in prompts:
            text = prompts[row][0].replace("\n", "\n  | ")
            yield f"\n{row.place}, {source}, as the model sees it:\n  | {text}\n  ground truth: {row.truth!r}"


def _named_function(reward: str) -> tuple[str, str]:
    """Path and name of ``FILE:FUNCTION``; the function is compute_score if none is named."""
    path, colon, name = reward.rpartition(":")
    return (path, name) if colon and not name.startswith("//") else (reward, "compute_score")  # pkg://module


def _truths(rows: Sequence[_Row], reader: Callable[..., list[str | None]], findings: Findings) -> set[_Row]:
    """Add ground truths with which no response, or only an unlikely one, earns anything, by the reward's own word.

    Returns:
        The rows on which no response earns anything.
    """
    unread: set[_Row] = set()
    distinct = list({(row.source, str(row.truth)): (row.source, row.truth) for row in rows}.values())
    problems = dict(zip([(source, str(truth)) for source, truth in distinct], reader(distinct, {}), strict=True))
    for problem, which in _by(rows, lambda row: problems[row.source, str(row.truth)]).items():
        if problem is None:
            continue
        where = f"{_short(which[0].truth)} (data_source={which[0].source}): {_named(which)}"
        if problem.startswith(NOTE):
            note = f"the ground truth {problem.removeprefix(NOTE)}: {where}"
            findings.lines.append(f"note: {len(which)} row(s) on which {note}")
        else:
            unread |= {*which}
            findings.problems.append(
                f"{len(which)} row(s) on which no response can earn anything, as the ground truth {problem}: "
                f"{where}. Write the answer alone, as text, or give a reward that reads this (--reward)"
            )
    return unread


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _scores(scores: Sequence[tuple[str, str, float, float]], place: str) -> Iterator[str]:
    """The scores of the first rows of each source."""
    yield f"\n{place}    response = ground truth    no response"
    for index in first_of_each([source for _, source, _, _ in scores], _SHOWN):
        row, source, best, nothing = scores[index]
        yield f"  {row}, {source}: {best:g}    {nothing:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 0, 1 if training would stop or leave rows out, 2 after a user's error."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.runner.check_data",
        description=(
            "Look at every row of data files as a run would use them: columns, types, empty and repeated prompts, "
            "prompt lengths, a sample of each data source. Exit status 1, with the reasons, if training would stop at "
            "these files or would leave rows out."
        ),
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="the files of a run, in verl's schema")
    parser.add_argument("--model", help="folder or hub name: lengths in tokens, and the chat template applied")
    parser.add_argument("--max-prompt-length", type=int, metavar="N", help="data.max_prompt_length of the run")
    parser.add_argument(
        "--reward",
        metavar="FILE[:FUNCTION]",
        help="call this reward (default: the recipe's) with the ground truth as response, and with none",
    )
    args = parser.parse_args(argv)
    try:
        if args.max_prompt_length is not None and args.model is None:
            raise ValueError("--max-prompt-length counts tokens: give --model, whose tokenizer counts them")
        report = check(args.files, args.model, args.max_prompt_length, args.reward)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report.lines))
    for problem in report.problems:
        print(f"error: {problem}", file=sys.stderr)
    if not report.problems:
        print("\nnothing is wrong with these files")
    return 1 if report.problems else 0


if __name__ == "__main__":
    exit_status = main()
    end_in_time(exit_status)  # a call of the reward may hang
    sys.exit(exit_status)
