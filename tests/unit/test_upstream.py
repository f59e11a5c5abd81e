"""Everything of verl, Ray, vLLM and others that this project relies on and that is private or undocumented.

What our files import, and the methods of verl's classes that ours call by ``super()``, is read from their code. For the
rest a mark stands where it is used: ``# upstream: MODULE:NAME(PARAMETER, ...)``, a class, function, method
(``Class.a|b``) or assigned attribute, with parameters that it must take; or ``# upstream: MODULE "TEXT"``, a text of
the installed source, blanks and lines aside. ``grep -rn "# upstream:" fspo recipe`` is the list to go through before an
upgrade.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from checking import check_all

from recipe.runner import verl_patches

ROOT = Path(__file__).resolve().parents[2]
OURS = sorted([*(ROOT / "recipe").rglob("*.py"), *(ROOT / "fspo").rglob("*.py")])
Check = tuple[str, Callable[[], None]]
#: What our code imports of these is looked up.
WATCHED = ("verl", "vllm", "transfer_queue", "transformers", "hydra", "ray")


def called(value: Any) -> Any:
    """What runs: of a property its function."""
    return inspect.unwrap(value.fget if isinstance(value, property) else value)


def check_takes(value: Any, takes: set[str]) -> None:
    taken = inspect.signature(called(value)).parameters if takes else {}
    kinds = {parameter.kind for parameter in taken.values()}
    if not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        assert takes <= {*taken}, f"it takes {', '.join(taken)} now"


def check_definition(module: str, name: str, takes: set[str]) -> None:
    """An attribute that a class sets on itself is found in its source."""
    value: Any = import_module(module)
    for part in name.split("."):
        if not hasattr(value, part) and inspect.isclass(value):
            assert re.search(rf"self\.{part}\b[^=\n]*=", inspect.getsource(value)), f"{module}:{name} is gone"
            return
        value = getattr(value, part)
    check_takes(value, takes)


def check_text(module: str, text: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is gone"
    source = " ".join(Path(spec.origin).read_text(encoding="utf-8").split())
    assert text in source, f"{module} no longer has {text}"


def check_import(module: str, name: str | None = None) -> None:
    if not hasattr(import_module(module), name or "__name__"):
        import_module(f"{module}.{name}")


def check_above(owner: type[Any], name: str, takes: set[str]) -> None:
    check_takes(getattr(super(owner, owner), name), takes)


def marks() -> Iterator[tuple[str, str, Callable[[], None]]]:
    """File and line, text (or nothing), and check of each mark."""
    for path in OURS:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if "# upstream:" not in line:
                continue
            place = f"{path.relative_to(ROOT)}:{number}"
            match = re.search(r"# upstream: ([\w.]+)(?::((?:\w+\.)?)([\w|]+)(?:\((.*)\))?| \"(.*)\")$", line)
            assert match, f"{place}: no mark as above"
            module, owner, names, takes, text = match.groups()
            if text:
                yield place, text, partial(check_text, module, text)
            for name in names.split("|") if names else ():
                parameters = set(filter(None, (takes or "").split(", ")))
                yield place, "", partial(check_definition, module, owner + name, parameters)


def imports() -> Iterator[Check]:
    """A check of each module and name of a watched package that our code imports."""
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                found = [f"{node.module}:{alias.name}" for alias in node.names]
            for name in found:
                if re.split(r"\W", name)[0] in WATCHED:
                    yield f"an import in {path.relative_to(ROOT)}", partial(check_import, *name.split(":"))


def overrides() -> Iterator[Check]:
    """A check of each method that calls the one above it, and of the parameters that it names."""
    for path in (path for path in OURS if "super()." in path.read_text(encoding="utf-8") and path.stem != "trl"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        owners = [one for one in vars(import_module(module)).values() if getattr(one, "__module__", "") == module]
        for owner in filter(inspect.isclass, owners):
            for method in filter(inspect.isfunction, map(called, vars(owner).values())):
                source = inspect.getsource(method) if method.__code__.co_filename == str(path) else ""
                arguments = inspect.getfullargspec(method)
                for name in set(re.findall(r"super\(\)\.(\w+)", source)) - {"__init__"}:
                    named = {*arguments.args} if name == method.__name__ and not arguments.varargs else set()
                    yield f"{module}: {owner.__name__}", partial(check_above, owner, name, named)


def test_everything_that_the_project_relies_on_is_still_there() -> None:
    marked, inherited = [(place, check) for place, _, check in marks()], [*overrides()]
    assert len(marked) > 60 and len(inherited) > 35
    check_all([*marked, *inherited, *imports()])


def test_each_patch_of_verl_marks_what_is_wrong_in_it() -> None:
    """A text that is gone is good news: the patch can go."""
    texts = {place.partition(":")[0] for place, text, _ in marks() if text}
    for path in (ROOT / "recipe/runner/verl_patches").glob("[!_]*.py"):
        assert str(path.relative_to(ROOT)) in texts and f"``{path.stem}``" in (verl_patches.__doc__ or "")
