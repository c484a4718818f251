"""Ctrl-C and SIGTERM: the first asks training to finish its step, save and stop; the second ends it at once.

    with StopOnSignal(trainer) as stop:
        trainer.train()
    stop.stopped_by    # the signal's number, or None

Whoever hears a signal only notes it. What follows happens at the end of a step, where nothing is half done: ranks tell each other in the
talk that they have in every step anyway, so all of them stop at the same one, also where the signal reached a single one. With several
ranks that may be the step after, if the talk of this one was over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Final, Self

from brim.locale import _

if TYPE_CHECKING:
    from types import FrameType

SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
SAME_PRESS_SECONDS: Final = 1.0
"""One Ctrl-C can arrive twice: from the terminal, and from a launcher that hands it on."""


class Wish(IntFlag):
    """What a rank may want all ranks to do at the end of a step."""

    STOP = 1
    SAVE = 2


class StopOnSignal:
    """While it is open, signals stop this trainer in good order.

    Signals belong to the main thread; in another one this does nothing. A signal that whoever started us ignores (nohup, a job in the
    background) stays ignored. The handlers of before come back at the end.
    """

    def __init__(
        self, trainer: Any, *, same_press_seconds: float = SAME_PRESS_SECONDS, signals: tuple[signal.Signals, ...] = SIGNALS
    ) -> None:
        self.stopped_by: int | None = None
        """The first signal that came."""
        self._trainer = trainer
        self._same_press_seconds = same_press_seconds
        self._signals = signals
        self._heard_at = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._trainer.stop_asked_by = None
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_details: object) -> None:
        for number, handler in self._before.items():
            # None: it was set by something that is not Python, and cannot be set from here again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._hear_in_worker(number)
            return
        if self.stopped_by is None:
            self.stopped_by, self._heard_at = number, time.monotonic()
            self._trainer.stop_asked_by = number
            self._say()
        elif time.monotonic() - self._heard_at >= self._same_press_seconds:
            raise KeyboardInterrupt

    def _hear_in_worker(self, number: int) -> None:
        """A loader's worker, forked from us, gets the terminal's Ctrl-C too. It goes on: the step that is being finished needs it.

        The second SIGTERM ends it, as a loader that is shut down wants.
        """
        if number == signal.SIGTERM:
            if self.stopped_by is not None:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self.stopped_by = number

    def _say(self) -> None:
        if self._trainer.args.process_index == 0:
            text = _("brim: finishes this step, saves and stops. Once more ends it at once.")
            # Not by `print`, which may be what was interrupted; and the terminal may be gone.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{text}\n".encode())


def stop_here(trainer: Any) -> None:
    """At the end of a step: save, unless it is saved, and go no further. An evaluation that is due is made when the run goes on."""
    control = trainer.control
    control.should_training_stop = True
    control.should_evaluate = False
    control.should_save = trainer.saved_step != trainer.state.global_step
    number = trainer.stop_asked_by
    trainer.ended_because = (
        _("Another rank was asked to stop.")
        if number is None
        else _("Stopped by {signal}.").format(signal=signal.Signals(number).name)
    )
