"""Agent loops, tools and parsers: what verl's workers could not load is named with key, value and remedy."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import answered_here
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from composing import composed
from data_rows import ROW
from verl.experimental.agent_loop import agent_loop, tool_parser
from verl.tools import function_tool

from recipe.runner import agent_failures
from recipe.runner.launch import agents
from recipe.runner.launch.prepare import on_this_machine
from recipe.runner.launch.reward_function import NOTE

TOOLS, FUNCTIONS = "multi_turn.tool_config_path", "multi_turn.function_tool_path"
LOOPS, MANAGER, PARSER = "agent.agent_loop_config_path", "agent.agent_loop_manager_class", "multi_turn.format"
LOOP = "agent.default_agent_loop"
VALUES = {TOOLS: None, FUNCTIONS: None, LOOPS: None, MANAGER: None, PARSER: "hermes", LOOP: "tool_agent"}

FUNCTION = '''
from verl.tools.function_tool import function_tool
@function_tool
def {}(number: int) -> str:
    """Twice a number.

    Args:
        number: The number.
    """
    return str(2 * number)
'''
FILES = {
    "my_code.py": """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.tools.base_tool import BaseTool
class Tool(BaseTool): ...
class Bare: ...
class NoServer(BaseTool):
    def __init__(self, config, tool_schema):
        raise ConnectionError("no server")
class Loop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs): ...
class Narrow(AgentLoopBase):
    def __init__(self, trainer_config): ...
    async def run(self, sampling_params, **kwargs): ...
class NoRun: ...
class Manager:
    def create(self): ...
    def generate_sequences(self): ...
""",
    "double.py": FUNCTION.format("double"),
    "tool.py": FUNCTION.format("tool"),
    "none.py": "",
    "fails.py": "import nothing_like_it",
    "untyped.py": FUNCTION.format("untyped").replace(": int", ""),
    "pointer": "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n",
    "brackets.yaml": "tools: [",
    "list.yaml": "- name",
    "empty.yaml": "",
    **{f"{name}.yaml": f"- {{name: my_loop, _target_: my_code.{name}}}" for name in ("Loop", "Narrow", "NoRun", "Lop")},
    "no_target.yaml": "- {name: my_loop}",
    "further_key.yaml": "- {name: my_loop, _target_: my_code.Loop, tokenizer: 1, of_the_loop: 2}",
}


OWN_DATA = """
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset
class Mine(RLHFDataset): ...
class Bare: ...
@register("mine")
class Loop(SingleTurnAgentLoop): ...
"""


def tools(class_name: str, kind: str = "native", schema: bool = True) -> str:
    """A tool configuration with one tool."""
    empty = {"type": "object", "properties": {}, "required": []}
    function = {"name": "tool", "description": "a tool", "parameters": empty}
    tool = {"class_name": class_name, "config": {"type": kind}}
    return json.dumps(
        {"tools": [tool | ({"tool_schema": {"type": "function", "function": function}} if schema else {})]}
    )


FILES |= {f"{name}_tool.yaml": tools(f"my_code.{name}") for name in ("Tool", "Tol", "Bare", "NoServer")}
FILES |= {
    "mcp_tool.yaml": tools("my_code.Tool", "mcp"),
    "module_tool.yaml": tools("my_cod.Tool"),
    "undotted_tool.yaml": tools("Tool"),
    "unsaid_tool.yaml": tools("my_code.Tool", schema=False),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_code", raising=False)
    # What a worker of a new process has.
    monkeypatch.setattr(agent_loop, "_agent_loop_registry", {**agent_loop._agent_loop_registry})
    monkeypatch.setattr(tool_parser.ToolParser, "_registry", {**tool_parser.ToolParser._registry})
    monkeypatch.setattr(function_tool, "FUNCTION_TOOL_REGISTRY", {})
    monkeypatch.setattr(function_tool, "_LOADED_FUNCTION_TOOL_PATHS", {})
    yield tmp_path
    sys.modules.pop("my_code", None)


def problems(values: dict[str, str], *loops: str) -> list[str]:
    """What a process of its own would answer, in this one."""
    places = {name: f"actor_rollout_ref.rollout.{LOOP}" for name in loops or (VALUES | values)[LOOP].split()}
    return [*agents._problems(VALUES | values, places, None)]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {LOOP: "tool_agnet"},
            ("default_agent_loop=tool_agnet ", "did you mean tool_agent?", "agent_loop_config_path"),
        ),
        ({PARSER: "hermess"}, ("format=hermess ", "did you mean hermes?", "qwen3_coder")),
        ({PARSER: "hermess", LOOP: "single_turn_agent"}, ("format=hermess ",)),
        ({TOOLS: "Tol_tool.yaml"}, ("Tol_tool.yaml", "class_name=my_code.Tol ")),
        ({TOOLS: "module_tool.yaml"}, ("module_tool.yaml", "class_name=my_cod.Tool ", "No module named 'my_cod'")),
        ({TOOLS: "undotted_tool.yaml"}, ("undotted_tool.yaml", "class_name=Tool ")),
        ({TOOLS: "Bare_tool.yaml"}, ("Bare_tool.yaml", "class_name=my_code.Bare ", "tool_schema")),
        ({TOOLS: "unsaid_tool.yaml"}, ("unsaid_tool.yaml", "my_code.Tool")),
        ({TOOLS: "mcp_tool.yaml"}, ("mcp_tool.yaml", "mcp", "config.type=native")),
        *(({TOOLS: f"{name}.yaml"}, (f"/{name}.yaml", "`tools`")) for name in ("brackets", "list", "empty", "Loop")),
        ({TOOLS: "pointer"}, ("/pointer", "`tools`")),
        ({FUNCTIONS: "none.py"}, ("/none.py", "@function_tool")),
        ({FUNCTIONS: "fails.py"}, ("/fails.py", "nothing_like_it")),
        ({FUNCTIONS: "untyped.py"}, ("/untyped.py", "number")),
        ({FUNCTIONS: "Loop.yaml"}, ("/Loop.yaml", "Python file")),
        ({FUNCTIONS: "pointer"}, ("/pointer", "Python file")),
        ({TOOLS: "Tool_tool.yaml", FUNCTIONS: "tool.py"}, ("Tool_tool.yaml", "/tool.py", "rename")),
        *(({LOOPS: f"{name}.yaml"}, (f"/{name}.yaml", "_target_")) for name in ("brackets", "list", "empty")),
        ({LOOPS: "Tool_tool.yaml"}, ("/Tool_tool.yaml", "YAML list")),
        ({LOOPS: "Loop.yaml"}, ("/Loop.yaml", "my_loop", "tool_agent", "default_agent_loop=my_loop")),
        ({LOOPS: "Lop.yaml", LOOP: "my_loop"}, ("/Lop.yaml", "my_code.Lop")),
        ({LOOPS: "Narrow.yaml", LOOP: "my_loop"}, ("/Narrow.yaml", "my_code.Narrow")),
        ({LOOPS: "NoRun.yaml", LOOP: "my_loop"}, ("/NoRun.yaml", "my_code.NoRun")),
        ({LOOPS: "no_target.yaml", LOOP: "my_loop"}, ("/no_target.yaml", "_target_")),
        ({MANAGER: "no.such.Manager"}, ("agent_loop_manager_class=no.such.Manager", "No module")),
        ({MANAGER: "Manager"}, ("agent_loop_manager_class=Manager", "package.module.Class")),
        ({MANAGER: "my_code.Loop"}, ("agent_loop_manager_class=my_code.Loop", "generate_sequences")),
    ],
    ids=str,
)
def test_what_a_worker_could_not_load_is_named(folder: Path, values: dict[str, str], parts: tuple[str, ...]) -> None:
    in_folder = {name: str(folder / value) if value in FILES else value for name, value in values.items()}
    (sentence,) = problems(in_folder)
    assert not sentence.startswith(NOTE)
    assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize(
    "values",
    [
        {},
        {TOOLS: "Tool_tool.yaml"},
        {FUNCTIONS: "double.py", PARSER: "qwen3_coder"},
        {TOOLS: "Tool_tool.yaml", FUNCTIONS: "double.py"},
        {LOOPS: "Loop.yaml", LOOP: "my_loop", PARSER: "of_the_loop"},
        {MANAGER: "my_code.Manager", LOOP: "of_the_manager"},
    ],
    ids=str,
)
def test_what_a_worker_loads_gets_no_word(folder: Path, values: dict[str, str]) -> None:
    assert problems({name: str(folder / value) if value in FILES else value for name, value in values.items()}) == []


def test_a_constructor_that_fails_here_is_a_note(folder: Path) -> None:
    (sentence,) = problems({TOOLS: str(folder / "NoServer_tool.yaml")})
    assert sentence.startswith(NOTE)
    assert "my_code.NoServer" in sentence and "no server" in sentence


def test_each_loop_that_the_rows_name_is_looked_up(folder: Path) -> None:
    rows = [ROW | {"agent_name": name} for name in ("tool_agent", "tool_agnet", "tool_agent")]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    config = on_this_machine(composed("run.dir=/nowhere", "data.train_files=rows.parquet"))
    loops = agents.named_loops(config)
    assert loops is not None and set(loops) == {"tool_agent", "tool_agnet", "single_turn_agent"}  # the last by default
    (sentence,) = agents._problems(VALUES, loops, None)
    assert "rows.parquet" in sentence and "tool_agnet" in sentence
    absent = on_this_machine(composed("run.dir=/nowhere", "data.train_files=/no/such.parquet"))
    assert agents.named_loops(absent) is None


def test_a_process_of_its_own_answers_and_a_file_is_found_from_a_workers_folder(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rollout = "actor_rollout_ref.rollout"
    own = [f"{rollout}.{LOOP}=tool_agnet", f"{rollout}.{TOOLS}=NoServer_tool.yaml"]
    config = on_this_machine(composed("run.dir=/nowhere", *own, f"{rollout}.{FUNCTIONS}=double.py"))
    assert config.data.function_tool_path == str(folder / "double.py")  # verl's data set counts the prompt with it
    (problem,) = agents.agent_problems(config)
    assert "did you mean tool_agent?" in problem
    assert "no server" in capfd.readouterr().err
    (problem,) = agents.agent_problems(
        on_this_machine(composed("run.dir=/nowhere", f"{rollout}.{TOOLS}=/no/such.yaml"))
    )
    assert type(problem).__name__ == "MachineProblem" and "/no/such.yaml" in problem


def test_a_worker_keeps_the_last_exception_of_its_loops() -> None:
    worker = SimpleNamespace()
    assert agent_failures._kept(worker) == ""
    agent_failures._keep(worker)
    try:
        for text in ("first", "the tool server is down"):
            try:
                raise ConnectionError(text)
            except ConnectionError:
                agent_failures.agent_loop_tq.logger.exception("Error in _run_prompt")
        assert "ConnectionError: the tool server is down" in agent_failures._kept(worker)
    finally:
        agent_failures.agent_loop_tq.logger.removeHandler(worker.last_failure)
    assert isinstance(worker.last_failure, logging.Handler)


@pytest.mark.parametrize(
    ("path", "name", "loop", "parts"),
    [
        ("pkg://own_data", "Mine", "mine", ()),
        ("own_data.py", "Mine", "tool_agent", ()),
        # verl loads the file, but imports the loop's class by the name of a module, which a file has not.
        ("own_data.py", "Mine", "mine", ("default_agent_loop=mine", "custom_cls.path=pkg://MODULE", "external_lib")),
        ("own_data.py", "Bare", "tool_agent", ("custom_cls.path=own_data.py", "name=Bare", "Dataset")),
        ("own_data.py", "Absent", "tool_agent", ("custom_cls.path=own_data.py", "name=Absent")),
        ("fails.py", "Mine", "tool_agent", ("custom_cls.path=fails.py", "nothing_like_it")),
    ],
    ids=str,
)
def test_a_data_set_class_is_loaded_as_a_worker_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str, loop: str, parts: tuple[str, ...]
) -> None:
    (folder / "own_data.py").write_text(OWN_DATA)
    monkeypatch.delitem(sys.modules, "own_data", raising=False)
    answers = [*agents._problems(VALUES | {LOOP: loop}, None, None, (path, name))]
    assert len(answers) == bool(parts)
    assert all(part in answer and not answer.startswith(NOTE) for answer in answers for part in parts), answers
    sys.modules.pop("own_data", None)


def test_the_file_of_a_data_set_class_is_looked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["data.custom_cls.path=no/such.py", "data.custom_cls.name=Mine"]
    (problem,) = agents.agent_problems(on_this_machine(composed("run.dir=/nowhere", *own)))
    assert type(problem).__name__ == "MachineProblem" and f"custom_cls.path={folder}/no/such.py " in problem
    own[0] = "data.custom_cls.path=pkg://own_data"
    assert on_this_machine(composed("run.dir=/nowhere", *own)).data.custom_cls.path == "pkg://own_data"
    (folder / "own_data.py").write_text(OWN_DATA)
    own[0] = "data.custom_cls.path=own_data.py"
    config = on_this_machine(composed("run.dir=/nowhere", *own, f"actor_rollout_ref.rollout.{LOOP}=mine"))
    assert config.data.custom_cls.path == str(folder / "own_data.py")
    monkeypatch.setattr(agents, "asked", answered_here.of_agents)
    (problem,) = agents.agent_problems(config)
    assert "default_agent_loop=mine" in problem
