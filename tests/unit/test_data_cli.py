"""``python -m fspo.data``: the commands of the demo and of SmolLM2, as a user types them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fspo.data.cli import main


def test_demo_data_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo-data", "--out", str(tmp_path), "--n-train", "12", "--n-test", "5", "--seed", "3"]) == 0
    assert pq.read_table(tmp_path / "train.parquet").num_rows == 12
    assert pq.read_table(tmp_path / "test.parquet").num_rows == 5
    assert str(tmp_path / "train.parquet") in capsys.readouterr().out


@pytest.mark.slow
def test_demo_model_is_trained_saved_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert main(["demo-model", "--out", str(out), "--skill-steps", "1", "--habit-steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert "loss_" in printed
    assert "accuracy_T0 " in printed
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == 16
    assert tokenizer.decode(tokenizer("12%5=")["input_ids"]) == "12%5="


def test_an_existing_model_folder_is_never_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo-model", "--out", str(tmp_path)]) == 2
    assert f"{tmp_path} exists: give a new folder" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="the extra packages are installed")
def test_smollm2_without_its_packages_says_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smollm2", "--out", str(tmp_path / "x")]) == 2
    assert "make smollm2" in capsys.readouterr().err
    assert not (tmp_path / "x" / "model").exists()


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs `make smollm2`")
def test_smollm2_data_has_no_problem_twice(tmp_path: Path) -> None:
    from fspo.data.smollm2 import chain_sums, write_data

    write_data(tmp_path, n_train=8, n_test=4, seed=1)
    train, test = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    questions = [row["prompt"][0]["content"] for row in train + test]
    assert len(set(questions)) == 12
    with pytest.raises(ValueError, match="ask for fewer"):
        chain_sums(1_000_000, seed=1)
