"""docs/ownership.md says what the code and the tests say, and every statement has a test or a reason."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.ledger.held import LIFE, Stage
from kvbus.ledger.transfer import TRANSITIONS, Phase
from scripts import make_ownership, statements

ROOT = Path(__file__).resolve().parents[2]
ALL = [*map(str, range(1, 57)), *(f"R{n}" for n in range(1, 25)), *(f"P{n}" for n in range(1, 27))]
ALL += [f"H{n}" for n in range(1, 39)]


Found = dict[str, list[statements.Proof]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What the tests name; read once, since it takes all of them."""
    return statements.proofs(ROOT)


def test_the_page_is_not_stale(found: Found) -> None:
    text = (ROOT / make_ownership.PAGE).read_text(encoding="utf-8")
    assert make_ownership.page(text, found) == text, "run scripts/make_ownership.py and read what has changed"


def test_every_statement_is_listed_once() -> None:
    assert list(statements.titles()) == ALL


def test_every_statement_has_a_test_or_a_reason(found: Found) -> None:
    assert [number for number in ALL if not found[number] and not statements.OPEN.get(number)] == []


def test_every_marker_belongs_to_a_test(found: Found) -> None:
    assert [(number, file) for number, tests in found.items() for file, test in tests if test == "(no test)"] == []


def test_every_reason_belongs_to_a_statement() -> None:
    assert set(statements.OPEN) <= set(ALL)


@pytest.mark.parametrize(
    ("comment", "numbers"),
    [
        ("# contract 17", "17"),
        ("# contract 39–41, P3", "39 40 41 P3"),
        ("# contract 29, 41; P17", "29 41 P17"),
        ("# contract P9, 17, 18, P26", "P9 17 18 P26"),
        ("# R12, R18, contract 40", "R12 R18 40"),
        ("# P10: two bounds from one party", "P10"),
        ("# contract 2.1.8: elsewhere the same prompt counts as a repeat", ""),
        ("# contract 34 of the merged path: a partly filled block", ""),
        ("# the cap (P26)", ""),
        ("# see P26", ""),
        ("# P26 is about the cap", ""),
    ],
)
def test_a_comment_counts_only_where_its_numbers_stand_first(comment: str, numbers: str) -> None:
    assert list(statements.numbers_of(comment)) == numbers.split()


TESTS = '''
# contract 1
@pytest.mark.contract("P2, R5")
def test_first() -> None:
    assert True  # contract 3


class TestGroup:
    def test_second(self) -> None:
        # R4
        assert True


def test_third() -> None:
    """Prove nothing."""
'''


def test_markers_are_found_above_on_and_in_a_test(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "test_x.py"
    file.write_text(TESTS, encoding="utf-8")
    found = {number: [test for _, test in tests] for number, tests in statements.proofs(tmp_path).items() if tests}
    first, second = ["test_first"], ["test_second"]
    assert found == {"1": first, "3": first, "R4": second, "R5": first, "P2": first}
    file.write_text("# contract 99\ndef test_it() -> None: ...\n", encoding="utf-8")
    with pytest.raises(ValueError, match="names statement '99'"):
        statements.proofs(tmp_path)


@pytest.mark.parametrize(
    ("states", "moves", "start"), [(Stage, LIFE, Stage.TAKEN), (Phase, TRANSITIONS, Phase.RESOLVING)]
)
def test_a_diagram_shows_every_move_and_says_what_each_state_means(
    states: type[Stage] | type[Phase], moves: frozenset[tuple[Stage, Stage]], start: Stage
) -> None:
    drawn = make_ownership.diagram(states, moves, start)
    for before, after in moves:
        assert f"    {before.name.lower()} --> {after.name.lower()}\n" in drawn
    assert drawn.count(" --> ") == len(moves) + 1 + len(set(states) - {before for before, _ in moves})
    explained = [text for text in make_ownership.meanings(states).values() if text]
    assert len(explained) >= len(states) - 1  # "ended" needs no words


def test_a_page_without_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match="expected each of"):
        make_ownership.page("# nothing\n", {})


def test_the_how_to_shows_the_script_that_runs() -> None:
    script = ROOT / "docs" / "third_party_backend.py"
    page = (ROOT / "docs" / "third_party_backend.md").read_text(encoding="utf-8")
    assert f"```python\n{script.read_text(encoding='utf-8')}```" in page
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=150)
    assert (result.returncode, result.stdout) == (0, "the store keeps the contract\n"), result.stderr
