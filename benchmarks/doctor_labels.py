"""Findings of `brim doctor` on public projects, compared with findings that were labelled by hand.

    python benchmarks/doctor_labels.py --labels LABELS.csv [--labels MORE.csv] --projects DIR [--only OWNER/NAME] [--show] [--json]

LABELS.csv has the columns repo, commit, file, line, rule, severity, label, note. A label is TRUE-useful, TRUE-noise, FALSE, or
MISSED for a fault that a reader found. DIR holds one folder per project, OWNER+NAME, with the files of that commit. Their code is not part
of this repository.

A finding has the label of the same rule in the same file, at most three lines away. Printed for each severity: how many findings are
true, how many are useful, and how many have no label; then how many of the useful and the missed ones are reported at medium or above,
the safe fixes, and with --show every finding that is false or has no label. Percentages are of labelled findings.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEAR = 3
SEVERITIES = ("high", "medium", "low")


@dataclass(frozen=True)
class Label:
    """A finding that was read by hand."""

    repo: str
    file: str
    line: int
    rule: str
    label: str
    note: str

    def fits(self, finding: dict[str, Any]) -> bool:
        """Whether it is about this finding."""
        last = max(finding["line"], finding["end_line"])
        is_near = finding["line"] - NEAR <= self.line <= last + NEAR
        return self.file == finding["path"] and is_near and self.rule in ("any", finding["rule"])


def read_labels(paths: list[Path]) -> list[Label]:
    """All labels of these files."""
    labels = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                line = int(row["line"] or 0)
                labels.append(Label(row["repo"], row["file"], line, row["rule"], row["label"], row.get("note") or ""))
    return labels


def diagnose(folder: Path) -> tuple[list[dict[str, Any]], float]:
    """The findings in one project, with paths relative to it, and the seconds they took."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "brim", "doctor", str(folder), "--json", "--fail-on", "never"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        print(f"{folder.name}: exit code {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return [], seconds
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    for finding in findings:
        finding["path"] = str(Path(finding["file"]).resolve().relative_to(folder.resolve()))
        finding["repo"] = folder.name.replace("+", "/", 1)
    return findings, seconds


def closest(labels: list[Label], finding: dict[str, Any]) -> Label | None:
    """The label of a finding, the nearest line first."""
    fitting = [label for label in labels if label.repo == finding["repo"] and label.label != "MISSED" and label.fits(finding)]
    return min(fitting, key=lambda label: abs(label.line - finding["line"]), default=None)


def report(labels: list[Label], findings: list[dict[str, Any]], *, show: bool) -> dict[str, Any]:
    """Print the comparison and return its counts."""
    judged = [(finding, closest(labels, finding)) for finding in findings]
    counts: dict[str, Any] = {}
    for severity in SEVERITIES:
        kinds = Counter(label.label if label else "unlabelled" for finding, label in judged if finding["severity"] == severity)
        labelled = sum(kinds.values()) - kinds["unlabelled"]
        true = kinds["TRUE-useful"] + kinds["TRUE-noise"]
        share = (
            f"true {true}/{labelled} = {true / labelled:.0%}, useful {kinds['TRUE-useful'] / labelled:.0%}"
            if labelled
            else "none labelled"
        )
        print(f"{severity:7} {sum(kinds.values()):4}  {share}, unlabelled {kinds['unlabelled']}")
        counts[severity] = dict(kinds)
    reported = [finding for finding in findings if finding["severity"] != "low"]
    for kind in ("TRUE-useful", "MISSED"):
        wanted = [label for label in labels if label.label == kind]
        kept = [label for label in wanted if any(label.repo == f["repo"] and label.fits(f) for f in reported)]
        if wanted:
            print(f"{kind}: {len(kept)}/{len(wanted)} = {len(kept) / len(wanted):.0%} are reported at medium or above")
        counts[f"{kind} reported"] = [len(kept), len(wanted)]
        if show:
            for label in wanted:
                if label not in kept:
                    print(f"  not reported: {label.repo} {label.file}:{label.line} {label.rule}  {label.note}")
    fixes = [finding for finding, _label in judged if finding["is_safe"]]
    print(f"Safe fixes: {len(fixes)}")
    counts["safe fixes"] = len(fixes)
    if show:
        for finding, nearest in judged:
            if nearest is None or nearest.label != "TRUE-useful":
                place = f"{finding['repo']} {finding['path']}:{finding['line']}"
                judgement = nearest.label if nearest else "unlabelled"
                print(f"  {finding['severity']:6} {judgement:10} {finding['rule']:26} {place}  {finding['message']}")
        for finding in fixes:
            print(f"  fix: {finding['repo']} {finding['path']}:{finding['line']} {finding['rule']}\n{finding['patch']}")
    return counts


def main() -> None:
    """Diagnose every project and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, action="append", required=True)
    parser.add_argument("--projects", type=Path, required=True)
    parser.add_argument("--only")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    labels = [label for label in read_labels(given.labels) if given.only in (None, label.repo)]
    repos = sorted({label.repo for label in labels if "/" in label.repo} | ({given.only} if given.only else set()))
    folders = [given.projects / repo.replace("/", "+", 1) for repo in repos]
    for folder in folders:
        if not folder.is_dir():
            print(f"{folder} is missing: it is left out", file=sys.stderr)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(diagnose, [folder for folder in folders if folder.is_dir()]))
    findings = [finding for some, _seconds in done for finding in some]
    counts = report(labels, findings, show=given.show)
    if given.json:
        print(json.dumps({"projects": len(done), "slowest_seconds": round(max(seconds for _, seconds in done), 1), **counts}))


if __name__ == "__main__":
    main()
