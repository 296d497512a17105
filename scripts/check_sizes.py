"""Check that every module and function is small enough to be read at once.

Modules aim at 300 lines and functions at 40; the gate stands where a reader has to scroll twice. Decorators
do not count, docstrings do.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
FOLDERS = ("kvbus", "scripts", "bench")


def main() -> int:
    """Print one line per module or function that is too long; 0 if there is none."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    files = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*") if _is_python(path))
    if not files:
        print(f"check_sizes: no Python file below {root}")
        return 2
    faults = [fault for path in files for fault in faults_of(path)]
    for fault in faults:
        print(fault)
    print(f"check_sizes: {len(files)} files, {len(faults)} too long")
    return 1 if faults else 0


def faults_of(path: Path) -> Iterator[str]:
    """Yield one sentence for the module and for each function that is over its bound."""
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    if lines > MODULE_LINES_MAX:
        yield f"{path}:1: module has {lines} lines, at most {MODULE_LINES_MAX}: split it by noun"
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES_MAX}"


def _is_python(path: Path) -> bool:
    if path.suffix == ".py":
        return True
    if path.suffix or not path.is_file():
        return False
    with path.open("rb") as file:  # programs without a suffix, such as scripts/get_model
        return b"python" in file.readline(200)


if __name__ == "__main__":
    sys.exit(main())
