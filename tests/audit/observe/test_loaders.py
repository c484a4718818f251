"""Whether a loader shuffles, through whatever samplers lie in each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import data

from brim.audit.observer.loaders import _settings

ROWS = list(range(8))


class Wrapped:
    """As accelerate's: a batch sampler that holds another."""

    def __init__(self, inner: Any) -> None:
        self.batch_sampler = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return 0


class Own(data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)


class Drawn(Own):
    generator = torch.Generator()


class Stream(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)


def ranks(*, shuffle: bool) -> data.Sampler[int]:
    return data.DistributedSampler(ROWS, num_replicas=2, rank=0, shuffle=shuffle)  # type: ignore[arg-type]


def wrapped(sampler: data.Sampler[int]) -> Any:
    return Wrapped(data.BatchSampler(sampler, 2, drop_last=False))


@pytest.mark.parametrize(
    ("arguments", "shuffles"),
    [
        ({"shuffle": True}, True),
        ({}, False),
        ({"sampler": ranks(shuffle=True)}, True),
        ({"sampler": ranks(shuffle=False)}, False),
        ({"sampler": data.WeightedRandomSampler([1.0] * 8, 8)}, True),
        ({"batch_sampler": wrapped(data.RandomSampler(ROWS))}, True),
        ({"batch_sampler": wrapped(data.SequentialSampler(ROWS))}, False),
        ({"sampler": Own()}, None),
        ({"sampler": Drawn()}, True),
        ({"batch_sampler": [[0, 1], [2, 3]]}, None),
    ],
    ids=["asked", "plain", "ranks", "ranks-in-order", "weighted", "wrapped", "wrapped-in-order", "own", "drawn", "list"],
)
def test_a_sampler_shows_whether_the_order_is_random_or_nothing_is_said(arguments: dict[str, Any], shuffles: bool | None) -> None:
    assert _settings(torch, data.DataLoader(ROWS, **arguments))["shuffle"] is shuffles  # type: ignore[arg-type]


def test_of_a_stream_the_order_is_not_known() -> None:
    assert _settings(torch, data.DataLoader(Stream()))["shuffle"] is None


def test_the_seedable_sampler_of_accelerate_shuffles() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    loader: Any = data.DataLoader(ROWS, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    prepared = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    assert _settings(torch, prepared)["shuffle"] is True
