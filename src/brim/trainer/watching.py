"""No rank waits for one that is gone.

A rank that is inside a collective hears nothing: not an error of another rank, not its death. So each has a thread that listens beside it,
through a client of its own to the store at which the ranks met. A rank that must leave says why there, and leaves; the others find
that word, or find that a process is dead or has been silent for long, and leave as well, within seconds, wherever they are stuck. The first
rank that is left says it once. Process groups cannot be used again after that: who wants to go on, starts anew.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from brim.errors import ChildError
from brim.locale import _

if TYPE_CHECKING:
    from brim.trainer.ranks import World

LOOK_SECONDS: Final = 0.5
SILENT_SECONDS: Final = 60.0
"""Of a rank on another machine: so long without a sign is taken for its end."""
LOST_SECONDS: Final = 15.0
"""Without the store, which the first machine holds."""
MEET_SECONDS: Final = 300.0
"""For all ranks to be there: they have been started by now, and only their imports differ."""
_ANSWER_SECONDS: Final = 10
_NOTICE, _BEAT, _PROCESS, _DONE = "notice", "beat", "process", "done"


@dataclass(frozen=True)
class Notice:
    """Why the ranks leave."""

    rank: int
    """The one that is the reason."""
    message: str
    error: str = "RunError"
    """The class of the error."""
    hint: str | None = None
    is_dead: bool = False
    """Whether that rank could not say it itself."""
    stopped_by: int | None = None
    """The signal, where nothing failed and that rank was asked to stop."""


Leave = Callable[[Notice, bool], Any]
"""`leave(notice, speaks)`: end this process; `speaks` for the first rank that is left."""


class Watch:
    """One rank's ear. Made when the process group is there; `stop` when nothing collective follows."""

    def __init__(self, world: World, leave: Leave) -> None:
        self._world, self._leave = world, leave
        self._store = _client()
        self._ended = threading.Event()
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._heard_at = time.monotonic()
        self._count = 0
        self._store.set(self._key(_PROCESS, world.rank), json.dumps([_machine(), os.getpid(), born(os.getpid())]))
        self._peers = self._everybody()
        self._thread = threading.Thread(target=self._listen, name="brim-watch", daemon=True)
        self._thread.start()

    def tell(self, notice: Notice) -> Notice:
        """This rank is about to leave. The word that was there first counts, and comes back."""
        try:
            if not self._store.check([self._key(_NOTICE)]):
                self._store.set(self._key(_NOTICE), json.dumps(asdict(notice)))
                return notice
            return self._notice() or notice
        except Exception:  # noqa: BLE001 (whatever a store says that is gone: nobody is left to be told)
            return notice
        finally:
            self._ended.set()

    def reason(self, seconds: float) -> Notice | None:
        """Why a collective may have failed here: another rank's word, or its end; None where nothing is known after so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                found = self._notice() or self._dead()
            except Exception:  # noqa: BLE001 (as above)
                return Notice(0, _("The first process is gone, and with it the place where the others meet."), is_dead=True)
            if found is not None:
                return found
            time.sleep(LOOK_SECONDS / 5)
        return None

    def leave(self) -> None:
        """This rank listens no more. It has told why, or the others will miss it."""
        self._ended.set()

    def stop(self) -> None:
        """All that is collective is done: who ends now, ends well."""
        self._ended.set()
        try:
            self._store.set(self._key(_DONE, self._world.rank), "1")
        except Exception:  # noqa: BLE001 (the first rank may have ended already, with the store)
            return

    def _listen(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            try:
                self._beat()
                found = self._notice() or self._dead() or self._silent()
                self._heard_at = time.monotonic()
            except Exception:  # noqa: BLE001 (a store that is busy, or gone)
                if time.monotonic() - self._heard_at < LOST_SECONDS:
                    continue
                found = Notice(0, _("The first process is gone, and with it the place where the others meet."), is_dead=True)
            if found is not None and not self._ended.is_set():
                self._leave(found, self._speaks(found))
                return

    def _notice(self) -> Notice | None:
        if not self._store.check([self._key(_NOTICE)]):
            return None
        return Notice(**json.loads(self._store.get(self._key(_NOTICE))))

    def _beat(self) -> None:
        self._count += 1
        self._store.set(self._key(_BEAT, self._world.rank), str(self._count))

    def _everybody(self) -> dict[int, tuple[str, int, str]]:
        keys = [self._key(_PROCESS, rank) for rank in range(self._world.size)]
        try:
            self._store.wait(keys, dt.timedelta(seconds=MEET_SECONDS))
        except Exception as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            text = _("Of {size} processes, these did not come within {seconds:.0f} seconds: {missing}.")
            said = ", ".join(map(str, missing))
            raise ChildError(text.format(size=self._world.size, seconds=MEET_SECONDS, missing=said)) from error
        return {rank: tuple(json.loads(self._store.get(key))) for rank, key in enumerate(keys)}

    def _dead(self) -> Notice | None:
        """A process of this machine that is no more."""
        here = self._peers[self._world.rank][0]
        for rank, (host, process, born_at) in self._peers.items():
            if host == here and rank != self._world.rank and born(process) != born_at and not self._is_done(rank):
                return self._notice() or Notice(
                    rank,
                    _("Rank {rank} ended without reporting an error: it was killed, or it crashed.").format(rank=rank),
                    is_dead=True,
                )
        return None

    def _silent(self) -> Notice | None:
        """A rank of another machine that gives no sign of life."""
        here, now = self._peers[self._world.rank][0], time.monotonic()
        for rank, (host, _process, _born_at) in self._peers.items():
            if host == here:
                continue
            beat = self._store.get(self._key(_BEAT, rank)) if self._store.check([self._key(_BEAT, rank)]) else b""
            was, since = self._beats.setdefault(rank, (beat, now))
            if beat != was:
                self._beats[rank] = (beat, now)
            elif now - since > SILENT_SECONDS and not self._is_done(rank):
                text = _("Rank {rank} on {host} has not been heard of for {seconds:.0f} seconds.")
                return Notice(rank, text.format(rank=rank, host=host.partition(" ")[0], seconds=now - since), is_dead=True)
        return None

    def _is_done(self, rank: int) -> bool:
        return bool(self._store.check([self._key(_DONE, rank)]))

    def _speaks(self, notice: Notice) -> bool:
        """One rank is enough: the first, or the second where the first is the one that is gone."""
        return self._world.rank == (1 if notice.rank == 0 and notice.is_dead else 0)

    def _key(self, name: str, rank: int | None = None) -> str:
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"brim/{again}/{name}" + ("" if rank is None else f"/{rank}")


def _client() -> Any:
    """A connection of its own: the ranks' is held by whoever waits in it."""
    import torch.distributed as dist

    made: Any = dist
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return made.TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=dt.timedelta(seconds=_ANSWER_SECONDS * 6)
    )


def _machine() -> str:
    """Where a number of a process means the same process: machines and containers may have one name, and each counts for itself."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            str(Path("/proc/self/ns/pid").readlink()),
        ]
    return " ".join(parts)


def born(process: int) -> str:
    """When a process began, in its system's clock: its number may be another's by now. Empty for one that is dead."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, ValueError):
        return "" if sys.platform == "linux" else _exists(process)
    return "" if fields[0] in {"Z", "X"} else fields[19]


def _exists(process: int) -> str:
    try:
        os.kill(process, 0)
    except OSError:
        return ""
    return "here"
