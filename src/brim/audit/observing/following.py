"""Follow the runs of a command while it goes on: join the ranks' steps, count them, and keep the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from brim.audit.observing.booking import Began, Book
from brim.audit.observing.configured import Clues, configured, fed
from brim.audit.observing.reading import Reader, Run
from brim.audit.observing.tally import Step, Tally
from brim.errors import BrimError
from brim.records.observations import is_in_other_rows

if TYPE_CHECKING:
    from pathlib import Path

    from brim.records.observations import Configured

Event = dict[str, Any]


@dataclass
class Followed:
    """One run: its sums, its ledger, and the step that waits for the next one to tell whether the data ended with it."""

    run: Run
    tally: Tally = field(default_factory=Tally)
    book: Book | None = None
    is_unwritable: bool = False
    """Whether the ledger could not be begun."""
    held: Step | None = None
    taken: int = 0

    @property
    def settings(self) -> list[Event]:
        """Facts and loaders, of the process that speaks for the run."""
        return self.run.first.settings

    @property
    def clues(self) -> Clues:
        """What the run says of itself."""
        ranks = self.run.world if len(self.run.ranks) == self.run.expected else len(self.run.ranks)
        return Clues(self.run.first.opening.get("argv", ()), self.settings, ranks)

    @property
    def machines(self) -> int:
        """By how much this machine's ranks must be multiplied; 1 where they are all."""
        return max(1, self.run.world // len(self.run.ranks)) if len(self.run.ranks) == self.run.expected else 1

    def configured(self, asked: int | None) -> Configured | None:
        """What was asked for, as far as it is known by now."""
        return configured(self.clues, self.tally.in_force(len(self.run.ranks), self.machines), asked)


class Follower:
    """All runs of one command."""

    def __init__(self, output: Path, events: Path, asked: int | None) -> None:
        self.began = Began.now()
        self.reader = Reader(events)
        self.followed: list[Followed] = []
        self.troubles: list[str] = []
        """What went wrong on our side, in sentences: the command goes on all the same."""
        self._output = output
        self._asked = asked

    def look(self) -> None:
        """Take in what is new. Called now and then, and once more at the end. Never fails: a command runs that must not be left alone."""
        try:
            self._take()
        except Exception as error:  # noqa: BLE001 (whatever it is, the command comes first)
            self._note(error)

    def end(self, *, finished: bool, reason: str) -> None:
        """The command has ended: what was held back is written, and the ledgers are closed."""
        try:
            self._take(at_the_end=True)
        except Exception as error:  # noqa: BLE001 (as above)
            self._note(error)
        for each in self.followed:
            try:
                self._end(each, finished=finished, reason=reason)
            except Exception as error:  # noqa: BLE001 (as above)
                self._note(error)

    def _end(self, each: Followed, *, finished: bool, reason: str) -> None:
        if each.held is not None:
            end = each.run.first.end or {}
            held, each.held = each.held, None
            self._write(each, replace(held, ends_data=held.ends_data or end.get("data_ended") == "before"))
        if each.book is not None:
            each.book.close(finished=finished, reason=reason)

    def _note(self, error: Exception) -> None:
        sentence = error.message if isinstance(error, BrimError) else f"{type(error).__name__}: {error}."
        if sentence not in self.troubles:
            self.troubles.append(sentence)

    def main(self) -> Followed | None:
        """The run that is told about: the longest."""
        return max(self.followed, key=lambda each: each.tally.steps, default=None)

    def _take(self, *, at_the_end: bool = False) -> None:
        self.reader.look()
        for run in self.reader.runs[len(self.followed) :]:
            self.followed.append(Followed(run))
        for each in self.followed:
            for by_rank in each.run.joined(at_the_end=at_the_end):
                self._hold(each, by_rank)

    def _hold(self, each: Followed, by_rank: dict[int, Event]) -> None:
        ended = {event.get("data_ended") for event in by_rank.values()}
        if each.held is not None:
            self._write(each, replace(each.held, ends_data=each.held.ends_data or "before" in ended))
        each.taken += 1
        each.held = Step(each.taken, by_rank, ends_data="here" in ended)

    def _write(self, each: Followed, step: Step) -> None:
        each.tally.add(step)
        if each.book is None and not each.is_unwritable:
            try:
                each.book = self._open(each)
            except (BrimError, OSError) as error:
                each.is_unwritable = True
                self._note(error)
        if each.book is not None:
            each.book.write(step)

    def _open(self, each: Followed) -> Book:
        place = self.followed.index(each)
        name = "ledger.jsonl" if not place else f"ledger-{place + 1}.jsonl"
        asked = each.configured(self._asked)
        batch = each.tally.in_force(len(each.run.ranks), each.machines)
        is_comparable = each.machines == 1 and (
            batch is None or asked is None or not is_in_other_rows(asked, batch, fed(each.settings))
        )
        promised = asked.effective_batch if asked is not None and is_comparable else None
        return Book(
            self._output / name,
            began=self.began,
            promised=promised,
            ranks=len(each.run.ranks),
            first=each.run.first.identity,
            settings=each.settings,
        )
