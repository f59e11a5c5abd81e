"""A hint is the remedy of a typing mistake, and nothing else."""

from __future__ import annotations

import pytest

from fspo.names import did_you_mean

KNOWN = (
    "Adam",
    "AdamW",
    "ppo",
    "max_prompt_length",
    "min_lr_ratio",
    "param_offload",
    "top_k",
    "train_files",
    "val_files",
    "entropy_coeff",
)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_promt_length", "max_prompt_length"),
        ("max_prompt_lenght", "max_prompt_length"),
        ("maxprompt_length", "max_prompt_length"),
        ("train_file", "train_files"),
        ("entropy_coef", "entropy_coeff"),
        ("Param_Offload", "param_offload"),
        ("pop", "ppo"),
        ("adamw", "AdamW"),
        ("entropy_coefficient", "entropy_coeff"),
        ("max_prompt_len", "max_prompt_length"),
    ],
)
def test_one_or_two_letters_are_a_typing_mistake(name: str, meant: str) -> None:
    assert did_you_mean(name, KNOWN) == f" (did you mean {meant}?)"


@pytest.mark.parametrize(
    "name", ["opo", "po", "min_prompt_length", "grad_offload", "top_p", "max_obs_length", "test_files", "max", ""]
)
def test_another_word_is_none(name: str) -> None:
    assert did_you_mean(name, KNOWN) == ""
