"""Ranks exchange plain values, and never pickles.

This file is also the program of two ranks: `torchrun -m tests.step.test_exchange FOLDER`.
"""

from __future__ import annotations

import ast
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import brim
from brim.errors import RunError
from brim.planner.budget import AloneOrSeveral
from brim.step import exchange
from brim.step.budget import Budget, ScaledCost, ShapeCost
from brim.step.engine import Tally
from brim.step.fitting import LargestOf
from brim.step.measured import MeasuredCost
from tests import torchrun

PARTS = LargestOf((ShapeCost(fixed=1.5, per_token=0.1), ShapeCost(per_sequence=2.0)))
VALUES: list[Any] = [
    None, True, 1, 1 << 70, 0.1, math.inf, "a\x1b\ud800é", b"\x00\xff", [1, [2]], (1, (2, "b")), {"a": 1, 2: (3,)},
    Tally(items=3, ids=[1, 2], slices=[(2, 8)], splits=[("backward", 2, 8, 2, None)], gradients=b"\x01"),
    Budget(ScaledCost(AloneOrSeveral(PARTS, PARTS), 0.5), 100, MeasuredCost(PARTS, 1.0, 64, 2.0, ((1, 8),))),
]  # fmt: skip


class _Code:
    """Unpickling this writes a file."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    assert exchange.can_travel(value)
    found = exchange._value_of(exchange._bytes_of(value), 0)
    assert (found, type(found)) == (value, type(value))


def test_numbers_of_numpy_are_numbers() -> None:
    assert exchange._value_of(exchange._bytes_of([np.int64(3), np.float32(0.5)]), 0) == [3, 0.5]


@pytest.mark.parametrize("value", [lambda: None, Path("a"), {1, 2}, object(), math.sqrt])
def test_what_is_not_plain_is_not_sent(value: Any) -> None:
    assert not exchange.can_travel(value)


@pytest.mark.parametrize(
    "said",
    [
        pickle.dumps(_Code()), b"", b"\xff", b"{}", b'{"kind": "os.system", "fields": {"command": "touch unpickled"}}', b"[" * 100_000,
        b'{"kind": "brim.step.engine.Tally", "fields": {"other": 1}}', b'{"kind": "bytes", "base64": "?"}', b'{"kind": ["tuple"]}',
    ],
    ids=range(9),
)  # fmt: skip
def test_what_is_not_of_brims_is_refused(said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="Rank 3 sent something that brim does not understand"):
        exchange._value_of(torch.tensor(list(said), dtype=torch.uint8), 3)
    assert not list(tmp_path.iterdir())


def test_no_module_of_brim_exchanges_pickles() -> None:
    forbidden = {
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
    for path in Path(brim.__file__).parent.rglob("*.py"):
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute | ast.Name)
        }
        assert not names & forbidden, path


def test_two_ranks_exchange_and_refuse_alike(tmp_path: Path) -> None:
    torchrun.on_two_ranks("tests.step.test_exchange", str(tmp_path), seconds=120)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["gathered"] == [[0, "ab"], [1, "abab"]]
        assert found["broadcast"] == {"from": 0}
        assert found["pickle"] == "Rank 1 sent something that brim does not understand"
        assert found["large"] == "Rank 1 sent 105 bytes, and ranks exchange at most 100"
    assert not Path("unpickled").exists()


def _program() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {
        "gathered": exchange.gather((rank, "ab" * (rank + 1))),
        "broadcast": exchange.broadcast({"from": rank} if rank == 0 else None),
    }

    def message_of(value: Any) -> str:
        try:
            exchange.gather(value)
        except RunError as error:
            return error.message.partition(":")[0].rstrip(".")
        return ""

    honest = exchange._bytes_of
    if rank == 1:
        exchange._bytes_of = lambda value: torch.tensor(list(pickle.dumps(_Code())), dtype=torch.uint8)
    found["pickle"] = message_of(0)
    exchange._bytes_of = honest
    exchange.LIMIT_BYTES = 100  # type: ignore[misc]
    found["large"] = message_of("a" * (103 * rank))
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    torchrun.leave()


if __name__ == "__main__":
    _program()
