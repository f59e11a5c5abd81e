"""The built wheel works by itself, outside this repository: packages, configuration, model, plugin, commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building in place would leave build/ and egg-info behind."""
    out, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=300)
    (path,) = out.glob("*.whl")
    return path


#: Prints a loss of the composed configuration, whether the demo's model is there, and verl's plugins.
PROGRAM = """
from importlib.metadata import distributions
from pathlib import Path
import recipe.math.data
from recipe.fspo.main import composed as compose

config = compose(["algo=gspo", "experiment=demo", "trainer.default_local_dir=x"])
print(config.actor_rollout_ref.actor.policy_loss.loss_mode)
print((Path(recipe.math.data.__file__).parent / "assets/demo_model/config.json").is_file())
print(*{e.value for d in distributions() for e in d.entry_points if e.group == "verl.plugins"})
"""


def test_the_wheel_holds_what_a_run_needs_alone(wheel: Path, tmp_path: Path) -> None:
    """And it is found with the wheel's files first on the path, in an empty folder."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"fspo/py.typed", "recipe/math/data/assets/demo_model/model.safetensors"} <= names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"fspo", "recipe"}, "conf, tests or scripts would be in everybody's way"
    code = {str(path.relative_to(ROOT)) for top in ("fspo", "recipe") for path in (ROOT / top).rglob("*.py")}
    assert code <= names, "a package is missing from pyproject.toml"
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "VERL_PLATFORM": "cpu"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    loss, model, *plugins = done.stdout.split()
    assert (loss, model) == ("seq_gspo", "True")
    assert {"recipe.fspo.plugin", "recipe.runner.plugin"} <= {plugin.partition(":")[0] for plugin in plugins}


def test_the_library_needs_torch_and_pyarrow_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own; the examples compute a loss, a band and an LRE."""
    examples = [(ROOT / "examples/own_loop.py").read_text()]
    examples += re.findall(r"```python\n(.*?)```", (ROOT / "docs/audit.md").read_text(), re.S)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=300)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", wheel, f"torch=={version('torch')}"], check=True, timeout=600)
    listed = subprocess.run([*pip, "list"], check=True, capture_output=True, text=True, timeout=300).stdout
    assert not re.search(r"^(verl|ray|vllm|transformers|hydra-core|pandas|pyyaml)", listed, re.M | re.I), listed
    done = subprocess.run(
        [python, "-c", "\n".join(examples)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "LRE" in done.stdout and "What follows" in done.stdout
    command = [python, "-m", "fspo.audit", "expected", "sigma=0.03", "lengths=[100]"]
    assert "| gspo " in subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
