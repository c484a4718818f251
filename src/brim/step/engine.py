"""One optimizer step on one rank: every micro-batch, whatever the memory does; then the sum over all ranks, once.

    g = 1/N * sum over micro-batches and ranks of d(sum of losses),   N: everything that the losses are means of

A micro-batch returns the mean over its own n items, so it goes backward with the weight n / n_rank; the rank's sum is then scaled by
n_rank / N in the reduction. Both factors are at most 1, so nothing overflows at half precision, and N need not be known before
the end. Out of memory is met inside (see oom.py); what leaves this room is the exact gradient of the promised sequences, or an error
and no gradient at all.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from brim.errors import BrimError, RunError
from brim.locale import _
from brim.step.exchange import travels
from brim.step.micro import Counting, MicroBatch
from brim.step.oom import Failure, Guard, does_not_fit_alone, failure_of, release
from brim.step.randomness import Randomness
from brim.step.squares import GradientSquares, steps_between
from brim.workload.words import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from brim.machine.device import Device
    from brim.step.loading import Collate, StepItem
    from brim.step.ranks import Ranks

_SMALL_BUFFER_BYTES = 1 << 20


@dataclass
class Mark:
    """Where the work on a micro-batch has come to: whoever does it says when backward begins."""

    phase: Phase = "forward"
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the items of this micro-batch that somebody wants to see, besides the loss."""


class Compute(Protocol):
    """Forward, then backward on `weight` times the mean loss. Returns that mean, detached."""

    def __call__(self, batch: Any, items: int, weight: float, mark: Mark) -> torch.Tensor:
        """One micro-batch."""
        ...


@travels
@dataclass
class Tally:
    """What one rank did in one step. Plain values: it travels between ranks."""

    items: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    """In the order in which they ran."""
    slices: list[tuple[int, ...]] = field(default_factory=list)
    """(sequences, padded length), the target's length third."""
    slice_items: list[int] = field(default_factory=list)
    slice_squares: list[float | None] = field(default_factory=list)
    """Of each slice: what its loss is the mean of, and the squared norm of that mean's gradient, where it is wanted."""
    splits: list[tuple[str, int, int, int, int | None]] = field(default_factory=list)
    """(phase, sequences, padded length, into how many, bytes that were asked for)."""
    metric_sums: dict[str, float] = field(default_factory=dict)
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    """Up to the end of the last backward."""
    gradients: bytes = b""
    """Which parameters have one."""
    error: str | None = None


@dataclass(frozen=True)
class Total:
    """What all ranks did in one step."""

    tallies: tuple[Tally, ...]

    @property
    def items(self) -> int:
        """N, the one divisor."""
        return sum(tally.items for tally in self.tallies)

    @property
    def loss(self) -> float:
        """Mean over all items; NaN where there was none."""
        return sum(tally.loss_sum for tally in self.tallies) / self.items if self.items else float("nan")

    @property
    def metrics(self) -> dict[str, float]:
        """The other means over all items."""
        names = {name for tally in self.tallies for name in tally.metric_sums}
        return {name: sum(tally.metric_sums.get(name, 0.0) for tally in self.tallies) / self.items for name in sorted(names)}


@dataclass(frozen=True)
class Ran:
    """One micro-batch that went through."""

    loss: torch.Tensor
    items: int
    metrics: dict[str, float]
    square: torch.Tensor | None


@dataclass(frozen=True)
class _Again:
    """Backward failed: everything once more, in these slices."""

    micro: list[MicroBatch]


class Engine:
    """The guarded accumulation of one rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        compute: Compute,
        *,
        counting: Counting,
        guard: Guard,
        ranks: Ranks,
        device: Device,
        collate: Collate | None = None,
        on_split: Callable[[str], None] = lambda _sentence: None,
        noise_scale: bool | None = False,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`noise_scale`: keep the squared norm of each micro-batch's gradient. None: in some steps, where that costs next to nothing."""
        self.counting = counting
        self.guard = guard
        self.ranks = ranks
        self.device = device
        self.longest_tokens = 0
        """The longest padded row that has gone through."""
        self._compute = compute
        self._collate = collate
        self._on_split = on_split
        self._parameters = ranks.parameters
        self._steps_between = steps_between(noise_scale, self._parameters)
        self._loss_scale = loss_scale
        self._squares: GradientSquares | None = None
        self._torch_device = next(parameter.device for parameter in model.parameters() if parameter.requires_grad)
        self._buffers = [buffer for buffer in model.buffers() if buffer.numel() * buffer.element_size() <= _SMALL_BUFFER_BYTES]
        self._versions = [buffer._version for buffer in self._buffers]  # noqa: SLF001 (torch's own count of writes)
        self._has_run = False
        self._alone: set[int] = set()
        self._last = Total(())

    def accumulate(self, item: StepItem | None, error: Exception | None = None) -> Total:
        """The gradient of the global batch in `.grad`, the same on every rank. `error`: this rank's data could not be loaded.

        No rank waits for one that has failed: each tells how it went before anything is reduced.
        """
        self._restart = self._moment()
        total = self._accumulate(item, error)
        if not total.tallies[self.ranks.rank].splits:
            self.guard.step_was_clean()
        return total

    def accumulate_again(self, item: StepItem) -> Total:
        """The same gradient once more. Several ranks cannot do it on their own: the others are past this step, and gradients are whole."""
        earlier = self._last
        if self.ranks.size > 1:
            return earlier
        self._restart()
        again = self._accumulate(item, None)
        again.tallies[0].splits[:0] = earlier.tallies[0].splits
        return again

    def _accumulate(self, item: StepItem | None, error: Exception | None) -> Total:
        tally = Tally()
        self.clear_gradients()
        if item is not None and error is None:
            try:
                with self._watching(item.step):
                    tally = self._all_micro_batches(item)
            except Exception as raised:  # noqa: BLE001 (told to the other ranks, then raised)
                error = raised
        if error is not None:
            tally.error = error.message if isinstance(error, BrimError) else f"{type(error).__name__}: {error}"
        if self.ranks.size > 1:
            reading = self.device.read()
            tally.peak_allocated_bytes, tally.peak_reserved_bytes = reading.peak_allocated_bytes, reading.peak_reserved_bytes
        tally.gradients = self.ranks.gradients()
        total = Total(tuple(self.ranks.gather(tally)))
        if error is not None:
            self.clear_gradients()
            raise error
        self._stop_if_another_failed(total)
        gradients = self.ranks.merge([each.gradients for each in total.tallies])
        self.ranks.reduce(tally.items / total.items if total.items else 0.0, gradients)
        self._has_run = True
        self._last = total
        return total

    def clear_gradients(self) -> None:
        """No parameter has a gradient: not even zeros, which decay and momentum would act on."""
        for parameter in self._parameters:
            parameter.grad = None

    def _stop_if_another_failed(self, total: Total) -> None:
        for rank, tally in enumerate(total.tallies):
            if tally.error is not None:
                self.clear_gradients()
                raise RunError(_("Rank {rank} failed, so this step was not taken: {why}").format(rank=rank, why=tally.error))

    def _all_micro_batches(self, item: StepItem) -> Tally:
        tally = Tally(items=sum(micro.items(self.counting) for micro in item.micro))
        self._alone.clear()
        outcome: Tally | _Again = _Again(self._allowed(item.micro))
        while isinstance(outcome, _Again):
            outcome = self._pass(outcome.micro, tally)
            if isinstance(outcome, _Again):
                self.clear_gradients()
                self._restart()
        return outcome

    def _pass(self, micro_batches: list[MicroBatch], tally: Tally) -> Tally | _Again:
        """Each micro-batch once; split in forward where it must be. `tally` is complete when all went through."""
        waiting, done = deque(micro_batches), list[MicroBatch]()
        ran: list[Ran] = []
        while waiting:
            micro = waiting.popleft()
            items = micro.items(self.counting)
            if items:
                moment = self._moment()
                outcome = self._attempt(micro, items, items / tally.items)
                if isinstance(outcome, Failure):
                    smaller = self._smaller(micro, outcome, tally)
                    if outcome.phase != "forward":
                        return _Again(self._allowed([*done, *smaller, *waiting]))
                    moment()
                    waiting = deque(self._allowed([*smaller, *waiting]))
                    continue
                ran.append(outcome)
            done.append(micro)
        self._count(tally, done, ran)
        return tally

    def _attempt(self, micro: MicroBatch, items: int, weight: float) -> Ran | Failure:
        mark = Mark()
        if self._squares is not None:
            self._squares.begin()
        try:
            loss = self._compute(micro.batch, items, weight, mark)
            return Ran(loss, items, mark.metrics, None if self._squares is None else self._squares.take())
        except Exception as error:
            failure = failure_of(error, mark.phase)
            if failure is None:
                raise
            release(error, self.device)
        return failure

    def _smaller(self, micro: MicroBatch, failure: Failure, tally: Tally) -> Sequence[MicroBatch]:
        """What takes the place of a micro-batch that failed: its halves; itself once more if it is one sequence, then an error."""
        self.guard.learn(micro)
        if len(micro) == 1:
            alone = int(micro.ids[0])
            if alone in self._alone:
                raise does_not_fit_alone(micro, failure, self.device, self.longest_tokens)
            self._alone.add(alone)
            halves: Sequence[MicroBatch] = (micro,)
        else:
            halves = micro.split(self._collate)
        tally.splits.append((failure.phase, len(micro), micro.shape[0], len(halves), failure.requested_bytes))
        text = _("brim: out of memory in {phase} with {sequences} x {tokens} tokens: now {parts}. Nothing is lost.")
        if len(halves) == 1:
            text = _(
                "brim: out of memory in {phase} with {sequences} x {tokens} tokens: freed what can be freed, and tries once more."
            )
        self._on_split(
            text.format(
                phase=failure.phase,
                sequences=len(micro),
                tokens=micro.shape[0],
                parts=" + ".join(str(len(half)) for half in halves),
            )
        )
        return halves

    def _allowed(self, micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """The same sequences in micro-batches within the limit in force, which may have fallen since they were sliced."""
        found: list[MicroBatch] = []
        waiting = deque(micro_batches)
        while waiting:
            micro = waiting.popleft()
            if self.guard.allows(micro):
                found.append(micro)
            else:
                waiting.extendleft(reversed(micro.split(self._collate)))
        return found

    def _count(self, tally: Tally, done: list[MicroBatch], ran: list[Ran]) -> None:
        done = [micro for micro in done if not micro.is_filler]  # no part of the step
        for micro in done:
            tally.ids += micro.ids.tolist()
            tally.slices.append((len(micro), *micro.shape))
            tally.tokens += micro.tokens
            tally.padded_tokens += micro.padded_tokens
            self.longest_tokens = max(self.longest_tokens, micro.shape[0])
        means = torch.stack([each.loss.detach().float() for each in ran]).tolist() if ran else []
        tally.loss_sum = sum(mean * each.items for mean, each in zip(means, ran, strict=True))
        tally.slice_items = [micro.items(self.counting) for micro in done]
        tally.slice_squares = self._squares_of(tally, ran)
        for each in ran:
            for name, value in each.metrics.items():
                tally.metric_sums[name] = tally.metric_sums.get(name, 0.0) + value * each.items

    @contextmanager
    def _watching(self, step: int) -> Iterator[None]:
        """Keep the squares of this step's gradients, if it is one of those."""
        if self._steps_between is None or step % self._steps_between:
            yield
            return
        self._squares = GradientSquares(self._parameters, self._loss_scale)
        try:
            with self._squares.watching():
                yield
        finally:
            self._squares = None

    def _squares_of(self, tally: Tally, ran: list[Ran]) -> list[float | None]:
        if self._squares is None:
            return [None] * len(tally.slice_items)
        found = iter(self._squares.unscaled([each.square for each in ran], [each.items / tally.items for each in ran]))
        return [next(found) if items else None for items in tally.slice_items]

    def _moment(self) -> Callable[[], None]:
        """Everything that forward changes besides gradients: random numbers, and buffers that move (running statistics)."""
        device = self._torch_device  # not the engine itself: what it keeps may not hold it
        randomness = Randomness.of(device)
        pairs = zip(self._buffers, self._versions, strict=True)
        # In the first step nothing is known yet; later only those that have ever moved.
        moving = [buffer for buffer, version in pairs if not self._has_run or buffer._version != version]  # noqa: SLF001
        copies = [(buffer, buffer.detach().clone()) for buffer in moving]

        def restore() -> None:
            randomness.restore(device)
            with torch.no_grad():
                for buffer, copy in copies:
                    buffer.copy_(copy)

        return restore


def warnings_of(model: torch.nn.Module) -> tuple[str, ...]:
    """What of this model no slicing can keep the same."""
    kinds = (torch.nn.modules.batchnorm._BatchNorm,)  # noqa: SLF001 (what all of them derive from)
    if any(isinstance(module, kinds) and module.training for module in model.modules()):
        return (_("This model normalises over the batch (BatchNorm), so its gradient depends on the slices."),)
    return ()
