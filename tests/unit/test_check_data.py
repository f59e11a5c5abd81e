"""``python -m recipe.runner.check_data`` finds what would stop a run or cost rows, as verl and datasets do it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import ROW, Row
from messages import holds
from transformers import AutoTokenizer

from benchmarks.models.demo_model import shipped_model
from recipe.runner.check_data import check, main
from recipe.runner.launch.data_files import join_problems, read_table


def rows(number: int) -> list[Row]:
    """Different prompts of 7 tokens of the demo's model, the generation prompt included."""
    return [{**copy.deepcopy(ROW), "prompt": [{"role": "user", "content": f"{100 + i}%44"}]} for i in range(number)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def to_file(content: list[Row], name: str = "train.parquet") -> str:
        pq.write_table(pa.Table.from_pylist(content), tmp_path / name)
        return str(tmp_path / name)

    return to_file


MESSAGE = {"role": "user", "content": "150%44"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([{"extra_info": {"index": 0}}, {"extra_info": {"index": 1, "level": "hard"}}], None),
        ([{"extra_info": {"index": 0, "level": 1}}, {"extra_info": {"index": 1, "level": "hard"}}], None),
        ([{}, {"reward_model": {"ground_truth": "1", "style": "rule", "tests": [1, "a"]}}], None),
        ([{"prompt": [MESSAGE]}, {"prompt": [MESSAGE | {"name": "Ann"}]}], None),
        ([{"extra_info": {"a": {"b": 1}}}, {"extra_info": {"a": {"c": "2"}}}], None),
        ([{"ability": "math"}, {"ability": 3}], None),
        ([{"reward_model": {"ground_truth": "1"}}, {"reward_model": {"ground_truth": 1}}], "ground_truth"),
        ([{"data_source": "own"}, {"data_source": 3}], "data_source"),
        ([{"prompt": [MESSAGE]}, {"prompt": [MESSAGE | {"content": [{"type": "text", "text": "1"}]}]}], "content"),
    ],
)
def test_json_lines_whose_records_differ_are_read_as_verl_reads_them(
    tmp_path: Path, changes: list[Row], says: str | None
) -> None:
    file = tmp_path / "own.jsonl"
    lines = [{**row, **changes[number % 2]} for number, row in enumerate(rows(4))]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    problems = check([str(file)]).problems
    assert (problems == []) if says is None else any(says in problem and str(file) in problem for problem in problems)
    if says is None:
        assert list(join_problems({str(file): read_table(file).schema})) == []


def test_features_of_another_datasets_are_named_with_the_file(write: Callable[..., str]) -> None:
    file = write(rows(2))
    table = pq.read_table(file)
    features = {"info": {"features": {"prompt": {"_type": "NewList"}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), file)
    (problem,) = check([file]).problems
    assert file in problem and "NewList" in problem and datasets.__version__ in problem


@pytest.mark.parametrize("content", [7, [{"type": "text", "text": "1"}]])
def test_content_that_is_not_text_is_named(write: Callable[..., str], content: object) -> None:
    file = write([{**row, "prompt": [{"role": "user", "content": content}]} for row in rows(2)])
    (problem,) = check([file]).problems
    assert file in problem and "prompt" in problem and "content" in problem


def with_truths(*truths: str) -> list[Row]:
    return [
        {**row, "reward_model": {"ground_truth": truth}} for row, truth in zip(rows(len(truths)), truths, strict=True)
    ]


def test_truths_that_no_answer_can_match_are_a_problem(write: Callable[..., str]) -> None:
    for good in (r"\frac{1}{2}", '["15"]', "#### 15", "Jane Smith"):
        result = check([write(with_truths(good, good))])
        assert result.problems == [] and not any("note: " in line for line in result.lines)
    result = check([write(with_truths(r"\frac{1}{2}"))], reward="pkg://recipe.math.reward")
    assert result.problems == [] and "own/task: 1    0" in "\n".join(result.lines)
    for truth in ("$$", "<b>7</b>", '{"inputs": ["1"]}'):  # in any row
        (problem,) = check([write(with_truths(*["18"] * 20, truth))]).problems
        assert all(part in problem for part in ("own/task", "row 20", truth, "1 row", "--reward")), problem
    (problem,) = check([write(with_truths("$$"))], reward="pkg://recipe.math.rewards").problems
    assert "--reward pkg://recipe.math.rewards" in problem


def test_truths_that_only_their_own_words_match_are_a_note(write: Callable[..., str]) -> None:
    for truth in ("He sold 4 and 3. So 7 <<4+3=7>>", r"\text{red, green, and blue}", "Alice, Bob, Carol, and Dave"):
        result = check([write(with_truths("18", truth))])
        (note,) = [line for line in result.lines if line.startswith("note: ")]
        assert result.problems == [] and all(part in note for part in ("own/task", "row 1", "1 row", "words")), note


def test_a_reward_with_which_no_truth_earns_anything_is_noted(write: Callable[..., str], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    file = write(with_truths("18", "19"))
    for tries, noted in (("solution_str == '<answer>' + ground_truth + '</answer>'", False), ("0.0", True)):
        reward.write_text(f"def compute_score(solution_str, ground_truth, **_):\n    return float({tries})\n")
        result = check([file], reward=str(reward))
        notes = [line for line in result.lines if line.startswith("note: ")]
        assert result.problems == [] and len(notes) == noted
        assert all(str(reward) in note and "own/task" in note and "'18'" in note for note in notes)


@pytest.mark.parametrize("changed", [{"data_source": " "}, {"reward_model": {"style": "rule", "ground_truth": "$$"}}])
def test_a_bad_row_does_not_keep_the_reward_from_the_others(write: Callable[..., str], changed: Row) -> None:
    first, other = rows(2)
    result = check([write([first | changed, other])])
    assert len(result.problems) == 1 and any("row 1 of " in line and ": 1    0" in line for line in result.lines)
    for content in ([first | changed], [{"prompt": other["prompt"]}]):
        result = check([write(content)])
        assert result.problems and any("--reward" in line and "not tried" in line for line in result.lines)


def test_a_reward_gets_what_a_run_adds_to_extra_info(write: Callable[..., str], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    uses = "extra_info['index'] * 0 + extra_info['num_turns'] + len(extra_info['rollout_reward_scores'])"
    reward.write_text(f"def compute_score(extra_info, **_):\n    return {uses} + extra_info['response_length']\n")
    assert check([write(rows(2))], reward=str(reward)).problems == []


def test_a_reward_that_does_not_return_is_named(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipe.runner.launch.reward_trial.CALL_LIMIT_S", 0.2)
    reward = tmp_path / "reward.py"
    reward.write_text("import time\ndef compute_score(**_):\n    time.sleep(1000)\n")
    (problem,) = check([write(rows(2))], reward=str(reward)).problems
    assert str(reward) in problem and "row 0" in problem and "time limit" in problem


@pytest.mark.parametrize("own", [True, False])
def test_a_reward_for_which_the_time_is_too_short_is_noted(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    monkeypatch.setattr("recipe.runner.launch.reward_trial.LIMIT_S", -1.0)
    (tmp_path / "reward.py").write_text("def compute_score(**_):\n    return 0.0\n")
    result = check([write(rows(2))], reward=str(tmp_path / "reward.py") if own else None)
    assert result.problems == [] and any("note: " in line and "0 of 2 rows" in line for line in result.lines)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"prompt": [{"role": "user", "content": " \n"}]}, "empty prompt or message"),
        ({"data_source": " "}, "data_source"),
        ({"reward_model": {"style": "rule", "ground_truth": "None"}}, "ground_truth"),
        ({"reward_model": {"style": "rule", "ground_truth": "nan"}}, "ground_truth"),
        ({"prompt": [{"role": "user", "content": ""}]}, "empty prompt or message"),
        ({"prompt": [None, {"role": "user", "content": "1"}]}, "empty prompt or message"),
        ({"reward_model": {"style": "rule", "ground_truth": " "}}, "reward_model.ground_truth"),
        ({"prompt": [{"role": "human", "content": "1"}]}, "role"),
        ({"prompt": [{"role": "assistant", "content": "1"}]}, "assistant"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "reward_model.ground_truth"),
        ({"data_source": None}, "data_source"),
        ({"prompt": [{"role": "user", "content": "1" * 20}]}, "data.max_prompt_length=7"),
    ],
)
def test_a_row_that_verl_leaves_out_or_stops_at_is_named(write: Callable[..., str], changed: Row, says: str) -> None:
    bad = rows(3)
    bad[2] |= changed
    bad[1]["reward_model"] = {"style": "rule", "ground_truth": "0"}  # an answer like any other
    (problem,) = check([write(bad)], str(shipped_model()), 7).problems
    assert says in problem and "row 2 of " in problem


CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
@pytest.mark.parametrize("said", [{"content": ""}, {"content": None}, {}], ids=["empty", "null", "absent"])
def test_messages_that_call_tools_need_no_text_as_in_verl(tmp_path: Path, name: str, said: Row) -> None:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    content = rows(3)
    for row in content:
        answer = {"role": "tool", "content": "", "tool_call_id": "c1"}
        row["prompt"] += [{"role": "assistant", **said, "tool_calls": CALLS}, answer]
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(content), tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in content))
    file = str(tmp_path / name)
    assert check([file]).problems == []
    settings = {"filter_overlong_prompts": False, "cache_dir": str(tmp_path / "cache")}
    verls = RLHFDataset(file, AutoTokenizer.from_pretrained(shipped_model()), OmegaConf.create(settings))
    assert [row["raw_prompt"][1]["tool_calls"] is not None for row in verls] == [True] * 3


def test_images_are_named_and_compared(write: Callable[..., str]) -> None:
    content = [{**ROW, "images": [{"bytes": bytes([number]), "path": None}]} for number in range(2)]
    file = write(content)
    result = check([file])
    notes = [line for line in result.lines if line.startswith("note: ")]
    assert result.problems == [] and len(notes) == 1 and file in notes[0] and "images" in notes[0]  # no duplicates
    (problem,) = check([file], "pkg://recipe.math.data/assets/demo_model").problems
    assert file in problem and "images" in problem and "preprocessor_config.json" in problem
    assert check([write([{**ROW, "images": []}, {**ROW, "images": None}])], str(shipped_model())).problems == []


def test_lengths_are_those_by_which_verl_leaves_prompts_out(write: Callable[..., str]) -> None:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    mixed = rows(6)
    for row, text in zip(mixed, ["1", "11", "1%1", "111%1", "111%11", "111111%1"], strict=True):
        row["prompt"][0]["content"] = text
    file = write(mixed)
    settings = {"max_prompt_length": 6, "filter_overlong_prompts_workers": None, "cache_dir": str(Path(file).parent)}
    kept = RLHFDataset(file, AutoTokenizer.from_pretrained(shipped_model()), OmegaConf.create(settings))
    (problem,) = check([file], str(shipped_model()), 6).problems
    assert problem.startswith(f"{6 - len(kept)} of 6 prompts longer")


def test_duplicates_are_told_within_and_across_files(write: Callable[..., str]) -> None:
    train, test = rows(4), rows(2)
    train[3] = {**train[0], "reward_model": {"style": "rule", "ground_truth": "19"}}
    result = check([write(train), write(test, "test.parquet")])
    assert result.problems == []
    assert "own/task           6" in result.lines
    notes = [line for line in result.lines if line.startswith("note: ")]
    assert [int(re.search(r"\d+", note)[0]) for note in notes] == [2, 2, 1]  # type: ignore[index]
    assert ["several files" in note for note in notes] == [False, True, False]


def test_a_test_set_is_compared_with_the_training_set_but_for_formatting(write: Callable[..., str]) -> None:
    train, test = rows(4), rows(2)
    for row in test:
        row["prompt"] = [{"role": "user", "content": f"  ${row['prompt'][0]['content'].upper()}$."}]
    (note,) = (line for line in check([write(train), write(test, "test.parquet")]).lines if "several files" in line)
    assert note.startswith("note: 2 prompt(s)") and "row 0" in note and "test.parquet" in note


def test_the_command_shows_sources_lengths_a_sample_and_scores(
    write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = rows(3)
    content[2]["data_source"] = "own/other"
    file, reward = write(content), tmp_path / "reward.py"
    reward.write_text(
        "async def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': solution_str == ground_truth}\n"
    )
    model = "pkg://recipe.math.data/assets/demo_model"
    command = [file, "--model", model, "--max-prompt-length", "7", "--reward", f"{reward}:score"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^own/task +2  7, 7, 7, 7, 7$", printed, re.M)
    assert "  | 102%44=\n  ground truth: '18'" in printed
    assert f"row 2 of {file}, own/other: 1    0" in printed and "note: " not in printed
    command[-1] = str(reward)
    assert main(command) == 1
    assert "compute_score" in capsys.readouterr().err
    reward.write_text("def compute_score(solution_str, **_):\n    return 1 / len(solution_str)\n")
    assert main(command) == 1
    errors = capsys.readouterr().err
    assert "(own/task), response ''" in errors and "ZeroDivisionError" in errors
    assert f'File "{reward}", line 2, in compute_score' in errors


ALARM = """
import signal
def compute_score(solution_str, ground_truth, **_):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(3)
    signal.alarm(0)
    return float(solution_str == ground_truth)
"""
MATH_VERIFY = """
from math_verify import parse, verify
def compute_score(solution_str, ground_truth, **_):
    return float(verify(parse(ground_truth{}), parse(solution_str{}){}))
"""
OF_VERIFY = MATH_VERIFY.format(*[", parsing_timeout=None"] * 2, "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ALARM, "signal only works in main thread"),
        (ALARM.replace("def ", "async def "), "signal only works in main thread"),
        (MATH_VERIFY.format("", "", ""), "parse"),
        (OF_VERIFY, "Math-Verify"),
    ],
    ids=["alarm", "async", "parse", "verify"],
)
def test_a_reward_that_needs_the_main_thread_is_refused(
    write: Callable[..., str], tmp_path: Path, text: str, says: str
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(text)
    (problem,) = check([write(rows(2))], reward=f"{reward}:compute_score").problems
    place = (f"{reward}:compute_score", "row 0 of ", f'File "{reward}", line ')
    assert re.search(holds(*place, says, "thread", "signal.alarm", "parsing_timeout=None"), problem), problem


def test_a_reward_that_fails_in_any_thread_is_not_said_to_need_the_main_one(
    write: Callable[..., str], tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(solution_str, **_):\n    return 1 / 0\n")
    (problem,) = check([write(rows(2))], reward=str(reward)).problems
    assert "ZeroDivisionError" in problem and "thread" not in problem


def test_a_reward_that_earns_later_is_not_said_to_need_the_main_thread(
    write: Callable[..., str], tmp_path: Path
) -> None:
    """Such as a judge that answers 0 until it has warmed up."""
    reward = tmp_path / "reward.py"
    text = "calls = []\ndef compute_score(solution_str, **_):\n    calls.append(0)\n"
    reward.write_text(f"{text}    return float(len(calls) > {{}} and bool(solution_str))\n")
    whole = reward.read_text()
    for calls in range(0, 60, 3):
        reward.write_text(whole.format(calls))
        assert check([write(rows(2))], reward=str(reward)).problems == []


def test_math_verify_without_its_time_limits_passes(write: Callable[..., str], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(MATH_VERIFY.format(*[", parsing_timeout=None"] * 2, ", timeout_seconds=None"))
    result = check([write(rows(2))], reward=str(reward))
    assert result.problems == [] and any("own/task: 1    0" in line for line in result.lines)


def test_each_file_needs_rows(write: Callable[..., str]) -> None:
    good, zero = write(rows(2)), write(rows(2), "zero.parquet")
    pq.write_table(pq.read_table(zero)[:0], zero)
    (problem,) = check([good, zero]).problems
    assert zero in problem and "no rows" in problem


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return {'score': 1.0, 'parts': {'a': 1}}", "parts={'a': 1} (dict)"),
        ("return {'score': 1.0, 'parts': [1] * (1 + len(solution_str))}", "parts=[1], numbers of shape (1,)"),
        ("return {'score': 1.0, 'parts': []}", "parts=[] (list)"),
        ("return {'score': 1.0, 'parts': {1}}", "parts={1} (set)"),
        ("return {'score': 1.0, 'parts': ['a']}", "parts=['a'] (list)"),
        ("return {'score': 1.0, 'parts': 1 if solution_str else 'none'}", "parts='none', text"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("return {'score': 1.0, 'acc': 5.0}", "acc=5.0"),
        ("return {'score': 1.0, 'a' if solution_str else 'b': 1}", "keys"),
        ("return {'score': 1.0, 'a': 1} if solution_str else 1.0", "keys"),
    ],
)
def test_what_a_reward_must_not_do(write: Callable[..., str], tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "reward.py").write_text(f"def compute_score(solution_str, **_):\n    {body}\n")
    (problem,) = check([write(rows(2))], reward=str(tmp_path / "reward.py")).problems
    assert says in problem and "row 0 of " in problem


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train.jsonl", b"", "0 bytes"),
        ("train.jsonl", json.dumps(ROW).encode()[:-9], "JSON"),
        ("train.jsonl", json.dumps({**ROW, "data_source": "é"}, ensure_ascii=False).encode("latin-1"), "0xe9"),
        ("train.csv", b"a,b", ".parquet, .jsonl, .json"),
        ("train.parquet", b"PAR1", "train.parquet"),
        ("train.parquet", None, "does not exist"),
        ("train.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / name) in error and says in error


def test_json_lines_are_read_and_a_length_needs_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows(3)))
    assert check([str(file)]).problems == []
    assert main([str(file), "--max-prompt-length", "9"]) == 2
    assert "give --model" in capsys.readouterr().err
