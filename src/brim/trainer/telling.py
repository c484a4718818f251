"""What a person is told: what is in force before the first step, one line now and then, and promise against fact at the end."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from brim.locale import _
from brim.machine.screen import redraw, say
from brim.sizes import format_bytes
from brim.trainer.words import format_seconds

if TYPE_CHECKING:
    from brim.records import RunCard

_HEARTBEAT_SECONDS = 30.0
_LIVE_SECONDS = 0.5
_RECENT = 20


class TellProgress(TrainerCallback):
    """A line at every logging step; on a terminal one more, which lives; elsewhere a sign of life twice a minute."""

    def __init__(self, card: RunCard, trainer: Any) -> None:
        import weakref

        self._card = card
        self._trainer: Any = weakref.proxy(trainer)
        self._is_live = sys.stderr is not None and sys.stderr.isatty()
        self._began = self._told = time.monotonic()
        self._first_step = 0
        self._step_began = self._began
        self._steps: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        """Tokens and seconds of the last steps: saving and evaluating are not in them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:  # noqa: ARG002 (the Trainer's names)
        """From where the rate and the time that is left are counted."""
        self._began = self._told = time.monotonic()
        self._first_step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:  # noqa: ARG002 (the Trainer's names)
        """The data is there."""
        self._step_began = time.monotonic() - self._trainer.running.wait_seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:  # noqa: ARG002 (the Trainer's names)
        """A sign of life."""
        total = self._trainer.running.total
        now = time.monotonic()
        self._steps.append((sum(tally.tokens for tally in total.tallies), now - self._step_began))
        if not self._is_live and self._is_logged(state.global_step):
            return
        if now - self._told < (_LIVE_SECONDS if self._is_live else _HEARTBEAT_SECONDS):
            return
        self._told = now
        line = self._line(state, total.loss)
        if self._is_live:
            redraw(line)
        else:
            say(line)

    def _is_logged(self, step: int) -> bool:
        """Whether the Trainer itself tells of this step in a moment."""
        return step in {1, self._card.total_steps} or step % self._card.options.logging_steps == 0

    def on_log(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:  # noqa: ARG002 (the Trainer's names)
        """What the Trainer logs, in one line."""
        logs: dict[str, float] = keywords.get("logs") or {}
        if "eval_loss" in logs:
            self._clear()
            others = "".join(f", {name.removeprefix('eval_')} {logs[name]:.4f}" for name in logs if name == "eval_accuracy")
            text = _("Evaluation after step {step}: loss {loss:.4f}{others}")
            say(text.format(step=state.global_step, loss=logs["eval_loss"], others=others))
        elif "loss" in logs:
            self._clear()
            self._told = time.monotonic()
            say(self._line(state, self._trainer.running.total.loss))

    def on_save(self, *_details: Any, **_keywords: Any) -> None:
        """A checkpoint is complete."""
        self._clear()

    def _line(self, state: Any, loss: float) -> str:
        seconds = max(1e-9, time.monotonic() - self._began)
        done = max(1, state.global_step - self._first_step)
        left = (self._card.total_steps - state.global_step) * seconds / done
        text = _("Step {step} of {total}: loss {loss:.4f}, {rate:,.0f} tokens/s, {memory}, {left} left")
        return text.format(
            step=state.global_step,
            total=self._card.total_steps,
            loss=loss,
            rate=sum(tokens for tokens, _seconds in self._steps) / max(1e-9, sum(took for _tokens, took in self._steps)),
            memory=self._memory(),
            left=format_seconds(left),
        )

    def _memory(self) -> str:
        reading = self._trainer.running.device.read()
        used, limit = reading.peak_reserved_bytes, self._card.memory_limit_bytes
        if self._card.predicted is not None:
            # The limit of a card counts the context too.
            used += self._card.predicted.by_kind.get("context", 0)
        if limit is None:
            return format_bytes(used)
        return _("{used} of {limit}").format(used=format_bytes(used), limit=format_bytes(limit))

    def _clear(self) -> None:
        if self._is_live:
            redraw()
