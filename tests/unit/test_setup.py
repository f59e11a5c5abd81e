"""The scripts that make and lock the environment give addresses on by the environment: a command line is public."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX, LINKS = "https://alice:SECRETPIP@index.example/simple", "https://bob:SECRETLINK@wheels.example"


@pytest.mark.parametrize("from_file", [True, False])
@pytest.mark.parametrize("script", ["setup.sh", "lock.sh"])
def test_addresses_reach_uv_by_its_environment(tmp_path: Path, script: str, from_file: bool) -> None:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (programs := tmp_path / "venv" / "bin").mkdir(parents=True)
    # The real pip reads the configuration; nothing is installed.
    python = f'#!/bin/bash\n[[ "$*" != *"pip install"* ]] || exit 0\nexec {sys.executable} "$@"\n'
    seen = (
        f'tr "\\0" " " </proc/$$/cmdline >>{tmp_path}/lines\necho "$UV_DEFAULT_INDEX $UV_FIND_LINKS" >>{tmp_path}/env'
    )
    uv = f"#!/bin/bash\n{seen}\n"
    for name, text in (("python", python), ("uv", uv)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/pip.conf").write_text(f"[global]\nindex-url = {INDEX}\nfind-links =\n    {LINKS}\n    /wheels\n")
    given = {"XDG_CONFIG_HOME": str(tmp_path)}
    if not from_file:
        given = {"PIP_INDEX_URL": INDEX, "PIP_FIND_LINKS": f"{LINKS} /wheels"}
    unset = ("UV_DEFAULT_INDEX", "UV_FIND_LINKS", "PIP_INDEX_URL", "PIP_FIND_LINKS")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | given
    argument = tmp_path / "venv" if script == "setup.sh" else programs
    ended = subprocess.run(
        ["bash", tmp_path / "requirements" / script, argument],
        env=environment | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = (tmp_path / "lines").read_text()
    assert "uv" in lines and "SECRET" not in lines + ended.stdout + ended.stderr
    assert set((tmp_path / "env").read_text().splitlines()) == {f"{INDEX} {LINKS},/wheels"}
