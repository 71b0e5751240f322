"""The plan of the house as code: what may import what, and how large a file may grow.

`violations(root)` reads the sources below a root and returns every breach as one line; it imports
nothing of them, so it can be pointed at a planted tree as well as at the project.
"""

import ast
import sys
from pathlib import Path

PACKAGES = ("kvcore", "backends", "model")

# A file may import, of its own package, only files of an earlier row.
KVCORE_LAYERS = (
    ("errors",),
    ("arguments",),
    ("tokens",),
    ("items", "block"),
    ("hashing",),
    ("names",),
    ("events",),
    ("lifetimes",),
    ("free_queue", "content_tree", "groups", "slots", "stats", "reports"),
    ("retention",),
    ("free_blocks",),
    ("published",),
    ("pool", "block_table"),
    ("leases", "sequence"),
    ("release", "advance", "peaks"),
    ("prefix", "state"),
    ("steps", "doubt"),
    ("manager",),
    ("invariants",),
    ("__init__",),
    ("build_hook",),  # runs when kvcore is built; nothing imports it
)

# Which other packages a package may import, by their roots alone.
MAY_IMPORT = {"kvcore": set(), "backends": set(), "model": {"kvcore", "backends"}}

# The control plane counts Python ints; these must not load a tensor library.
CONTROL_PLANE = ("kvcore/*.py", "model/errors.py", "model/control/*.py")
TENSOR_LIBRARIES = {"torch", "numpy", "numba", "triton", "transformers"}

# What kvcore may import beside the standard library, and what a part that nothing else imports may.
KVCORE_NEEDS = {"xxhash"}
KVCORE_EXTRAS = {
    "kvcore/testing": {"hypothesis"},
    "kvcore/bench": set(),
    "kvcore/build_hook.py": {"hatchling"},
}

# A loader of code that may be absent, or must not load early, imports inside a function.
LAZY_IMPORTS = {"backends/registry.py"}

# What blocks, tables, sequences, leases and pools have for kvcore alone: docs/api.md does not name
# it, and the runner reads none of it. `test_architecture.py` says that nothing is left out.
KVCORE_INSIDES = frozenset(
    """
    assign attach beyond block_id blocks chain child_nodes cut cut_names deadline descendants
    drop empty_blocks exchange find_limits first_copy first_kept forget forget_identity forgets
    free_blocks free_queue grow hand_out has_children id_object is_active is_open is_uneven keep
    kind last_child last_copy last_event namespace_key next_blocks next_copy next_free next_pass
    node num_missing num_published num_settled_tokens opened_at pool prev_copy prev_free publish
    ref_count release revive root seq_id shelf trees unpublish wishes
    """.split()  # noqa: SIM905  # words are easier to read so
)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

MAX_FILE_LINES = 700
MAX_CODE_LINES = 450
MAX_FUNCTION_LINES = 60
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}


def violations(root):
    """Return one line for every rule that a file below `root` breaks."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            for check in (_imports, _needs, _planes, _lazy, _insides, _sizes):
                found += [f"{name}: {what}" for what in check(path, name, source, tree)]
    return found


def imported(tree):
    """Yield the dotted name of every import, relative ones with their dots in front."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def _imports(path, name, source, tree):
    package = name.split("/")[0]
    for module in imported(tree):
        top, _, rest = module.partition(".")
        if top in PACKAGES and top != package:
            if top not in MAY_IMPORT[package]:
                yield f"imports {module}: {package} does not know {top}"
            elif (
                rest
                and not (
                    Path(*path.parts[: -len(name.split("/"))]) / module.replace(".", "/")
                ).is_dir()
            ):
                yield f"imports {module}: a package is imported by its root"
        if package == "kvcore" and top == "kvcore" and name.count("/") == 1:
            yield from _downward(Path(name).stem, rest)


def _downward(importer, target):
    rows = {file: row for row, files in enumerate(KVCORE_LAYERS) for file in files}
    if importer not in rows:
        yield "is in no layer: give it a row in KVCORE_LAYERS and in docs/architecture.md"
    elif rows.get(target, -1) >= rows[importer]:
        yield f"imports kvcore.{target}, which does not stand above it"


def _needs(path, name, source, tree):
    package, _, rest = name.partition("/")
    if package != "kvcore":
        return
    part = f"kvcore/{rest.split('/')[0]}"
    allowed = {"kvcore"} | KVCORE_NEEDS | KVCORE_EXTRAS.get(part, set()) | sys.stdlib_module_names
    for module in imported(tree):
        if module.partition(".")[0] not in allowed | set(PACKAGES):
            yield f"imports {module}, which it does not need"
        for extra in KVCORE_EXTRAS:
            if part != extra and f"{module}.".startswith(extra.replace("/", ".") + "."):
                yield f"imports {module}: nothing else of kvcore may"


def _planes(path, name, source, tree):
    if not any(Path(name).match(pattern) for pattern in CONTROL_PLANE):
        return
    for module in imported(tree):
        top = module.partition(".")[0]
        if top in TENSOR_LIBRARIES:
            yield f"imports {module}: the control plane has no tensors"


def _lazy(path, name, source, tree):
    if name in LAZY_IMPORTS:
        return
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    yield f"line {node.lineno}: an import inside {function.name}"


def _insides(path, name, source, tree):
    if name.startswith("model/"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in KVCORE_INSIDES:
                yield f"line {node.lineno}: reads {node.attr}, which is kvcore's own"


def _body_lines(function):
    """Count the lines of a function's body: no signature, no docstring, no function inside."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if not body:
        return 0
    lines = (function.end_lineno or 0) - body[0].lineno + 1
    inner = [node for node in ast.walk(function) if isinstance(node, FUNCTIONS)]
    direct = [node for node in inner if node in body]
    return lines - sum((node.end_lineno or 0) - node.lineno + 1 for node in direct)


def _code_lines(source, tree):
    """Count the lines that are neither empty, nor a comment, nor part of a docstring."""
    prose = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(1 for n, line in lines if n not in prose and line.strip() and line.strip()[0] != "#")


def _sizes(path, name, source, tree):
    lines, code = source.count("\n"), _code_lines(source, tree)
    if lines > MAX_FILE_LINES or code > MAX_CODE_LINES:
        yield f"{lines} lines, {code} of code: it has found a second subject"
    if Path(name).stem in FORBIDDEN_NAMES:
        yield "a name that says nothing"
    if source.strip() and ast.get_docstring(tree) is None:
        yield "a module opens with what it decides"
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and _body_lines(node) > MAX_FUNCTION_LINES:
            yield f"{node.name} has {_body_lines(node)} lines"
        if isinstance(node, ast.Assert):
            yield f"line {node.lineno}: an assert vanishes under python -O"
