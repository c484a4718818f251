"""Who owned the memory at the peak, from torch's history walked backwards."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from brim.emulator.agent.peaks import live_at_peak, owner_of


@given(st.lists(st.integers(1, 60), max_size=80), st.randoms(use_true_random=False), st.integers(0, 40))
def test_the_blocks_at_the_peak_are_those_of_a_replay(sizes: list[int], random: Any, forgotten: int) -> None:
    live: dict[int, int] = {}
    events: list[dict[str, Any]] = []
    states: list[dict[int, int]] = [{}]
    for address, units in enumerate(sizes):
        while live and random.random() < 0.4:
            freed = random.choice(sorted(live))
            events.append({"action": "free_requested", "addr": freed, "size": live.pop(freed)})
            states.append(dict(live))
        live[address] = units * 512
        events.append({"action": "alloc", "addr": address, "size": units * 512 - 5, "frames": [{"filename": f"{address}.py"}]})
        states.append(dict(live))
    kept = events[min(forgotten, len(events)) :]
    possible = states[min(forgotten, len(events)) :]
    blocks = [{"state": "active_allocated", "address": address, "size": size} for address, size in live.items()]
    found, frames = live_at_peak([{"device": 0, "blocks": blocks}], kept, 0)
    most = max(sum(state.values()) for state in possible)
    assert sum(found.values()) == most
    assert found in [state for state in possible if sum(state.values()) == most]
    for address in found:
        if any(event["addr"] == address and event["action"] == "alloc" for event in kept):
            assert frames[address] == [{"filename": f"{address}.py"}]


def frame(filename: str, line: int = 1, name: str = "f") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def test_an_owner_is_the_innermost_line_outside_torch_with_the_users_own_line() -> None:
    frames = [
        frame("/env/site-packages/torch/nn/functional.py"),
        frame("/env/site-packages/transformers/models/llama.py", 164, "forward"),
        frame("/env/lib/python3.11/contextlib.py"),
        frame("/home/me/train.py", 31, "main"),
    ]
    assert owner_of(frames, "", ("/env/site-packages/torch",)) == (
        "/env/site-packages/transformers/models/llama.py:164",
        "forward",
        "/home/me/train.py:31",
    )


def test_a_block_without_a_python_frame_belongs_to_the_last_backward() -> None:
    assert owner_of([], "/home/me/train.py:32", ()) == ("/home/me/train.py:32", "backward", "")
    assert owner_of([], "", ()) == ("", "", "")
