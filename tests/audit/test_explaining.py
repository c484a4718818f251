"""`--explain` tells about a rule in the language in force, from the rule's own texts."""

from __future__ import annotations

import pytest

from brim.audit.explaining import as_markdown, explain, explain_all
from brim.audit.pages import pages
from brim.audit.rules import RULES, find_rule, names_of
from brim.errors import UnknownNameError
from tests.audit.parts import add_rules, rule


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    add_rules(monkeypatch)


def test_a_rule_is_told_with_its_examples_and_sources() -> None:
    told = explain("test-high")
    assert told.title == "The batch size is held down"
    assert told.bad == {"train.py": "size = min(config.batch_size, 2)\n"}
    assert told.to_dict()["sources"] == ["https://docs.pytorch.org/docs/stable/data.html"]


@pytest.mark.parametrize("spelling", ["TEST-HIGH", "test_high", " test-high "])
def test_the_spelling_of_a_name_is_taken_kindly(spelling: str) -> None:
    assert find_rule(spelling).name == "test-high"


def test_an_unknown_rule_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="no rule 'test-hihg'") as caught:
        explain("test-hihg")
    assert caught.value.nearest[0] == "test-high"
    with pytest.raises(UnknownNameError):
        names_of(["test-high", "nothing"])
    assert names_of(["test_high"]) == {"test-high"}


def test_an_example_of_several_files_names_them() -> None:
    text = as_markdown(
        rule("r", bad={"config.py": "size = 64\n", "train.py": "size = min(size, 2)\n"}, good={"train.py": "size = 64\n"})
    )
    assert "`config.py`\n\n```python\nsize = 64\n```" in text
    assert "`train.py`\n\n```python\nsize = min(size, 2)\n```" in text
    assert "Right:\n\n```python\nsize = 64\n```" in text


def test_all_rules_can_be_told() -> None:
    assert [each.rule for each in explain_all()] == list(RULES)


def test_of_a_ledger_the_beginning_and_the_end_are_shown() -> None:
    text = as_markdown(rule("r", bad={"ledger.jsonl": "".join(f'{{"step": {step}}}\n' for step in range(24))}))
    assert '```json\n{"step": 0}\n{"step": 1}\n...\n{"step": 22}\n{"step": 23}\n```' in text


def test_of_ledgers_the_fields_that_differ_are_shown() -> None:
    bad = '{"kind": "step", "step": 1, "epoch": 0, "sequences": 2}\n'
    told = as_markdown(rule("r", bad={"ledger.jsonl": bad}, good={"ledger.jsonl": bad.replace("2}", "32}")}))
    assert '{"kind": "step", "step": 1, "sequences": 2}' in told
    assert "fields that are equal in both ledgers are left out" in told
    assert all(len(line) <= 300 for name in RULES for line in as_markdown(RULES[name]).splitlines() if line.startswith("{"))


def test_another_severity_is_told_with_the_rule() -> None:
    assert explain("test-high").also == ""
    assert explain("drop-last-small").also.startswith("High if")
    assert explain("drop-last-small").also in pages()["drop-last-small.md"]
