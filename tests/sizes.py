"""How large the project is and how tangled, each count beside its budget: `python -m tests.sizes`.

A budget is a line in `tests/architecture.py`. A count above it fails `tests/test_sizes.py`, so a
change that needs more raises the budget, and its reviewer sees that line. A count far below it
fails as well: what has been won is kept.

Idea: tinygrad's `sz.py`, which prints the lines of each folder and fails above a limit.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.architecture import BUDGETS, FUNCTIONS, PACKAGES, imported_names

_QUESTIONS = re.compile(r"(What|Whether|See)\b")
_PRIVATE = re.compile(r"_[A-Za-z](\w*[A-Za-z0-9])?")
_DOCUMENTED = {"_asdict", "_exit"}  # of named tuples and of os
_DOTTED = re.compile(r"\w+(\.\w+)*")


def counts(root: Path) -> dict[str, int]:
    """Return the name and size of everything that has a budget. O(sources)."""
    found: Counter[str] = Counter()
    arrows = set()
    sources = [(name, source, ast.parse(source)) for name, source in _sources(root)]
    own = _own_names([tree for _, _, tree in sources])
    for name, source, tree in sources:
        package, *folders = name.split("/")[:-1]
        part = "/".join([package, *folders[:1]])
        found[f"lines of {'tests' if package == 'tests' else part}"] += source.count("\n")
        if package not in PACKAGES:
            continue
        found["lines of the product"] += source.count("\n")
        found["docstrings that begin with What, Whether or See"] += sum(_questions(tree))
        found["places with private names of other libraries"] += len(set(_private_names(tree, own)))
        if package == "model":
            arrows.update((part, target) for target in _folders_of_model(tree) if target != part)
    found["arrows between folders of model"] = len(arrows)
    return dict(found)


def _sources(root: Path) -> Iterator[tuple[str, str]]:
    for package in (*PACKAGES, "tests"):
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def _questions(tree: ast.Module) -> Iterator[bool]:
    """Yield, for each docstring, whether its first sentence is no sentence about the thing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            yield isinstance(text, str) and _QUESTIONS.match(text) is not None


def _own_names(trees: list[ast.Module]) -> set[str]:
    """Return each name that the project itself gives to something."""
    own = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                own.add(node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            own.update(each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
    return own


def _private_names(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name where a private name is used that the project did not give.

    It is in the path of an import, an attribute, or a text that names an attribute or a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = imported_names(ast.Module([node], []))
            parts = {part for name in names for part in name.split(".")}
        elif isinstance(node, ast.Attribute):
            parts = {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = set(node.value.split(".")) if _DOTTED.fullmatch(node.value) else set()
        else:
            continue
        for part in parts:
            is_ours = part in own or part.startswith("_kvcore") or part in _DOCUMENTED
            if _PRIVATE.fullmatch(part) and not is_ours:
                yield node.lineno, part


def _folders_of_model(tree: ast.Module) -> Iterator[str]:
    for name in imported_names(tree):
        parts = name.split(".")
        if parts[0] == "model" and len(parts) > 2:
            yield "/".join(parts[:2])


def main() -> int:
    """Print every count beside its budget; return 1 if one is above."""
    found = counts(Path(__file__).parents[1])
    over = 0
    for name in sorted(found, key=lambda each: (not each.startswith("lines"), each)):
        budget = BUDGETS.get(name)
        is_over = budget is not None and found[name] > budget
        over += is_over
        beside = "" if budget is None else f" of {budget:>7,}"
        sys.stdout.write(f"{found[name]:>7,}{beside}  {name}{'  <- over' if is_over else ''}\n")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
