"""``python -m benchmarks.scripts CHECKOUT...``: what the recipe says to the launch scripts of checkouts of verl.

bash itself runs each script that starts ``main_ppo``, in a copy of the checkout, without a network, and with a PATH on
which every program but a few that only read and print is a stub: quoting, arrays and defaults are bash's own. The
arguments are then composed and checked as ``dry_run=full`` does, each command in a child of one process. What a script
runs once its remedies are applied is compared leaf by leaf with verl's own composition of the script's arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TextIO

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.fspo.job import JOB, choices, compose
from recipe.runner import main as runner
from recipe.runner.launch import compose as runner_compose
from recipe.runner.launch.compose import SEARCH_PATH, has_key, leaves, parsed, text_of, verl_config_dir
from recipe.runner.launch.machine import export_platform
from recipe.runner.launch.no_effect import values_of

#: Programs that scripts compute their arguments with.
_REAL: Final = "basename cat cut date dirname expr getopt grep head printf pwd realpath sed seq sort tail tr uname wc"
#: Programs that a script may start python with, by a way that bash looks up on PATH alone.
_STARTERS: Final = "python python3 ray torchrun srun uv env nohup exec timeout tee mkdir rm cp pip nvidia-smi"
#: A stub: keeps its words if they start training, and prints nothing.
_STUB: Final = """[[ "$*" != *"import torch_npu"* ]] || exit 1  # there are no NPUs
for word in "$@"; do
    if [[ $word == *main_ppo || $word == *main_dapo || $word == *main_ppo.py ]]; then
        printf '%s\\0' "$0" "$@" $'\\n' >> "$CALLS"
        break
    fi
done
"""
_SECONDS: Final = 20
_TRAINS: Final = re.compile(r"\bmain_(?:ppo|dapo)\b")
_MODULE: Final = re.compile(r"(?:.*[./])?main_(?:ppo|dapo)(?:\.py)?$")


#: What of verl is not read for the keys that it names: declarations, engines that are not served, older trainers.
_NOT_READ: Final = re.compile(
    "megatron|mcore|veomni|torchtitan|automodel|mindspeed|sglang|trtllm|/workers/config/|/trainer/config/|sft|_v0|"
    "one_step|fully_async|/vla/|ray_trainer|main_generation|fsdp_turbo"
)
#: Groups whose names are the user's: of a function, of vLLM, of transformers, of Ray, of an agent, of the tokenizer.
_FREE: Final = re.compile(
    "_kwargs[.]|override_config[.]|ray_init[.]|teacher_models[.]|_cls[.]|override_optimizer_config[.]"
)
_SILENT: Final = "without a word: "
_MOST_EDITS: Final = 10
#: Today's key for another: a whole one, and no setting with its value.
_TODAY: Final = re.compile(r"did you mean ([\w.]+)\?|; use ([\w.]+\.[\w.]+)(?:;|$)")
#: Where the remedy of an error begins.
_REMEDY: Final = re.compile(
    r"(?:^|[:;,.] |[)] |please )(?:give|set|write|leave|choose|use|change|correct|raise|name|add|make)\b"
    r"|; [\w.]+=\w+ takes ",
    re.IGNORECASE,
)
_GIVEN: Final = re.compile(r"(?<![\w.+@/=])(\+{0,2}[a-z][\w.@]*=(?:\[[^\]]*\]|[-\w./:+]*[\w/+]))")
_PLACEHOLDER: Final = re.compile(r"=(?:FOLDER|FILE|NAME|VALUE|RUN|\[FOLDER\]|\[\.\.\.\])")
#: Keys that stand in no group of the error's: choices of groups, and whole keys.
_CHOICES: Final = ("algo", "mode", "experiment", "seed")
_ROOTS: Final = ("actor_rollout_ref.", "algorithm.", "critic.", "data.", "fspo.", "reward.", "run.", "trainer.")
#: Where ``dry_run=full`` prints the configuration, after everything else.
_CONFIGURATION: Final = "\nactor_rollout_ref:\n"
_TOKENS: Final = "16"  # of a response in every script; the length itself decides nothing here


def scripts(checkout: Path) -> list[Path]:
    """The scripts that start training."""
    return sorted(path for path in checkout.rglob("*.sh") if _TRAINS.search(path.read_text(errors="replace")))


def arguments(checkout: Path, paths: Sequence[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Each script with the arguments of its first start of training; none if it makes no such start."""
    with tempfile.TemporaryDirectory() as folder:
        stubs, home, copy = Path(folder) / "bin", Path(folder) / "home", Path(folder) / "copy"
        stubs.mkdir()
        home.mkdir()
        shutil.copytree(checkout, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        for name in _REAL.split():
            if program := shutil.which(name):
                (stubs / name).symlink_to(program)
        for name in _STARTERS.split():
            (stubs / name).write_text(f"#!/bin/bash\n{_STUB}", encoding="utf-8")
            (stubs / name).chmod(0o755)
        calls = Path(folder) / "calls"
        environment = {
            "PATH": str(stubs),
            "HOME": str(home),
            "CALLS": str(calls),
            "USER": "user",
            # bash calls it for every other program.
            "BASH_FUNC_command_not_found_handle%%": f"() {{ {_STUB} }}",
        }
        for path in paths:
            calls.unlink(missing_ok=True)
            words = [shutil.which("unshare") or "unshare", "-rn", "/bin/bash", str(path.relative_to(checkout))]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(words, cwd=copy, env=environment, capture_output=True, timeout=_SECONDS, check=False)
            starts = calls.read_text(errors="replace").split("\0\n\0") if calls.exists() else [""]
            start = starts[0].split("\0")
            first = next((i for i, word in enumerate(start) if _MODULE.match(word)), len(start))
            yield path, start[first + 1 :]


@dataclass
class Answer:
    """What the recipe says to one command.

    Attributes:
        status: Exit status; 0 if the run would start.
        errors: Its errors.
        silent: Keys that were given, that no line names, and that have no effect by what :func:`_without_reader` sees.
        traceback: Whether it ended with one.
        text: All that it says, without the configuration.
        config: What the run would do; empty for a command that is refused.
    """

    status: int
    errors: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    traceback: bool = False
    text: str = ""
    config: DictConfig = field(default_factory=OmegaConf.create)


@functools.cache
def _names() -> frozenset[str]:
    """The names in the code of verl and of the recipe that may read a setting: no declarations, no other engines."""
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0])  # type: ignore[union-attr,index]
    recipe = Path(__file__).resolve().parents[1] / "recipe"
    files = [file for folder in (verl, recipe) for file in folder.rglob("*.py") if not _NOT_READ.search(str(file))]
    texts = (file.read_text(encoding="utf-8") for file in files if file.name != "old_keys.py")
    return frozenset(name for text in texts for name in re.findall(r"""(?:\.|["'\s(])(\w+)""", text))


def _without_reader(key: str, config: DictConfig) -> str | None:
    """Why a key certainly has no effect, as far as this can be seen without the program's table; else None.

    No line of code has its name, or a group above it is switched off by its own ``enable``.
    """
    *groups, name = key.split(".")
    if name not in _names() and not _FREE.search(key):
        return "no code reads it"
    for n in range(len(groups), 0, -1):
        switch = OmegaConf.select(config, ".".join([*groups[:n], "enable"]), default=None)
        if switch is False and (n < len(groups) or name != "enable"):
            return f"{'.'.join(groups[:n])}.enable=False"
    return None


def answer(words: Sequence[str]) -> Answer:
    """What ``python -m recipe.fspo.main WORDS dry_run=full`` says, in a child of this process."""
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if child == 0:
            _answer(words, out)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        text, _, config = out.read().partition(_CONFIGURATION)
    config, *more = f"{_CONFIGURATION}{config}".split(f"\n{_SILENT}") if config else ("",)
    lines = text.splitlines()
    silent = [line.strip() for line in more]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    has_traceback = any("Traceback (most recent call last)" in part for part in (text, config, *more))
    composed = OmegaConf.create("" if has_traceback else config)
    return Answer(status, errors, silent, has_traceback, text, composed)  # type: ignore[arg-type]


def _answer(words: Sequence[str], out: TextIO) -> None:
    """In the child: the command's output, then the keys without effect that it does not name; does not return."""
    status = 1
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                runner.main(JOB, str, "", [*words, "dry_run=full"])
                status = 0
            except SystemExit as ended:
                status = int(ended.code or 0)
            out.flush()
            if status == 0:
                out.seek(0)
                named, _, _ = out.read().partition(_CONFIGURATION)
                out.seek(0, os.SEEK_END)
                config = compose(words)
                for key in values_of(config, parsed(words)):
                    if not re.search(rf"(?<![\w.]){key}(?![\w.])", named) and (why := _without_reader(key, config)):
                        print(f"\n{_SILENT}{key}: {why}")
    except BaseException:
        traceback.print_exc(file=out)
    out.flush()
    os._exit(status)


@dataclass(frozen=True)
class Remedy:
    """What one alternative of an error asks for.

    Attributes:
        takes_out: Keys to leave out, with all below them.
        renames: Today's key by the one that is given.
        gives: Overrides to give, in place of those of the same keys.
    """

    takes_out: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    gives: tuple[str, ...] = ()


def remedies(error: str) -> list[Remedy]:
    """The alternatives that an error offers, in its order; those that a person has to judge are left out."""
    what, _, way = error.partition(": ")
    keys = _keys(what)
    if what.startswith("verl refuses") and (of_dataclass := re.search(r"([\w.]+); leave it out$", way)):
        return [Remedy((of_dataclass[1],))]
    if what.startswith("+") and "leave the + out" in way:
        return [Remedy(renames=((keys[0], keys[0]),))]
    if today := _TODAY.search(error):
        if "there is no" not in way:
            value = re.match(r"(?:there is no )?([\w.]+)=[^,()]*[(]did you mean", error)
            return [Remedy(gives=(f"{value[1]}={today[1]}",))] if value else [Remedy(tuple(keys))]
        old = re.search(r"there is no ([\w.]+);", way)
        return [Remedy(renames=((old[1] if old else keys[0], today[1] or today[2]),))]
    start = _REMEDY.search(error)
    if start is None:
        return [Remedy(tuple(keys))] if keys else []
    parts = re.split(r"(?:,? or |; |[.] )(?=\w+=|[a-zA-Z]+ |[+\w]+[.])", error[start.start() :])
    asked = [_asked(part, keys) for part in parts]
    gone = tuple(keys) if "there is no" in way else ()  # whatever stands in its place
    return list(dict.fromkeys(replace(remedy, takes_out=remedy.takes_out + gone) for remedy in asked if remedy))


def _keys(what: str) -> list[str]:
    """The keys that an error is about, in its order."""
    keys = [key for part in what.split(", ") for key in re.findall(r"^'?(?:\+\+?|~)?([-\w.@]+)(?:=|$| )", part)]
    keys += re.findall(r"(?:^|[ ,])([\w.]+)(?==)", what)
    groups = [key.rpartition(".")[0] for key in keys if "." in key]
    # A name without its group, beside a key that has one, is in that group.
    return list(dict.fromkeys(key if "." in key or not groups else f"{groups[0]}.{key}" for key in keys))


def _asked(text: str, keys: Sequence[str]) -> Remedy | None:
    """What one alternative asks for, of a list of choices the last; None if a person has to judge."""
    leaves_out = tuple(keys) if "leave it out" in text else ()
    gives = [word.replace("TOKENS", _TOKENS) for word in _GIVEN.findall(text) if not _PLACEHOLDER.search(word)]
    if leaves_out or gives:
        return Remedy(leaves_out, gives=tuple(_whole(word, keys) for word in gives))
    if keys and (value := re.search(r"\bset it to ([\w.]+)", text)):
        return Remedy(gives=(f"{keys[0]}={value[1].rstrip('.')}",))
    if keys and (choices := re.search(r"choose (?:one of )?(.+)", text)):
        return Remedy(gives=(f"{keys[0]}={choices[1].split(', ')[-1].strip(chr(39))}",))
    if named := re.search(r"leave ([\w.]+)(?: \([\w.]+\))? out", text):
        return Remedy(tuple(keys) if named[1] == "it" else (named[1],))
    return None


def _whole(word: str, keys: Sequence[str]) -> str:
    """An override with the groups of its key: those of a key that the error names, or those of the first one."""
    name = word.lstrip("+").partition("=")[0]
    roots = (*_ROOTS, *(f"{key.partition('.')[0]}." for key in keys))
    if not keys or name in _CHOICES or name.startswith(roots):
        return word
    groups = next((key for key in keys if f".{key}".endswith(f".{name}")), keys[0]).rpartition(".")[0]
    return f"{groups}.{word}" if groups else word


def edited(words: Sequence[str], errors: Sequence[str], which: int = 0) -> list[str]:
    """The command after a remedy of each error, done to the letter: the first, or the ``which``-th if it has so many.

    Without a remedy the keys that the error is about are left out.
    """
    out, renamed, gives = set[str](), dict[str, str](), dict[str, str]()
    for error in errors:
        offered = remedies(error) or [Remedy(tuple(_keys(error.partition(": ")[0])))]
        remedy = offered[min(which, len(offered) - 1)]
        out |= set(remedy.takes_out)
        renamed |= dict(remedy.renames)
        gives |= {word.lstrip("+").partition("=")[0]: word for word in remedy.gives}
    # Where the keys stood that verl's migration has moved.
    out |= {re.sub("^reward[.]reward_manager[.]name$", "reward.reward_model.reward_manager", key) for key in out}
    out |= {key.removeprefix("reward.") for key in out}
    below = tuple(f"{key}." for key in out)
    rest = []
    for word in (_renamed(word, renamed) for word in words):
        key = word.lstrip("+~").partition("=")[0]
        if not f"{key}.".startswith(below) and key not in gives:
            rest.append(word)
    return [*rest, *gives.values()]


def _renamed(word: str, renamed: Mapping[str, str]) -> str:
    """The word with today's name of its key, or of a group above it."""
    key, _, value = word.partition("=")
    key = key.lstrip("+")
    old = next((old for old in renamed if f"{key}.".startswith(f"{old}.")), None)
    return word if old is None else f"{renamed[old]}{key.removeprefix(old)}={value}"


def _compose_once(base: str) -> None:
    """Put each choice of groups together once, for all children; values are set afterwards, as Hydra does itself."""
    whole, kept = hydra_compose, dict[tuple[str, ...], bytes]()

    def compose_once(config_name: str, overrides: list[str]) -> DictConfig:
        words = parsed(overrides)
        values = [one for one in words if "." in one.key_or_group and one.key_or_group != SEARCH_PATH]
        choices = tuple(text_of(one) for one in words if one not in values)
        if choices not in kept:
            kept[choices] = pickle.dumps(whole(config_name, overrides=list(choices)))
        config: DictConfig = pickle.loads(kept[choices])
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config

    runner_compose.hydra_compose = compose_once  # type: ignore[attr-defined]
    for groups in ([], [base], *([base, f"algo={algo}"] for algo in ("grpo", "dapo", "gspo_verl"))):
        compose(groups)


def _is_of_another_engine(last: Answer) -> bool:
    """Whether a script is refused for what trains or generates: no edit of it would be the same experiment."""
    return any("not served" in error for error in last.errors)


@dataclass
class Trial:
    """The answers to a command and to its edits, and the words of the last one."""

    answers: list[Answer]
    words: list[str]

    @property
    def first(self) -> Answer:
        """The answer to the command."""
        return self.answers[0]

    @property
    def last(self) -> Answer:
        """The answer once it passes, or once no edit is left."""
        return self.answers[-1]

    @property
    def edits(self) -> int:
        """The rounds of remedies."""
        return len(self.answers) - 1


def tried(words: Sequence[str]) -> Trial:
    """Give a command, and apply remedies, until it passes or no edit is left."""
    trial = Trial([answer(words)], [*words])
    while trial.last.status and not trial.last.traceback and trial.edits < _MOST_EDITS:
        rest = edited(trial.words, trial.last.errors)
        if rest == trial.words or _is_of_another_engine(trial.last):
            break
        trial.words = rest
        trial.answers.append(answer(rest))
    return trial


# ---------------------------------------------------------------- leaf by leaf against verl


def algorithm(words: Sequence[str]) -> str:
    """The ``algo=`` of a script's arguments, by the table of docs/verl.md."""
    values = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    actor = "actor_rollout_ref.actor"
    loss = values.get(f"{actor}.policy_loss.loss_mode", "vanilla").strip("'\"")
    if loss == "vanilla":
        return "dapo" if values.get(f"{actor}.clip_ratio_high") == "0.28" else "grpo"
    named = {"gspo": "gspo_verl", "geo_mean": "gmpo"}.get(loss, loss)
    return named if named in choices("algo") else "grpo"


@functools.cache
def _plain_verl() -> bytes:
    """verl's ``ppo_trainer`` without overrides, pickled."""
    with initialize_config_dir(config_dir=str(verl_config_dir()), version_base=None):
        return pickle.dumps(hydra_compose("ppo_trainer"))


def verls(words: Sequence[str]) -> DictConfig:
    """What verl's own command composes from the same arguments; those that it refuses are left out."""
    groups, values = list[str](), list[str]()
    plain = pickle.loads(_plain_verl())
    for word in words:
        with contextlib.suppress(HydraException, OmegaConfBaseException):
            (override,) = parsed([word])
            group, _, _ = override.key_or_group.partition("@")
            if (verl_config_dir() / group).is_dir() and not isinstance(override.value(), int | float):
                groups.append(word)
            else:
                ConfigLoaderImpl._apply_overrides_to_config([override], plain)
                values.append(word)
    with initialize_config_dir(config_dir=str(verl_config_dir()), version_base=None):
        try:
            config = hydra_compose("ppo_trainer", overrides=[*groups, *values])
        except HydraException:  # an option of another release
            config = hydra_compose("ppo_trainer", overrides=values)
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    OmegaConf.set_struct(config, False)
    with contextlib.redirect_stdout(None):
        migrated: DictConfig = migrate_legacy_reward_impl(config)
    return migrated


def unnamed(words: Sequence[str], trial: Trial) -> tuple[int, list[str]]:
    """How many leaves of verl's configuration a run has otherwise, and those of them that nothing names, with values.

    A leaf is named if some answer to the command has its key, by today's or verl's earlier name. It need not be if verl
    composes the run's value from the command that passes: then the remedies gave it.
    """
    of_verl, here, after = verls(words), trial.last.config, verls(trial.words)
    text = "\n".join(one.text for one in trial.answers)
    differing, missing = 0, []
    for key, _ in leaves(OmegaConf.to_container(of_verl)):
        value, given, own = (
            _plain(OmegaConf.select(of, key, throw_on_resolution_failure=False)) for of in (of_verl, after, here)
        )
        own = own if has_key(here, key) else "no such key"
        if _is_same(value, own) or "***" in str(own):
            continue
        differing += 1
        keys = [key, *(re.sub("^reward[.](?=custom_)|^reward(?=[.]reward_)", old, key) for old in ("", "reward_model"))]
        if not (any(_is_named(name, text) for name in keys) or _is_same(given, own)):
            missing.append(f"{key}: {value} -> {own}")
    return differing, missing


def _is_same(value: Any, own: Any) -> bool:
    """Whether a run has a value, a path as in its own folder."""
    return bool(own == value or own == _absolute(value) or own == [_absolute(value)])


def _is_named(key: str, text: str) -> bool:
    """Whether a text has a key, or its last part with a value behind one of its group: ``a.b.path=x, name=y``."""
    group, _, name = key.rpartition(".")
    return bool(
        re.search(rf"(?<![\w.]){re.escape(key)}(?![.]?\w)", text)
        or re.search(rf"(?<![\w.]){re.escape(group)}[.]\w+=\S+, {name}=", text)
    )


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _absolute(value: Any) -> Any:
    """A path, or each of a list, as a run has it in its own folder."""
    if isinstance(value, list):
        return [_absolute(one) for one in value]
    return os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) else value


def main() -> None:
    """Parse the command line, try the scripts of the checkouts, and print a line for each and the sums."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts", description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="+", help="checkouts of verl, or of recipes for it")
    parser.add_argument(
        "--experiment",
        help="one to put the arguments on, with algo= by the table of docs/verl.md; without it none, as with "
        "~experiment",
    )
    parser.add_argument("--only", default="", help="a part of the paths to try")
    parser.add_argument("--at-most", type=int, help="scripts with different arguments of each checkout, evenly spread")
    args = parser.parse_args()
    export_platform(compose(["~experiment"]), elsewhere=True)  # as the command does, before verl is imported
    for module in ("recipe.runner.launch.start", "recipe.runner.plan.prediction"):
        importlib.import_module(module)  # once, and not in every child
    base = f"experiment={args.experiment}" if args.experiment else "~experiment"
    _compose_once(base)
    _names()
    _plain_verl()
    sums, silent, nameless = Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for checkout in args.checkouts:
            paths = [path for path in scripts(checkout) if args.only in str(path)]
            for path, words in _spread(arguments(checkout, paths), args.at_most):
                name = f"{checkout.name}/{path.relative_to(checkout)}"
                if not words:
                    sums["starts no training here"] += 1
                    print(f"{name}: starts no training here")
                    continue
                more = [base, f"algo={algorithm(words)}"] if args.experiment else [base]
                # The page has these options left out before anything else.
                own = _without_its_file(words)
                trial = tried([*more, f"run.dir={folder}/run", *own])
                verdict = _verdict(trial)
                sums[verdict] += 1
                silent.update(trial.last.silent)
                why = trial.first.errors + (trial.last.errors if trial.last.status else [])
                lines = [f"  {error}" for error in dict.fromkeys(why)]
                lines += [f"  without a word: {key}" for key in trial.last.silent]
                if trial.last.status == 0:
                    differing, missing = unnamed(own, trial)
                    sums["leaves other than verl's"] += differing
                    nameless.update(missing)
                    lines += [
                        f"  {differing} leaves other than verl's",
                        *(f"  nothing names {leaf}" for leaf in missing),
                    ]
                print(f"{name}: {verdict}", *lines, sep="\n", flush=True)
    print(*(f"{count:5d}  {what}" for what, count in sums.most_common()), sep="\n")
    for counts, what in ((silent, "keys without effect, without a word"), (nameless, "leaves that nothing names")):
        print(f"{counts.total():5d}  {what}")
        print(*(f"{count:5d}    {key}" for key, count in counts.most_common()), sep="\n")


def _without_its_file(words: Sequence[str]) -> list[str]:
    """Without the options that name verl's configuration file, whose value may be the next word."""
    kept: list[str] = []
    is_value = False
    for word in words:
        is_option = not is_value and word.startswith(("--config-", "-c"))
        if not is_option and not is_value:
            kept.append(word)
        is_value = is_option and "=" not in word
    return kept


def _spread(starts: Iterator[tuple[Path, list[str]]], most: int | None) -> list[tuple[Path, list[str]]]:
    """The scripts, or ``most`` of those with different arguments, evenly spread."""
    if most is None:
        return [*starts]
    distinct = list({tuple(words): (path, words) for path, words in starts if words}.values())
    return distinct if len(distinct) <= most else [distinct[i * len(distinct) // most] for i in range(most)]


def _verdict(trial: Trial) -> str:
    if trial.first.traceback or trial.last.traceback:
        return "TRACEBACK"
    if trial.last.status:
        return "needs another engine" if _is_of_another_engine(trial.last) else "refused"
    return f"passes after {trial.edits} round(s) of remedies" if trial.edits else "passes"


if __name__ == "__main__":
    main()
