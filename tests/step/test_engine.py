"""The engine sums the exact gradient of a global batch in whatever pieces memory allows, and leaves nothing behind of those that failed."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from brim.errors import OutOfMemoryError, RunError
from brim.machine.device import CpuDevice
from brim.step.batch import BatchPlan
from brim.step.budget import Budget
from brim.step.engine import Engine, Mark, Total
from brim.step.loading import StepDataset, StepItem
from brim.step.oom import CLIMB_AFTER, Guard
from brim.step.ranks import Ranks
from tests.step import toys
from tests.step.faults import out_of_memory, swiftly

EFFECTIVE_BATCH = 16


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    with swiftly():
        yield


class Words(torch.nn.Module):
    """The smallest model with everything that a step may disturb: dropout, running statistics, a mean over supervised tokens."""

    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(32, 8)
        self.norm = torch.nn.BatchNorm1d(8) if norm else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(8, 32)
        self.double()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(input_ids).flatten(0, 1)).view(*input_ids.shape, -1)
        logits: torch.Tensor = self.head(self.dropout(hidden))
        return logits


@dataclass
class Memory:
    """A device on which no more than so many sequences fit, and on which memory runs out in this phase."""

    sequences: float = float("inf")
    phase: str = "forward"
    always_fails: set[int] = field(default_factory=set)
    """Calls, from 0, that fail whatever their size."""
    calls: int = 0
    failures: int = 0
    held: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    still_held: int = 0
    """Activations of micro-batches that were over, at the start of a later one."""

    def check(self, phase: str, rows: int) -> None:
        if phase == self.phase and (rows > self.sequences or self.calls - 1 in self.always_fails):
            self.failures += 1
            raise out_of_memory(self.failures)


class Bench:
    """An engine with its data, one rank."""

    def __init__(
        self, model: torch.nn.Module, memory: Memory | None = None, *, budget: Budget | None = None, count: int = 160
    ) -> None:
        self.model, self.memory = model, memory or Memory()
        data = toys.data(count, longest=12, vocabulary=32)
        self.guard = Guard(budget or Budget.sequences(8))
        plan = BatchPlan([len(one["input_ids"]) for one in data], effective_batch=EFFECTIVE_BATCH)
        self.data = StepDataset(data, toys.collate, plan, self.guard)
        self.said: list[str] = []
        self.engine = Engine(
            model, self.compute,
            counting="next-token", guard=self.guard, ranks=Ranks(list(model.parameters())), device=CpuDevice(),
            collate=toys.collate, on_split=self.said.append,
        )  # fmt: skip

    def compute(self, batch: Any, items: int, weight: float, mark: Mark) -> torch.Tensor:
        memory = self.memory
        memory.still_held += sum(held() is not None for held in memory.held)
        memory.held.clear()
        memory.calls += 1
        rows = len(batch["input_ids"])
        # In backward memory runs out when the head has its gradient already, and the embedding has not.
        hook = self.model.get_submodule("embedding").register_forward_hook(
            lambda _module, _inputs, output: output.register_hook(lambda _gradient: memory.check("backward", rows)) and None
        )
        with hook:
            logits = self.model(batch["input_ids"])
        memory.held.append(weakref.ref(logits))
        memory.check("forward", rows)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        mark.phase = "backward"
        mark.metrics["rows"] = float(rows)
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, number: int) -> Total:
        return self.engine.accumulate(self.data[number])

    @property
    def gradient(self) -> torch.Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters() if parameter.grad is not None])


def test_the_gradient_is_that_of_one_large_batch_however_it_is_cut() -> None:
    whole = Bench(Words(), budget=Budget.sequences(EFFECTIVE_BATCH))
    total = whole.step(0)
    assert len(total.tallies[0].slices) == 1
    for budget in (Budget.sequences(1), Budget.sequences(5), Budget.tokens(40)):
        cut = Bench(Words(), budget=budget)
        other = cut.step(0)
        assert len(other.tallies[0].slices) > 1
        torch.testing.assert_close(cut.gradient, whole.gradient, rtol=1e-12, atol=1e-14)
        assert other.loss == pytest.approx(total.loss, rel=1e-7)
        assert sorted(other.tallies[0].ids) == sorted(total.tallies[0].ids)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("fits", [1, 3, 7])
def test_a_true_limit_is_learned_in_the_first_step_and_changes_no_gradient(phase: str, fits: int) -> None:
    free, tight = Bench(Words()), Bench(Words(), Memory(fits, phase))
    splits = []
    for step in range(8):
        expected, found = free.step(step), tight.step(step)
        torch.testing.assert_close(tight.gradient, free.gradient, rtol=1e-12, atol=1e-14)
        assert sorted(found.tallies[0].ids) == sorted(expected.tallies[0].ids)
        assert max(sequences for sequences, _length in found.tallies[0].slices) <= fits
        splits.append(found.tallies[0].splits)
    assert 1 <= len(splits[0]) <= 3
    assert all(split[0] == phase for split in splits[0])
    assert not any(splits[1:])
    assert len(tight.said) == len(splits[0])


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_each_split_is_one_sentence_with_its_parts(phase: str) -> None:
    bench = Bench(Words(), Memory(phase=phase, always_fails={0}), budget=Budget.sequences(5))
    hardest = bench.data[0].micro[0]
    bench.step(0)
    parts = {2: "1 + 1", 3: "2 + 1", 4: "2 + 2", 5: "3 + 2"}[len(hardest)]
    assert bench.said == [
        f"brim: out of memory in {phase} with {len(hardest)} x {hardest.shape[0]} tokens: now {parts}. Nothing is lost."
    ]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_sequence_that_is_tried_again_has_its_own_sentence(phase: str) -> None:
    bench = Bench(Words(), Memory(phase=phase, always_fails={0}), budget=Budget.sequences(1))
    tokens = bench.data[0].micro[0].shape[0]
    bench.step(0)
    assert bench.said == [
        f"brim: out of memory in {phase} with 1 x {tokens} tokens: freed what can be freed, and tries once more."
    ]


def test_the_limit_climbs_back_when_memory_is_free_again() -> None:
    bench = Bench(Words(), Memory(3))
    bench.step(0)
    assert bench.guard.limit == pytest.approx(3.6)
    bench.memory.sequences = float("inf")
    climbs = 9  # 3.6 x 1.1^9 is above 8
    for step in range(1, climbs * CLIMB_AFTER):
        bench.step(step)
        assert bench.guard.limit < 8
    bench.step(climbs * CLIMB_AFTER)
    assert bench.guard.limit == 8
    slices = bench.step(climbs * CLIMB_AFTER + 1).tallies[0].slices
    assert [sequences for sequences, _length in slices] == [8, 8]


def test_a_climb_that_fails_waits_twice_as_long_for_the_next() -> None:
    bench = Bench(Words(), Memory(3))
    failed_at = [step for step in range(3 * CLIMB_AFTER + 4 * CLIMB_AFTER + 3) if bench.step(step).tallies[0].splits]
    # Two climbs take the limit from 3.6 to 4.4, at which four sequences are tried; then each wait is twice as long.
    assert failed_at == [0, 2 * CLIMB_AFTER + 1, 2 * CLIMB_AFTER + 1 + 2 * 2 * CLIMB_AFTER + 1]
    assert bench.guard.state()["climb_after"] == 4 * CLIMB_AFTER


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_what_a_failed_micro_batch_held_is_free_before_the_next_one_runs(phase: str) -> None:
    bench = Bench(Words(), Memory(phase=phase, always_fails=set(range(0, 400, 5))))
    live = []
    for step in range(24):
        bench.guard.restore({"limit": 8.0, "clean": 0, "climb_after": CLIMB_AFTER})
        bench.step(step % 10)
        bench.engine.clear_gradients()
        gc.collect()
        live.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert bench.memory.failures >= 20
    assert bench.memory.still_held == 0
    assert len(set(live[4:])) == 1, live


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_running_statistics_and_dropout_are_as_if_nothing_had_happened(phase: str) -> None:
    def run(memory: Memory) -> tuple[torch.Tensor, list[torch.Tensor]]:
        bench = Bench(Words(0.3, norm=True), memory, budget=Budget.sequences(1))
        torch.manual_seed(5)
        gradients = []
        for step in range(3):
            bench.step(step)
            gradients.append(bench.gradient)
        return torch.stack(gradients), [buffer.clone() for buffer in bench.model.buffers()]

    gradients, buffers = run(Memory())
    # A single sequence that fails once runs again as it is.
    failing = Memory(phase=phase, always_fails={3, 24, 40})
    again, buffers_again = run(failing)
    assert failing.failures == 3
    assert torch.equal(gradients, again)
    assert all(torch.equal(one, other) for one, other in zip(buffers, buffers_again, strict=True))


def test_random_numbers_of_python_and_numpy_are_put_back_too() -> None:
    drawn: list[tuple[float, float]] = []

    class Drawing(Words):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            drawn.append((random.random(), float(np.random.rand())))
            return super().forward(input_ids)

    bench = Bench(Drawing(), Memory(always_fails={1}), budget=Budget.sequences(1))
    bench.step(0)
    assert drawn[1] == drawn[2]
    assert len(set(drawn)) == EFFECTIVE_BATCH


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_sequence_that_fits_nowhere_is_an_error_and_no_gradient_is_left(phase: str) -> None:
    bench = Bench(Words(), Memory(0, phase))
    hardest = int(bench.data[0].micro[0].ids[0])
    with pytest.raises(
        OutOfMemoryError, match=f"Sequence {hardest} .* does not fit even alone: out of memory in {phase}"
    ) as caught:
        bench.step(0)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Nothing has fitted yet.")
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_an_error_of_loading_is_raised_by_the_step_and_leaves_no_gradient() -> None:
    bench = Bench(Words())
    bench.step(0)
    with pytest.raises(OSError, match="the disk is gone"):
        bench.engine.accumulate(None, OSError("the disk is gone"))
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_another_rank_that_failed_stops_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Words())
    gather: Callable[[Any], list[Any]] = bench.engine.ranks.gather

    def with_a_failed_one(tally: Any) -> list[Any]:
        return [*gather(tally), type(tally)(error="Sequence 7 does not fit.")]

    monkeypatch.setattr(bench.engine.ranks, "gather", with_a_failed_one)
    with pytest.raises(RunError, match="Rank 1 failed, so this step was not taken: Sequence 7 does not fit."):
        bench.step(0)
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_sequences_without_a_supervised_token_count_as_done_and_weigh_nothing() -> None:
    bench = Bench(Words(), budget=Budget.sequences(1))
    item = bench.data[0]
    for micro in item.micro[:5]:
        micro.batch["labels"].fill_(toys.IGNORED)
    total = bench.engine.accumulate(item)
    found = bench.gradient
    assert bench.memory.calls == EFFECTIVE_BATCH - 5
    assert sorted(total.tallies[0].ids) == sorted(item.promised.tolist())
    bench.engine.accumulate(StepItem(item.step, item.promised, item.micro[5:]))
    assert torch.equal(found, bench.gradient)


def test_a_step_without_any_supervised_token_has_no_gradient_and_no_loss() -> None:
    bench = Bench(Words())
    item = bench.data[0]
    for micro in item.micro:
        micro.batch["labels"].fill_(toys.IGNORED)
    total = bench.engine.accumulate(item)
    assert total.items == 0
    assert np.isnan(total.loss)
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def test_other_means_are_weighed_by_items_as_the_loss_is() -> None:
    bench = Bench(Words(), Memory(3))
    total = bench.step(0)
    sizes = [sequences for sequences, _length in total.tallies[0].slices]
    assert min(sizes) <= total.metrics["rows"] <= max(sizes)
    assert total.tallies[0].metric_sums["rows"] == pytest.approx(total.metrics["rows"] * total.items)


def test_the_same_gradient_can_be_made_again_and_what_was_split_is_not_forgotten() -> None:
    bench = Bench(Words(0.3), Memory(always_fails={0}))
    item = bench.data[0]
    torch.manual_seed(5)
    first = bench.engine.accumulate(item)
    gradient, clean = bench.gradient, bench.guard.state()["clean"]
    again = bench.engine.accumulate_again(item)
    assert len(first.tallies[0].splits) == 1
    assert sorted(again.tallies[0].ids) == sorted(first.tallies[0].ids)
    assert again.tallies[0].splits == first.tallies[0].splits
    assert bench.guard.state()["clean"] == clean
    assert again.loss == first.loss
    assert torch.equal(gradient, bench.gradient)
