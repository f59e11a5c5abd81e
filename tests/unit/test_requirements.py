"""The pinned lists: every file has a sum, which every installation asks for, and no address is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LISTS = sorted(path.stem for path in REQUIREMENTS.glob("*.in"))


@pytest.mark.parametrize("name", LISTS)
def test_every_pinned_file_has_a_sum_and_no_address(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    entries = re.sub(r" \\\n +", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    pinned = re.compile(r"[\w.\[\],-]+==\d\S*( --hash=sha256:[0-9a-f]{64})+")
    assert entries and [entry for entry in entries if not pinned.fullmatch(entry)] == []
    assert "://" not in text


def test_every_installation_asks_for_sums() -> None:
    for name in ("requirements/setup.sh", "requirements/install-gpu.sh", "Makefile"):
        commands = re.sub(r"\\\n", " ", (ROOT / name).read_text(encoding="utf-8")).splitlines()
        of_lists = [
            c for c in commands if re.search(r"pip.* (install|download) ", c) and re.search(r" (-r|--requirement) ", c)
        ]
        without = ("--require-hashes", "$FLASH_ATTN_WHEEL")  # a wheel that the user names is in no list
        assert of_lists and not [c for c in of_lists if not any(word in c for word in without)], name
