"""The page as text: complete, honest about what is missing, and safe whatever is in the records."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from brim import locale
from brim.cli._subject import read_subject
from brim.pictures.page import page
from brim.pictures.steps import MOST_READ, look
from brim.pictures.subject import Subject
from brim.records import Advice, Finding, InForce, LedgerEntry, Slice
from brim.step.ledger import read_ledger
from tests.pictures import made
from tests.pictures.reading import Page
from tests.planner.emit.plans import PLANS, make_plan

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<b>\u202e"
WHOLE_RUN = [
    "memory",
    "measured",
    "peaks",
    "speed",
    "timeline",
    "lengths",
    "padding",
    "loss",
    "norm",
    "rate",
    "slices",
    "seconds",
    "tokens",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    locale.activate("en")
    return page(read_subject(folder))


def seen(entries: list[LedgerEntry], folder: Path, *, ends: bool = True, **header: object) -> Page:
    """A page of these steps alone."""
    return Page.of(page(read_subject(made.ledger(folder / "steps.jsonl", entries, ends=ends, **header))))


def test_a_whole_run_has_every_section_and_every_chart(text: str) -> None:
    found = Page.of(text)
    assert found.charts == WHOLE_RUN
    assert [each["id"] for each in found.all("section")] == [
        "verdict", "plan", "memory", "speed", "timeline", "data", "loss", "slices", "findings", "proofs", "repeat",
    ]  # fmt: skip
    for words in (
        "The promise was kept.", "All 200 steps took exactly the sequences that were promised, each once.", "16 × 2 (gradient accumulation) = 32",
        "Memory peaked at 596 MiB, 99.3% of the limit of 600 MiB.", "Memory ran out 6 times", "fastest: 8", "largest: 17",
        "9 sequences, 431 tokens in all", "notes.jsonl, line 17", "this run, as it went", "in random order", "predicted 539 MiB",
        "The model is right at every batch size that was tried.", "brim train ./tiny-llama --data data/notes.jsonl", "2.13.0",
        "The effective batch was not said, and is taken as 32.",
    ):  # fmt: skip
        assert words in found.text, words


def test_a_limit_far_above_is_said_and_not_drawn(tmp_path: Path) -> None:
    far = 100 * made.LIMIT
    folder = made.run(tmp_path / "run", memory_limit_bytes=far, limit_is_hard=False, predicted=made.memory(8, far))
    for name in ("plan.json", "probe.json", "timeline.json"):
        (folder / name).unlink()
    found = Page.of(page(read_subject(folder)))
    assert "limit 58.6 GiB, far to the right" in found.text
    assert "The limit was 58.6 GiB." in found.text
    assert not any("level limit" in str(each.get("class")) for each in found.all("line"))


def test_slices_that_vary_make_no_product(tmp_path: Path) -> None:
    folder = made.run(tmp_path / "run", predicted=made.memory(12), micro_batch=12, accumulation=5, fewest_slices=3)
    found = Page.of(page(read_subject(folder)))
    assert "32 in every step, in 3 to 5 micro-batches of up to 12" in found.text
    assert "For the costliest micro-batch of this run" in found.text
    assert "The prediction is for micro-batches of up to 12 sequences, and this run had some of 16." in found.text
    uneven = replace(made.candidate(16, 0.6), micro_batch=5, accumulation=7, slices=(5, 5, 5, 5, 4, 4, 4))
    plan = Page.of(page(Subject(title="plan", plan=replace(made.plan(), best=uneven, alternatives=()))))
    assert "7 of up to 5" in plan.text
    assert "5 × 7," not in plan.text


def test_rows_that_are_held_out_are_told_apart(tmp_path: Path) -> None:
    held = made.run(tmp_path / "run", training_sequences=made.SEQUENCES - 400, evaluation_sequences=400)
    assert "6,400: 6,000 to train on, 400 to evaluate on" in Page.of(page(read_subject(held))).text


def test_as_many_micro_batches_in_every_step_are_no_range(tmp_path: Path) -> None:
    one = Slice(rank=0, sequences=made.BATCH, length=40, items=900)
    entries = [replace(each, slices=(one,), splits=()) for each in made.entries(3)]
    assert "Every step was one micro-batch, the largest of 32 sequences." in seen(entries, tmp_path).text
    entries = [replace(each, slices=(one, one), splits=()) for each in entries]
    assert "Every step was cut into 2 micro-batches, the largest of 32 sequences." in seen(entries, tmp_path).text


def test_a_page_is_made_for_everybody(text: str) -> None:
    found = Page.of(text)
    ids = [each["id"] for _name, each in found.elements if each.get("id")]
    assert len(ids) == len(set(ids))
    headings = [int(name[1]) for name, _each in found.elements if re.fullmatch(r"h[1-6]", name)]
    assert headings.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(headings))
    for landmark in ("header", "nav", "main", "footer"):
        assert len(found.all(landmark)) == 1
    assert found.all("html")[0]["lang"] == "en"
    links = [str(each["href"]) for each in found.all("a")]
    assert links[0] == "#content"
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    charts = [each for _name, each in found.elements if each.get("role") == "img"]
    for chart in charts:
        assert all(name in ids for name in str(chart["aria-labelledby"]).split())
    assert len(found.all("figcaption")) == len(charts) == len([name for name, _each in found.elements if name == "figure"])
    assert all(each.get("scope") == "col" for each in found.all("th"))
    assert len(found.all("caption")) == len(found.all("table")) > len(charts)


def test_a_page_needs_nothing_beside_it(text: str) -> None:
    found = Page.of(text)
    assert not found.all("link")
    assert not found.all("img")
    assert len(found.all("script")) == 1
    assert all("src" not in each and "style" not in each for _name, each in found.elements)
    assert not re.search(r"https?://", text)
    assert len(text.encode()) < 400_000


def test_names_of_users_stay_words(tmp_path: Path) -> None:
    finding = Finding(
        rule="run-promise-broken", file=HOSTILE, line=1, end_line=1, severity="high", confidence="high", message=HOSTILE,
        in_force=(InForce(setting=HOSTILE, set=1, in_force=HOSTILE),),
    )  # fmt: skip
    made.run(
        tmp_path, name=HOSTILE, steps=30, not_in_force=(HOSTILE,), notes=(HOSTILE,), device=HOSTILE, versions={HOSTILE: HOSTILE}
    )
    whole = replace(read_subject(tmp_path), title=HOSTILE, findings=(finding,), mends={finding.rule: HOSTILE}, promise=(HOSTILE,))
    text = page(whole)
    found = Page.of(text)
    assert not found.all("img")
    assert len(found.all("script")) == 1
    assert "\u202e" not in text
    assert "onerror" not in {name for _tag, each in found.elements for name in each}
    assert "</script><img src=x onerror=alert(1)>" in found.text


def test_a_run_that_has_not_begun_is_told_so(tmp_path: Path) -> None:
    made.card().write(tmp_path / "run.json")
    for _again in range(2):
        found = Page.of(page(read_subject(tmp_path)))
        assert "No step has been taken yet." in found.text
        assert "loss" not in found.charts
        (tmp_path / "ledger.jsonl").write_text(made.line(made.header()), encoding="utf-8")


def test_a_run_of_one_step_can_be_drawn(tmp_path: Path) -> None:
    found = seen(list(made.entries(1)), tmp_path, ends=False)
    assert found.charts == ["peaks", "padding", "loss", "norm", "rate", "slices", "seconds", "tokens"]
    assert "There is one loss so far: 6.494." in found.text
    assert "It goes on, or was killed: the last line is that of step 1." in found.text


def test_losses_that_are_no_numbers_leave_a_gap_and_are_told(tmp_path: Path) -> None:
    strange = [math.nan, math.inf, -math.inf]
    entries = [replace(each, loss=strange[each.step % 3] if each.step > 20 else each.loss) for each in made.entries(30)]
    found = seen(entries, tmp_path)
    assert "In 10 steps it is not a finite number" in found.text
    only = seen([replace(each, loss=math.nan, grad_norm=math.nan) for each in entries], tmp_path)
    assert "In 30 steps it is not a finite number" in only.text
    assert "norm" not in only.charts


def test_memory_that_was_not_measured_is_not_drawn_as_zero(tmp_path: Path) -> None:
    for nothing in (0, None):
        entries = [replace(each, peak_allocated_bytes=nothing, peak_reserved_bytes=nothing) for each in made.entries(25)]
        found = seen(entries, tmp_path)
        assert "peaks" not in found.charts
        assert "The run's memory was not measured" in found.text
        assert "Memory peaked" not in found.text


def test_a_broken_promise_comes_first(tmp_path: Path) -> None:
    entries = list(made.entries(25))
    entries[6] = replace(entries[6], sequence_ids=entries[6].sequence_ids[:-1], sequences=31)
    found = seen(entries, tmp_path)
    assert "✗ The promise was broken." in found.text
    assert "1 of 25 steps did not take what was promised." in found.text
    assert "Step 7 took 31 sequences, and 32 were promised." in found.text


def test_what_is_not_in_force_stands_before_the_verdict(tmp_path: Path) -> None:
    made.run(tmp_path, steps=20, not_in_force=("--workers 8: there are 2 cores.",))
    text = Page.of(page(read_subject(tmp_path))).text
    assert -1 < text.find("--workers 8") < text.find("The promise was kept.")


def watched(step: int, promised: int | None, sequences: int) -> LedgerEntry:
    return LedgerEntry(
        step=step, epoch=0.0, promised_sequences=promised, sequence_ids=(), sequences=sequences, tokens=None, padded_tokens=None,
        supervised_tokens=None, slices=(Slice(rank=0, sequences=sequences, length=None),), compute_seconds=0.5, wait_seconds=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("promised", "taken", "said"),
    [(None, 4, "There was no promise to be kept."), (4, 4, "The batch that was asked for was in force."), (64, 2, "The batch that was asked for was not in force.")],
    ids=["nothing asked for", "as asked for", "less than asked for"],
)  # fmt: skip
def test_a_watched_script_is_judged_by_what_is_known_of_it(tmp_path: Path, promised: int | None, taken: int, said: str) -> None:
    header = made.header(
        observed=True, seed=None, effective_batch=promised, sequences_in_data=None, steps_per_epoch=None, drop_last=None, budget=None,
        data_fingerprint=None, memory_limit_bytes=None,
    )  # fmt: skip
    lines = [made.line(header), *(made.line(watched(step, promised, taken)) for step in range(1, 31))]
    (tmp_path / "ledger.jsonl").write_text("".join(lines), encoding="utf-8")
    found = Page.of(page(read_subject(tmp_path)))
    assert said in found.text
    assert found.charts == ["slices", "seconds"]


def test_a_short_last_step_of_a_watched_script_is_no_broken_promise(tmp_path: Path) -> None:
    header = made.header(
        observed=True, seed=None, effective_batch=4, sequences_in_data=None, steps_per_epoch=None, drop_last=None, budget=None,
        data_fingerprint=None,
    )  # fmt: skip
    lines = [made.line(header), *(made.line(watched(step, 4, 4 if step % 10 else 2)) for step in range(1, 31))]
    (tmp_path / "ledger.jsonl").write_text("".join(lines), encoding="utf-8")
    text = Page.of(page(read_subject(tmp_path))).text
    assert "The batch that was asked for was in force, but for short steps." in text
    assert "3 of 30 steps took fewer sequences" in text


def test_steps_that_a_resume_took_again_count_once(tmp_path: Path) -> None:
    entries = list(made.entries(30))
    file = tmp_path / "ledger.jsonl"
    file.write_text(
        "".join(
            [
                made.line(made.header()),
                *map(made.line, entries[:25]),
                made.line(made.header(resumed_from_step=20)),
                *map(made.line, entries[20:]),
            ]
        )
        + '{"schema": "brim.led',
        encoding="utf-8",
    )
    found = Page.of(page(read_subject(file)))
    assert "All 30 steps took exactly" in found.text
    assert "Continued" in found.text


def small() -> LedgerEntry:
    return LedgerEntry(
        step=1, epoch=0.5, promised_sequences=1, sequence_ids=(0,), sequences=1, tokens=9, padded_tokens=10, supervised_tokens=5,
        slices=(Slice(rank=0, sequences=1, length=10, items=5),), compute_seconds=0.5, wait_seconds=0.01, loss=2.0, grad_norm=1.0,
        learning_rate=1e-4, peak_reserved_bytes=made.MIB,
    )  # fmt: skip


def long_ledger(file: Path, steps: int) -> Path:
    line = made.line(small())
    with file.open("w", encoding="utf-8") as stream:
        stream.write(made.line(made.header(effective_batch=1, sequences_in_data=steps, steps_per_epoch=steps)))
        for step in range(1, steps + 1):
            stream.write(
                line.replace('"step": 1,', f'"step": {step},', 1).replace('"loss": 2.0', f'"loss": {2 + step % 7 / 10}', 1)
            )
    return file


@pytest.mark.parametrize(("steps", "most"), [(3001, 2000), pytest.param(200_000, MOST_READ, marks=pytest.mark.slow)])
def test_a_long_run_is_sampled_and_says_so(tmp_path: Path, steps: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.pictures.steps.MOST_READ", most)
    subject = read_subject(long_ledger(tmp_path / "long.jsonl", steps))
    assert subject.ledger is not None
    looked_at = look(subject.ledger)
    assert len(looked_at) <= most + 1
    assert looked_at.step[-1] == looked_at.total == steps
    text = page(subject)
    found = Page.of(text)
    assert len(text.encode()) < 2_000_000
    assert f"one step in {looked_at.stride} was looked at" in found.text
    assert "The promise was kept in every step that was looked at." in found.text
    assert "All " not in found.text
    assert "a peak between two of them is not seen" in found.text
    assert "was not audited for this page" in found.text
    longest = max(len(str(each.get("d"))) for each in found.all("path"))
    assert longest < 1500 * 24


@pytest.mark.slow
def test_the_largest_page_stays_small(tmp_path: Path) -> None:
    """As many steps as are read whole, every one of them different."""
    entries = list(made.entries(6000))
    made.ledger(tmp_path / "ledger.jsonl", entries, sequences_in_data=6000 * made.BATCH, steps_per_epoch=6000)
    subject = replace(read_subject(tmp_path), evaluations=tuple(made.evaluations(6000) * 20), timeline=made.timeline(layers=200))
    assert len(page(subject).encode()) < 2_000_000


def test_the_same_records_give_the_same_page(folder: Path, text: str) -> None:
    assert page(read_subject(folder)) == text


def test_a_chinese_reader_gets_a_chinese_page(folder: Path) -> None:
    locale.activate("zh_CN")
    found = Page.of(page(read_subject(folder)))
    assert found.all("html")[0]["lang"] == "zh-CN"
    assert found.charts == WHOLE_RUN


def test_a_plan_a_probe_and_proofs_have_pages_of_their_own() -> None:
    plan = Page.of(page(Subject(title="plan", plan=made.plan())))
    assert plan.charts == ["memory", "lengths", "padding"]
    assert "It fits." in plan.text
    nothing = replace(made.plan(), fits=False, best=None, missing_bytes=3 * made.MIB)
    assert "It does not fit." in Page.of(page(Subject(title="plan", plan=nothing))).text
    probe = Page.of(page(Subject(title="probe", probe=made.probe())))
    assert probe.charts == ["memory", "measured", "speed", "lengths", "padding"]
    assert "Predicted for 17" in probe.text
    failed = replace(
        made.probe(),
        largest=None,
        fastest=None,
        fit=None,
        versus=None,
        predicted=None,
        points=(),
        trials=made.probe().trials[-1:],
    )
    assert "Not even one sequence trains here." in Page.of(page(Subject(title="probe", probe=failed))).text
    wrong = Page.of(page(Subject(title="proofs", verification=made.verification(proven=False))))
    assert "The model is not right: batch." in wrong.text
    assert "Expand the mask over the batch." in wrong.text


def test_the_page_of_a_plan_holds_what_was_chosen_and_why() -> None:
    plan = PLANS["zero 3, parameters on the host"]
    assert plan.best is not None
    best = replace(plan.best, reasons=("Micro-batch 6 does not fit.",), learning_rate=2e-4)
    advice = Advice(setting="adam_beta2", now=0.999, then=0.996, reason="the same half-life", source="a paper")
    other = replace(best, micro_batch=2, accumulation=4, precision="fp32", reasons=())
    plan = replace(plan, best=best, alternatives=(other,), advice=(advice,), hints=("A chunked loss saves 1 GiB.",))
    found = Page.of(page(Subject(title="plan", plan=plan)))
    assert {"id": "plan", "aria-labelledby": "heading-plan"} in found.all("section")
    for words in (
        "amp-bf16", "zero3 over 8 ranks", "parameters", "sdpa", "adamw", "Micro-batch 6 does not fit.", "2 × 4", "fp32", "0.0002",
        "the same half-life", "A chunked loss saves 1 GiB.",
    ):  # fmt: skip
        assert words in found.text, words
    uneven = Page.of(page(Subject(title="plan", plan=make_plan(7, 4, gpus="t4*2"))))
    assert "4 | 3" in uneven.text
    would = replace(best, reasons=("--method qlora", "Adapters train, on a model of 4 bits."))
    nothing = replace(plan, fits=False, best=None, alternatives=(would,))
    assert "--method qlora: Adapters train, on a model of 4 bits." in Page.of(page(Subject(title="plan", plan=nothing))).text


def test_a_plan_for_many_gpus_shows_what_more_of_them_would_do() -> None:
    found = Page.of(page(Subject(title="plan", plan=made.scaled_plan())))
    assert found.charts == ["memory", "scaling-speed", "scaling-efficiency", "scaling-links", "lengths", "padding"]
    for words in (
        "Adding GPUs beyond 64 pays less than 50%: each brings less than that of what one of 2 does.", "the knee: 64 GPUs", "the plan: 1,024 GPUs",
        "1,024 GPUs pay from an effective batch of 128 on", "With a noise scale of 90 sequences a batch of 32 takes 3.81 times the fewest steps",
        "above the noise scale", "between nodes: infiniband-ndr*8", "does not fit", "On 1,024 GPUs a step computes for 0.0625 s",
    ):  # fmt: skip
        assert words in found.text, words
    unknown = Page.of(page(Subject(title="plan", plan=made.scaled_plan(noise_scale=None))))
    assert "which is not known here" in unknown.text
    assert "--noise-scale RUN" in unknown.text
    assert "times the fewest steps" not in unknown.text


def test_a_curve_of_one_number_that_fits_can_be_drawn() -> None:
    whole = made.scaled_plan()
    assert whole.scaling is not None
    points = tuple(
        replace(each, fits=each.gpus == 1024, efficiency=1.0 if each.gpus == 1024 else None) for each in whole.scaling.points
    )
    alone = replace(whole.scaling, points=points, reference_gpus=1024, knee_gpus=1024)
    found = Page.of(page(Subject(title="plan", plan=replace(whole, scaling=alone))))
    assert "scaling-speed" in found.charts


def test_a_page_of_nothing_is_still_a_page() -> None:
    assert "There is nothing to judge." in Page.of(page(Subject(title=""))).text


def test_what_a_ledger_holds_is_what_is_counted(folder: Path) -> None:
    steps = look(read_ledger(folder / "ledger.jsonl"))
    assert (steps.total, steps.stride, len(steps)) == (200, 1, 200)
    assert (len(steps.splits), steps.is_kept.count(True)) == (6, 200)
    assert steps.padding == pytest.approx(0.042, abs=1e-3)
    assert steps.highest_peak == made.LIMIT - 4 * made.MIB
