"""Everything of verl, Ray, vLLM and others that this project relies on and that is private or undocumented.

What our files import, and the methods of verl's classes that ours call by ``super()``, is read from their code. For the
rest a mark stands where it is used: ``# upstream: MODULE:NAME(PARAMETER, ...)``, a class, function, method
(``Class.a|b``) or assigned attribute, with parameters that it must take; or ``# upstream: MODULE "TEXT"``, a text of
the installed source, blanks and lines aside. ``grep -rn "# upstream:" fspo recipe`` is the list to go through before an
upgrade. Installed sources are read as text, nothing is imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from checking import check_all

from recipe.runner import verl_patches

ROOT = Path(__file__).resolve().parents[2]
OURS = sorted([*(ROOT / "recipe").rglob("*.py"), *(ROOT / "fspo").rglob("*.py")])
Check = tuple[str, Callable[[], None]]
#: What our code imports of these is looked up; of ours, because classes of ours derive from each other.
WATCHED = ("verl", "vllm", "transfer_queue", "transformers", "hydra", "ray", "recipe")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def source_of(module: str) -> Path:
    """The file of a module; only its top package may be imported to find it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    assert spec is not None and spec.submodule_search_locations, f"{top} is not installed"
    path = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    raise AssertionError(f"the module {module} is gone")


def attributes_of(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """What a module or class defines: functions, classes, assignments, imports, and ``self.name = ...``."""
    attributes: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, (*FUNCTION, ast.ClassDef)):
            attributes[node.name] = node
            if node.name == "__init__":
                for target in ast.walk(node):
                    if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                        attributes.setdefault(target.attr, target)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                attributes |= {target.id: node} if isinstance(target, ast.Name) else {}
        elif isinstance(node, ast.ImportFrom):
            attributes |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.If | ast.Try):
            attributes |= attributes_of(node.body)
    return attributes


def is_watched(module: str) -> bool:
    return module.partition(".")[0] in WATCHED and not module.startswith("ray._raylet")  # which is compiled


def definition(module: str, name: str) -> tuple[str, ast.AST | None]:
    """The module that defines a name of this one, and the definition; an import itself if that is not watched."""
    node = attributes_of(tree_of(source_of(module)).body).get(name)
    if isinstance(node, ast.ImportFrom) and is_watched(str(node.module)):
        (original,) = (alias.name for alias in node.names if name in (alias.asname, alias.name))
        return definition(str(node.module), original)
    return module, node


def bases_of(module: str, owner: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
    """The watched classes that a class of this module derives from, each with its module."""
    found = [definition(module, base.id) for base in owner.bases if isinstance(base, ast.Name)]
    return [(module, node) for module, node in found if isinstance(node, ast.ClassDef)]


def above(module: str, owner: ast.ClassDef, name: str) -> ast.AST | None:
    """What a class inherits by this name."""
    return next(filter(None, (member(*base, name) for base in bases_of(module, owner))), None)


def member(module: str, owner: ast.ClassDef, name: str) -> ast.AST | None:
    return attributes_of(owner.body).get(name) or above(module, owner, name)


def check_takes(node: ast.AST | None, name: str, takes: set[str]) -> None:
    assert node is not None, f"{name} is gone"
    if isinstance(node, FUNCTION) and not (node.args.vararg and node.args.kwarg):
        taken = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        assert takes <= taken, f"{name} takes {sorted(taken)} now"


def check_definition(module: str, name: str, takes: set[str]) -> None:
    first, _, last = name.partition(".")
    place, node = definition(module, first)
    if last and isinstance(node, ast.ClassDef):
        node = member(place, node, last)
    check_takes(node, f"{module}:{name}", takes)


def check_above(module: str, owner: ast.ClassDef, name: str, takes: set[str]) -> None:
    check_takes(above(module, owner, name), f"{name} above {owner.name}", takes)


def check_text(module: str, text: str) -> None:
    assert text in " ".join(source_of(module).read_text(encoding="utf-8").split()), f"{module} no longer has {text}"


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
        for node in ast.walk(tree_of(path)):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                found = [f"{node.module}:{alias.name}" for alias in node.names]
            for name in found:
                if is_watched(name) and not name.startswith("recipe."):
                    yield f"an import in {path.relative_to(ROOT)}", partial(check_import, *name.split(":"))


def check_import(module: str, name: str | None = None) -> None:
    body = tree_of(source_of(module)).body
    if name is None or name in attributes_of(body):
        return
    whole = [node.module for node in body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    if not any(name in attributes_of(tree_of(source_of(f"{module}.{part}")).body) for part in whole):
        source_of(f"{module}.{name}")


def overrides() -> Iterator[Check]:
    """A check of each method that calls the one above it, and of the parameters that it names."""
    for path in OURS:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for owner in (node for node in tree_of(path).body if isinstance(node, ast.ClassDef)):
            for method in owner.body if bases_of(module, owner) else ():
                if isinstance(method, FUNCTION) and "super()." in (code := ast.unparse(method)):
                    named = set() if method.args.vararg else {argument.arg for argument in method.args.args}
                    for name in set(re.findall(r"super\(\)\.(\w+)", code)) - {"__init__", "__new__"}:
                        takes = named if name == method.name else set()
                        yield f"{module}: {owner.name}", partial(check_above, module, owner, name, takes)


def test_everything_that_the_project_relies_on_is_still_there() -> None:
    marked, inherited = [(place, check) for place, _, check in marks()], [*overrides()]
    assert len(marked) > 60 and len(inherited) > 35
    check_all([*marked, *inherited, *imports()])


def test_each_patch_of_verl_marks_what_is_wrong_in_it() -> None:
    """A text that is gone is good news: the patch can go."""
    texts = {place.partition(":")[0] for place, text, _ in marks() if text}
    for path in (ROOT / "recipe/runner/verl_patches").glob("[!_]*.py"):
        assert str(path.relative_to(ROOT)) in texts and f"``{path.stem}``" in (verl_patches.__doc__ or "")
