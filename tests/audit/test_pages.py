"""The pages of docs/rules are what the rules say."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.audit.pages import INDEX, main, pages, write_pages
from brim.audit.rules import RULES

PAGES = Path(__file__).parents[2] / "docs" / "rules"


def test_the_pages_are_up_to_date() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in PAGES.iterdir()}
    assert written == pages(), "run `python -m brim.audit.pages docs/rules`"


def test_every_rule_has_a_page_and_a_line_in_the_index() -> None:
    made = pages()
    assert set(made) == {INDEX, *(f"{name}.md" for name in RULES)}
    for name in RULES:
        assert f"| [{name}]({name}.md) |" in made[INDEX]


def test_pages_of_rules_that_are_gone_are_taken_away_and_others_stay(tmp_path: Path) -> None:
    write_pages(tmp_path)
    index = (tmp_path / INDEX).read_text()
    (tmp_path / "gone.md").write_text(index)
    (tmp_path / "mine.md").write_text("# mine\n")
    write_pages(tmp_path)
    assert not (tmp_path / "gone.md").exists()
    assert (tmp_path / "mine.md").exists()


def test_the_folder_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main([str(tmp_path)]) == 0
    assert "usage" in capsys.readouterr().err
