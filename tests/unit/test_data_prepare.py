"""Data sets in verl's schema: published ones from local copies in their layout, and anybody's two columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from messages import holds

from recipe.math.data.decontaminate import BOILERPLATE, distinct, without_overlap
from recipe.math.data.prepare import REQUEST, main, prepare
from recipe.math.data.sources import DAPO_OPENING, SOURCES, Problem, SourceError, own_source

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


def write(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text("".join(",".join(row) + "\n" for row in (rows[0], *(row.values() for row in rows))))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(out: Path, name: str) -> Rows:
    rows: Rows = pq.read_table(out / f"{name}.parquet").to_pylist()
    return rows


def truths(out: Path, name: str) -> list[str]:
    return [row["reward_model"]["ground_truth"] for row in read(out, name)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    for name, rows in ROWS.items():
        write(tmp_path / "copies" / LAYOUT[name], rows)
    other = tmp_path / "copies/gsm8k/socratic/train-00000-of-00001.parquet"
    write(other, [{"question": "of another subset"}])
    write(tmp_path / "copies/math_train/data/test-00000-of-00001.parquet", ROWS["math_train"][:1] * 5)
    return tmp_path / "copies"


def test_published_sets_become_verls_rows(copies: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["prepare", "all", "--out", str(out), "--source", str(copies), "--against"]) == 0
    for name in SOURCES:
        for index, row in enumerate(read(out, name)):
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            (message,) = row["prompt"]
            assert (row["data_source"], message["role"], row["reward_model"]["style"]) == (name, "user", "rule")
            assert message["content"].endswith(REQUEST) and DAPO_OPENING[:20] not in message["content"]
            assert row["extra_info"]["problem_id"] == f"{name}/{index}"
    assert {name: truths(out, name) for name in SOURCES if name != "dapo_math_17k"} == {
        "math_train": [r"\frac{7}{2}", "4", "x^2+2x+1"],
        "math500": [r"\frac{3}{4}", "9"],
        "amc23": ["30", "4"],
        "aime24": ["19"],
        "aime25": ["147"],
        "gsm8k_train": ["6000", "-3", "180"],
        "gsm8k_test": ["180"],
    }


def test_duplicates_and_overlap_are_left_out_and_counted(copies: Path, tmp_path: Path) -> None:
    manifest = prepare(SOURCES["dapo_math_17k"], tmp_path, copies, SOURCES["dapo_math_17k"].tests)
    counts = manifest["counts"]
    overlap = counts.pop("overlap_with_tests")
    assert counts == {"read": 10, "without_answer": 0, "duplicates": 4, "dropped_for_overlap": 2, "written": 4}
    assert {name: tuple(found.values()) for name, found in overlap.items()} == {
        "math500": (1, 0),
        "amc23": (0, 0),
        "aime24": (0, 1),
        "aime25": (0, 0),
    }
    assert read(tmp_path, "dapo_math_17k")[0]["extra_info"]["source_id"] == "u-1"


def test_a_manifest_describes_file_and_source(copies: Path, tmp_path: Path) -> None:
    first = prepare(SOURCES["math500"], tmp_path / "a", copies)
    assert first == prepare(SOURCES["math500"], tmp_path / "b", copies), "it can be made again"
    assert json.loads((tmp_path / "a/math500.manifest.json").read_text(encoding="utf-8")) == first
    written, source = tmp_path / "a/math500.parquet", copies / LAYOUT["math500"]
    sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (written, source)]
    assert [first["sha256"], *(file["sha256"] for file in first["source"]["files"])] == sums
    assert first["source"]["revision"] == SOURCES["math500"].revision


def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path, Rows], None]:
    def apply(path: Path, rows: Rows) -> None:
        rows = json.loads(json.dumps(rows))
        change(rows[1])
        write(path, rows)

    return apply


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("math500", lambda path, _: path.write_bytes(b""), ()),
        ("math500", changed(lambda row: row.pop("answer")), ("row 2", "'answer'", "None")),
        ("math500", changed(lambda row: row.update(problem=" ")), ("row 2", "'problem'")),
        ("amc23", lambda path, _: path.write_bytes(b"PAR1 but not really"), ("Parquet",)),
        ("dapo_math_17k", changed(lambda row: row["prompt"][0].update(content="plain")), ("row 2", "'prompt'")),
        ("dapo_math_17k", lambda path, _: path.unlink(), ()),
        ("gsm8k_train", changed(lambda row: row.update(answer="It is -3.")), ("row 2", "'answer'", "It is -3")),
    ],
)
def test_a_damaged_source_is_named_and_replaces_nothing(
    copies: Path, tmp_path: Path, name: str, damage: Callable[[Path, Rows], None], says: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    prepare(SOURCES[name], out, copies)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    damage(copies / LAYOUT[name], ROWS[name])
    with pytest.raises(SourceError, match=holds(str(copies), *says)):
        prepare(SOURCES[name], out, copies)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    words = ["prepare", name, "aime25", "--out", str(out), "--source", str(copies), "--against"]
    assert main(words) == 1 and (out / "aime25.parquet").exists(), "the other sets are written"


def test_the_hub_is_read_at_the_pinned_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    source = SOURCES["gsm8k_test"]

    def reachable(*args: object, **kwargs: object) -> datasets.Dataset:
        assert (args, kwargs) == (("openai/gsm8k", "main"), {"split": "test", "revision": source.revision})
        return datasets.Dataset.from_list(ROWS["gsm8k_test"])

    monkeypatch.setattr(datasets, "load_dataset", reachable)
    prepare(source, tmp_path)
    assert truths(tmp_path, "gsm8k_test") == ["180"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: next(iter(())))
    with pytest.raises(SourceError, match=rf"{source.hub_id} at {source.revision}.*--source DIR"):
        prepare(source, tmp_path)


QUESTION = "What is one plus one?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.mark.parametrize(
    ("name", "answer", "row"),
    [
        ("a.parquet", "expected", {"q": QUESTION, "expected": 2.0}),
        ("a.json", "solution", {"q": QUESTION, "solution": r"One by one, \boxed{1} and \boxed{2}."}),
        ("a.jsonl", "a", {"q": QUESTION, "a": "#### Sum\nIt is 2.\n#### 2"}),
        ("a.csv", "a", {"q": QUESTION, "a": "2"}),
        ("a.jsonl", "reward_model.ground_truth", {"q": QUESTION, "reward_model": {"ground_truth": "2"}}),
        ("a.parquet", "a", {"q": MESSAGES, "a": "2"}),
        ("a.parquet", "a", {"q": f" {json.dumps(MESSAGES)}", "a": "2"}),
    ],
)
def test_anybodys_two_columns_become_verls(tmp_path: Path, name: str, answer: str, row: dict[str, Any]) -> None:
    write(tmp_path / name, [row, row])
    words = ("--prompt", "q", "--answer", answer, "--name", "own", "--out", str(tmp_path / "out"))
    assert main(["prepare", str(tmp_path / name), *words]) == 0
    (result,) = read(tmp_path / "out", "own")
    assert result["prompt"][0]["content"] == QUESTION + REQUEST and result["reward_model"]["ground_truth"] == "2"


def test_answers_of_a_table_stay_as_written_or_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q,a\nx,1.50\ny,12345678901234567890\nz,\n")
    counts = prepare(own_source(tmp_path / "a.csv", "own", "train", "q", "a"), tmp_path)["counts"]
    assert (counts["read"], counts["without_answer"]) == (3, 1)
    assert truths(tmp_path, "own") == ["1.50", "12345678901234567890"]


@pytest.mark.parametrize(
    ("content", "words", "status", "says"),
    [
        (b'{"q": "a", "b": "1"}\n', "--prompt q --answer a", 1, ("no problem is left", "1 are without", "'a'")),
        (b'{"q": "a", "a": {"b": 1}}\n', "--prompt q --answer a", 1, ("row 1", "'a'", "'b': 1")),
        (b'{"q": [{"role": "system"}], "a": "1"}\n', "--prompt q --answer a", 1, ("row 1", "'q'", "system")),
        (b'{"q": "[{\'role\': \'user\'}]", "a": "1"}\n', "--prompt q --answer a", 1, ("row 1", "'q'", "JSON")),
        (b"version https://git-lfs.github.com/spec/v1\n", "--prompt q --answer a", 1, ("mine.jsonl",)),
        (b'{"q": "a"}\n', "--prompt q", 2, ("--answer",)),
        (b'{"q": "a"}\n', "", 2, ("mine.jsonl", "--prompt", "--answer")),
        (b'{"q": "a"}\n', "--prompt q --answer a --name math500", 2, ("'math500'",)),
    ],
)
def test_what_is_wrong_with_anybodys_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str, status: int, says: tuple[str, ...]
) -> None:
    (tmp_path / "mine.jsonl").write_bytes(content)
    out = tmp_path / "out"
    assert main(["prepare", str(tmp_path / "mine.jsonl"), *words.split(), "--out", str(out)]) == status
    error = capsys.readouterr().err
    assert all(part in error for part in says) and not out.exists()


def test_a_prepared_file_asks_once_and_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = "How many? Write it in \\boxed{your answer}."
    write(tmp_path / "mine.jsonl", [{"q": QUESTION, "a": "2"}, {"q": own, "a": "3"}])
    prepare(own_source(tmp_path / "mine.jsonl", "mine", "train", "q", "a"), tmp_path)
    first = read(tmp_path, "mine")
    words = ["prepare", str(tmp_path / "mine.parquet"), "--prompt", "prompt", "--answer", "reward_model.ground_truth"]
    assert main([*words, "--out", f"{tmp_path}/../{tmp_path.name}"]) == 1 and "--out" in capsys.readouterr().err
    assert read(tmp_path, "mine") == first
    assert main([*words, "--out", str(tmp_path / "again")]) == 0
    contents = [row["prompt"][0]["content"] for row in read(tmp_path / "again", "mine")]
    assert contents == [row["prompt"][0]["content"] for row in first] == [QUESTION + REQUEST, own]


def problem(text: str, answer: str = "1") -> Problem:
    return Problem(text, answer, "")


def test_equal_text_is_compared_without_its_form() -> None:
    assert distinct([problem("Find  x²\nnow"), problem("Find x2 now"), problem("Find x² now")]).duplicates == 2
    assert distinct([problem("x-1"), problem("x+1"), problem("X+1")]).duplicates == 0


def test_a_common_phrase_alone_is_no_overlap() -> None:
    phrase = "where m and n are relatively prime positive integers find the sum of m and n"
    train = [problem(f"Problem {i} is about {i} ducks {phrase}") for i in range(BOILERPLATE + 1)]
    copied = "seven ducks swim over eleven lakes and on every lake there are three islands with trees"
    train.append(problem(f"Once more: {copied} {phrase}"))
    tests = {"t": [problem(f"{copied.capitalize()}! How many trees? {phrase}")]}
    kept, overlaps = without_overlap(train, tests)
    assert kept == train[:-1] and overlaps["t"] == {"same_text": 0, "shared_ngram": 1}
    assert without_overlap(train[:3], tests)[0] == [], "three times it is no common phrase"
