"""Every rule about runs finds its own wrong example and is silent about the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.audit.rules import RULES as ALL_RULES
from brim.audit.rules.rule import Rule
from brim.audit.run.examine import examine_run

RULES = [rule for rule in ALL_RULES.values() if rule.group == "run"]
HIGH = {rule.name for rule in RULES if rule.severity == "high"}


def found_in(text: str, folder: Path) -> set[str]:
    path = folder / "ledger.jsonl"
    path.write_text(text, encoding="utf-8")
    return {found.rule for found in examine_run(path, "ledger.jsonl").found}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_wrong_example_is_found_and_nothing_else(rule: Rule, tmp_path: Path) -> None:
    assert found_in(rule.bad["ledger.jsonl"], tmp_path) == {rule.name}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_right_example_is_clean(rule: Rule, tmp_path: Path) -> None:
    assert not found_in(rule.good["ledger.jsonl"], tmp_path) & ({rule.name} | HIGH)


def test_names_are_those_that_were_agreed() -> None:
    assert {rule.name for rule in RULES} == {
        "run-promise-broken", "run-headroom", "run-data-bound", "run-disk-bound", "run-thrashing", "run-slowing", "run-splits", "run-skipped",
        "loss-diverges", "loss-oscillates", "loss-crawls", "loss-flat", "batch-beyond-noise",
    }  # fmt: skip
    assert all(set(rule.bad) == set(rule.good) == {"ledger.jsonl"} for rule in RULES)
