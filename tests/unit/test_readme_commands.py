"""Every command in the README and the documentation is one that works: composed, parsed or looked up, never run.

A command of a kind that is not known here fails, so that none can be added untested.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from composing import composed, composed_from
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from recipe.fspo.config import loss_problems
from recipe.runner.launch.compose import first_of_each_sweep, verl_config_dir, without_flags

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "recipe/fspo/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: What docs/extending.md lets its reader write.
TO_BE_WRITTEN = {"conf/algo/fspo_power.yaml"}
#: Files that docs/data-and-rewards.md shows and its reader saves; tests/unit/test_own_data.py runs them.
OF_THE_READER = {"own/make_data.py"}
#: Options of sbatch that the documentation uses; a misspelt one would only be noticed on a cluster.
SBATCH_OPTIONS = {"nodes", "array", "account", "partition", "signal", "gpus-per-node", "time"}
#: Commands that belong to the system: nothing of this project could make them wrong.
OF_THE_SYSTEM = {
    "cd": "the shell's",
    "export": "the shell's",
    "source": "the shell's",
    "git": "gets or inspects a checkout",
    "ray": "Ray's own command line, on a running cluster",
    "scontrol": "SLURM's",
    "squeue": "SLURM's",
    "mkdir": "the system's",
    "tar": "the system's",
    "hf": "the hub's own command line",
    "tensorboard": "its own command line",
    "wandb": "W&B's own command line",
    "mlflow": "its own command line",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def split_commands(block: str) -> Iterator[list[str]]:
    """The simple commands of a shell block as words, comments and line continuations taken out."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        command: list[str] = []
        for word in lexer:
            if set(word) <= set("&|;"):
                yield command
                command = []
            else:
                command.append(word)
        if command:
            yield command


def commands() -> list[tuple[str, str]]:
    """Page and command of every shell block, each distinct command once per page."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        for _, block in re.findall(r"^( *)```bash\n(.*?)^\1```$", page.read_text(encoding="utf-8"), re.M | re.S):
            for command in split_commands(block):
                found[name_of(page), shlex.join(command)] = None
    return list(found)


# ---------------------------------------------------------------- the kinds of commands


@cache
def composes(overrides: tuple[str, ...]) -> None:
    """Raise if these overrides of ``recipe.fspo.main`` name nothing, or contradict each other."""
    known = [override for override in without_flags(overrides) if not override.startswith("resume=")]
    config = composed(*first_of_each_sweep(known))
    problems = list(loss_problems(config))
    assert problems == [], problems


class _Parsed(Exception):
    """The arguments were accepted."""


def parses(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a module as ``python -m`` does, up to the moment when its own parser has accepted the arguments."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        parse_args(parser, *args, **kwargs)  # exits if they are wrong
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.syspath_prepend(str(ROOT))  # `benchmarks` is not installed
    with pytest.raises(_Parsed):
        runpy.run_module(module, run_name="__main__", alter_sys=False)


def check_compare(arguments: list[str]) -> None:
    from recipe.fspo.compare.__main__ import parse

    assert parse(arguments).runs()  # checks its own keys and composes the others


def check_plan(arguments: list[str]) -> None:
    from recipe.runner.plan.__main__ import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([*arguments, "json=true"])
    assert json.loads(printed.getvalue())["memory"]  # a prediction, whether it fits or not


def check_rehearse(arguments: list[str]) -> None:
    from recipe.runner.rehearse.__main__ import parse

    composes(tuple(parse(arguments)[1]))


def check_alignment(arguments: list[str]) -> None:
    from benchmarks.alignment.__main__ import parse

    with tempfile.TemporaryDirectory() as folder:  # in place of the run that the first argument names
        actor = Path(folder) / "checkpoints/global_step_1/actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").touch()
        (Path(folder) / "checkpoints/latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
        (Path(folder) / "config.yaml").touch()
        composes(tuple(parse([folder, *arguments[1:]])[2]))


def check_plain_verl(arguments: list[str]) -> None:
    """verl's own checks, and the one that it makes of vLLM's replicas only after Ray is up."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(verl_config_dir()), version_base=None):
        config = hydra_compose("ppo_trainer", overrides=[os.path.expandvars(each) for each in arguments])
    validate_config(config, need_reference_policy(config), need_critic(config))
    gpus, rollout = config.trainer.nnodes * config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout
    assert gpus % rollout.tensor_model_parallel_size == 0, rollout.tensor_model_parallel_size


#: Modules whose arguments are KEY=VALUE, and what accepts them.
KEY_VALUE: dict[str, Callable[[list[str]], None]] = {
    "recipe.fspo.main": lambda arguments: composes(tuple(arguments)),
    "benchmarks.alignment": check_alignment,
    "recipe.fspo.compare": check_compare,
    "recipe.runner.plan": check_plan,
    "recipe.runner.rehearse": check_rehearse,
    "verl.trainer.main_ppo": check_plain_verl,
}


def check_python(words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[1] in OF_THE_READER:
        return
    flag, module, *arguments = words[1:]
    assert flag == "-m", f"{words}: the documentation runs modules"
    if module in KEY_VALUE:
        KEY_VALUE[module](arguments)
    elif module == "pytest":
        check_pytest(arguments)
    elif module == "venv":
        assert len(arguments) == 1
    else:
        parses(module, arguments, monkeypatch)


def check_pytest(arguments: list[str]) -> None:
    for word in arguments:
        if word.startswith("tests/"):
            assert (ROOT / word.partition("::")[0]).exists(), word


def check_make(words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = [word for word in words[1:] if "=" not in word]
    assert named
    assert set(named) <= targets
    assert all(word.startswith(("ARGS=", "PYTHON=", "VENV=")) for word in words[1:] if "=" in word)


def check_sbatch(words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = [word for word in words[1:] if word.startswith("--")]
    assert {option[2:].partition("=")[0] for option in options} <= SBATCH_OPTIONS
    script, *overrides = [word for word in words[1:] if not word.startswith("--")]
    text = (ROOT / script).read_text(encoding="utf-8")
    (experiment,) = re.findall(r"experiment=(?:\$\{FSPO_EXPERIMENT:-)?(\w+)", text)
    known = set(re.findall(r"`(FSPO_\w+)`", (ROOT / "docs/clusters.md").read_text(encoding="utf-8")))
    assert set(environment) <= known
    train = (  # what slurm/train.sh adds
        f"experiment={environment.get('FSPO_EXPERIMENT', experiment)}",
        "++ray_kwargs.ray_init.address=auto",
        "trainer.nnodes=2",
    )
    if "recipe.fspo.compare" in text:
        check_compare([*train, "run=0", *overrides])
        return
    composes((*train, "fspo.run_dir=/nowhere", *overrides))


def check_pip(words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert words[1] == "install"
    for flag, value in itertools.pairwise(words):
        if flag == "-r":
            assert (ROOT / value).is_file(), value


def check_script(words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / words[1]).is_file(), words[1]


KINDS: dict[str, Callable[[list[str], dict[str, str], pytest.MonkeyPatch], None]] = {
    "python": check_python,
    "python3": check_python,
    "python3.12": check_python,
    "make": check_make,
    "sbatch": check_sbatch,
    "pip": check_pip,
    "bash": check_script,
}


def check(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise unless ``command`` is of a known kind and right."""
    words = shlex.split(command)
    environment: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    assert words, f"{command!r} only sets variables: export them"
    program = words[0].removeprefix(".venv/bin/")
    if program in OF_THE_SYSTEM:
        return
    assert program in KINDS, f"{command!r}: no test knows this kind of command"
    KINDS[program](words, environment, monkeypatch)


# ---------------------------------------------------------------- tests


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fspo.compare.__main__", "fspo.compare.losses", "runner.plan.setup"):
        monkeypatch.setattr(f"recipe.{module}.compose", composed_from)


def always_or_slow() -> Iterator[Any]:
    """The commands that a newcomer meets first are composed always, the other pages' in a slow test."""
    for page, command in commands():
        marks = () if page in ("README.md", "docs/index.md", "docs/demo.md") else (pytest.mark.slow,)
        yield pytest.param(page, command, marks=marks)


@pytest.mark.parametrize(("page", "command"), always_or_slow())
def test_documented_command(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "hydra.searchpath" in command:
        request.getfixturevalue("own_loss")  # which the page lets its reader write
    check(command, monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "curl http://example.org",
        "python -m recipe.fspo.main algo=fspoo",
        "python -m recipe.fspo.main actor_rollout_ref.actor.policy_loss.clip_hi=0.1",
        "python -m recipe.fspo.main actor_rollout_ref.actor.policy_loss.grad_scale=1",
        "python -m recipe.fspo.nothing",
        "python -m verl.trainer.main_ppo trainer.n_gpus_per_node=1 algorithm.adv_estimator=grpo "
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "python -m recipe.fspo.compare algos=[fspo,ppo]",
        "python -m recipe.fspo.compare experiment=demos",
        "python -m recipe.runner.plan experiment=qwen3_8b node=2",
        "python -m benchmarks.alignment runs/demo/RUN round=3",
        "python -m benchmarks.alignment runs/demo/RUN rounds=0",
        "python -m fspo.report runs/demo --output report",
        "python -m fspo.data prepare all",
        "make demos",
        "make ARGS=x",
        "sbatch --node=2 slurm/fspo_8b.sh",
        "sbatch slurm/fspo_9b.sh",
        "sbatch slurm/fspo_8b.sh algo=nothing",
        "FSPO_MODLES=x sbatch slurm/fspo_8b.sh",
        "pip install -r requirements/nothing.txt",
        "bash nothing.sh",
    ],
)
def test_a_wrong_command_is_noticed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(command, monkeypatch)


def test_a_block_is_split_into_its_commands() -> None:
    block = "cd x && FSPO_ALGOS='a b' sbatch s.sh \\\n    algo=gspo   # a comment\n# another\nmake demo | tail -3\n"
    assert list(split_commands(block)) == [
        ["cd", "x"],
        ["FSPO_ALGOS=a b", "sbatch", "s.sh", "algo=gspo"],
        ["make", "demo"],
        ["tail", "-3"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_targets_and_files_named_in_the_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for module in re.findall(r"`(?:\.venv/bin/)?python -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    for arguments in re.findall(r"`make ([a-z][^`]*)`", text):
        check_make(["make", *shlex.split(arguments)], {}, pytest.MonkeyPatch())
    if page.name != "CHANGELOG.md":  # which also names what there was
        files = re.findall(r"\b((?:fspo|recipe|conf|slurm|benchmarks|tests|requirements)/[\w./-]+\.\w+)\b", text)
        assert [name for name in files if name not in TO_BE_WRITTEN and not (ROOT / name).exists()] == []


# ---------------------------------------------------------------- the README's own tables


def test_the_readme_names_every_algorithm_and_only_those() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| `algo` |") :].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(path.stem for path in (ROOT / "conf/algo").glob("*.yaml"))
