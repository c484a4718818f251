"""The step where forward and backward are themselves collective (FSDP2, ZeRO): every rank runs every round, or none goes on.

Parameters are gathered and gradients scattered inside each micro-batch, so a rank that fails in the middle leaves the others waiting, and
cannot try again by itself. Three things follow. All ranks run the same number of rounds; one that has nothing left runs a sequence with
weight zero. The divisor N is agreed upon before the first round, because gradients are summed in each. And out of memory is not met
here: it is an error that says which shape failed, and whoever started the ranks starts them anew from the last checkpoint, with slices that
are smaller than that, on the same global batches.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from brim.errors import BrimError, OutOfMemoryError, RunError
from brim.locale import _, sentences
from brim.step.engine import Compute, Engine, Mark, Ran, Tally, Total
from brim.step.oom import Failure, failure_of, release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from brim.machine.device import Device
    from brim.step.loading import StepItem
    from brim.step.micro import Counting, MicroBatch
    from brim.step.oom import Guard
    from brim.step.ranks import Ranks


class TooLargeError(OutOfMemoryError):
    """A micro-batch ran out of memory on one rank of a group that cannot go on without it."""

    def __init__(self, micro: MicroBatch, failure: Failure, rank: int) -> None:
        text = _("Out of memory in {phase} with {sequences} x {tokens} tokens on rank {rank}.")
        self.phase, self.rank, self.step = failure.phase, rank, 0
        self.shape = tuple(max(1, each) for each in (len(micro), *micro.padded))
        """Sequences, and their padded lengths."""
        super().__init__(
            text.format(phase=failure.phase, sequences=self.shape[0], tokens=self.shape[1], rank=rank), family=failure.family
        )


class RanksApartError(RunError):
    """Something failed on one rank between collectives: the others are in one that will never end, so this rank can only leave."""

    @classmethod
    @contextmanager
    def told(cls, doing: str) -> Iterator[None]:
        """Whatever goes wrong inside."""
        try:
            yield
        except Exception as error:
            why = error.message if isinstance(error, BrimError) else f"{type(error).__name__}: {error}"
            raise cls(sentences(doing, why)) from error


class TogetherEngine(Engine):
    """The rounds of one rank. `begin_round(is_last)` is the sharding engine's; `clear` removes what gradients there are."""

    def __init__(
        self,
        model: torch.nn.Module,
        compute: Compute,
        *,
        counting: Counting,
        guard: Guard,
        ranks: Ranks,
        device: Device,
        begin_round: Callable[[bool], None],
        clear: Callable[[], None],
    ) -> None:
        super().__init__(model, compute, counting=counting, guard=guard, ranks=ranks, device=device)
        self._begin_round, self._clear = begin_round, clear

    def clear_gradients(self) -> None:
        """As the sharding engine does it."""
        self._clear()

    def accumulate_again(self, item: StepItem) -> Total:  # noqa: ARG002
        """Gradients are whole, and ranks cannot make them anew one by one."""
        return self._last

    def _accumulate(self, item: StepItem | None, error: Exception | None) -> Total:
        rounds = () if item is None else item.micro
        self.clear_gradients()
        items = sum(self._items(micro) for micro in rounds)
        total_items = self._agree(items, len(rounds), error)
        tally = Tally(items=items)
        if total_items:
            ran = [
                self._round(micro, total_items, is_last=number == len(rounds), step=0 if item is None else item.step)
                for number, micro in enumerate(rounds, 1)
            ]
            mine = [(micro, one) for micro, one in zip(rounds, ran, strict=True) if len(micro) and one.items]
            self._count(tally, [micro for micro in rounds if len(micro)], [one for _micro, one in mine])
        else:
            self._count(tally, [micro for micro in rounds if len(micro)], [])
        reading = self.device.read()
        tally.peak_allocated_bytes, tally.peak_reserved_bytes = reading.peak_allocated_bytes, reading.peak_reserved_bytes
        self._last = Total(tuple(self.ranks.gather(tally)))
        self._has_run = True
        return self._last

    def _items(self, micro: MicroBatch) -> int:
        return micro.items(self.counting) if len(micro) else 0

    def _agree(self, items: int, rounds: int, error: Exception | None) -> int:
        """N, before the first round. Nothing collective begins while a rank has no data, or has other rounds than the rest."""
        why = None if error is None else error.message if isinstance(error, BrimError) else f"{type(error).__name__}: {error}"
        said = self.ranks.gather((items, rounds, why))
        if error is not None:
            raise error
        for rank, (_items, theirs, trouble) in enumerate(said):
            if trouble is not None:
                raise RunError(_("Rank {rank} failed, so this step was not taken: {why}").format(rank=rank, why=trouble))
            if theirs != rounds:
                text = _("Rank {rank} has {theirs} micro-batches in this step, and rank {other} has {mine}.")
                raise RunError(text.format(rank=rank, theirs=theirs, other=self.ranks.rank, mine=rounds))
        return sum(each for each, _rounds, _why in said)

    def _round(self, micro: MicroBatch, total_items: int, *, is_last: bool, step: int) -> Any:
        """One micro-batch with its weight in the whole global batch; zero where nothing of it counts, but it runs all the same."""
        items = self._items(micro)
        self._begin_round(is_last)
        mark = Mark()
        try:
            loss = self._compute(micro.batch, max(1, items), items / total_items, mark)
        except Exception as error:
            failure = failure_of(error, mark.phase)
            if failure is None:
                raise
            release(error, self.device)
        else:
            return Ran(loss, items, mark.metrics, None)
        trouble = TooLargeError(micro, failure, self.ranks.rank)
        trouble.step = step + 1
        raise trouble
