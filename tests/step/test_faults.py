"""Memory runs out at every kind of moment of a run, and nothing is lost, nothing is learned twice, and the right thing is said."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from brim.errors import OutOfMemoryError, RunError
from brim.records import Split
from brim.step.budget import Budget
from brim.step.loop import Steps
from brim.trainer.verifying import last_whole_checkpoint
from tests.step import toys
from tests.step.faults import (
    ASKED_BYTES,
    EFFECTIVE_BATCH,
    SEQUENCES,
    STEPS,
    Fault,
    Ran,
    Where,
    a_trainer,
    adamw,
    own_loop,
    place,
    sequences,
    swiftly,
    tiny,
    trainer_loop,
)  # fmt: skip

TOLERANCE = 1e-5
"""Of the largest weight: other slices round otherwise, and a sequence that is lost changes a thousand times as much."""
OWN: list[tuple[Where, int, int]] = [
    ("forward", 1, 10), ("forward", 2, 4), ("backward", 1, 12), ("backward", 3, 4), ("clip", 1, 3), ("clip", 2, 3),
]  # fmt: skip
TRAINER: list[tuple[Where, int, int]] = [
    ("forward", 1, 4), ("forward", 3, 2), ("backward", 1, 4), ("backward", 2, 2), ("clip", 1, 2), ("clip", 2, 2),
]  # fmt: skip
"""Phase, step, and at how many of its operations, evenly spread."""


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    with swiftly():
        yield


def in_turn(phases: list[tuple[Where, int, int]]) -> list[Any]:
    return [
        pytest.param(where, step, share, shares, id=f"{where}-step{step}-{share + 1}of{shares}")
        for where, step, shares in phases
        for share in range(shares)
    ]


@cache
def clean(dropout: float = 0.0, sequences_at_once: int = 3) -> Ran:
    """The own loop without a fault."""
    return own_loop(dropout=dropout, budget=Budget.sequences(sequences_at_once))


@cache
def operations(where: Where, step: int, foreach: bool = False, sequences_at_once: int = 3) -> int:
    fault = Fault(where, step)
    own_loop(fault, foreach=foreach, budget=Budget.sequences(sequences_at_once))
    assert fault.seen >= 4
    return fault.seen


@pytest.fixture(scope="module")
def clean_trainer(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return trainer_loop(a_trainer(tmp_path_factory.mktemp("clean")))


@pytest.fixture(scope="module")
def trainer_operations(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Where, int], int]:
    @cache
    def count(where: Where, step: int) -> int:
        fault = Fault(where, step)
        trainer_loop(a_trainer(tmp_path_factory.mktemp("count")), fault)
        assert fault.seen >= 4
        return fault.seen

    return count


@pytest.fixture(scope="module")
def clean_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return trainer_loop(a_trainer(tmp_path_factory.mktemp("dropout"), dropout=0.2))


def check_the_promise(ran: Ran, expected: Ran) -> None:
    """Every sequence once, in its step; every step once; the same weights in the end."""
    assert ran.ids == expected.ids
    assert sorted(place for ids in ran.ids for place in ids) == list(range(SEQUENCES))
    assert all(entry.kept() for entry in ran.entries)
    assert ran.steps_taken == len(ran.entries) == STEPS
    assert [entry.loss for entry in ran.entries] == pytest.approx([entry.loss for entry in expected.entries], rel=TOLERANCE)
    assert [entry.grad_norm for entry in ran.entries] == pytest.approx(
        [entry.grad_norm for entry in expected.entries], rel=TOLERANCE
    )
    assert [entry.supervised_tokens for entry in ran.entries] == [entry.supervised_tokens for entry in expected.entries]
    assert ran.farthest(expected) <= TOLERANCE


def check_what_is_told(ran: Ran, where: Where, step: int) -> None:
    """A split is in the ledger with its phase and bytes, and a line on the screen. Clipping splits nothing."""
    splits = ran.entries[step - 1].splits
    assert len(splits) == sum(len(entry.splits) for entry in ran.entries)
    if where == "clip":
        assert not splits
        return
    assert [split.phase for split in splits] == [where]
    assert splits[0].requested_bytes == ASKED_BYTES
    assert [line for line in ran.said if "out of memory in" in line] == [sentence_of(splits[0])]
    assert ran.said[-1].startswith("brim: the promise was kept. ")
    assert f"splits after out of memory: {len(splits)}," in ran.said[-1]
    assert not any("memory" in sentence for sentence in ran.warned)


def sentence_of(split: Split) -> str:
    """What the screen says of it: halves differ by one sequence at most, and one alone cannot be halved."""
    text = f"brim: out of memory in {split.phase} with {split.sequences} x {split.length} tokens: "
    if split.into == 1:
        return text + "freed what can be freed, and tries once more."
    return text + f"now {(split.sequences + 1) // 2} + {split.sequences // 2}. Nothing is lost."


@pytest.mark.parametrize(("where", "step", "share", "shares"), in_turn(OWN))
def test_a_loop_of_ones_own_keeps_its_promise(where: Where, step: int, share: int, shares: int) -> None:
    fault = Fault(where, step, place(share, shares, operations(where, step)))
    ran = own_loop(fault)
    assert fault.raised == 1
    check_the_promise(ran, clean())
    check_what_is_told(ran, where, step)


@pytest.mark.parametrize(("where", "step", "share", "shares"), in_turn(TRAINER))
def test_the_trainer_keeps_its_promise(
    where: Where,
    step: int,
    share: int,
    shares: int,
    tmp_path: Path,
    clean_trainer: Ran,
    trainer_operations: Callable[[Where, int], int],
) -> None:
    fault = Fault(where, step, place(share, shares, trainer_operations(where, step)))
    ran = trainer_loop(a_trainer(tmp_path, eval_strategy="no", save_strategy="no"), fault)
    assert fault.raised == 1
    check_the_promise(ran, clean_trainer)
    check_what_is_told(ran, where, step)


@pytest.mark.parametrize(("where", "step", "share", "shares"), in_turn([("forward", 1, 4), ("backward", 2, 4), ("clip", 2, 3)]))
def test_dropout_draws_again_what_it_drew(where: Where, step: int, share: int, shares: int) -> None:
    """One sequence at a time cannot be split: it runs again as it was, and must then be the same to the last bit."""
    ran = own_loop(
        Fault(where, step, place(share, shares, operations(where, step, sequences_at_once=1))),
        dropout=0.2,
        budget=Budget.sequences(1),
    )
    expected = clean(0.2, 1)
    assert ran.farthest(expected) == 0
    assert [(entry.loss, entry.grad_norm) for entry in ran.entries] == [
        (entry.loss, entry.grad_norm) for entry in expected.entries
    ]
    assert expected.farthest(clean(0.0, 1)) > 1e-3  # dropout does something


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_sequence_that_never_fits_is_named_with_its_length_and_bytes(where: Where) -> None:
    ran = Ran()
    with pytest.raises(OutOfMemoryError) as caught:
        own_loop(Fault(where, 2, 7, times=100), ran=ran)
    # Step 2 begins with its costliest micro-batch, and after splits with the longest of it.
    hardest = max(clean().ids[1], key=lambda one: len(sequences()[one]["input_ids"]))
    tokens = len(sequences()[hardest]["input_ids"])
    assert f"Sequence {hardest} ({tokens} tokens) does not fit even alone: out of memory in {where}" in caught.value.message
    assert "20.0 MiB more asked for" in caught.value.message
    fitted = max(one.length or 0 for one in ran.entries[0].slices)
    assert f"Sequences of up to {fitted} tokens have fitted" in str(caught.value.hint)
    assert (ran.steps_taken, len(ran.entries)) == (1, 1)


def test_clipping_that_never_fits_is_named_and_takes_no_step() -> None:
    ran = Ran()
    with pytest.raises(OutOfMemoryError, match="while the gradient was clipped.*the weights are as they were"):
        own_loop(Fault("clip", 2, 1, times=2), ran=ran)
    assert ran.steps_taken == 1


@pytest.mark.parametrize("share", range(5))
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("step", [1, 2])
def test_memory_that_runs_out_in_the_optimizer_ends_the_run_for_good(step: int, foreach: bool, share: int) -> None:
    model = tiny()
    optimizer = adamw(model, foreach=foreach)
    fault = Fault("optimizer", step, place(share, 5, operations("optimizer", step, foreach)))
    saved: dict[str, Any] = {}
    with fault.around(model, optimizer):
        steps = own_steps(model, optimizer)
        loop = iter(steps)
        for _done in range(step - 1):
            next(loop).run()
            saved = checkpoint(steps, model, optimizer)
        due = next(loop)
        with pytest.raises(OutOfMemoryError, match="Out of memory in the optimizer's step .* half changed") as caught:
            due.run()
        check_that_nothing_goes_on(steps, due)
    assert fault.steps_done == step - 1
    assert all(parameter.grad is None for parameter in model.parameters())
    hint = "Load what was saved with state() after step 1" if step == 2 else "No checkpoint was saved yet: start again."
    assert hint in str(caught.value.hint)
    if step == 2:
        assert resumed(saved, foreach).farthest(own_loop(foreach=foreach)) == 0


def own_steps(model: Any, optimizer: torch.optim.Optimizer, resume: Any = None) -> Steps:
    return Steps(
        sequences(), model, optimizer,
        effective_batch=EFFECTIVE_BATCH, budget=Budget.sequences(3), collate=toys.collate, counting="next-token", resume=resume,
    )  # fmt: skip


def checkpoint(steps: Steps, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parts = {"steps": steps.state(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return cast(
        "dict[str, Any]", torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, parts)
    )


def resumed(saved: dict[str, Any], foreach: bool) -> Ran:
    model = tiny()
    optimizer = adamw(model, foreach=foreach)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for step in own_steps(model, optimizer, saved["steps"]):
        step.run()
    ran = Ran()
    ran.keep(model)
    return ran


def check_that_nothing_goes_on(steps: Steps, due: Any) -> None:
    for attempt in (due.run, steps.state, lambda: next(iter(steps))):
        with pytest.raises(RunError, match="half changed: .* nothing goes on from them"):
            attempt()


@pytest.mark.parametrize(("step", "share"), [(1, 1), (2, 0), (2, 1), (2, 2)])
def test_the_trainer_names_the_last_checkpoint_and_saves_nothing_half_changed(
    step: int, share: int, tmp_path: Path, clean_trainer: Ran, trainer_operations: Callable[[Where, int], int]
) -> None:
    trainer = a_trainer(tmp_path)
    fault = Fault("optimizer", step, place(share, 3, trainer_operations("optimizer", step)))
    with pytest.raises(OutOfMemoryError, match="Out of memory in the optimizer's step .* half changed") as caught:
        trainer_loop(trainer, fault)
    hint = str(caught.value.hint)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{done}" for done in range(1, step)]
    for save in (trainer.save_model, lambda: trainer._save_checkpoint(trainer.model, None), trainer.train):
        with pytest.raises(RunError, match="half changed"):
            save()
    assert not list(tmp_path.glob("*.safetensors"))
    if step == 1:
        assert "No checkpoint was saved yet: start again." in hint
        return
    last = str(tmp_path / "checkpoint-1")
    assert f"go on with resume_from_checkpoint={last!r}" in hint
    ran = trainer_loop(a_trainer(tmp_path), resume=last)
    assert ran.farthest(clean_trainer) == 0
    assert ran.ids == clean_trainer.ids


@pytest.mark.parametrize("share", range(3))
def test_evaluation_halves_its_own_batch_and_training_does_not_notice(
    share: int, tmp_path: Path, clean_with_dropout: Ran, trainer_operations: Callable[[Where, int], int]
) -> None:
    expected = clean_with_dropout
    trainer = a_trainer(tmp_path / "fault", dropout=0.2)
    ran = trainer_loop(trainer, Fault("evaluation", 2, place(share, 3, trainer_operations("evaluation", 2))))
    assert trainer.args.per_device_eval_batch_size == 2
    assert "Evaluation ran out of memory: its batch size goes from 4 to 2. Training goes on as it was." in ran.warned
    assert ran.farthest(expected) == 0
    assert [entry.loss for entry in ran.entries] == [entry.loss for entry in expected.entries]
    assert not ran.splits
    assert [entry.limit for entry in ran.entries] == [3.0] * STEPS
    assert len([line for line in trainer.state.log_history if "eval_loss" in line]) == STEPS


def test_evaluation_that_does_not_fit_with_a_batch_of_one_is_an_error_of_evaluation(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    fault = Fault("evaluation", 2, 3, times=3)
    with pytest.raises(
        OutOfMemoryError, match="Evaluation ran out of memory with a batch of 1. Training is unaffected."
    ) as caught:
        trainer_loop(trainer, fault)
    assert "per_device_eval_batch_size" in str(caught.value.hint)
    assert fault.raised == 3


@pytest.mark.parametrize("share", range(5))
def test_saving_is_tried_once_more_and_then_the_checkpoint_is_whole(
    share: int, tmp_path: Path, clean_trainer: Ran, trainer_operations: Callable[[Where, int], int]
) -> None:
    fault = Fault("saving", 2, place(share, 5, trainer_operations("saving", 2)))
    ran = trainer_loop(a_trainer(tmp_path / "fault"), fault)
    assert fault.raised == 1
    assert "Saving ran out of memory. Freed what can be freed; retrying once." in ran.warned
    check_the_promise(ran, clean_trainer)
    first = tmp_path / "fault" / "checkpoint-1"
    assert trainer_loop(a_trainer(tmp_path / "again"), resume=str(first)).farthest(clean_trainer) == 0


def test_saving_that_fails_twice_is_named_and_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    with pytest.raises(
        OutOfMemoryError, match="Saving the checkpoint of step 2 ran out of memory. In-memory weights are unaffected."
    ):
        trainer_loop(a_trainer(tmp_path), Fault("saving", 3, 4, times=2))
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_that_is_not_about_memory_passes_untouched_and_leaves_no_gradient(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.step.faults.out_of_memory", lambda _number: ValueError("the labels are upside down"))
    model = tiny()
    optimizer = adamw(model)
    fault = Fault(where, 1, operations(where, 1) - 2)
    loop = iter(own_steps(model, optimizer))
    with fault.around(model, optimizer), pytest.raises(ValueError, match="^the labels are upside down$"):
        next(loop).run()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert fault.steps_done == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_trainer_holds_nothing_of_a_failed_micro_batch_when_the_next_one_runs(where: Where, tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, eval_strategy="no", save_strategy="no")
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def begins(*_details: Any) -> None:
        alive.append(sum(one() is not None for one in held))
        held.clear()

    trainer.model.model.register_forward_pre_hook(begins)
    trainer.model.model.norm.register_forward_hook(lambda _module, _inputs, output: held.append(weakref.ref(output)))
    fault = Fault(where, 1, 45)
    trainer_loop(trainer, fault)
    assert fault.raised == 1
    assert len(alive) > 2 * STEPS
    assert not any(alive)
