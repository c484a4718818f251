"""Where nothing is left for a rank, it runs a batch from which nothing is learnt, because the others run one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from brim.step.batch import BatchPlan
from brim.step.budget import Budget
from brim.step.loading import StepDataset, StepItem
from brim.step.micro import IGNORED, Counting, MicroBatch, filler
from brim.step.oom import Guard
from tests.step import toys
from tests.step.test_engine import Bench, Words


def steps_of(rank: int, *, together: bool = True, budgets: list[Budget] | None = None, effective_batch: int = 2) -> StepDataset:
    data = toys.data(20)
    lengths = [len(row["input_ids"]) for row in data]
    plan = BatchPlan(lengths, effective_batch=effective_batch, ranks=3, together=together)
    return StepDataset(data, toys.collate, plan, Guard((budgets or [Budget.tokens(4096)])[0]), rank, budgets=budgets)


def test_two_sequences_on_three_ranks_leave_a_filler_for_one_of_them() -> None:
    items: list[StepItem] = [steps_of(rank)[4] for rank in range(3)]
    assert [len(item.micro) for item in items] == [1, 1, 1]
    (only,) = [item.micro[0] for item in items if item.micro[0].is_filler]
    others = [item.micro[0] for item in items if not item.micro[0].is_filler]
    assert sorted(place for micro in others for place in micro.ids.tolist()) == sorted(items[0].promised.tolist())
    shortest = min(others, key=lambda micro: micro.tokens)
    assert torch.equal(only.batch["input_ids"], shortest.batch["input_ids"])
    assert (only.batch["labels"] == IGNORED).all()
    assert not (shortest.batch["labels"] == IGNORED).all(), "the sequence itself keeps its labels"


@pytest.mark.parametrize("counting", ["next-token", "token", "sequence"])
@pytest.mark.parametrize("lengths", [np.array([5]), np.array([[5, 5]])], ids=["one length", "with targets"])
def test_a_filler_counts_for_nothing(lengths: Any, counting: Counting) -> None:
    like = MicroBatch(np.array([7]), lengths, toys.collate(toys.data(1)))
    found = filler(like)
    assert (len(found), found.ids.tolist(), found.items(counting), found.tokens, found.padded_tokens) == (0, [], 0, 0, 0)
    assert found.padded == (0,) * lengths.ndim
    assert found.shape[0] == like.batch["input_ids"].shape[1]
    assert Guard(Budget(lambda count, *_lengths: 1e9 + count, 1.0, lambda count, *_lengths: 1.0 * count)).allows(found)
    assert not like.is_filler


def test_the_gradient_of_a_filler_is_exactly_zero_in_decoders_and_in_seq2seq() -> None:
    decoder = toys.model()
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    t5: Any = T5ForConditionalGeneration(T5Config(vocab_size=toys.VOCABULARY, **sizes))
    for model in (decoder, t5):
        batch = filler(MicroBatch(np.array([0]), np.array([5]), toys.collate(toys.data(1)))).batch
        (model(**batch).loss * 0.0).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert gradients
        assert all(bool((gradient == 0).all()) for gradient in gradients)


def test_a_filler_is_no_part_of_what_a_step_writes_down() -> None:
    bench = Bench(Words())
    item = bench.data[0]
    wanted = bench.engine.accumulate(item)
    gradient = bench.gradient.clone()
    found = bench.engine.accumulate(replace(item, micro=(*item.micro, filler(item.micro[-1]))))
    for name in ("ids", "slices", "slice_items", "tokens", "padded_tokens", "items", "loss_sum"):
        assert getattr(found.tallies[0], name) == getattr(wanted.tallies[0], name), name
    assert torch.equal(bench.gradient, gradient)


def test_what_one_rank_has_learned_cuts_its_own_share_finer_and_leaves_the_shares_as_they_are() -> None:
    budgets = [Budget.tokens(limit) for limit in (200, 400, 800)]
    steps = [steps_of(rank, together=False, budgets=budgets, effective_batch=18) for rank in range(3)]
    before = [steps[rank][0].micro for rank in range(3)]
    steps[2].guard.learn(before[2][0])
    after = [steps[rank][0].micro for rank in range(3)]

    def share(micro: tuple[MicroBatch, ...]) -> list[int]:
        return sorted(place for one in micro for place in one.ids.tolist())

    assert [share(micro) for micro in after] == [share(micro) for micro in before]
    assert max(budgets[2].cost_of(len(one), *one.padded) for one in after[2]) <= steps[2].guard.limit < budgets[2].limit
    together = steps_of(2, budgets=budgets, effective_batch=18)
    sliced = [micro.ids.tolist() for micro in together[0].micro]
    together.guard.learn(before[2][0])
    assert [micro.ids.tolist() for micro in together[0].micro] == sliced, "all ranks must run equally many"
