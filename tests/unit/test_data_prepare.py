"""Data sets in verl's schema: published ones from local copies in their layout, and anybody's two columns."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import files_of
from messages import holds

from recipe.math.data.decontaminate import BOILERPLATE, distinct, without_overlap
from recipe.math.data.prepare import REQUEST, main, prepare
from recipe.math.data.sources import DAPO_OPENING, SOURCES, Problem

Rows = list[dict[str, Any]]
ROWS: dict[str, Rows] = json.loads((Path(__file__).parent / "assets" / "source_rows.json").read_text(encoding="utf-8"))
TRAIN, TEST = "train-00000-of-00001.parquet", "test-00000-of-00001.parquet"
LAYOUT = {
    **{"dapo_math_17k": "dapo_math_17k/data/dapo-math-17k.parquet", "math_train": f"math_train/data/{TRAIN}"},
    **{"math500": "math500/test.jsonl", "amc23": f"amc23/{TEST}", "aime24": f"aime24/data/{TRAIN}"},
    **{"aime25": "aime25/test.jsonl", "gsm8k_train": f"gsm8k/main/{TRAIN}", "gsm8k_test": f"gsm8k/main/{TEST}"},
}


def write(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(out: Path, name: str) -> Rows:
    return pq.read_table(out / f"{name}.parquet").to_pylist()  # type: ignore[no-any-return]


def truths(out: Path, name: str) -> list[str]:
    return [row["reward_model"]["ground_truth"] for row in read(out, name)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    for name, rows in ROWS.items():
        write(tmp_path / "copies" / LAYOUT[name], rows)
    write(tmp_path / f"copies/gsm8k/socratic/{TRAIN}", [{"question": "of another subset"}])
    write(tmp_path / f"copies/math_train/data/{TEST}", ROWS["math_train"][:1] * 5)
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
    assert [truths(out, name) for name in SOURCES if name != "dapo_math_17k"] == [
        *([r"\frac{7}{2}", "4", "x^2+2x+1"], [r"\frac{3}{4}", "9"], ["30", "4"], ["19"], ["147"]),
        *(["6000", "-3", "180"], ["180"]),
    ]


def test_what_is_left_out_is_counted_in_a_manifest(copies: Path, tmp_path: Path) -> None:
    source = SOURCES["dapo_math_17k"]
    manifest = prepare(source, tmp_path / "a", copies, source.tests)
    assert manifest == prepare(source, tmp_path / "b", copies, source.tests), "it can be made again"
    assert json.loads((tmp_path / "a/dapo_math_17k.manifest.json").read_text(encoding="utf-8")) == manifest
    assert list(manifest["counts"].values()) == [10, 0, 4, 2, 4]
    found = {name: tuple(kinds.values()) for name, kinds in manifest["overlap_with_tests"].items()}
    assert found == {"math500": (1, 0), "amc23": (0, 0), "aime24": (0, 1), "aime25": (0, 0)}
    assert manifest["rows"] == len(read(tmp_path / "a", source.name)) == 4
    sums = [manifest["sha256"], *(file["sha256"] for file in manifest["source"]["files"])]
    files = [tmp_path / "a/dapo_math_17k.parquet", copies / LAYOUT[source.name]]
    assert sums == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert manifest["source"]["revision"] == source.revision


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("math500", {"problem": 3}),
        ("math500", {"answer": None}),
        ("math_train", {"solution": "It is 7."}),
        ("dapo_math_17k", {"prompt": [{"role": "user", "content": "plain"}]}),
        ("gsm8k_train", {"answer": "It is -3."}),
    ],
)
def test_a_damaged_source_is_named_and_replaces_nothing(
    copies: Path, tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    prepare(SOURCES[name], out, copies)
    before = files_of(out)
    write(copies / LAYOUT[name], [ROWS[name][0], ROWS[name][1] | change])
    with pytest.raises(ValueError, match=holds(str(copies), "row 2", *map(repr, change))):
        prepare(SOURCES[name], out, copies)
    assert files_of(out) == before
    words = ["prepare", name, "aime25", "--out", str(out), "--source", str(copies), "--against"]
    assert main(words) == 1 and (out / "aime25.parquet").exists(), "the other sets are written"


def test_the_hub_is_read_at_the_pinned_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, unreachable = SOURCES["gsm8k_test"], Mock(side_effect=ConnectionError)
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match=rf"{source.hub_id} at {source.revision}.*--source DIR"):
        prepare(source, tmp_path)
    unreachable.assert_called_once_with("openai/gsm8k", "main", split="test", revision=source.revision)


def of_columns(file: Path, out: Path, *more: str) -> int:
    """The command's status for somebody's own file; of an option that is given twice, the last counts."""
    return main(["prepare", str(file), "--prompt", "q", "--answer", "a", "--out", str(out), *more])


QUESTION = "What is one plus one?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.mark.parametrize(
    ("name", "answer", "row"),
    [
        ("a.parquet", "expected", {"q": QUESTION, "expected": 2.0}),
        ("a.json", "solution", {"q": QUESTION, "solution": r"One by one, \boxed{1} and \boxed{2}."}),
        ("a.jsonl", "a", {"q": QUESTION, "a": "#### Sum\nIt is 2.\n#### 2"}),
        ("a.parquet", "a", {"q": MESSAGES, "a": "2"}),
        ("a.parquet", "a", {"q": f" {json.dumps(MESSAGES)}", "a": "2"}),
    ],
)
def test_anybodys_two_columns_become_verls(tmp_path: Path, name: str, answer: str, row: dict[str, Any]) -> None:
    write(tmp_path / name, [row, row])
    assert of_columns(tmp_path / name, tmp_path / "out", "--name", "own", "--answer", answer) == 0
    (result,) = read(tmp_path / "out", "own")
    assert result["prompt"][0]["content"] == QUESTION + REQUEST and result["reward_model"]["ground_truth"] == "2"


def test_answers_of_a_table_stay_as_written_or_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('q,a\nx,1.50\ny,12345678901234567890\nz,\nw,"\\boxed{1,2}"\nv,"#### 1,200"\n')
    assert of_columns(tmp_path / "a.csv", tmp_path) == 0
    assert json.loads((tmp_path / "a.manifest.json").read_text())["counts"]["without_answer"] == 1
    assert truths(tmp_path, "a") == ["1.50", "12345678901234567890", "1,2", "1200"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"q": "a", "b": "1"}\n', ("no problem is left", "'without_answer': 1", "'a'")),
        (b'{"q": "a", "a": [1]}\n', ("row 1", "'a'", "[1]")),
        (b'{"q": [{"role": "system"}], "a": "1"}\n', ("row 1", "'q'", "system")),
        (b"version https://git-lfs.github.com/spec/v1\n", ("mine.jsonl",)),
    ],
)
def test_what_is_wrong_with_anybodys_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: tuple[str, ...]
) -> None:
    (tmp_path / "mine.jsonl").write_bytes(content)
    assert of_columns(tmp_path / "mine.jsonl", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert all(part in error for part in says) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", ["gsm8k_test.jsonl", "a.jsonl --name aime24", "a.jsonl --name ../up"])
def test_a_name_that_would_be_anothers_file_is_refused(tmp_path: Path, words: str) -> None:
    file, *more = words.split()
    write(tmp_path / file, [{"q": QUESTION, "a": "2"}])
    before = files_of(tmp_path)
    with pytest.raises(SystemExit) as refused:
        of_columns(tmp_path / file, tmp_path / "out", *more)
    assert refused.value.code == 2 and files_of(tmp_path) == before


def test_a_prepared_file_asks_once(tmp_path: Path) -> None:
    own = "How many? Write it in \\boxed{your answer}."
    write(tmp_path / "mine.jsonl", [{"q": QUESTION, "a": "2"}, {"q": own, "a": "3"}])
    assert of_columns(tmp_path / "mine.jsonl", tmp_path) == 0
    columns = ("--prompt", "prompt", "--answer", "reward_model.ground_truth")
    assert of_columns(tmp_path / "mine.parquet", tmp_path / "again", *columns) == 0
    for out in (tmp_path, tmp_path / "again"):
        assert [row["prompt"][0]["content"] for row in read(out, "mine")] == [QUESTION + REQUEST, own]


def problems(*texts: str) -> list[Problem]:
    return [Problem(text, "1") for text in texts]


def test_equal_text_is_compared_without_its_form() -> None:
    assert distinct(problems("Find  x²\nnow", "Find x2 now", "Find x² now"))[1]["duplicates"] == 2
    assert distinct(problems("x-1", "x+1", "X+1"))[1]["duplicates"] == 0
    copy = problems(r"Find $\left(x-1\right)^2 \cdot \dfrac{1}{2}$.")
    assert without_overlap(copy, {"t": problems(r"find (x - 1)^{2} \cdot \frac{1}{2}")})[0] == []


def test_a_common_phrase_alone_is_no_overlap() -> None:
    phrase = "where m and n are relatively prime positive integers find the sum of m and n"
    copied = "seven ducks swim over eleven lakes and on every lake there are three islands with trees"
    common = [f"Problem {i} is about {i} ducks {phrase}" for i in range(BOILERPLATE + 1)]
    train = problems(*common, f"Once more: {copied} {phrase}")
    tests = {"t": problems(f"{copied.capitalize()}! How many trees? {phrase}")}
    kept, overlaps = without_overlap(train, tests)
    assert kept == train[:-1] and overlaps["t"] == {"same_text": 0, "shared_ngram": 1}
    assert without_overlap(train[:3], tests)[0] == [], "three times it is no common phrase"
