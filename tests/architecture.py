"""The plan of the house as code: what may import what, and how large a file may grow.

`violations(root)` reads the sources below a root and returns every breach as one line; it imports
nothing of them, so it can be pointed at a planted tree as well as at the project.
"""

import ast
import sys
from pathlib import Path

PACKAGES = ("kvcore", "backends", "model")

# A file may import, of its own package, only files of an earlier row. What stands below
# `kvcore`'s folders (`bench`, `testing`) has no rows: nothing else of kvcore imports it.
KVCORE_LAYERS = (
    ("errors",),
    ("arguments",),
    ("tokens",),
    ("items", "block"),
    ("hashing",),
    ("names",),
    ("events",),
    ("lifetimes",),
    ("free_queue", "content_tree", "groups", "slots", "reports"),
    ("retention",),
    ("deadlines",),
    ("idle_blocks",),
    ("pool", "block_table"),
    ("sequence",),
    ("leases", "forward", "rewind", "peaks"),
    ("sharing", "loading"),
    ("manager",),
    ("pool_map",),
    ("invariants",),
    ("__init__",),
    ("build_hook",),  # runs when kvcore is built; nothing imports it
)

BACKENDS_LAYERS = (
    ("errors",),
    ("contract",),
    ("checks", "oracle", "registry"),
    ("__init__",),
    ("numba_cpu/bits", "numba_cpu/plans", "numba_cpu/workers"),
    ("numba_cpu/matmul", "numba_cpu/scales", "numba_cpu/schedule", "numba_cpu/tiles"),
    ("numba_cpu/warm_up",),
    ("numba_cpu/rows", "numba_cpu/slot_mapping", "numba_cpu/store_kv"),
    ("numba_cpu/item", "numba_cpu/prefill", "numba_cpu/copy_blocks"),
    ("numba_cpu/paged_attention",),
    ("numba_cpu/backend",),
    ("numba_cpu/__init__",),
    ("triton_gpu/place",),
    (
        "triton_gpu/ahead",
        "triton_gpu/e4m3",
        "triton_gpu/launch",
        "triton_gpu/soft_cap",
        "triton_gpu/splits",
    ),
    ("triton_gpu/layer", "triton_gpu/softmax"),
    ("triton_gpu/cascade", "triton_gpu/chunk", "triton_gpu/prefill_order"),
    ("triton_gpu/copy_blocks", "triton_gpu/slot_mapping", "triton_gpu/store_kv"),
    ("triton_gpu/hopper_items", "triton_gpu/merge"),
    ("triton_gpu/hopper_store", "triton_gpu/hopper_merge"),
    (
        "triton_gpu/decode",
        "triton_gpu/hopper_latent",
        "triton_gpu/hopper_consume",
        "triton_gpu/hopper_load",
        "triton_gpu/hopper_widen",
    ),
    ("triton_gpu/hopper_prefill",),
    ("triton_gpu/prefill", "triton_gpu/latent"),
    ("triton_gpu/paged_attention",),
    ("triton_gpu/warm_up",),
    ("triton_gpu/backend",),
    ("triton_gpu/__init__",),
    ("conformance/cases", "conformance/report"),
    ("conformance/spread",),
    ("conformance/attention", "conformance/movement", "conformance/relations"),
    ("conformance/parallel",),
    ("conformance/__init__",),
    ("conformance/__main__",),
    ("bench/__init__", "bench/measured"),
    ("bench/cpu", "bench/graphs", "bench/host"),
    ("bench/moves", "bench/prefill"),
    ("bench/gpu",),
    ("bench/__main__",),
)

MODEL_LAYERS = (
    ("errors",),
    ("control/__init__", "control/settings"),
    ("control/config", "control/grammar"),
    ("control/params",),
    ("control/request", "control/submission"),
    ("control/step", "control/drafts"),
    ("control/admission", "control/pool_frames"),
    ("control/planner",),
    ("control/scheduler",),
    ("text", "trace", "checkpoint"),
    ("output", "pace", "token_stream"),
    (
        "device/__init__",
        "device/latents",
        "device/layout",
        "device/chunks",
        "device/grammar_compiler",
        "device/grammar_trial",
        "device/lifeline",
        "device/positions",
        "device/ranges",
        "device/rope",
        "device/shared_prefix",
        "device/sight",
    ),
    ("device/kv_caches", "device/memory", "device/ranks", "device/sampler"),
    (
        "device/attention",
        "device/batch",
        "device/draw_graphs",
        "device/draw_kernels",
        "device/grammars",
        "device/swap",
    ),
    ("device/request_sampler",),
    (
        "device/few_rows",
        "device/fx_trace",
        "device/probes",
        "device/small_heads",
        "device/small_products",
    ),
    ("device/piecewise",),
    ("architectures",),
    ("device/parallel",),
    ("loader",),
    ("device/network",),
    ("device/begin",),
    ("device/cuda_graphs", "device/profile", "device/quantised"),
    ("device/prepare",),
    ("device/sanitized",),
    ("device/step_runner",),
    ("device/draft_model",),
    ("engine",),
    ("async_engine", "twins"),
    ("tiny/network", "tiny/prompts", "tiny/prose", "tiny/vocabulary"),
    ("tiny/__init__", "tiny/corpus"),
    ("minimal",),
    ("tiny/train",),
    ("cli/__init__", "cli/bars", "cli/files", "cli/progress", "cli/writer"),
    ("cli/exits",),
    ("cli/settings", "cli/step_table", "cli/verify"),
    ("cli/options", "cli/report"),
    ("cli/args", "start"),
    ("cli/prompts",),
    ("cli/session",),
    ("llm",),
    ("bench/__init__", "bench/configs", "bench/metrics", "bench/process", "bench/workloads"),
    ("bench/networks", "bench/options", "bench/report", "bench/serve"),
    ("bench/args", "bench/peers", "bench/simulate"),
    ("bench/waste",),
    ("bench/host", "bench/session", "bench/waste_session"),
    ("bench/__main__",),
    ("run", "page"),
    ("view",),
    ("serve/__init__", "serve/config", "serve/load"),
    ("serve/args", "serve/errors", "serve/head", "serve/kv_events", "serve/listener"),
    ("serve/bounds", "serve/metrics"),
    ("serve/gate", "serve/protocol"),
    ("serve/service", "serve/logprobs"),
    ("serve/generation",),
    ("serve/about", "serve/chat", "serve/completions", "serve/live"),
    ("serve/app",),
    ("serve/process",),
    ("serve/__main__", "serve/cost"),
    ("cluster/__init__", "cluster/config", "cluster/router", "cluster/scaling"),
    ("cluster/args", "cluster/sent", "cluster/simulate"),
    ("cluster/rays", "cluster/routing"),
    ("cluster/front", "cluster/replica"),
    ("cluster/app",),
    ("cluster/session",),
    ("cluster/__main__", "cluster/bench"),
    ("__init__",),
)

LAYERS = {"kvcore": KVCORE_LAYERS, "backends": BACKENDS_LAYERS, "model": MODEL_LAYERS}

# Two folders of one package that do not know each other.
STRANGERS = {"numba_cpu", "triton_gpu"}

# Which other packages a package may import, by their roots alone.
MAY_IMPORT = {"kvcore": set(), "backends": set(), "model": {"kvcore", "backends"}}

# What an engine's attention and kvcore's blocks meet in; nothing imports it before it is asked for.
BRIDGES = {"kvcore/adapters/transformers_attention.py"}

# The control plane counts Python ints; these must not load a tensor library.
CONTROL_PLANE = ("kvcore/*.py", "model/errors.py", "model/control/*.py")
TENSOR_LIBRARIES = {"torch", "numpy", "numba", "triton", "transformers"}

# What kvcore may import beside the standard library, and what a part that nothing else imports may.
KVCORE_NEEDS = {"xxhash"}
KVCORE_EXTRAS = {
    "kvcore/adapters": {"torch", "transformers", "vllm"},
    "kvcore/testing": {"hypothesis", "pytest"},
    "kvcore/bench": set(),
    "kvcore/sanitize": set(),
    "kvcore/wire": {"msgspec", "zmq"},
    "kvcore/build_hook.py": {"hatchling"},
}

# A loader of code that may be absent, or must not load early, imports inside a function.
LAZY_IMPORTS = {"backends/registry.py"}

# What blocks, tables, sequences, leases and pools have for kvcore alone: docs/api.md does not name
# it, and the runner reads none of it. `test_architecture.py` says that nothing is left out.
KVCORE_INSIDES = frozenset(
    """
    assign attach beyond block_id blocks chain child_nodes common_size cut cut_names deadline
    descendants empty_blocks exchange find_limits first_copy first_kept first_loaded forget
    forget_identity forgets free_blocks give_back grow hand_out has_children id_object
    idle_blocks is_active is_open is_uneven keep kind last_child last_copy last_event made_block
    made_blocks namespace_key next_blocks next_copy next_free next_pass node num_missing
    num_published num_settled_tokens opened_at pool prev_copy prev_free ref_count release renew
    revive root seq_id trees unpublish wishes
    """.split()  # noqa: SIM905  # words are easier to read so
)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

MAX_FILE_LINES = 700  # of a file that is more than one class
MAX_CODE_LINES = 500
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
            for check in (_imports, _downward, _needs, _planes, _lazy, _insides, _sizes):
                found += [f"{name}: {what}" for what in check(path, name, source, tree)]
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
                and not (
                    Path(*path.parts[: -len(name.split("/"))]) / module.replace(".", "/")
                ).is_dir()
            ):
                yield f"imports {module}: a package is imported by its root"


def _downward(path, name, source, tree):
    package, _, rest = name.removesuffix(".py").partition("/")
    if package == "kvcore" and "/" in rest:
        return
    rows = {file: row for row, files in enumerate(LAYERS[package]) for file in files}
    if rest not in rows:
        table = f"{package.upper()}_LAYERS"
        yield f"is in no layer: give it a row in {table} and in docs/architecture.md"
        return
    for imported_name in imported_names(tree):
        top, *parts = imported_name.split(".")
        if top != package:
            continue
        # A name is that of a module, or stands in the module, or in the package, before it.
        for target in ("/".join(parts), "/".join(parts[:-1]), "/".join([*parts[:-1], "__init__"])):
            if target in rows:
                if rows[target] >= rows[rest]:
                    dotted = target.replace("/", ".")
                    yield f"imports {package}.{dotted}, which does not stand above it"
                strangers = {target.split("/")[0], rest.split("/")[0]}
                if strangers == STRANGERS:
                    yield f"{rest.split('/')[0]} does not know {target.split('/')[0]}"
                break


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
