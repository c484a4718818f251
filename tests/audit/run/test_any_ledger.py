"""Whatever a ledger holds, as long as it is one: it is read to its end, and what is said of it can be printed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from brim.audit.rules import RULES
from brim.audit.run.examine import examine_run
from brim.records import BudgetLimit, LedgerEntry, LedgerHeader, Pulse, Slice, Split
from brim.step.ledger import LedgerWriter
from tests.audit.run.ledgers import HEADER, step_of

COUNTS = st.integers(0, 2**40)
FLOATS = st.floats(0, 1e12)
REALS = st.floats(allow_nan=True, allow_infinity=True)
NAMES = {rule.name for rule in RULES.values() if rule.group == "run"}

pulses = st.builds(
    Pulse, seconds=FLOATS, device_utilisation=st.none() | FLOATS, workers=st.none() | COUNTS, worker_cpu=st.none() | FLOATS,
    main_cpu=st.none() | FLOATS, read_bytes=st.none() | COUNTS, blocked_seconds=st.none() | FLOATS, retries=st.none() | COUNTS,
    swapped_bytes=st.none() | COUNTS,
)  # fmt: skip
slices = st.builds(
    Slice, rank=st.integers(0, 3), sequences=st.integers(1, 2**30), length=st.integers(1, 2**30), target_length=st.integers(0, 2**30),
    items=COUNTS, gradient_square=st.none() | REALS,
)  # fmt: skip
splits = st.builds(Split, rank=st.integers(0, 3), phase=st.just("forward"), sequences=st.integers(1, 9), into=st.integers(1, 9))
changes = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(1, 2**40), "epoch": FLOATS, "promised_sequences": st.none() | st.integers(1, 2**40), "sequences": COUNTS,
        "sequence_ids": st.lists(st.integers(0, 2**40), max_size=3).map(tuple), "tokens": COUNTS, "padded_tokens": COUNTS,
        "supervised_tokens": COUNTS, "slices": st.lists(slices, max_size=3).map(tuple), "splits": st.lists(splits, max_size=2).map(tuple),
        "limit": st.none() | REALS, "skipped": st.booleans(), "peak_allocated_bytes": st.none() | COUNTS,
        "peak_reserved_bytes": st.none() | COUNTS, "compute_seconds": FLOATS, "wait_seconds": FLOATS, "loss": st.none() | REALS,
        "grad_norm": st.none() | REALS, "learning_rate": st.none() | FLOATS, "pulse": st.none() | pulses,
    },
)  # fmt: skip
headers = st.builds(
    LedgerHeader, started_at=st.just(""), observed=st.just(True), seed=COUNTS, effective_batch=st.none() | st.integers(1, 2**40),
    sequences_in_data=st.none(), steps_per_epoch=st.none(), budget=st.none() | st.just(BudgetLimit(unit="tokens", limit=1.0)),
    world_size=st.integers(1, 4), device=st.sampled_from(["cpu", "cuda:0"]), memory_limit_bytes=st.none() | COUNTS,
    resumed_from_step=st.integers(0, 40),
)  # fmt: skip


@pytest.mark.filterwarnings("error::RuntimeWarning")
@given(
    parts=st.lists(
        st.tuples(st.just(HEADER) | headers, st.lists(changes, max_size=6), st.integers(0, 40)), min_size=1, max_size=3
    ),
    finished=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_ledger_is_too_strange(
    tmp_path: Path, parts: list[tuple[LedgerHeader, list[dict[str, Any]], int]], finished: bool
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.unlink(missing_ok=True)
    for header, given_changes, repeats in parts:
        entries = [step_of(number, **each) for number, each in enumerate(given_changes * repeats, 1)]
        writer = LedgerWriter(path, header)
        for entry in entries:
            writer.write(entry)
        writer.close(finished=finished)
    report = examine_run(path, "ledger.jsonl")
    lines = len(path.read_text().splitlines())
    for found in report.found:
        assert found.rule in NAMES
        assert 1 <= found.line <= found.end_line <= lines
        assert found.message.endswith((".", ")"))
        json.dumps(dataclasses.asdict(found))


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_was_cut_anywhere_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "ledger.jsonl"
    if not path.exists():
        with LedgerWriter(path, HEADER) as writer:
            for number in range(1, 26):
                writer.write(step_of(number))
    whole = path.read_bytes()
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(whole[: data.draw(st.integers(whole.index(b"\n") + 1, len(whole)))])
    assert examine_run(cut, "cut.jsonl").steps <= 25


def test_entries_of_other_tools_may_leave_out_what_has_a_default(tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(LedgerEntry) if field.default is dataclasses.MISSING}
    header = HEADER.to_dict()
    rows = [{key: value for key, value in step_of(number).to_dict().items() if key in names} for number in range(1, 31)]
    path = tmp_path / "ledger.jsonl"
    lines = [header, *({"schema": "brim.ledger/1", "kind": "step", **row} for row in rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert examine_run(path, "ledger.jsonl").steps == 30
