"""What the pages show is what the files hold."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_readme_shows_the_script_that_docs_hold() -> None:
    script = (ROOT / "docs" / "request_transfer.py").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert f"```python\n{script}```" in readme


def test_every_command_of_the_makefile_is_listed_by_help() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for target in ("setup", "demo", "test", "lint", "bench", "clean"):
        assert any(line.startswith(f"{target}:") and " ## " in line for line in makefile.splitlines())
