"""Check that the one banned word stands nowhere: it would stand for three different facts (GLOSSARY.md).

Say *delivered*, *access ended* or *settled*. Checked are names that kvbus makes, comments, strings and the pages of
prose; an attribute that another library named so (`future.…()`) is its own affair.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_BANNED = re.compile(r"(?<![a-z])" + "do" + r"ne(?![a-z])", re.IGNORECASE)  # in two parts, so as not to find itself
FOLDERS = ("kvbus", "scripts", "tests", "bench", "docs")


def main() -> int:
    """Print one line per find; 0 if there is none."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    sources = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    pages = sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])
    if not sources:
        print(f"check_words: no Python file below {root}")
        return 2
    faults = [f"{path}:{line}: {text}" for path in sources for line, text in faults_of_source(path.read_text("utf-8"))]
    faults += [f"{path}:{line}: {text}" for path in pages for line, text in faults_of_prose(path.read_text("utf-8"))]
    for fault in faults:
        print(fault)
    print(f"check_words: {len(sources) + len(pages)} files, {len(faults)} finds")
    return 1 if faults else 0


def faults_of_source(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each name, comment or string that holds the word."""
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        foreign = token.type == tokenize.NAME and before == "."
        if token.type in {tokenize.NAME, tokenize.COMMENT, tokenize.STRING} and not foreign:
            for offset, line in enumerate(token.string.splitlines()):
                if _BANNED.search(line):
                    yield token.start[0] + offset, line.strip()
        before = token.string


def faults_of_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each line of prose that holds the word."""
    yield from ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if _BANNED.search(line))


if __name__ == "__main__":
    sys.exit(main())
