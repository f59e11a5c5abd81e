"""The model that the package carries, and the recipe that makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fspo.data.char_tokenizer import build_tokenizer
from fspo.data.demo_model import (
    CHECKSUMS,
    CONTEXT,
    Recipe,
    accuracy,
    checksums,
    save,
    shipped_model,
    train,
)
from fspo.data.offline_task import ALPHABET, generate

#: Measured when the shipped model was made; see docs/demo.md.
SAMPLED_ACCURACY = (0.25, 0.6)
GREEDY_ACCURACY = (0.35, 0.65)


def test_shipped_files_match_their_checksums_and_are_small() -> None:
    folder = shipped_model()
    lines = (folder / CHECKSUMS).read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert listed == checksums(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000


def test_shipped_tokenizer_is_the_recipes() -> None:
    shipped = AutoTokenizer.from_pretrained(shipped_model())
    built = build_tokenizer(ALPHABET, CONTEXT)
    assert shipped.get_vocab() == built.get_vocab()
    assert shipped.chat_template == built.chat_template
    assert shipped.decode(shipped.encode("150%44=106")) == "150%44=106"


def test_shipped_model_solves_part_of_the_task() -> None:
    model = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(shipped_model())
    problems = generate(0, 128, seed=0)[1]
    low, high = SAMPLED_ACCURACY
    assert low < accuracy(model, tokenizer, problems, temperature=1.0) < high


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
    ("key", "value"), [("skill_steps", 0), ("habit_steps", -1), ("careful_share", 1.5), ("pool", 33), ("seed", -1)]
)
def test_bad_recipes_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        Recipe(**{key: value})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_recipe_still_gives_a_like_model() -> None:
    model, tokenizer, losses = train(Recipe())
    assert losses["skill"] < 0.03
    problems = generate(0, 200, seed=0)[1]
    low, high = SAMPLED_ACCURACY
    assert low < accuracy(model, tokenizer, problems, temperature=1.0) < high
    low, high = GREEDY_ACCURACY
    assert low < accuracy(model, tokenizer, problems, temperature=0.0) < high
