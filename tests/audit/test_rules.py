"""Every rule finds its wrong example, leaves its right one alone, and has texts that can be shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import brim.audit.rules as registry
from brim.audit.doctor import doctor
from brim.audit.publishing import GROUPS
from brim.audit.rules import RULES
from brim.audit.rules.rule import Rule, files_of
from brim.records import Diagnosis
from brim.records.findings import SEVERITIES

MODULES = ("values", "ignored", "loops", "calls", "config", "run")


def diagnose(example: str, rule: Rule, folder: Path) -> Diagnosis:
    """Write the files of an example, and look at them. A first line `# gpu: t4` names the card."""
    for name, text in files_of(example, rule.example_name).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    card = re.search(r"^# gpu: (\S+)", example, re.MULTILINE)
    return doctor(folder, gpu=card[1] if card else None, all_rules=True)


def told(diagnosis: Diagnosis) -> str:
    return "\n".join(f"{each.severity} {each.rule} {each.file}:{each.line} {each.message}" for each in diagnosis.findings)


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_wrong_example_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    diagnosis = diagnose(RULES[name].bad, RULES[name], Path("example"))
    mine = [each for each in diagnosis.findings if each.rule == name]
    assert mine, f"not found; found were:\n{told(diagnosis)}"
    assert all(each.code or each.file.endswith(".jsonl") for each in mine)
    assert all(each.message.endswith((".", "?")) for each in mine)


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_right_example_is_left_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    diagnosis = diagnose(RULES[name].good, RULES[name], Path("example"))
    wrong = [each for each in diagnosis.findings if each.rule == name or each.severity == "high"]
    assert not wrong, told(diagnosis)


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_rule_has_texts_that_can_be_shown(name: str) -> None:
    rule = RULES[name]
    assert rule.name == name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name)
    assert rule.group in GROUPS
    assert rule.severity in SEVERITIES
    assert not rule.title.endswith(".")
    assert 10 <= len(rule.title) <= 120
    assert rule.why.endswith(".")
    assert 2 <= len(re.findall(r"[.?!](?:\s|$)", rule.why)) <= 8
    assert rule.mend.endswith(".")
    assert rule.bad != rule.good
    assert rule.sources
    assert all(re.fullmatch(r"https://\S+\.\S+", address) for address in rule.sources)
    for text in (rule.title, rule.why, rule.mend):
        assert not re.search(r"% [A-Za-z]", text), "gettext takes that for a format"


def test_there_are_at_least_thirty_rules_and_no_name_is_used_twice() -> None:
    names = [rule.name for module in MODULES for rule in getattr(registry, module).RULES]
    assert len(names) == len(set(names)) == len(RULES)
    assert sum(not rule.example_name.endswith(".jsonl") for rule in RULES.values()) >= 30
