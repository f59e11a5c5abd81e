"""The pinned lists: every file has a sum, no address is named, and the page on advisories speaks of these versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LISTS = sorted(path.stem for path in REQUIREMENTS.glob("*.in"))


def pinned(name: str) -> dict[str, tuple[str, list[str]]]:
    """Version and sums of each package of a list."""
    text = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    entries = re.sub(r" \\\n +", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    return {
        entry.partition("==")[0]: (entry.partition("==")[2].split()[0], re.findall(r"--hash=(\S+)", entry))
        for entry in entries
    }


@pytest.mark.parametrize("name", LISTS)
def test_every_pinned_file_has_a_sum_and_no_list_names_an_address(name: str) -> None:
    assert "://" not in (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    packages = pinned(name)
    assert packages
    assert not [p for p, (version, sums) in packages.items() if not re.match(r"\d", version) or not sums]
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for _, sums in packages.values() for one in sums)


def test_torch_for_cpus_has_a_sum_for_every_python_that_setup_takes() -> None:
    """No package index has these wheels, so `make lock` sees those of one Python only."""
    taken = re.search(r"\((\d), (\d+)\) <= .* <= \(3, (\d+)\)", (REQUIREMENTS / "setup.sh").read_text(encoding="utf-8"))
    assert taken is not None
    pythons = int(taken[3]) - int(taken[2]) + 1
    assert len(pinned("cpu")["torch"][1]) >= pythons


def test_every_installation_of_a_list_asks_for_its_sums() -> None:
    for name in ("requirements/setup.sh", "requirements/install-gpu.sh", "Makefile"):
        commands = re.sub(r"\\\n", " ", (ROOT / name).read_text(encoding="utf-8")).splitlines()
        of_lists = [
            c for c in commands if re.search(r"pip.* (install|download) ", c) and re.search(r" (-r|--requirement) ", c)
        ]
        without = ("--require-hashes", "$FLASH_ATTN_WHEEL")  # a wheel that the user names is in no list
        assert of_lists and not [c for c in of_lists if not any(word in c for word in without)], name


def test_actions_are_pinned_by_commit() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml"))
    used = re.findall(r"uses: *(\S+)", text)
    assert used and all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action) for action in used)
