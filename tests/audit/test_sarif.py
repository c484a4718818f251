"""SARIF 2.1.0, checked against what its standard requires of a log with one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from brim.audit.patching import Desk
from brim.audit.publishing import publish_all
from brim.audit.rules import RULES
from brim.audit.sarif import to_sarif
from brim.audit.source.module import Source
from brim.records import Diagnosis, InForce
from tests.audit.parts import add_rules, edit, found, source_of


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> None:
    add_rules(monkeypatch)


OBJECTS: dict[str, tuple[set[str], set[str]]] = {
    "sarifLog": ({"version", "runs"}, {"$schema", "inlineExternalProperties", "properties"}),
    "run": ({"tool"}, {"columnKind", "results", "invocations", "artifacts", "originalUriBaseIds", "properties"}),
    "tool": ({"driver"}, {"extensions", "properties"}),
    "driver": ({"name"}, {"version", "semanticVersion", "informationUri", "rules", "properties"}),
    "rule": ({"id"}, {"shortDescription", "fullDescription", "help", "helpUri", "defaultConfiguration", "properties"}),
    "defaultConfiguration": (set(), {"level", "enabled", "rank", "properties"}),
    "invocation": ({"executionSuccessful"}, {"toolExecutionNotifications", "exitCode", "properties"}),
    "notification": ({"message"}, {"level", "locations", "properties"}),
    "result": ({"message"}, {"ruleId", "ruleIndex", "level", "locations", "fixes", "properties"}),
    "message": (set(), {"text", "markdown", "id", "arguments", "properties"}),
    "location": (set(), {"physicalLocation", "message", "properties"}),
    "physicalLocation": (set(), {"artifactLocation", "region", "properties"}),
    "artifactLocation": (set(), {"uri", "uriBaseId", "index", "properties"}),
    "region": (set(), {"startLine", "startColumn", "endLine", "endColumn", "snippet", "properties"}),
    "snippet": (set(), {"text", "properties"}),
    "fix": ({"artifactChanges"}, {"description", "properties"}),
    "artifactChange": ({"artifactLocation", "replacements"}, {"properties"}),
    "replacement": ({"deletedRegion"}, {"insertedContent", "properties"}),
}
"""Of each object: the properties that the schema requires, and others that it has; it allows no further ones."""
KINDS = {
    "runs": "run", "tool": "tool", "driver": "driver", "rules": "rule", "defaultConfiguration": "defaultConfiguration",
    "invocations": "invocation", "toolExecutionNotifications": "notification", "results": "result", "message": "message",
    "shortDescription": "message", "fullDescription": "message", "help": "message", "description": "message",
    "locations": "location", "physicalLocation": "physicalLocation", "artifactLocation": "artifactLocation", "region": "region",
    "deletedRegion": "region", "snippet": "snippet", "insertedContent": "snippet", "fixes": "fix",
    "artifactChanges": "artifactChange", "replacements": "replacement",
}  # fmt: skip


def check_object(value: dict[str, Any], kind: str) -> None:
    """The structure that the schema of 2.1.0 gives an object, and those in it."""
    required, others = OBJECTS[kind]
    assert required <= set(value) <= required | others, kind
    for name, inner in value.items():
        if name in KINDS:
            for each in inner if isinstance(inner, list) else [inner]:
                check_object(each, KINDS[name])
        elif name in {"startLine", "endLine", "startColumn", "endColumn"}:
            assert isinstance(inner, int)
            assert inner >= 1
        elif name == "ruleIndex":
            assert isinstance(inner, int)
            assert inner >= 0
        elif name not in {"properties", "executionSuccessful"}:
            assert isinstance(inner, str), name


def check(log: dict[str, Any]) -> None:
    """What the standard requires: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html."""
    check_object(log, "sarifLog")
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    for each in driver["rules"]:
        assert set(each) == {"id", "shortDescription", "fullDescription", "help", "helpUri", "defaultConfiguration", "properties"}
        assert each["shortDescription"]["text"]
        assert each["fullDescription"]["text"]
        assert each["help"]["text"]
        assert each["help"]["markdown"]
        assert each["helpUri"].startswith("https://")
        assert each["defaultConfiguration"]["level"] in {"error", "warning", "note"}
    for result in run["results"]:
        check_result(result, driver["rules"])
    json.dumps(log, allow_nan=False)


def check_result(result: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert result["level"] in {"error", "warning", "note"}
    assert result["message"]["text"]
    for location in result["locations"]:
        physical = location["physicalLocation"]
        check_address(physical["artifactLocation"])
        assert 1 <= physical["region"]["startLine"] <= physical["region"]["endLine"]
    for fix in result.get("fixes", []):
        assert fix["description"]["text"]
        assert fix["artifactChanges"]
        for change in fix["artifactChanges"]:
            check_address(change["artifactLocation"])
            assert change["replacements"]
            for replacement in change["replacements"]:
                region = replacement["deletedRegion"]
                assert 1 <= region["startLine"] <= region["endLine"]
                assert isinstance(replacement["insertedContent"]["text"], str)


def check_address(artifact: dict[str, str]) -> None:
    uri = artifact["uri"]
    assert uri.isascii()
    assert " " not in uri
    assert uri.startswith("file:///") or (artifact["uriBaseId"] == "%SRCROOT%" and not uri.startswith("/"))


def applied(log: dict[str, Any], texts: dict[str, str]) -> dict[str, str]:
    """Do what an editor does with the fixes of the first result."""
    made = dict(texts)
    for change in log["runs"][0]["results"][0]["fixes"][0]["artifactChanges"]:
        file = unquote(change["artifactLocation"]["uri"])
        lines = made[file].split("\n")
        for replacement in reversed(change["replacements"]):
            region = replacement["deletedRegion"]
            new = replacement["insertedContent"]["text"]
            lines[region["startLine"] - 1 : region["endLine"] - 1] = new.removesuffix("\n").split("\n") if new else []
        made[file] = "\n".join(lines)
    return made


def diagnosis_of(*found_: Any, sources: tuple[Source, ...] = ()) -> Diagnosis:
    table = {each.file: each for each in sources}
    return Diagnosis(
        targets=(".",), findings=publish_all(found_, table, Desk(table)), files=1, lines=1, notes=("One was not read.",)
    )


def test_nothing_found_is_a_valid_log() -> None:
    log = to_sarif(Diagnosis(targets=(".",)))
    check(log)
    assert log["runs"][0]["results"] == []


def test_findings_become_results_with_levels_confidence_and_what_is_in_force() -> None:
    rows = (InForce(setting="batch_size", set=64, in_force=2),)
    log = to_sarif(diagnosis_of(found("my code/訓練.py", 3, in_force=rows), found(rule="test-low"), found(rule="test-medium")))
    check(log)
    results = log["runs"][0]["results"]
    assert [each["level"] for each in results] == ["error", "warning", "note"]
    assert unquote(results[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]) == "my code/訓練.py"
    assert results[0]["properties"]["confidence"] == "high"
    assert results[0]["properties"]["in_force"] == [{"setting": "batch_size", "set": 64, "in_force": 2, "when": ""}]


def test_a_severity_of_its_own_is_the_results_level_and_not_the_rules() -> None:
    log = to_sarif(diagnosis_of(found(rule="test-low", severity="high")))
    check(log)
    run = log["runs"][0]
    assert run["results"][0]["level"] == "error"
    assert run["tool"]["driver"]["rules"][0]["defaultConfiguration"]["level"] == "note"


def test_a_patch_becomes_a_fix_that_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import torch\n\nsize = min(x, 2)\na = 1\nb = 2\nc = 3\nd = 4\ne = 5\nf = 6\ng = 7\nprint(size)\n"
    one, two = (source_of(Path(name), text.encode()) for name in ("a.py", "my b.py"))
    edits = (
        edit("a.py", 3, 7, 16, "x"),
        edit("a.py", 5, 0, 0, "", end_line=6),
        edit("a.py", 10, 0, 0, "# one\n# two\n"),
        edit("my b.py", 11, 0, 11, "log(size)"),
    )
    log = to_sarif(diagnosis_of(found("a.py", 3, edits=edits), sources=(one, two)))
    check(log)
    made = applied(log, {"a.py": text, "my b.py": text})
    expected = text.replace("min(x, 2)", "x").replace("b = 2\n", "").replace("g = 7\n", "# one\n# two\ng = 7\n")
    assert made == {"a.py": expected, "my b.py": text.replace("print(size)", "log(size)")}


def test_a_notebooks_region_is_a_line_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [{"cell_type": "code", "source": ["a = 1\n", 'size = min(x["b"], 2)\n']}]
    source = source_of(Path("a.ipynb"), json.dumps({"cells": cells, "nbformat": 4}, indent=1).encode())
    log = to_sarif(diagnosis_of(found("a.ipynb", 2), sources=(source,)))
    check(log)
    region = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]
    assert "min(x" in Path("a.ipynb").read_text().split("\n")[region["startLine"] - 1]


def test_a_file_elsewhere_is_named_whole(tmp_path: Path) -> None:
    path = tmp_path / "a b.py"
    source = source_of(path, b"size = min(x, 2)\n")
    log = to_sarif(diagnosis_of(found(str(path), edits=(edit(str(path), 1, 7, 16, "x"),)), sources=(source,)))
    check(log)
    (result,) = log["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == path.as_uri()
    assert result["fixes"][0]["artifactChanges"][0]["artifactLocation"]["uri"] == path.as_uri()


def test_every_rule_can_be_written() -> None:
    log = to_sarif(diagnosis_of(*(found(rule=name) for name in RULES)))
    check(log)
    assert len(log["runs"][0]["tool"]["driver"]["rules"]) == len(RULES)
