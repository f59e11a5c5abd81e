"""Promise 9: ``python -m fspo.check_loss`` finds planted faults, passes sound losses, and names another loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import Ended, run
from some_losses import FAULTS

pytestmark = pytest.mark.promise(9)


def check(folder: Path, *words: str) -> Ended:
    return run("fspo.check_loss", *words, folder=folder)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each faulty loss; one command checks them all."""
    ended = check(tmp_path_factory.mktemp("x"), *(f"some_losses:{name}" for name in FAULTS))
    assert ended.status == 1
    parts = re.split(r"^.*some_losses:(\w+).*$", ended.out, flags=re.M)
    return {name: text for name, text in zip(parts[1::2], parts[2::2], strict=True) if text.strip()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_check(name: str, faulty: dict[str, str]) -> None:
    failed = re.findall(r"^FAIL\s+(\S+)", faulty[name], re.M)
    wanted = {"micro": {"micro-batches", "ranks"}}.get(name.split("_")[0], {name.split("_")[0]})
    assert wanted & {*failed}, faulty[name]


def test_sound_losses_pass(tmp_path: Path) -> None:
    ended = check(tmp_path, *(f"some_losses:{name}" for name in ("PPO", "GSPO", "gspo_half", "with_metrics")))
    assert ended.status == 0 and "FAIL" not in ended.out


@pytest.mark.parametrize(
    ("loss", "like", "status"),
    [
        ("some_losses:GSPO", "seq_gspo", 0),
        ("some_losses:gspo_half", "seq_gspo", 1),
        ("some_losses:GSPO", "seq_rloo", 1),
        ("some_losses:PPO", "some_losses:PPO", 0),
        ("some_losses:PPO", "some_losses:GSPO", 1),
    ],
)
def test_a_loss_equals_a_named_one_or_not(loss: str, like: str, status: int, tmp_path: Path) -> None:
    assert check(tmp_path, loss, "--like", like).status == status


@pytest.mark.parametrize(
    "words",
    [
        ["some_losses"],
        ["some_losses:PPPO"],
        ["no_such:f"],
        ["some_losses:FAULTS"],
        ["some_losses:PPO", "--config", "clip"],
        ["some_losses:PPO", "--like", "gspoo"],
    ],
)
def test_what_cannot_be_checked_is_named(words: list[str], tmp_path: Path) -> None:
    ended = check(tmp_path, *words)
    assert ended.status == 2 and words[0] in ended.error and words[-1] in ended.error
    assert "Traceback" not in ended.error
