"""Who holds the memory of a card, as NVML lists it."""

from __future__ import annotations

import os

import pytest

from brim.machine import nvml
from brim.machine.nvml import Card, Process
from brim.machine.sharing import Others, others_of_card, others_on
from brim.sizes import GIB


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    processes: list[Process] = []
    card = Card(0, "Tesla T4", "GPU-1", 16 * GIB, 4 * GIB, "7.5", "580")
    monkeypatch.setattr(nvml, "processes", lambda _index: tuple(processes))
    monkeypatch.setattr(nvml, "cards", lambda: (card,))
    return processes


def test_others_are_all_but_this_process_the_largest_first(listed: list[Process]) -> None:
    listed += [Process(os.getpid(), 6 * GIB, "python"), Process(10, GIB, "Xorg"), Process(11, 5 * GIB, "python")]
    found = others_of_card(0, own_bytes=5 * GIB)
    assert (found.used_bytes, [process.pid for process in found.processes]) == (6 * GIB, [11, 10])
    assert str(found) == "Other processes hold 6.00 GiB of this GPU: python (pid 11) 5.00 GiB, Xorg (pid 10) 1.00 GiB."


def test_where_this_process_is_not_listed_nobody_is_named(listed: list[Process]) -> None:
    listed.append(Process(31337, 6 * GIB, "systemd"))  # a number of the host, seen from a container
    found = others_of_card(0, own_bytes=5 * GIB)
    assert not found.processes
    assert 6 * GIB < found.used_bytes < 7 * GIB
    assert "about" in str(found)


def test_a_process_without_a_context_takes_everybody_for_another(listed: list[Process]) -> None:
    listed.append(Process(11, None))
    assert others_of_card(0) == Others()
    listed[:] = [Process(11, GIB)]
    assert str(others_of_card(0)) == "Other processes hold 1.00 GiB of this GPU: pid 11 1.00 GiB."


def test_many_processes_are_counted(listed: list[Process]) -> None:
    listed += [Process(number, GIB, "python") for number in range(2, 7)]
    assert str(others_of_card(0)).endswith("python (pid 4) 1.00 GiB, 2 more.")


def test_what_cannot_tell_has_no_others() -> None:
    assert others_on(object()) == Others()
    assert str(Others()) == ""
