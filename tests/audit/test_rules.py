"""Every rule finds its wrong example, leaves its right one alone, and has texts that can be shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from brim.audit.doctor import doctor
from brim.audit.rules import RULES
from brim.audit.rules.rule import GROUPS, parse_rule
from brim.records import Diagnosis
from brim.records.findings import SEVERITIES


def diagnose(example: dict[str, str], folder: Path) -> Diagnosis:
    """Write the files of an example, and look at them. A first line `# gpu: t4` names the card."""
    for name, text in example.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    card = re.search(r"^# gpu: (\S+)", "".join(example.values()), re.MULTILINE)
    return doctor(folder, gpu=card[1] if card else None, all_rules=True)


def told(diagnosis: Diagnosis) -> str:
    return "\n".join(f"{each.severity} {each.rule} {each.file}:{each.line} {each.message}" for each in diagnosis.findings)


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_wrong_example_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    diagnosis = diagnose(RULES[name].bad, Path("example"))
    mine = [each for each in diagnosis.findings if each.rule == name]
    assert mine, f"not found; found were:\n{told(diagnosis)}"
    assert all(each.code or each.file.endswith(".jsonl") for each in mine)
    assert all(each.message.endswith((".", "?")) for each in mine)


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_right_example_is_left_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    diagnosis = diagnose(RULES[name].good, Path("example"))
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
    assert rule.fix.endswith(".")
    assert rule.bad != rule.good
    assert rule.sources
    assert all(re.fullmatch(r"https://\S+\.\S+", address) for address in rule.sources)
    for text in (rule.title, rule.why, rule.fix):
        assert not re.search(r"% [A-Za-z]", text), "gettext takes that for a format"


def test_a_file_that_is_no_rule_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"broken\.md does not have the parts of a rule"):
        parse_rule("broken", "---\ngroup: batch\n---\n\n# Title\n")
