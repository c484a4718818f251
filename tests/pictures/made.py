"""Runs composed for pictures: whole folders as `brim train` leaves them, with everything in them that a page can show."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from brim.machine.catalogue import find_gpu
from brim.machine.records import Host, Machine
from brim.records import (
    AffineFit,
    BadRow,
    BatchGuide,
    BatchPoint,
    BudgetLimit,
    Candidate,
    DataCard,
    DataReport,
    Evaluation,
    LedgerEntry,
    LedgerHeader,
    LedgerSummary,
    Measurement,
    MemoryPrediction,
    Plan,
    Proof,
    Proven,
    Pulse,
    RunCard,
    ScalePoint,
    Scaling,
    ShapePoint,
    Slice,
    SpeedPrediction,
    Split,
    TrainingRecipe,
    Trial,
    Verification,
    Versus,
    Wire,
)
from brim.workload.records import LengthCount, Workload
from brim.workload.settings import Settings

MIB = 1024**2
LIMIT = 600 * MIB
BATCH = 32
STEPS = 200
SEQUENCES = BATCH * STEPS
STARTED = "2026-03-14T09:30:00+00:00"


def lengths(seed: int = 7) -> tuple[LengthCount, ...]:
    """Short ones mostly, with a long tail."""
    draw = random.Random(seed)
    counts: dict[int, int] = {}
    for _each in range(SEQUENCES):
        length = max(8, min(300, round(draw.lognormvariate(4.0, 0.62))))
        counts[length] = counts.get(length, 0) + 1
    return tuple(LengthCount(tokens=length, sequences=count) for length, count in sorted(counts.items()))


def memory(micro_batch: int, limit: int = LIMIT) -> MemoryPrediction:
    each = 28 * MIB
    kinds: dict[Any, int] = {
        "parameters": 24 * MIB, "gradients": 24 * MIB, "optimizer": 48 * MIB, "activations": int(each * 0.68) * micro_batch,
        "logits": int(each * 0.3) * micro_batch, "temporary": 3 * MIB, "buffers": MIB, "workspace": 0, "communication": 0,
        "fragmentation": 0, "context": 0,
    }  # fmt: skip
    whole = sum(kinds.values())
    return MemoryPrediction(
        peak_allocated_bytes=whole, peak_reserved_bytes=whole, peak_device_bytes=whole, smallest_surviving_limit_bytes=whole,
        limit_bytes=limit, fits=whole <= limit, peak_phase="backward", by_phase={"forward": whole * 9 // 10, "backward": whole},
        by_kind=kinds,
    )  # fmt: skip


def machine() -> Machine:
    return Machine(host=Host(memory_bytes=16 * 1024 * MIB, available_bytes=12 * 1024 * MIB, cores=2.0, affinity_cores=2))


def workload(name: str = "tiny-llama") -> Workload:
    return Workload(model=name, task="causal-lm", effective_batch=BATCH, max_length=300, lengths=lengths(), samples=SEQUENCES)


def report_of_data() -> DataReport:
    return DataReport(
        source="data/notes.jsonl", sequences=SEQUENCES, tokens=SEQUENCES * 66, counted_by="tokenizer tiny-llama", exact=True,
        mean_tokens=66.0, median_tokens=55, p95_tokens=152, longest_tokens=412, cut=9,
        padding={"shuffled": 0.467, "grouped": 0.03, "sliced": 0.041},
    )  # fmt: skip


def candidate(micro_batch: int, seconds: float, checkpointing: str = "none", reason: str = "") -> Candidate:
    return Candidate(
        micro_batch=micro_batch, accumulation=BATCH // micro_batch, effective_batch=BATCH, checkpointing=checkpointing,
        memory=memory(micro_batch if checkpointing == "none" else micro_batch // 2),
        speed=SpeedPrediction(step_seconds=seconds, tokens_per_second=BATCH * 66 / seconds, steps_per_epoch=STEPS),
        reasons=(reason,) if reason else (),
    )  # fmt: skip


def plan(name: str = "tiny-llama") -> Plan:
    return Plan(
        workload=workload(name), machine=machine(), fits=True, best=candidate(16, 0.62, reason="16 x 2 = 32 sequences in every step."),
        alternatives=(candidate(8, 0.65), candidate(4, 0.74), candidate(32, 0.81, "full"), candidate(32, 0.6)), considered=42,
        elapsed_seconds=1.2, margin_bytes=12 * MIB, data=report_of_data(), hints=("A larger limit would save 3 percent of the time.",),
        assumptions=("The loader keeps up: waiting for data is not counted.",), brim_version="0.1.0",
    )  # fmt: skip


def scaling(*, noise_scale: float | None = 90.0) -> Scaling:
    """One GPU does not hold it; from 64 on the links are what a step waits for."""
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    points = []
    for gpus in counts:
        nodes = max(1, gpus // 8)
        computed, waited = 64.0 / gpus, 0.0 if gpus == 1 else 0.05 + 0.002 * gpus
        best = 64.0 + 2 * (0.05 + 0.002 * 2)
        points.append(
            ScalePoint(
                gpus=gpus, nodes=nodes, fits=gpus > 1, micro_batch=1, accumulation=max(1, 2048 // gpus), idle_gpus=max(0, gpus - 2048),
                device_bytes=(20 + 100 // gpus) * 1024 * MIB, step_seconds=computed + waited, compute_seconds=computed, exposed_seconds=waited,
                inside_seconds=waited / 2, between_seconds=waited if nodes > 1 else 0.0, tokens_per_second=1e6 / (computed + waited),
                efficiency=None if gpus == 1 else min(1.0, best / gpus / (computed + waited)),
            )
        )  # fmt: skip
    batches = [
        BatchPoint(
            effective_batch=BATCH << power, step_seconds=1.0 + power, tokens_per_second=3e6 * (1 + power), efficiency=0.2 + 0.15 * power,
            steps=1 + noise_scale / (BATCH << power) if noise_scale else None, examples=1 + (BATCH << power) / noise_scale if noise_scale else None,
            time=1.0 + 0.5 * power if noise_scale else None,
        )
        for power in range(5)
    ]  # fmt: skip
    return Scaling(
        inside=Wire(name="nvlink", bytes_per_second=337.5e9, hop_seconds=3.4e-6),
        between=Wire(name="infiniband-ndr*8", bytes_per_second=340e9, hop_seconds=9.6e-6),
        points=tuple(points), reference_gpus=2, knee_gpus=64, knee_share=0.5,
        batches=BatchGuide(noise_scale=noise_scale, points=tuple(batches), enough_batch=BATCH << 2),
    )  # fmt: skip


def scaled_plan(name: str = "tiny-llama", **changes: Any) -> Plan:
    """A plan for 1,024 GPUs."""
    return replace(plan(name), machine=find_gpu("h100*8").machine(nodes=128), scaling=scaling(**changes))


def probe(name: str = "tiny-llama") -> Measurement:
    def peak(size: int) -> int:
        return 100 * MIB + round(27.6 * MIB) * size

    speeds = {1: 1450.0, 2: 2120.0, 4: 2820.0, 8: 3290.0, 16: 3120.0, 17: 3090.0}
    trials = [
        Trial(micro_batch=size, max_length=300, verdict="ok", steps=2, peak_allocated_bytes=peak(size), peak_reserved_bytes=peak(size),
              peak_device_bytes=peak(size), step_seconds=1.1, tokens_per_second=speeds[size], elapsed_seconds=7.0)
        for size in (16, 17)
    ]  # fmt: skip
    trials.append(Trial(micro_batch=18, max_length=300, verdict="out-of-memory", phase="backward", elapsed_seconds=5.0))
    points = [
        ShapePoint(sequences=size, length=300, peak_bytes=peak(size), seconds=0.1 * size, tokens_per_second=speeds[size])
        for size in (8, 4, 2, 1)
    ]
    return Measurement(
        workload=workload(name), machine=machine(), settings=Settings(micro_batch=17, seq_len=300), device="cpu", limit_bytes=LIMIT,
        margin_bytes=3 * MIB, data=report_of_data(), trials=tuple(trials), points=tuple(points),
        largest=Proven(micro_batch=17, tokens_per_second=speeds[17], peak_bytes=peak(17)),
        fastest=Proven(micro_batch=8, tokens_per_second=speeds[8], peak_bytes=peak(8)),
        fit=AffineFit(base_bytes=100.0 * MIB, bytes_per_sequence=27.6 * MIB, residual_bytes=0.4 * MIB), predicted=memory(17),
        versus=Versus(micro_batch=17, predicted_bytes=memory(17).peak_device_bytes, measured_bytes=peak(17),
                      error=memory(17).peak_device_bytes / peak(17) - 1, predicted_largest=17),
        assumptions=("Weights are fresh ones: memory and time do not depend on their values.",), elapsed_seconds=31.0,
        versions={"torch": "2.13.0", "brim": "0.1.0"},
    )  # fmt: skip


def verification(name: str = "tiny-llama", *, proven: bool = True) -> Verification:
    names: tuple[Any, ...] = ("causality", "batch", "pad", "pack", "accumulation")
    proofs = [Proof(name=each, verdict="pass", attention="sdpa", tested="2 rows", value=3e-7, tolerance=1e-5) for each in names]
    if not proven:
        proofs[1] = Proof(name="batch", verdict="fail", attention="sdpa", tested="2 rows", value=0.4, tolerance=1e-5,
                          diagnosis="A row in a batch is not the row alone.", mend="Expand the mask over the batch.")  # fmt: skip
    return Verification(
        model=name,
        class_name="LlamaForCausalLM",
        weights="fresh",
        parameters=6_300_000,
        precision="fp32",
        seed=0,
        proofs=tuple(proofs),
    )


def card(name: str = "tiny-llama", **changes: Any) -> RunCard:
    data = DataCard(
        source="data/notes.jsonl", fingerprint="5f0c9be1d2aa77e0", folder="", task="causal-lm", columns="prompt/response",
        tokenizer="tiny-llama", max_length=300, sequences=SEQUENCES, tokens=SEQUENCES * 66, supervised_tokens=SEQUENCES * 40,
        longest_tokens=412, cut=9, cut_tokens=431, skipped=2, lengths=lengths(),
        bad_rows=(BadRow(place="notes.jsonl, line 17", reason="not JSON"), BadRow(place="notes.jsonl, line 940", reason="the answer is empty")),
    )  # fmt: skip
    made = RunCard(
        name=name, model="./tiny-llama", command=("brim", "train", "./tiny-llama", "--data", "data/notes.jsonl", "--device", "cpu",
        "--memory", "600MiB", "-o", "run"), created_at=STARTED, settings=Settings(task="causal-lm", micro_batch=16, seq_len=300),
        recipe=TrainingRecipe(learning_rate=3e-4, warmup_steps=10), effective_batch=BATCH, micro_batch=16, accumulation=2, fewest_slices=2,
        total_steps=STEPS, steps_per_epoch=STEPS, training_sequences=SEQUENCES, data=data, device="cpu", kernel="sdpa math", memory_limit_bytes=LIMIT,
        limit_is_hard=True, predicted=memory(16), predicted_step_seconds=0.62, verified="proven", probed=True, num_workers=2,
        prefetch_factor=2, assumptions=("The effective batch was not said, and is taken as 32.",),
        notes=("The model has no dropout: the same seed gives the same curve.",), versions={"torch": "2.13.0", "brim": "0.1.0"},
    )  # fmt: skip
    return replace(made, **changes)


def header(**changes: Any) -> LedgerHeader:
    made = LedgerHeader(
        started_at=STARTED, seed=42, effective_batch=BATCH, sequences_in_data=SEQUENCES, steps_per_epoch=STEPS,
        budget=BudgetLimit(unit="bytes", limit=float(LIMIT)), device="cpu", memory_limit_bytes=LIMIT, data_fingerprint="5f0c9be1d2aa77e0",
        configuration={"learning_rate": 3e-4, "optim": "adamw"}, versions={"torch": "2.13.0"},
    )  # fmt: skip
    return replace(made, **changes)


def entries(steps: int = STEPS, seed: int = 3) -> Iterator[LedgerEntry]:
    """Steps that learn, a few of them split."""
    draw = random.Random(seed)
    for step in range(1, steps + 1):
        cuts = (16, 16) if step % 29 else (16, 8, 8)
        slices = tuple(Slice(rank=0, sequences=size, length=40 + 45 * place, items=30 * size) for place, size in enumerate(cuts))
        padded = sum(one.sequences * (one.length or 0) for one in slices)
        splits = (
            () if step % 29 else (Split(rank=0, phase="backward", sequences=16, into=2, length=264, requested_bytes=9 * MIB),)
        )
        rate = 3e-4 * (step / 10 if step < 10 else max(0.0, 1 - (step - 10) / max(1, steps - 10)))
        first = (step - 1) * BATCH
        peak = round((430 + 95 * draw.random()) * MIB) if step % 29 else LIMIT - 4 * MIB
        yield LedgerEntry(
            step=step, epoch=step / steps, promised_sequences=BATCH, sequence_ids=tuple(range(first, first + BATCH)), sequences=BATCH,
            tokens=round(padded * 0.958), padded_tokens=padded, supervised_tokens=sum(one.items or 0 for one in slices), slices=slices,
            splits=splits, limit=float(LIMIT), peak_allocated_bytes=peak, peak_reserved_bytes=peak,
            compute_seconds=0.6 + 0.08 * draw.random() + (0.5 if splits else 0.0), wait_seconds=0.01 + 0.02 * draw.random(),
            loss=1.9 + 4.8 * math.exp(-step / 45) + draw.gauss(0, 0.09), grad_norm=0.7 + 2 * math.exp(-step / 30) + 0.3 * draw.random(),
            learning_rate=rate, pulse=Pulse(seconds=1.0, workers=2, worker_cpu=0.2, main_cpu=1.7) if step % 2 else None,
        )  # fmt: skip


def summary(found: list[LedgerEntry], **changes: Any) -> LedgerSummary:
    def total(name: str) -> Any:
        return sum(getattr(entry, name) for entry in found)

    made = LedgerSummary(
        last_step=found[-1].step, steps=len(found), sequences=total("sequences"), tokens=total("tokens"),
        padded_tokens=total("padded_tokens"), supervised_tokens=total("supervised_tokens"),
        splits=sum(len(entry.splits) for entry in found), skipped=0, seconds=141.0, compute_seconds=total("compute_seconds"),
        wait_seconds=total("wait_seconds"), peak_allocated_bytes=max(entry.peak_allocated_bytes or 0 for entry in found),
        peak_reserved_bytes=max(entry.peak_reserved_bytes or 0 for entry in found), last_loss=found[-1].loss, finished=True,
    )  # fmt: skip
    return replace(made, **changes)


def line(record: LedgerHeader | LedgerEntry | LedgerSummary | Evaluation) -> str:
    return record.to_json(indent=None) + "\n"


def ledger(file: Path, found: list[LedgerEntry], *, ends: bool = True, **changes: Any) -> Path:
    file.write_text(
        "".join([line(header(**changes)), *map(line, found), line(summary(found)) if ends and found else ""]), encoding="utf-8"
    )
    return file


def evaluations(steps: int = STEPS) -> list[Evaluation]:
    losses = {step: 2.05 + 4.6 * math.exp(-step / 45) for step in range(0, steps + 1, 40)}
    return [
        Evaluation(step=step, loss=loss, metrics={"perplexity": math.exp(loss)}, sequences=200, seconds=1.4)
        for step, loss in losses.items()
    ]


def timeline(layers: int = 4) -> dict[str, Any]:
    """One step: up through the layers, down again, the optimizer."""
    phases: list[str] = []
    places: list[int | None] = []
    activations: list[int] = []
    temporary: list[int] = []
    for layer in range(layers):
        for event in range(30):
            phases.append("forward")
            places.append(layer)
            activations.append((30 * layer + event) * 2 * MIB)
            temporary.append(event % 5 * MIB)
    for layer in reversed(range(layers)):
        for event in range(40):
            phases.append("backward")
            places.append(layer)
            activations.append((30 * layer + 30 - event * 30 // 40) * 2 * MIB)
            temporary.append((event % 7) * 3 * MIB)
    phases += ["optimizer"] * 60
    places += [None] * 60
    activations += [0] * 60
    temporary += [event % 9 * MIB for event in range(60)]
    kinds = {
        "parameters": [24 * MIB] * len(phases),
        "optimizer": [48 * MIB] * len(phases),
        "activations": activations,
        "temporary": temporary,
    }
    allocated = [sum(column[place] for column in kinds.values()) for place in range(len(phases))]
    reserved, highest = [], 0
    for size in allocated:
        highest = max(highest, size)
        reserved.append(highest + 4 * MIB)
    return {
        "schema": "brim.timeline/1", "limit_bytes": LIMIT, "phase": phases, "layer": places, "allocated_bytes": allocated,
        "reserved_bytes": reserved, "kind_bytes": kinds,
    }  # fmt: skip


def run(folder: Path, *, name: str = "tiny-llama", steps: int = STEPS, ends: bool = True, **changes: Any) -> Path:
    """A whole folder."""
    folder.mkdir(parents=True, exist_ok=True)
    card(name, **changes).write(folder / "run.json")
    plan(name).write(folder / "plan.json")
    probe(name).write(folder / "probe.json")
    verification(name).write(folder / "verify.json")
    (folder / "timeline.json").write_text(json.dumps(timeline()), encoding="utf-8")
    (folder / "evaluations.jsonl").write_text("".join(map(line, evaluations(steps))), encoding="utf-8")
    ledger(folder / "ledger.jsonl", list(entries(steps)), ends=ends)
    return folder
