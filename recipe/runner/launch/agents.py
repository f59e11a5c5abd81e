"""Agent loops, tools, the parser of their calls and a data set class, tried as verl's agent loop workers load them.

A worker loads them minutes after the start, and a loop that nobody registers fails in every response. So the rule
:func:`agent_problems` calls verl's own loaders in a process of its own, ``python -m recipe.runner.launch.agents``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from fspo.names import did_you_mean
from recipe.runner.launch.attempt import attempt
from recipe.runner.launch.data_files import columns_and_rows, data_files, generated_files, read_table
from recipe.runner.launch.own_process import answer, asked
from recipe.runner.launch.reward_function import NOTE, describe
from recipe.runner.launch.trial import library_problem
from recipe.runner.launch.values import MachineProblem

_ROLLOUT: Final = "actor_rollout_ref.rollout"
_LOOP, _PARSER = "agent.default_agent_loop", "multi_turn.format"
_TOOLS, _FUNCTIONS, _LOOPS = (
    "multi_turn.tool_config_path",
    "multi_turn.function_tool_path",
    "agent.agent_loop_config_path",
)
_MANAGER: Final = "agent.agent_loop_manager_class"
_LIBRARY: Final = "actor_rollout_ref.model.external_lib"
#: Files that the workers load, with what verl reads in each.
_FILES: Final = {
    _TOOLS: "a YAML file whose list `tools` has class_name, config.type=native and a tool_schema for each tool",
    _FUNCTIONS: "a Python file with functions under verl's @function_tool",
    _LOOPS: "a YAML list with a name and a _target_ for each agent loop",
}
#: The same as keys of the configuration.
FILES: Final = tuple(f"{_ROLLOUT}.{name}" for name in _FILES)
#: The data set class of the user's, which a worker loads before all these files.
_DATASET: Final = "data.custom_cls"
#: The column of the data that names the loop of a row.
_COLUMN: Final = "agent_name"
_ONE_TURN: Final = "single_turn_agent"
#: With what verl makes an agent loop, beside what its YAML entry holds.
_ARGUMENTS: Final = (
    *("trainer_config", "server_manager", "tokenizer", "processor", "hf_model_type"),
    *("dataset_cls", "data_config", "tools"),
)


class _Broken(Exception):
    """A file of the user's that verl's loader could not use; the message says what of it."""


def agent_problems(config: DictConfig) -> Iterator[str]:
    """Tools, agent loops and parsers that the workers could not load, or that the run does not name rightly."""
    from verl.workers.config import AgentLoopConfig, MultiTurnConfig

    rollout = config.actor_rollout_ref.rollout
    values = {name: OmegaConf.select(rollout, name) for name in (*_FILES, _MANAGER, _PARSER, _LOOP)}
    loops = named_loops(config)
    usual = {_PARSER: MultiTurnConfig().format, _LOOP: AgentLoopConfig().default_agent_loop}
    path, name = (OmegaConf.select(config, f"{_DATASET}.{key}") for key in ("path", "name"))
    if not path and values == dict.fromkeys(values) | usual and set(loops or ()) <= {usual[_LOOP]}:
        return
    if path and "://" not in path and not Path(path).is_file():
        yield MachineProblem(f"{_DATASET}.path={path} is no file: correct the path, or give pkg://package.module")
        return
    absent = [name for name in _FILES if values[name] and not _file_of(values[name])]
    for name in absent:
        yield MachineProblem(
            f"{_ROLLOUT}.{name}={values[name]} is no file: correct the path, or write it: {_FILES[name]}"
        )
    if not absent and library_problem(config) is None:  # each may register what the others name
        settings = {"values": values, "loops": loops, "library": OmegaConf.select(config, _LIBRARY)}
        settings |= {"dataset": [path, name] if path else None}
        given = json.dumps(OmegaConf.to_container(OmegaConf.create(settings))).encode()
        problems, ended = asked(__name__, given=given)
        if ended is not None:
            named = ", ".join(f"{_ROLLOUT}.{key}={value}" for key, value in values.items() if value)
            named += f", {_DATASET}.path={path}" if path else ""
            yield f"{named}: {ended}"
        for sentence in problems or ():
            if sentence.startswith(NOTE):
                print(sentence, file=sys.stderr)
            else:
                yield sentence


def _file_of(value: str) -> Path | None:
    """The file that verl takes for a path: of the working folder, or of its own package's."""
    from verl.utils.import_utils import resolve_config_path

    with contextlib.suppress(FileNotFoundError):
        file = Path(resolve_config_path(value))
        return file if file.is_file() else None
    return None


def named_loops(config: DictConfig) -> dict[str, str] | None:
    """The agent loops that the rows of the data have, each with the setting or file that names it.

    None where only the run can tell: with a data set class or an agent loop manager of the user's, or without the data.
    """
    default = str(config.actor_rollout_ref.rollout.agent.default_agent_loop)
    if OmegaConf.select(config, "data.custom_cls.path") or OmegaConf.select(config, f"{_ROLLOUT}.{_MANAGER}"):
        return None
    generated, loops = generated_files(config.data), {}
    for file in (*data_files(config.data, "train_files"), *data_files(config.data, "val_files")):
        names = [] if file in generated else _names_in(Path(file).expanduser())
        if names is None:
            return None
        loops |= {name: f"the column {_COLUMN} of {file}" for name in names} or {default: f"{_ROLLOUT}.{_LOOP}"}
    return loops


@functools.cache
def _names_in(file: Path) -> list[str] | None:
    """The agent loops that a file's rows name; none without such a column, None for a file that is not here."""
    try:
        if _COLUMN not in columns_and_rows(file)[0].names:
            return []
        return [str(name) for name in read_table(file, [_COLUMN])[_COLUMN].unique().to_pylist()]
    except (OSError, ValueError):
        return None


def takes_one_turn(config: DictConfig) -> bool:
    """Whether it is certain that verl's loop of one turn, which calls no tool, writes every response."""
    return set(named_loops(config) or ()) == {_ONE_TURN}


# ---------------------------------------------------------------- in a process of its own


def _problems(
    values: Mapping[str, Any], loops: Mapping[str, str] | None, library: Any, dataset: Sequence[str] | None = None
) -> Iterator[str]:
    """Each problem; as a note (:data:`NOTE`) what may be none in a worker. Loads in the order of a worker."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager, _agent_loop_registry
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.tools.tool_registry import load_all_tools
    from verl.utils.import_utils import load_class_from_fqn, resolve_config_path

    for module in library if isinstance(library, list) else [library] if library else []:
        importlib.import_module(module)
    if dataset:
        path, name = dataset
        problem, _ = _tried(functools.partial(_dataset_class, path, name))
        if problem is not None:
            given = f"{_DATASET}.path={path}, {_DATASET}.name={name}"
            yield f"{given}: verl wants a subclass of torch.utils.data.Dataset there. {problem}"
            return
    is_own_manager = False
    if fqn := values[_MANAGER]:
        problem, manager = _tried(functools.partial(load_class_from_fqn, fqn, "AgentLoopManager"))
        methods = ("create", "generate_sequences")
        if problem is None and not all(callable(getattr(manager, name, None)) for name in methods):
            problem = "it has no methods create and generate_sequences, which verl calls"
        if problem is not None:
            yield f"{_ROLLOUT}.{_MANAGER}={fqn}: give package.module.Class, or leave it out for verl's. {problem}"
            return
        is_own_manager = not issubclass(manager, AgentLoopManager)
    if is_own_manager:  # what it loads is its own affair
        return
    before = set(_agent_loop_registry)
    paths = {name: resolve_config_path(values[name]) if values[name] else None for name in (_TOOLS, _FUNCTIONS)}
    is_broken = False
    for names in ((_TOOLS,), (_FUNCTIONS,), (_TOOLS, _FUNCTIONS)):
        if is_broken or not all(paths[name] for name in names):
            continue
        files = {name.rpartition(".")[2]: paths[name] if name in names else None for name in paths}
        with _checked_classes():
            problem, tools = _tried(functools.partial(load_all_tools, **files))
        if problem is None and not tools and set(_agent_loop_registry) == before:
            problem = "it has no tool"
        if problem is not None:
            is_broken, of_files = not problem.startswith(NOTE), " and ".join(_FILES[name] for name in names)
            given = ", ".join(f"{_ROLLOUT}.{name}={values[name]}" for name in names)
            yield f"{'' if is_broken else NOTE}{given}: verl reads {of_files}. {problem.removeprefix(NOTE)}"
    entries: Sequence[str] = ()
    if values[_LOOPS]:
        given = f"{_ROLLOUT}.{_LOOPS}={values[_LOOPS]}"
        problem, entries = _tried(functools.partial(_register_loops, resolve_config_path(values[_LOOPS])))
        if problem is not None:
            yield f"{given}: verl reads {_FILES[_LOOPS]}. {problem}"
            return
        if loops and not set(entries) & set(loops):
            of_rows = f"the rows have {', '.join(loops)}"
            yield f"{given} has {', '.join(entries)}, and {of_rows}: set {_ROLLOUT}.{_LOOP}={next(iter(entries))}"
    classes: list[Any] = []
    default = {str(values[_LOOP]): f"{_ROLLOUT}.{_LOOP}"}
    for name, place in (default if loops is None else loops).items():
        at = f"{place}={name}" if place.startswith(_ROLLOUT) else f"{place}: {name}"
        if name not in _agent_loop_registry:
            if not is_broken:  # it may be what registers the loop
                known = sorted(_agent_loop_registry)
                way = f"choose one of {', '.join(known)}, or give the file that registers it ({_ROLLOUT}.{_LOOPS})"
                yield f"{at} is registered by nobody{did_you_mean(name, known)}: {way}"
            continue
        problem, loop = _tried(functools.partial(_loop_class, _agent_loop_registry[name]))
        if problem is not None and name in entries:
            yield f"{_ROLLOUT}.{_LOOPS}={values[_LOOPS]}: correct _target_ and keys of {name}: {problem}"
        elif problem is not None and _reason(str(_agent_loop_registry[name].get("_target_"))):
            way = f"{_LIBRARY}=MODULE, {_DATASET}.path=pkg://MODULE, or a file of {_ROLLOUT}.{_LOOPS} that names it"
            yield f"{at}: {problem}. Put the loop into a module of the Python path, and give {way}"
        elif problem is not None:
            yield f"{at}: correct the loop: {problem}"
        else:
            classes.append(loop)
    # A loop of the user's may have parsers of its own.
    theirs = [loop for loop in classes if not (loop.__module__.startswith("verl.") or issubclass(loop, ToolAgentLoop))]
    if values[_PARSER] not in ToolParser._registry and not theirs and not is_broken:
        known = sorted(ToolParser._registry)
        parser = f"{_ROLLOUT}.{_PARSER}={values[_PARSER]}"
        yield f"{parser} is no parser of tool calls{did_you_mean(values[_PARSER], known)}: choose {', '.join(known)}"


def _tried(call: Callable[[], Any]) -> tuple[str | None, Any]:
    """What is wrong with what a call loads; and what it returns."""
    loaded, error = attempt(call)
    return (str(error) if isinstance(error, _Broken) else error and describe(error)), loaded


def _dataset_class(path: str, name: str) -> Any:
    """The data set class, as verl loads it; what failed in its file, and not that something did."""
    from verl.utils.dataset.rl_dataset import get_dataset_class

    try:
        return get_dataset_class(OmegaConf.create({"custom_cls": {"path": path, "name": name}}))
    except RuntimeError as error:
        raise error.__cause__ or error from None


@contextlib.contextmanager
def _checked_classes() -> Iterator[None]:
    """verl's loader of tools, with a class that is named where it cannot be imported, called or made here."""
    from verl.tools import tool_registry

    whole = tool_registry.get_tool_class

    def get_tool_class(name: str) -> Callable[..., Any]:
        try:
            cls = whole(name)
        except (Exception, SystemExit) as error:
            raise _Broken(f"class_name={name} cannot be imported ({_reason(name) or describe(error)})") from error

        def make(**arguments: Any) -> Any:
            try:
                inspect.signature(cls).bind(**arguments)
            except TypeError as error:
                raise _Broken(f"class_name={name} does not take {', '.join(arguments)} ({error})") from error
            try:
                return cls(**arguments)
            except Exception as error:
                *_, (frame, _) = traceback.walk_tb(error.__traceback__)
                is_certain = str(frame.f_globals.get("__name__")).startswith("verl.tools.")  # it has no schema
                note, where = ("", "") if is_certain else (NOTE, " on this machine")  # a worker may have what it needs
                raise _Broken(f"{note}class_name={name} failed{where}: {describe(error)}") from error

        return make

    tool_registry.get_tool_class = get_tool_class
    try:
        yield
    finally:
        tool_registry.get_tool_class = whole


def _reason(name: str) -> str:
    """Why the module of a class is not there, where Python's own words are better than those of verl's loader."""
    try:
        importlib.import_module(name.rpartition(".")[0])
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def _register_loops(file: str) -> list[str]:
    """Register the loops of a YAML file as a worker does; their names."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    entries = OmegaConf.load(file)
    if not OmegaConf.is_list(entries) or not all(OmegaConf.is_dict(one) and one.get("name") for one in entries):
        raise _Broken("it is no list of entries with a name")
    _agent_loop_registry.update({str(one.name): one for one in entries})
    return [str(one.name) for one in entries]


def _loop_class(entry: Any) -> Any:
    """The class of a registered loop."""
    import hydra

    target = entry.get("_target_")
    if not target:
        raise _Broken("it has no _target_")
    try:
        loop = hydra.utils.get_class(target)
    except Exception as error:
        raise _Broken(f"_target_={target} is no class that can be imported ({_reason(target) or error})") from error
    own = [key for key in entry if key not in ("name", "_target_")]
    try:  # Hydra passes the entry's name, too
        inspect.signature(loop).bind(**dict.fromkeys([*(key for key in entry if key != "_target_"), *_ARGUMENTS]))
    except TypeError as error:
        raise _Broken(f"{target} does not take what verl makes it with ({error}); keys of its own: {own}") from error
    if not callable(getattr(loop, "run", None)) or inspect.isabstract(loop):
        raise _Broken(f"{target} has no method run, which verl calls")
    return loop


if __name__ == "__main__":
    answer(lambda: [*_problems(**json.loads(sys.stdin.read()))])
