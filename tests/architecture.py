"""The plan of the house as code: what may import what, and how large a file may grow.

`violations(root)` reads the sources below a root and returns every breach as one line; it imports
nothing of them, so it can be pointed at a planted tree as well as at the project.
"""

import ast
import graphlib
import sys
from pathlib import Path

PACKAGES = ("kvcore", "backends", "model")

# A row names folders, and files that stand at the root of a package. What is in a row may import,
# of its own package, only what stands in an earlier row, and what is in the same folder.
KVCORE_LAYERS = (
    ("errors", "block"),
    ("arguments",),
    ("identity",),
    ("events",),
    ("content_tree", "eviction"),
    ("tables", "reports"),
    ("pool", "sequence"),
    ("lease",),
    ("verbs",),
    ("manager",),
    ("inspect", "sanitize"),
    ("__init__",),
    ("tiers",),
    ("adapters", "testing", "wire"),
    ("__main__",),
    ("build_hook",),  # runs when kvcore is built; nothing imports it
)

BACKENDS_LAYERS = (
    ("errors", "helper_process"),
    ("contract",),
    ("sparse", "states"),
    ("checks", "oracle", "registry"),
    ("state_oracle",),
    ("sparse_oracle",),
    ("__init__",),
    ("numba_cpu", "triton_gpu"),
    ("conformance",),
)

TRITON_GPU_LAYERS = (
    ("shared",),
    ("decode", "prefill", "state"),
    ("hopper",),
    ("latent",),
    ("ahead", "copy_blocks", "move_blocks", "paged_attention", "slot_mapping", "store_kv"),
    ("sparse",),
    ("warm_up",),
    ("backend",),
    ("__init__",),
)

MODEL_LAYERS = (
    ("errors", "host"),
    ("control",),
    ("trace", "caches"),
    ("attention", "ranks"),
    ("load",),
    ("compile", "sample"),
    ("forward",),
    ("pace", "token_stream", "turns"),
    ("engine_core",),
    ("async_engine", "twins"),
    ("engine",),
    ("tiny",),
    ("minimal", "cli"),
    ("llm",),
    ("run", "chat", "bench", "page"),
    ("view", "serve"),
    ("cluster",),
    ("__main__",),
    ("__init__",),
)

LAYERS = {
    "kvcore": KVCORE_LAYERS,
    "backends": BACKENDS_LAYERS,
    "backends/triton_gpu": TRITON_GPU_LAYERS,
    "model": MODEL_LAYERS,
}

# Which other packages a package may import, by their roots alone.
MAY_IMPORT = {"kvcore": set(), "backends": set(), "model": {"kvcore", "backends"}}

# What an engine's attention and kvcore's blocks meet in; nothing imports it before it is asked for.
BRIDGES = {
    "kvcore/adapters/recurrent/state_functions.py",
    "kvcore/adapters/transformers/attention.py",
}

# The control plane counts Python ints; these must not load a tensor library.
CONTROL_PLANE = ("kvcore/*.py", "kvcore/*/*.py", "model/errors.py", "model/control/*.py")
TENSOR_LIBRARIES = {"torch", "numpy", "numba", "triton", "transformers"}

# What kvcore may import beside the standard library, and what a part that nothing else imports may.
KVCORE_NEEDS = {"xxhash"}
KVCORE_EXTRAS = {
    "kvcore/adapters": {"torch", "transformers", "vllm"},
    "kvcore/testing": {"hypothesis", "pytest"},
    "kvcore/sanitize.py": set(),
    "kvcore/wire": {"msgspec", "zmq"},
    "kvcore/build_hook.py": {"hatchling"},
}

# A loader of code that may be absent, or must not load early, imports inside a function.
LAZY_IMPORTS = {"backends/registry.py"}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

MAX_FILE_LINES = 725  # of a file that is more than one class; engine_core.py is the longest
MAX_CODE_LINES = 585  # scheduler.py has most
MAX_FUNCTION_LINES = 60

# The most of each that `python -m tests.sizes` may count: a change that needs more says so here.
BUDGETS = {
    "lines of backends": 2_236,
    "lines of backends/conformance": 1_976,
    "lines of backends/numba_cpu": 3_111,
    "lines of backends/triton_gpu": 9_059,
    "lines of kvcore": 4_627,
    "lines of kvcore/adapters": 5_371,
    "lines of kvcore/eviction": 766,
    "lines of kvcore/identity": 609,
    "lines of kvcore/inspect": 695,
    "lines of kvcore/tables": 829,
    "lines of kvcore/testing": 4_021,
    "lines of kvcore/tiers": 4_278,
    "lines of kvcore/verbs": 2_877,
    "lines of kvcore/wire": 2_646,
    "lines of model": 4_460,
    "lines of model/attention": 2_401,
    "lines of model/caches": 1_403,
    "lines of model/cli": 3_829,
    "lines of model/cluster": 1_597,
    "lines of model/compile": 4_042,
    "lines of model/control": 4_958,
    "lines of model/forward": 3_792,
    "lines of model/load": 4_000,
    "lines of model/ranks": 1_136,
    "lines of model/sample": 3_101,
    "lines of model/serve": 7_857,
    "lines of model/tiny": 43,
    "lines of tests": 91_449,
    "lines of the product": 85_720,
    "arrows between folders of model": 81,
    "docstrings that begin with What, Whether or See": 151,
    "places with private names of other libraries": 100,
}

FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}


def violations(root):
    """Return one line for every rule that a file below `root` breaks."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            for check in (_imports, _downward, _needs, _planes, _lazy, _sizes):
                found += [f"{name}: {what}" for what in check(path, name, source, tree)]
        found += _circles(root, package)
    return found


def imported(tree):
    """Yield the dotted name of every import, relative ones with their dots in front."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def imported_names(tree):
    """Yield the dotted name of everything that is imported, of a module or of what is in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _imports(path, name, source, tree):
    package = name.split("/")[0]
    for module in imported(tree):
        top, _, rest = module.partition(".")
        if top in PACKAGES and top != package:
            if top not in MAY_IMPORT[package] and not (top == "backends" and name in BRIDGES):
                yield f"imports {module}: {package} does not know {top}"
            elif (
                rest
                and module.replace(".", "/") + ".py" not in {*KVCORE_EXTRAS, *BRIDGES}
                and not (
                    Path(*path.parts[: -len(name.split("/"))]) / module.replace(".", "/")
                ).is_dir()
            ):
                yield f"imports {module}: a package is imported by its root"


def _downward(path, name, source, tree):
    for folder in (each for each in LAYERS if name.startswith(f"{each}/")):
        rows = {part: row for row, parts in enumerate(LAYERS[folder]) for part in parts}
        own = _part(rows, name.removesuffix(".py").removeprefix(f"{folder}/").split("/"))
        if own is None:
            table = f"{folder.rpartition('/')[2].upper()}_LAYERS"
            yield f"is in no layer: give its folder a row in {table}"
            continue
        dotted = folder.replace("/", ".")
        for imported_name in imported_names(tree):
            if not f"{imported_name}.".startswith(f"{dotted}."):
                continue
            # A name of the package itself stands in its __init__.
            target = _part(rows, imported_name.split(".")[dotted.count(".") + 1 :]) or "__init__"
            if target != own and rows[target] >= rows[own]:
                yield f"imports {imported_name}: {own} does not stand below {target}"


def _circles(root, package):
    """Report files of one folder that import each other in a circle."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        dotted = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        modules[dotted] = ast.parse(path.read_text(encoding="utf-8"))
    graph = {}
    for name, tree in modules.items():
        direct = set()
        for imported_name in set(imported_names(tree)) - _for_types_alone(tree):
            module = imported_name
            while module and module not in modules:
                module = module.rpartition(".")[0]
            direct.add(module)
        graph[name] = {module for module in direct - {name, ""} if "." in module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"{package}: a circle of imports: {' -> '.join(error.args[1])}"


def _for_types_alone(tree):
    """Return what is imported for the type checker, and not when the module runs."""
    guards = [node for node in tree.body if isinstance(node, ast.If)]
    guards = [node for node in guards if ast.unparse(node.test) == "TYPE_CHECKING"]
    return {name for guard in guards for name in imported_names(guard)}


def _part(rows, parts):
    """Return the folder, or the file at the root of the package, that has a row."""
    return parts[0] if parts and parts[0] in rows else None


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
            dotted = extra.removesuffix(".py").replace("/", ".")
            if part != extra and f"{module}.".startswith(dotted + "."):
                yield f"imports {module}: nothing else of kvcore may"


def _planes(path, name, source, tree):
    is_extra = any(name.startswith(f"{extra}/") for extra in KVCORE_EXTRAS)
    if is_extra or not any(Path(name).match(pattern) for pattern in CONTROL_PLANE):
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


def _is_one_class(tree):
    """Say whether a file is one class and nothing else: what its verbs promise is its length."""
    parts = [node for node in tree.body if isinstance(node, (ast.ClassDef, *FUNCTIONS))]
    return len(parts) == 1 and isinstance(parts[0], ast.ClassDef)


def _sizes(path, name, source, tree):
    lines, code = source.count("\n"), _code_lines(source, tree)
    if (lines > MAX_FILE_LINES and not _is_one_class(tree)) or code > MAX_CODE_LINES:
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
