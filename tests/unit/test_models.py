"""The model that the package carries (``python -m benchmarks.models``)."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.models.char_tokenizer import build_tokenizer
from benchmarks.models.demo_model import CONTEXT, SHIPPED, Recipe, accuracy, slips, train
from recipe.math.data.offline_task import VOCABULARY, distinct


def test_the_shipped_tokenizer_knows_every_problem() -> None:
    shipped, built = AutoTokenizer.from_pretrained(SHIPPED), build_tokenizer(VOCABULARY, CONTEXT)
    assert shipped.get_vocab() == built.get_vocab() and shipped.chat_template == built.chat_template
    for problem in distinct(300, 1, "train"):
        text = f"{problem.question}={problem.working}"
        assert shipped.decode(shipped.encode(text)) == text and shipped.unk_token_id not in shipped.encode(text)
        assert problem.working not in slips(problem)


def test_the_recipe_of_the_model_can_be_repeated() -> None:
    tiny = Recipe(skill_steps=2, habit_steps=2, batch_size=4, pool=8, hidden_size=32, heads=1, kv_heads=1, layers=1)
    (model, tokenizer, losses), (again, _, same) = train(tiny), train(tiny)
    assert losses == same
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert accuracy(model, tokenizer, distinct(4, 0, "test"), 1.0) < 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_recipe_still_gives_a_like_model() -> None:
    model, tokenizer, losses = train(Recipe())
    assert losses["skill"] < 0.05
    # around the shipped model (0.355 and 0.475) and six other seeds; a machine that rounds otherwise is like another
    for temperature, (low, high) in ((1.0, (0.25, 0.6)), (0.0, (0.35, 0.65))):
        assert low < accuracy(model, tokenizer, distinct(200, 0, "test"), temperature) < high
