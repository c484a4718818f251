"""Two real processes, one optimizer step: the gradient of one large batch, the same on both, and never a wait without an end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import UnsupportedError
from brim.step.ranks import Ranks
from tests import torchrun
from tests.conftest import once
from tests.step import ranks_program as program
from tests.step.ranks_program import agreement, big_batch_gradient, is_exact

Both = dict[str, list[Any]]
"""What the two ranks found, by scenario."""

HEALTHY = (
    "plain", "wrapped", "wrapped_and_several_windows", "uncounted", "nothing_on_one", "half_precision", "overflow_on_one",
    "other_branches", "sums", "talk",
)  # fmt: skip
TOGETHER_OR_NOT_AT_ALL = ("sparse", "mixed_use", "other_scales", "other_models", "other_weights", "windows_differ")
"""Scenarios in which both ranks must stop, and go on with the next."""
LIMITED = ("no_memory_on_one",) if sys.platform == "linux" else ()
SCENARIOS = (*HEALTHY, *TOGETHER_OR_NOT_AT_ALL, *LIMITED)


@pytest.fixture(scope="module")
def both(shared: Path) -> Both:
    """All in one pair of processes: imports are most of the time."""
    folder = shared / "ranks"
    once(folder, lambda: torchrun.on_two_ranks(program.__name__, str(folder), *SCENARIOS, seconds=240))
    return {name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)] for name in SCENARIOS}


@pytest.mark.parametrize("scenario", ["plain", "wrapped"])
def test_two_ranks_with_unequal_windows_of_unequal_tokens_have_the_gradient_of_one_batch(both: Both, scenario: str) -> None:
    rows = program.ragged_rows(12)
    wanted, loss = big_batch_gradient(program.llama(), rows)
    shares = [sum(int(program.items_in(part)) for part in program.of_two(program.single(rows), rank)) for rank in range(2)]
    assert shares[0] > 2 * shares[1]
    for found in both[scenario]:
        assert len(found["gradients"]) == 1
        assert is_exact(found["gradients"][0], wanted)
        updated, average = next(answer for answer in found["answers"] if answer[0])
        assert updated
        assert average == pytest.approx(loss, rel=1e-5)
    same_weights(both[scenario])


def same_weights(ranks: list[Any]) -> None:
    """Bit for bit, or ranks would part."""
    for name, weight in ranks[0]["weights"].items():
        assert torch.equal(weight, ranks[1]["weights"][name]), name


def test_what_each_rank_would_average_by_itself_is_another_gradient() -> None:
    rows = program.single(program.ragged_rows(12))
    model = program.llama()
    for rank in range(2):
        share = program.of_two(rows, rank)
        for micro_batch in share:
            (program.mean_loss(model, micro_batch) / len(share) / 2).backward()  # type: ignore[no-untyped-call]
    averaged = {name: parameter.grad for name, parameter in model.named_parameters()}
    wanted, _loss = big_batch_gradient(program.llama(), program.ragged_rows(12))
    assert agreement(averaged, wanted)[0] < 0.99


def test_several_clipped_steps_on_two_ranks_end_where_single_batches_end(both: Both) -> None:
    alone = program.run_windows(program.llama(), [program.ragged_rows(10, seed) for seed in range(3)], 1)
    same_weights(both["wrapped_and_several_windows"])
    found = both["wrapped_and_several_windows"][0]
    assert len(found["gradients"]) == 3
    assert found["norm"] == pytest.approx(alone["norm"], rel=1e-4)
    losses = [loss for updated, loss in found["answers"] if updated]
    assert losses == pytest.approx([loss for updated, loss in alone["answers"] if updated], rel=1e-4)
    for name, weight in alone["weights"].items():
        assert torch.allclose(found["weights"][name], weight, rtol=0, atol=1e-4 * float(weight.abs().max())), name


def test_without_counts_micro_batches_of_all_ranks_weigh_the_same(both: Both) -> None:
    wanted, _loss = big_batch_gradient(program.llama(), program.equal_rows(8), max_norm=1.0)
    assert all(is_exact(found["gradients"][0], wanted) for found in both["uncounted"])


@pytest.mark.parametrize("scenario", ["nothing_on_one", "half_precision"])
def test_a_rank_without_a_micro_batch_takes_the_step_of_the_others(both: Both, scenario: str) -> None:
    wanted, loss = big_batch_gradient(program.llama(), program.ragged_rows(6))
    for found in both[scenario]:
        assert is_exact(found["gradients"][0], wanted)
        assert found["answers"][-1] == (True, pytest.approx(loss, rel=1e-5))
    assert len(both[scenario][1]["answers"]) == 1
    same_weights(both[scenario])


def test_an_overflow_on_one_rank_is_skipped_by_all(both: Both) -> None:
    assert both["overflow_on_one"] == [(False, True, 512.0)] * 2


def test_what_one_rank_does_not_use_counts_as_zeros_and_what_none_uses_is_not_touched(both: Both) -> None:
    before = {name: parameter.detach() for name, parameter in program.Branches().named_parameters()}
    for gradients, weights in both["other_branches"]:
        (found,) = gradients
        # Three items on rank 0, one on rank 1; each branch's gradient is 1 for every input.
        assert torch.equal(found["branches.0.weight"], torch.full((1, 3), 0.75))
        assert torch.equal(found["branches.1.weight"], torch.full((1, 3), 0.25))
        assert found["branches.2.weight"] is None
        assert torch.equal(weights["branches.2.weight"], before["branches.2.weight"])
        assert not torch.equal(weights["branches.1.weight"], before["branches.1.weight"])


def test_every_sort_of_gradient_is_summed_through_buffers_of_every_size(both: Both) -> None:
    parts = [program.tensors(rank) for rank in range(2)]
    for rank in range(2):
        for found in both["sums"][rank].values():
            assert found["nowhere"] is None
            for name in parts[0].keys() - {"nowhere"}:
                given = [(part[name], scale) for part, scale in zip(parts, program.SCALES, strict=True)]
                present = [(tensor, scale) for tensor, scale in given if tensor is not None]
                wide = torch.promote_types(present[0][0].dtype, torch.float32)
                wanted = torch.stack([tensor.to(wide) * scale for tensor, scale in present]).sum(0)
                # 16 bits are rounded once, at the end.
                assert torch.equal(found[name], wanted.to(present[0][0].dtype)), name


def test_ranks_hear_each_other_in_order(both: Both) -> None:
    said = [{"rank": 0, "text": ""}, {"rank": 1, "text": "ab"}]
    assert both["talk"] == [(0, 2, said), (1, 2, said)]


def test_a_sparse_gradient_is_refused_by_both_ranks_and_neither_waits(both: Both) -> None:
    found = both["sparse"]
    assert found[0] == found[1]
    for message in found[0]:
        assert message.startswith("UnsupportedError: The gradient of the parameter with shape [7, 2] is sparse")


def test_ranks_that_cannot_go_on_together_all_stop_and_none_waits(both: Both) -> None:
    for name, message in {
        "mixed_use": "UsageError: Some ranks gave num_items",
        "other_scales": "UsageError: The ranks' gradient scalers differ: 16, 32",
        "other_models": "UsageError: The ranks hold different parameters",
    }.items():
        assert all(text.startswith(message) for text in both[name]), both[name]

    assert all("begins with other weights than rank" in text for text in both["other_weights"])

    together = dict(zip(program.WINDOWS, zip(*both["windows_differ"], strict=True), strict=True))
    for counts, updates in {(4, 4): 2, (3, 4): 2, (4, 3): 2, (2, 4): 2, (0, 1): 1, (0, 0): 0}.items():
        assert together[counts] == (("no error", updates),) * 2, counts
    for counts, ended in {(2, 5): 0, (6, 1): 1}.items():
        message = f"RunError: Rank {ended} has taken its last optimizer step, and rank {1 - ended} has micro-batches left."
        assert [text for text, _updates in together[counts]] == [message] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited through RLIMIT_DATA, which only Linux has")
def test_a_rank_without_memory_for_its_gradients_stops_all_and_none_waits(both: Both) -> None:
    (first, here, kept), (second, there, nothing) = both["no_memory_on_one"]
    assert (first, kept) == ("OutOfMemoryError", 1.0)
    assert here.startswith("Rank 1 could not prepare its gradients: ")
    assert (second, nothing) == ("RuntimeError", None)
    assert "can't allocate memory" in there


def test_one_process_scales_in_place_and_talks_to_itself() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    unused = nn.Parameter(torch.zeros(3))
    ranks = Ranks([parameter, unused, parameter])
    assert (ranks.rank, ranks.size, ranks.gather("fact")) == (0, 1, ["fact"])
    parameter.grad = gradient = torch.tensor([1.0, 2.0, 4.0])
    ranks.reduce(0.5)
    assert parameter.grad is gradient
    assert gradient.tolist() == [0.5, 1.0, 2.0]
    assert unused.grad is None


def test_one_process_refuses_a_sparse_gradient_too() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match=r"shape \[5, 2\] is sparse") as caught:
        Ranks(list(embedding.parameters())).reduce(1.0)
    assert caught.value.hint == "Build the embedding with sparse=False."


def test_a_model_of_which_each_rank_holds_a_piece_is_refused() -> None:
    piece = nn.Parameter(torch.zeros(3))
    piece.device_mesh = "as sharded tensors have it"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="sharded over ranks"):
        Ranks([piece])
