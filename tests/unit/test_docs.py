"""The pages against the code: names and values are the code's, commands and examples work. `make docs` builds the site.

A command is composed, parsed or looked up, never run. One of a kind that is not known here fails, so that none can be
added untested.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from checking import check_all
from composing import composed, of_verl
from hydra.core.global_hydra import GlobalHydra
from of_the_reader import blocks, write_own_loss

import recipe.fspo.sqrt_rejection  # noqa: F401  (adds a rule to verl's)
from benchmarks import settings
from fspo.table import TableWriter
from recipe.fspo import checks
from recipe.fspo.main import composed as compose
from recipe.runner.launch.machine import verl_config

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "recipe/fspo/README.md", *sorted(DOCS.glob("*.md"))]
#: What docs/architecture.md lets its reader write, and what docs/data.md shows and its reader saves.
OF_THE_READER = {"conf/algo/fspo_power.yaml", "own/make_data.py"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def text_of(file: str | Path) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_the_page_of_settings_is_the_program_s() -> None:
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), "python -m benchmarks.settings writes it"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_modules_that_pages_name_exist(page: Path) -> None:
    text = text_of(page)
    # A block without a language would not be seen by the tests of commands and examples.
    assert set(re.findall(r"^ *```(.*)$", text, re.M)[::2]) <= {"bash", "python", "text", "json", "yaml"}
    for target in re.findall(r"(?:\]\(|src(?:set)?=\")(?!https?:)([^)#\s\"]+\.\w+)", text):
        assert (page.parent / target).exists(), target
    if page.name != "CHANGELOG.md":  # which also names what there was
        for module in re.findall(r"`(?:\.venv/bin/)?python -m ([\w.]+)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
        files = re.findall(r"\b((?:fspo|recipe|conf|slurm|benchmarks|tests|requirements)/[\w./-]+\.\w+)\b", text)
        assert [name for name in files if name not in OF_THE_READER and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if [*blocks(text_of(page), "python")]], ids=name_of)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks run in order, in one namespace, beside a run folder with a response whose gradient is clipped."""
    place = {"step": 1, "update": 1, "minibatch": 1, "id": ["removed", *"bcdefghi"]}
    values = {"S": 0.1, "L": range(1, 10), "A": 1.0, "inside": [0, *[1] * 8], "kept": [0, *[1] * 8]}
    for name in ("RUN", "audit"):  # the second as examples/own_loop.py and trl_fspo.py call it
        TableWriter(tmp_path / name / "responses", {"loss": "fspo"}, run="run").append(place | values)
        (tmp_path / name / "rollouts").mkdir()
        (tmp_path / name / "rollouts/1.jsonl").write_text('{"uid": "removed", "output": "42"}\n')
    module = ModuleType(page.stem)
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setitem(sys.modules, page.stem, module)  # dataclasses look it up
    for block in blocks(text_of(page), "python"):
        exec(compile(block, str(page), "exec"), module.__dict__)


#: Commands that belong to the system, and make, of which a wrong target says so at once.
OF_THE_SYSTEM = {"cd", "export", "source", "git", "ray", "tar", "tensorboard", "wandb", "mlflow", "hf", "make"}


def split_commands(block: str) -> Iterator[list[str]]:
    """The simple commands of a shell block as words, comments and line continuations taken out."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        for separator, words in itertools.groupby(lexer, lambda word: set(word) <= set("&|;")):
            if not separator:
                yield list(words)


#: What a newcomer meets first.
FIRST = (ROOT / "README.md", DOCS / "index.md")


@functools.cache
def composes(*words: str) -> None:
    """Raise if these words of ``recipe.fspo.main`` name nothing, or contradict each other; of a sweep the first run."""
    folders = [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    known = [word for word in words if not word.startswith(("resume=", "-"))]
    known = [word if "[" in word or "'" in word else word.partition(",")[0] for word in known]
    if folders:
        GlobalHydra.instance().clear()
        path = [f"file://{verl_config()}", "pkg://recipe.runner.conf", f"file://{Path(folders[0]).absolute()}"]
        config = compose([f"hydra.searchpath=[{','.join(map(repr, path))}]", *known])
    else:
        config = composed(*known)
    problems = checks.problems(config)
    assert problems == [], problems


def parses(module: str, *arguments: str) -> None:
    """Run a module as ``python -m`` does, up to the moment when its own parser has accepted the arguments."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *args: object) -> None:
        parse_args(parser, *args)  # exits if they are wrong
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(signal, "signal", lambda number, handler: None)  # of a process of its own
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(InterruptedError):
            runpy.run_module(module, run_name="__main__", alter_sys=False)


def check_plain_verl(*arguments: str) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    if arguments[0] == "...":  # the reader's own command; the page's complete one will do, without its loss
        own = next(split_commands(next(blocks(text_of("docs/verl.md"), "bash"))))[3:]
        arguments = (*(word for word in own if ".policy_loss." not in word), *arguments[1:])
    config = of_verl(*map(os.path.expandvars, arguments))
    assert checks.problems(config) == []
    omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    validate_config(config, need_reference_policy(config), need_critic(config))


def check_audit(*arguments: str) -> None:
    from fspo.audit.expected import expected

    if arguments[0] == "expected":
        assert expected(arguments[1:])
    else:
        parses("fspo.audit", *arguments)


#: What accepts the arguments of a module; the others have a parser of Python's.
MODULES: dict[str, Callable[..., None]] = {
    "recipe.fspo.main": composes,
    "fspo.audit": check_audit,
    "verl.trainer.main_ppo": check_plain_verl,
    "venv": lambda folder: None,
}


def check(words: Sequence[str]) -> None:
    """Raise unless these are the words of a command of a known kind, and right."""
    variables = [*itertools.takewhile(re.compile(r"[A-Z_]+=").match, words)]
    program, *arguments = words[len(variables) :]
    program = program.removeprefix(".venv/bin/")
    if program.startswith("python") and arguments[0] == "-m":
        module, *more = arguments[1:]
        MODULES.get(module, functools.partial(parses, module))(*more)
    elif program.startswith("python"):
        assert arguments[0] in OF_THE_READER or (ROOT / arguments[0]).is_file(), arguments[0]
    elif program == "sbatch":
        known = re.findall(r"`(FSPO_\w+)`", text_of("docs/clusters.md"))
        assert {word.partition("=")[0] for word in variables} <= set(known)
        script, *overrides = [word for word in arguments if not word.startswith("--")]
        (experiment,) = re.findall(r"experiment=(\w+)", text_of(script))
        # What slurm/train.sh adds.
        composes(f"experiment={experiment}", "++ray_kwargs.ray_init.address=auto", "trainer.nnodes=2", *overrides)
    elif program in ("bash", "pip"):
        files = [word for word in arguments if "/" in word and not word.startswith(("-", "/"))]
        assert all((ROOT / file).exists() for file in files), files
    else:
        assert program in OF_THE_SYSTEM, "no test knows this kind of command"


@pytest.fixture
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder, entered, with the loss that a page lets its reader write."""
    write_own_loss(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_loss", None)


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(FIRST, id="first"),
        pytest.param([page for page in PAGES if page not in FIRST], id="others", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("own_loss")
def test_commands_are_right(pages: Sequence[Path]) -> None:
    check_all(
        (f"{name_of(page)}: {shlex.join(words)}", functools.partial(check, words))
        for page in pages
        for block in blocks(text_of(page), "bash")
        for words in split_commands(block)
    )
