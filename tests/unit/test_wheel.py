"""The built wheel works by itself, outside this repository: packages, configuration, model, plugin, commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    source = ROOT
    if files.returncode == 0:  # from a copy: building in place would leave build/ and egg-info behind
        source = tmp_path_factory.mktemp("source")
        for name in files.stdout.splitlines():
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=300)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Runs Python with the wheel's files first on the path, in an empty folder."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    zipfile.ZipFile(wheel).extractall(site)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(site), "VERL_PLATFORM": "cpu"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert str(ROOT) not in done.stdout
        return done

    return run


def test_the_wheel_holds_what_a_run_needs_alone(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    conf = {"recipe/fspo/conf/fspo.yaml", "recipe/fspo/conf/experiment/demo.yaml", "recipe/runner/conf/run.yaml"}
    assert conf <= names
    assert "fspo/py.typed" in names
    assert any(
        name.startswith("recipe/math/data/assets/demo_model/") and name.endswith(".safetensors") for name in names
    )
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"fspo", "recipe"}, "conf, tests or scripts would be in everybody's way"
    code = {str(path.relative_to(ROOT)) for top in ("fspo", "recipe") for path in (ROOT / top).rglob("*.py")}
    assert code <= names, "a package is missing from pyproject.toml"


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


def test_configuration_model_and_plugins_are_found(outside: Python) -> None:
    loss, model, *plugins = outside("-c", PROGRAM).stdout.split()
    assert (loss, model) == ("seq_gspo", "True")
    assert {"recipe.fspo.plugin", "recipe.runner.plugin"} <= {plugin.partition(":")[0] for plugin in plugins}


def test_the_library_needs_torch_and_pyarrow_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own; the examples compute a loss, a band and an LRE."""
    examples = [(ROOT / "examples/own_loop.py").read_text()]
    examples += re.findall(r"```python\n(.*?)```", (ROOT / "docs/audit.md").read_text(), re.S)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", wheel, f"torch=={version('torch')}"], check=True, timeout=600)
    listed = subprocess.run([*pip, "list"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert not re.search(r"^(verl|ray|vllm|transformers|hydra-core|pandas|pyyaml)", listed, re.M | re.I), listed
    done = subprocess.run(
        [python, "-c", "\n".join(examples)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "LRE" in done.stdout and "tensor" in done.stdout
    command = [python, "-m", "fspo.audit", "expected", "sigma=0.03", "lengths=[100]"]
    assert "| gspo " in subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("module", ["fspo.report", "recipe.math.data"])
def test_a_command_explains_itself(outside: Python, module: str) -> None:
    assert f"python -m {module}" in outside("-m", module, "--help").stdout
