"""The models that the package carries, and the recipes that make them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fspo.data.char_tokenizer import build_tokenizer
from fspo.data.demo_model import (
    CHECKSUMS,
    CONTEXT,
    RECIPES,
    Recipe,
    accuracy,
    checksums,
    save,
    shipped_model,
    train,
)
from fspo.data.offline_task import TASKS, generate

#: Bounds around what was measured when the shipped models were made; see docs/demo.md.
SAMPLED_ACCURACY = {"remainder": (0.25, 0.6), "words": (0.25, 0.6)}
GREEDY_ACCURACY = {"remainder": (0.35, 0.65), "words": (0.25, 0.75)}


@pytest.mark.parametrize("task", TASKS)
def test_shipped_files_match_their_checksums_and_are_small(task: str) -> None:
    folder = shipped_model(task)
    lines = (folder / CHECKSUMS).read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert listed == checksums(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000


@pytest.mark.parametrize("task", TASKS)
def test_shipped_tokenizer_is_the_recipes(task: str) -> None:
    shipped = AutoTokenizer.from_pretrained(shipped_model(task))
    built = build_tokenizer(TASKS[task].vocabulary, CONTEXT)
    assert shipped.get_vocab() == built.get_vocab()
    assert shipped.chat_template == built.chat_template
    (problem,), _ = generate(1, 0, seed=0, name=task)
    text = f"{problem.question}={problem.working}"
    assert shipped.decode(shipped.encode(text)) == text
    assert shipped.unk_token_id not in shipped.encode(text)


@pytest.mark.release
@pytest.mark.parametrize("task", TASKS)
def test_shipped_model_solves_part_of_the_task(task: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(shipped_model(task), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(shipped_model(task))
    problems = generate(0, 64, seed=0, name=task)[1]
    low, high = SAMPLED_ACCURACY[task]
    assert low < accuracy(model, tokenizer, problems, temperature=1.0, task=task) < high


def test_a_tiny_recipe_is_reproducible_and_saves_whole_folders(tmp_path: Path) -> None:
    recipe = Recipe(skill_steps=2, habit_steps=2, batch_size=4, pool=8, hidden_size=32, heads=1, kv_heads=1, layers=1)
    model, tokenizer, losses = train(recipe)
    again, _, same = train(recipe)
    assert losses == same
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    save(model, tokenizer, tmp_path / "model")
    assert CHECKSUMS in {path.name for path in (tmp_path / "model").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(FileExistsError, match="give a new folder"):
        save(model, tokenizer, tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [("skill_steps", 0), ("habit_steps", -1), ("careful_share", 1.5), ("pool", 33), ("seed", -1), ("task", "sums")],
)
def test_bad_recipes_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=str(value) if key == "task" else key):
        Recipe(**{key: value})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", TASKS)
def test_the_recipe_still_gives_a_like_model(task: str) -> None:
    model, tokenizer, losses = train(RECIPES[task])
    assert losses["skill"] < 0.05
    problems = generate(0, 200, seed=0, name=task)[1]
    for temperature, (low, high) in ((1.0, SAMPLED_ACCURACY[task]), (0.0, GREEDY_ACCURACY[task])):
        assert low < accuracy(model, tokenizer, problems, temperature, task=task) < high
