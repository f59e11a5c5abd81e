"""Preparation of published data sets from local copies in their published layout and schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from messages import holds

from fspo.files import sha256_of
from recipe.math.answers import MathScorer
from recipe.math.data.decontaminate import BOILERPLATE, distinct, without_overlap
from recipe.math.data.prepare import main, prepare
from recipe.math.data.sources import DAPO_OPENING, GROUPS, SOURCES, Problem, SourceError, own_source
from recipe.math.wording import tokens

Rows = list[dict[str, Any]]
ROWS: dict[str, Rows] = json.loads((Path(__file__).parent / "assets" / "source_rows.json").read_text(encoding="utf-8"))
LAYOUT = {
    "dapo_math_17k": "dapo_math_17k/data/dapo-math-17k.parquet",
    "math_train": "math_train/data/train-00000-of-00001.parquet",
    "math500": "math500/test.jsonl",
    "amc23": "amc23/test-00000-of-00001.parquet",
    "aime24": "aime24/data/train-00000-of-00001.parquet",
    "aime25": "aime25/test.jsonl",
    "gsm8k_train": "gsm8k/main/train-00000-of-00001.parquet",
    "gsm8k_test": "gsm8k/main/test-00000-of-00001.parquet",
}


def write_rows(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets keeps what it has read; its messages and progress are not of a test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    folder = tmp_path / "copies"
    for name, rows in ROWS.items():
        write_rows(folder / LAYOUT[name], rows)
    return folder


def read(out: Path, name: str) -> Rows:
    rows: Rows = pq.read_table(out / f"{name}.parquet").to_pylist()
    return rows


def test_rows_are_in_verls_schema_with_answers_of_every_published_form(copies: Path, tmp_path: Path) -> None:
    answers = {}
    for name in SOURCES:
        manifest = prepare(SOURCES[name], tmp_path / "out", copies)
        rows = read(tmp_path / "out", name)
        assert manifest["rows"] == len(rows)
        answers[name] = [row["reward_model"]["ground_truth"] for row in rows]
        for index, row in enumerate(rows):
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            (message,) = row["prompt"]
            assert (row["data_source"], message["role"], row["reward_model"]["style"]) == (name, "user", "rule")
            assert message["content"].endswith("put your final answer within \\boxed{}.")
            assert DAPO_OPENING[:20] not in message["content"]
            assert row["extra_info"]["problem_id"] == f"{name}/{index}"
    assert len(answers.pop("dapo_math_17k")) == 5
    assert answers == {
        "math_train": [r"\frac{7}{2}", "4", "x^2+2x+1"],
        "math500": [r"\frac{3}{4}", "9"],
        "amc23": ["30", "4"],
        "aime24": ["19"],
        "aime25": ["147"],
        "gsm8k_train": ["6000", "-3", "180"],
        "gsm8k_test": ["180"],
    }
    with MathScorer(n_workers=1) as scorer:  # as the recipe's reward judges them
        boxes = [rf"So it is \boxed{{{answer}}}." for answer in (r"\$6,000", "6000.00", "600")]
        assert [scorer.score(box, "6000").score for box in boxes] == [1.0, 1.0, 0.0]


def test_duplicates_conflicts_and_overlap_are_removed_and_counted(copies: Path, tmp_path: Path) -> None:
    manifest = prepare(SOURCES["dapo_math_17k"], tmp_path / "out", copies, SOURCES["dapo_math_17k"].tests)
    assert manifest["counts"] == {
        "read": 10,
        "duplicates": 3,
        "conflicting_answers": 2,
        "without_answer": 0,
        "overlap_with_tests": {
            "math500": {"same_text": 1, "shared_ngram": 0},
            "amc23": {"same_text": 0, "shared_ngram": 0},
            "aime24": {"same_text": 0, "shared_ngram": 1},
            "aime25": {"same_text": 0, "shared_ngram": 0},
        },
        "dropped_for_overlap": 2,
        "written": 3,
    }
    rows = read(tmp_path / "out", "dapo_math_17k")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["51", "36", "-3"]
    assert [row["extra_info"]["source_id"] for row in rows] == ["u-1", "u-2", "u-7"]
    assert rows[0]["prompt"][0]["content"].startswith("A gardener")


def test_manifest_describes_file_and_source_and_is_reproducible(copies: Path, tmp_path: Path) -> None:
    first = prepare(SOURCES["math500"], tmp_path / "a", copies)
    assert first == prepare(SOURCES["math500"], tmp_path / "b", copies)
    written = json.loads((tmp_path / "a" / "math500.manifest.json").read_text(encoding="utf-8"))
    assert written == first
    assert written["sha256"] == sha256_of(tmp_path / "a" / "math500.parquet")
    (file,) = written["source"]["files"]
    assert file["sha256"] == sha256_of(copies / LAYOUT["math500"])
    assert written["source"]["revision"] == SOURCES["math500"].revision


def corrupt(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (name,) = (name for name, place in LAYOUT.items() if path.as_posix().endswith(place))
        rows = json.loads(json.dumps(ROWS[name]))
        change(rows[1] if len(rows) > 1 else rows[0])
        write_rows(path, rows)

    return apply


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("math500", lambda p: p.write_bytes(b""), ()),
        ("math500", corrupt(lambda row: row.pop("answer")), ("row 2", "'answer'", "None")),
        ("math500", corrupt(lambda row: row.update(problem=" ")), ("row 2", "'problem'")),
        ("amc23", lambda p: p.write_bytes(b"PAR1 but not really"), ("Parquet",)),
        ("amc23", lambda p: write_rows(p, [{"problem": "p", "answer": "1", "id": 1}]), ("row 1", "'question'")),
        ("math_train", corrupt(lambda row: row.update(solution=r"\boxed{1")), ("'solution'",)),
        ("dapo_math_17k", corrupt(lambda row: row["prompt"][0].update(content="plain")), ("row 2", "'prompt'")),
        ("dapo_math_17k", lambda p: p.unlink(), ()),
        ("gsm8k_train", corrupt(lambda row: row.update(answer="It is -3.")), ("row 2", "'answer'", "It is -3")),
    ],
)
def test_damaged_sources_are_named_and_leave_an_older_result(
    copies: Path, tmp_path: Path, name: str, damage: Callable[[Path], None], says: tuple[str, ...]
) -> None:
    path, out = copies / LAYOUT[name], tmp_path / "out"
    prepare(SOURCES[name], out, copies)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    damage(path)
    with pytest.raises(SourceError, match=holds(str(copies), SOURCES[name].hub_id, *says)):
        prepare(SOURCES[name], out, copies)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_single_files_and_of_a_copy_those_of_the_split_are_read(copies: Path, tmp_path: Path) -> None:
    (tmp_path / "aime25.json").write_text(json.dumps(ROWS["aime25"]), encoding="utf-8")
    assert prepare(SOURCES["aime25"], tmp_path / "out", tmp_path)["rows"] == 1
    write_rows(copies / "math_train" / "data" / "test-00000-of-00001.parquet", ROWS["math_train"][:1] * 5)
    assert prepare(SOURCES["math_train"], tmp_path / "out", copies)["counts"]["read"] == 3


def test_the_hub_is_read_at_the_pinned_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    source = SOURCES["gsm8k_test"]

    def reachable(*args: object, **kwargs: object) -> datasets.Dataset:
        assert (args, kwargs) == (("openai/gsm8k", "main"), {"split": "test", "revision": source.revision})
        return datasets.Dataset.from_list(ROWS["gsm8k_test"])

    monkeypatch.setattr(datasets, "load_dataset", reachable)
    assert prepare(SOURCES["gsm8k_test"], tmp_path)["source"]["revision"] == source.revision
    assert [row["reward_model"]["ground_truth"] for row in read(tmp_path, "gsm8k_test")] == ["180"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: next(iter(())))
    with pytest.raises(SourceError, match=rf"{source.hub_id} at {source.revision}.*--source DIR"):
        prepare(SOURCES["gsm8k_test"], tmp_path)


QUESTION = "What is one plus one?"
MESSAGES = [{"role": "user", "content": QUESTION}]
OWN: list[tuple[str, str, str, dict[str, Any]]] = [
    ("a.jsonl", "problem", "answer", {"problem": QUESTION, "answer": "2"}),
    ("a.parquet", "question", "expected", {"question": QUESTION, "expected": 2.0}),
    ("a.json", "problem", "solution", {"problem": QUESTION, "solution": r"One by one, \boxed{1} and \boxed{2}."}),
    ("a.json", "question", "answer", {"question": QUESTION, "answer": "#### Sum\nIt is 2.\n#### 2"}),
    ("a.jsonl", "question", "answer", {"question": QUESTION, "answer": "One by one it is 2. #### 2"}),
    ("a.csv", "question", "answer", {"question": QUESTION, "answer": "2"}),
    ("a.jsonl", "prompt", "reward_model.ground_truth", {"prompt": QUESTION, "reward_model": {"ground_truth": "2"}}),
    ("a.parquet", "prompt", "answer", {"prompt": MESSAGES, "answer": "2"}),
    ("a.parquet", "prompt", "answer", {"prompt": f" {json.dumps(MESSAGES)}", "answer": "2"}),
]


def write_own(path: Path, rows: Rows) -> None:
    if path.suffix == ".csv":
        path.write_text("".join(",".join(row) + "\n" for row in (rows[0], *(row.values() for row in rows))))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_rows(path, rows)


@pytest.mark.parametrize(("name", "prompt", "answer", "row"), OWN)
def test_anybodys_two_columns_become_verls(
    tmp_path: Path, name: str, prompt: str, answer: str, row: dict[str, Any]
) -> None:
    write_own(tmp_path / name, [row, row])
    columns = ["--prompt", prompt, "--answer", answer, "--name", "own"]
    assert main(["prepare", str(tmp_path / name), *columns, "--out", str(tmp_path / "out")]) == 0
    (result,) = read(tmp_path / "out", "own")
    assert result["prompt"][0]["content"].startswith(QUESTION) and result["reward_model"]["ground_truth"] == "2"
    assert result["data_source"] == "own" and result["extra_info"]["problem_id"] == "own/0"
    manifest = json.loads((tmp_path / "out/own.manifest.json").read_text())
    assert manifest["source"]["columns"] == [prompt, answer]
    assert manifest["counts"]["read"] == 2 and len(manifest["source"]["files"][0]["sha256"]) == 64


def test_answers_of_a_table_stay_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a\nx,1.50\ny,12345678901234567890\nz,\n")
    assert prepare(own_source(tmp_path / "a.csv", "own", "train", "q", "a"), tmp_path)["rows"] == 2
    assert [row["reward_model"]["ground_truth"] for row in read(tmp_path, "own")] == ["1.50", "12345678901234567890"]


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"q": "a", "a": "1"}, {"q": "b", "a": None}, {"q": " ", "a": "2"}, {"q": "c"}, {"q": "d", "a": ""}]
    write_rows(tmp_path / "mine.jsonl", rows)
    command = [
        "prepare",
        str(tmp_path / "mine.jsonl"),
        "--prompt",
        "q",
        "--answer",
        "a",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(command) == 0
    assert "mine: 5 rows read, 4 without a problem or an answer" in capsys.readouterr().out
    assert len(read(tmp_path / "out", "mine")) == 1


def test_problems_of_published_test_sets_are_kept_out_of_anybodys_set(copies: Path, tmp_path: Path) -> None:
    published = ROWS["math500"][0]
    rows = [{"problem": published["problem"], "answer": "1"}, {"problem": "Another one.", "answer": "2"}]
    write_rows(tmp_path / "mine.jsonl", rows)
    command = ["prepare", str(tmp_path / "mine.jsonl"), "--prompt", "problem", "--answer", "answer"]
    assert main([*command, "--out", str(tmp_path), "--against", "math500", "--source", str(copies)]) == 0
    assert [row["reward_model"]["ground_truth"] for row in read(tmp_path, "mine")] == ["2"]


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        (b'{"q": "a", "b": "1"}\n', ("--prompt", "q", "--answer", "a"), ("no problem is left", "1 are without", "'a'")),
        (b'{"q": "a", "a": {"b": 1}}\n', ("--prompt", "q", "--answer", "a"), ("row 1", "'a'", "'b': 1")),
        (b'{"q": [{"role": "system"}], "a": "1"}\n', ("--prompt", "q", "--answer", "a"), ("row 1", "'q'", "system")),
        (b'{"q": "[{\'role\': \'user\'}]", "a": "1"}\n', ("--prompt", "q", "--answer", "a"), ("row 1", "'q'", "JSON")),
        (b'{"q": "a", "a": "It is 1.\\nReally."}\n', ("--prompt", "q", "--answer", "a"), ("row 1", "'a'", "It is 1")),
        (b"version https://git-lfs.github.com/spec/v1\n", ("--prompt", "q", "--answer", "a"), ("mine.jsonl",)),
        (b'{"q": "a"}\n', ("--prompt", "q"), ("--answer",)),
        (b'{"q": "a"}\n', (), ("mine.jsonl", "--prompt", "--answer")),
        (b'{"q": "a"}\n', ("--prompt", "q", "--answer", "a", "--name", "math500"), ("'math500'",)),
        (b'{"q": "a"}\n', ("--prompt", "q", "--answer", "a", "--name", "a/b"), ("'a/b'",)),
    ],
)
def test_what_is_wrong_with_anybodys_file_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    arguments: tuple[str, ...],
    says: tuple[str, ...],
) -> None:
    (tmp_path / "mine.jsonl").write_bytes(content)
    assert main(["prepare", str(tmp_path / "mine.jsonl"), *arguments, "--out", str(tmp_path / "out")]) in (1, 2)
    error = capsys.readouterr().err
    assert all(part in error for part in says), error
    assert not (tmp_path / "out").exists()


def test_files_that_would_be_written_as_one_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / folder / "train.jsonl" for folder in "ab"]
    for file in files:
        write_rows(file, [{"q": "a", "a": "1"}])
    assert main(["prepare", *map(str, files), "--prompt", "q", "--answer", "a", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert str(files[1]) in error and "--name" in error, error
    assert not (tmp_path / "out").exists()


def test_a_prepared_file_is_not_written_over_and_asks_for_a_box_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "How many? Write it in \\boxed{your answer}."
    write_rows(tmp_path / "mine.jsonl", [{"q": QUESTION, "a": "2"}, {"q": own, "a": "3"}])
    columns = ("--prompt", "prompt", "--answer", "reward_model.ground_truth")
    assert (
        main(["prepare", str(tmp_path / "mine.jsonl"), "--prompt", "q", "--answer", "a", "--out", str(tmp_path)]) == 0
    )
    before = (tmp_path / "mine.parquet").read_bytes()
    assert main(["prepare", str(tmp_path / "mine.parquet"), *columns, "--out", f"{tmp_path}/../{tmp_path.name}"]) == 1
    error = capsys.readouterr().err
    assert "mine.parquet" in error and "--out" in error
    assert (tmp_path / "mine.parquet").read_bytes() == before
    assert main(["prepare", str(tmp_path / "mine.parquet"), *columns, "--out", str(tmp_path / "again")]) == 0
    first, again = ([row["prompt"] for row in read(out, "mine")] for out in (tmp_path, tmp_path / "again"))
    assert first == again and [prompt[0]["content"].count("boxed") for prompt in first] == [1, 1]
    assert first[1][0]["content"] == own


def problem(text: str, answer: str = "1") -> Problem:
    return Problem(text, answer, "")


def test_distinct_compares_text_up_to_unicode_form_and_white_space() -> None:
    same = [problem("Find  x²\nnow"), problem("Find x2 now"), problem("Find x² now")]
    assert distinct(same).duplicates == 2
    assert distinct([problem("x-1"), problem("x+1"), problem("X+1")]).duplicates == 0
    result = distinct([problem("p", "1"), problem("p", "2"), problem("p", "1"), problem("q")])
    assert (result.problems, result.conflicting, result.duplicates) == ([problem("q")], 3, 0)


def test_tokens_keep_operators_and_drop_formatting() -> None:
    assert tokens(r"Find $\dfrac{1}{2}-\left(x\right)$, please.") == tokens(r"find \frac{1}{2} - (x) Please")
    assert tokens("x-1") != tokens("x+1")
    assert tokens(r"\sin x") == [r"\sin", "x"]


def test_boilerplate_alone_is_no_overlap() -> None:
    phrase = "where m and n are relatively prime positive integers find the sum of m and n"
    train = [problem(f"Problem {i} is about {i} ducks {phrase}") for i in range(BOILERPLATE + 1)]
    copied = "seven ducks swim over eleven lakes and on every lake there are three islands with trees"
    train.append(problem(f"Once more: {copied} {phrase}"))
    tests = {"t": [problem(f"{copied.capitalize()}! How many trees? {phrase}")]}
    kept, overlaps = without_overlap(train, tests)
    assert kept == train[:-1]
    assert overlaps["t"] == {"same_text": 0, "shared_ngram": 1}
    few, overlaps = without_overlap(train[:3], tests)
    assert few == [] and overlaps["t"]["shared_ngram"] == 3


def test_command_line(copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(copies / "gsm8k" / "socratic" / "train-00000-of-00001.parquet", [{"question": "of another subset"}])
    for group, names in GROUPS.items():
        out = tmp_path / group
        assert main(["prepare", group, "--out", str(out), "--source", str(copies)]) == 0
        assert {path.name for path in out.glob("*.parquet")} == {f"{name}.parquet" for name in names}
    printed = capsys.readouterr().out
    assert "dapo_math_17k: 10 rows read, 0 without a problem or an answer, 3 duplicates, 2 with conf" in printed
    assert printed.count("gsm8k_train: 3 rows read, 0 without a problem or an answer, 0 duplicates, 0 with") == 2
    assert main(["prepare", "nonsense", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in ("'nonsense'", "--prompt", "--answer", *SOURCES))


def test_a_broken_set_is_named_and_the_others_are_written(
    copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copies / LAYOUT["aime24"]).write_bytes(b"broken")
    command = ["prepare", "aime24", "aime25", "--out", str(tmp_path / "out"), "--source", str(copies)]
    assert main(command) == 1
    assert [path.name for path in (tmp_path / "out").glob("*.parquet")] == ["aime25.parquet"]
    assert "error: aime24: " in capsys.readouterr().err


def test_a_file_is_no_folder_for_the_data(copies: Path, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "out")):
        prepare(SOURCES["aime25"], tmp_path / "out", copies)
