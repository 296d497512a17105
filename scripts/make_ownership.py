"""Write the generated parts of docs/ownership.md anew: diagrams from the code's own tables, statements from the tests.

`python scripts/make_ownership.py` writes the page, `--check` only says whether it is stale. What stands outside of the
`<!-- generated: … -->` marks is prose, and stays.
"""

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

# Works from a checkout that is not installed as well.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvbus.ledger.held import LIFE, Stage
from kvbus.ledger.transfer import TRANSITIONS, Phase
from scripts.statements import OPEN, Proof, proofs, titles

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs") / "ownership.md"
SHOWN_MAX = 3
"""Tests named for one statement: enough to start reading; the tests themselves carry all of their markers."""

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write the page, or say whether it is stale; 0 if it is as it should be."""
    path = ROOT / PAGE
    before = path.read_text(encoding="utf-8")
    after = page(before, proofs(ROOT))
    if "--check" in sys.argv[1:]:
        stale = before != after
        print(f"make_ownership: {PAGE} is {'stale: run scripts/make_ownership.py' if stale else 'up to date'}")
        return int(stale)
    path.write_text(after, encoding="utf-8")
    print(f"make_ownership: wrote {PAGE}")
    return 0


def page(text: str, tests: dict[str, list[Proof]]) -> str:
    """Return the page with its generated parts made anew; ValueError where a part is missing or unknown."""
    makers: dict[str, Callable[[], str]] = {
        "lease": lambda: diagram(Stage, LIFE, Stage.TAKEN),
        "transfer": lambda: diagram(Phase, TRANSITIONS, Phase.RESOLVING),
        "statements": lambda: table(tests),
        "open": open_table,
    }
    found = [match[2] for match in _PART.finditer(text)]
    if sorted(found) != sorted(makers):
        raise ValueError(f"{PAGE} has the generated parts {found}, expected each of {list(makers)} once")
    return _PART.sub(lambda match: f"{match[1]}\n{makers[match[2]]()}\n\n{match[3]}", text)


def diagram(states: type[StrEnum], moves: Iterable[tuple[StrEnum, StrEnum]], start: StrEnum) -> str:
    """Return a state diagram of a table of moves, and what each state means, from the source of its enum."""
    order = list(states)
    moves = sorted(moves, key=lambda move: (order.index(move[0]), order.index(move[1])))
    ends = [state for state in order if state not in {before for before, _ in moves}]
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f'    state "{state.value}" as {state.name.lower()}' for state in order]
    lines += [f"    [*] --> {start.name.lower()}"]
    lines += [f"    {before.name.lower()} --> {after.name.lower()}" for before, after in moves]
    lines += [f"    {state.name.lower()} --> [*]" for state in ends]
    lines += ["```", "", "| state | what it means |", "|---|---|"]
    lines += [f"| {name} | {meaning} |" for name, meaning in meanings(states).items()]
    return "\n".join(lines)


def meanings(states: type[StrEnum]) -> dict[str, str]:
    """Return value → the sentence below it in the enum's source."""
    (definition,) = ast.parse(inspect.getsource(states)).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    found: dict[str, str] = {}
    for node, after in pairwise(body):
        match node, after:
            case (
                ast.Assign(value=ast.Constant(value=str(value))),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[value] = text
            case _:
                pass
    return {state.value: found.get(state.value, "") for state in states}


def table(found: dict[str, list[Proof]]) -> str:
    """Return the statements with the tests that name them; those that name fewest statements say most, and go first."""
    named = Counter(proof for tests in found.values() for proof in tests)
    lines = ["| number | statement | tests |", "|---|---|---|"]
    for number, title in titles().items():
        best = sorted(found[number], key=lambda proof: (named[proof], proof))
        tests = [f"[{test}](../{file})" for file, test in best[:SHOWN_MAX]]
        more = len(found[number]) - len(tests)
        shown = "<br>".join(tests) + (f"<br>and {more} more" if more > 0 else "")
        lines.append(f"| {number} | {title} | {shown or 'none yet: see below'} |")
    return "\n".join(lines)


def open_table() -> str:
    """Return what cannot be proved here yet."""
    lines = ["| number | why |", "|---|---|"]
    return "\n".join([*lines, *(f"| {number} | {reason} |" for number, reason in OPEN.items())])


if __name__ == "__main__":
    sys.exit(main())
