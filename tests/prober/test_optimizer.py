"""`BatchSizeOptimizer`: it returns a size that ran, and leaves everything as it was, to the bit."""

from __future__ import annotations

import copy
import random
import resource
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from brim import BatchSizeOptimizer
from brim.errors import OutOfMemoryError, RunError, UsageError
from brim.sizes import GIB
from tests.prober.recoveries import swiftly
from tests.prober.subjects import Plain

TOO_MUCH = 1 << 40
"""Numbers that no machine has room for."""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits allocations on Linux only")


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    with swiftly():
        yield


@pytest.fixture(autouse=True)
def _one_server(one_server: None) -> None:
    """Trials of models that can travel run in the server of all tests."""


class State:
    """Everything that a search must leave as it was."""

    def __init__(self, model: nn.Module, dataset: Any) -> None:
        self._model, self._dataset, self._items = model, dataset, copy.deepcopy(list(dataset))
        self._tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self._grads = [(weight.grad, None if weight.grad is None else weight.grad.clone()) for weight in model.parameters()]
        self._modes = [module.training for module in model.modules()]
        self._generators = self._draw()

    def _draw(self) -> tuple[Any, ...]:
        numbers: Any = np.random.get_state()
        return (random.getstate(), numbers[1].tobytes(), numbers[2:], torch.get_rng_state().tolist())

    def assert_unchanged(self) -> None:
        now = self._model.state_dict()
        assert now.keys() == self._tensors.keys()
        assert all(same_bits(now[name], tensor) for name, tensor in self._tensors.items())
        for weight, (grad, values) in zip(self._model.parameters(), self._grads, strict=True):
            assert weight.grad is grad
            assert grad is None or same_bits(grad, values)
        assert [module.training for module in self._model.modules()] == self._modes
        assert self._draw() == self._generators
        assert len(self._dataset) == len(self._items)
        assert all(same_items(one, other) for one, other in zip(self._dataset, self._items, strict=True))


def same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


def same_items(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_items(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return all(map(same_items, one, other))
    return torch.equal(one, other)


def pairs(count: int, length: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (length,), generator=numbers) for _item in range(count)]
    return [(each, each.roll(-1)) for each in tokens]


def with_a_past(model: nn.Module) -> nn.Module:
    """Gradients of somebody's, and modes that differ."""
    for number, weight in enumerate(model.parameters()):
        if number % 2:
            weight.grad = torch.randn_like(weight)
    model.eval()
    next(model.children()).train()
    return model


def of_a_notebook(most: int, *, fails_in: str = "forward") -> tuple[nn.Module, Any]:
    """A model and an optimizer that no child can receive, and that hold `most` items at once."""

    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.drop, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 64)
            self.register_buffer("calls", torch.zeros(1))
            self.size = 0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.size = len(tokens)
            self.get_buffer("calls").add_(1)
            if fails_in == "forward" and self.size > most:
                torch.ones(TOO_MUCH)
            random.random(), np.random.rand()
            logits: torch.Tensor = self.head(self.drop(self.norm(self.layer(tokens.float()))))
            return logits

    class Greedy(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for weight in group["params"][:3]:
                    weight.data.add_(1.0)
            if fails_in == "optimizer" and model.size > most:
                torch.ones(TOO_MUCH)
            return super().step(closure)

    model = Limited()
    return model, lambda parameters: Greedy(parameters, lr=0.1)


def of_eight(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(tokens, torch.tensor(number % 64)) for number, (tokens, _targets) in enumerate(pairs(count))]


@on_linux
def test_in_a_child_a_real_limit_is_found_and_nothing_changes() -> None:
    torch.manual_seed(3)
    model, dataset, lines = with_a_past(Plain()), pairs(64, length=512), list[str]()
    state = State(model, dataset)
    finder = BatchSizeOptimizer(model, "cpu", memory="24MiB", say=lines.append)
    found = finder.find_optimal_batch_size(dataset, start_batch_size=2, max_batch_size=64)
    state.assert_unchanged()
    verdicts = {trial.micro_batch: trial.verdict for trial in finder.trials}
    assert 2 <= found < 64
    assert verdicts[found] == "ok"
    assert all(verdict == "out-of-memory" for size, verdict in verdicts.items() if size > found)
    assert [size for size, _gib in finder.memory_usage_history] == [size for size, verdict in verdicts.items() if verdict == "ok"]
    assert all(0 < gib < 24 / 1024 for _size, gib in finder.memory_usage_history)
    assert len(lines) == len(finder.trials)
    assert all(line.startswith(f"Batch size {trial.micro_batch}: ") for line, trial in zip(lines, finder.trials, strict=True))


@pytest.mark.parametrize("fails_in", ["forward", "optimizer"])
def test_what_cannot_travel_is_tried_here_and_put_back_to_the_bit(fails_in: str) -> None:
    torch.manual_seed(3)
    model, optimizer = of_a_notebook(4, fails_in=fails_in)
    dataset = of_eight(16)
    state = State(with_a_past(model), dataset)
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    finder = BatchSizeOptimizer(model, optimizer=optimizer, say=lambda text: None)
    assert finder.find_optimal_batch_size(dataset, start_batch_size=4, max_batch_size=8) == 4
    state.assert_unchanged()
    assert finder.trials[-1].verdict == "out-of-memory"
    assert finder.trials[-1].phase == fails_in
    assert resource.getrlimit(resource.RLIMIT_DATA) == limit


def test_one_line_for_each_size_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = of_a_notebook(5)
    finder = BatchSizeOptimizer(model, optimizer=optimizer)
    assert finder.find_optimal_batch_size(of_eight(16), start_batch_size=16, max_batch_size=16) == 5
    sizes = [trial.micro_batch for trial in finder.trials]
    assert sizes[0] == 16
    assert sorted(sizes) != sizes
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in printed] == [
        f"Batch size {size}: " + ("ok" if size <= 5 else "out-of-memory in forward") for size in sizes
    ]
    assert {size for size, gib in finder.memory_usage_history} == {size for size in sizes if size <= 5}
    assert all(0 <= gib * GIB < GIB for _size, gib in finder.memory_usage_history)


def test_no_size_above_the_maximum_or_the_data_is_tried() -> None:
    lines: list[str] = []
    model, optimizer = of_a_notebook(99)
    finder = BatchSizeOptimizer(model, optimizer=optimizer, say=lines.append)
    assert finder.find_optimal_batch_size(of_eight(9), max_batch_size=3) == 3
    assert max(trial.micro_batch for trial in finder.trials) == 3
    assert finder.find_optimal_batch_size(of_eight(2), max_batch_size=3) == 2
    assert any("The data have 2 items" in line for line in lines)


def test_a_second_search_begins_anew() -> None:
    model, optimizer = of_a_notebook(99)
    finder = BatchSizeOptimizer(model, optimizer=optimizer, say=lambda text: None)
    finder.find_optimal_batch_size(of_eight(4), start_batch_size=4, max_batch_size=4)
    finder.find_optimal_batch_size(of_eight(4), start_batch_size=2, max_batch_size=2)
    assert [size for size, _gib in finder.memory_usage_history] == [2]


def test_items_that_are_dictionaries_are_passed_by_name() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
            self.seen: set[tuple[int, ...]] = set()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(self.words(input_ids))
            assert input_ids.shape == labels.shape
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    dataset = [{"input_ids": tokens, "labels": targets} for tokens, targets in pairs(4)]
    state = State(model := ByName(), dataset)
    assert BatchSizeOptimizer(model, say=lambda text: None).find_optimal_batch_size(dataset, 2, 4) == 4
    state.assert_unchanged()


def test_sequences_of_different_lengths_are_padded_and_the_longest_are_tried() -> None:
    seen: list[int] = []

    class Ragged(Plain):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            seen.append(tokens.shape[1])
            return super().forward(tokens)

    dataset = [(torch.arange(length) % 64, torch.arange(length) % 64) for length in (3, 9, 5, 12, 4)]
    assert BatchSizeOptimizer(Ragged(8), say=lambda text: None).find_optimal_batch_size(dataset, 2, 5) == 5
    assert set(seen) == {12}


def test_a_loss_of_ones_own_and_a_collation_of_ones_own() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(numbers)
            return found

    dataset = [([1.0, 2.0, number], float(number)) for number in range(6)]

    def collate(items: list[Any]) -> Any:
        return torch.tensor([item[0] for item in items]), torch.tensor([[item[1]] for item in items])

    finder = BatchSizeOptimizer(Regression(), collate_fn=collate, say=lambda text: None)
    assert finder.find_optimal_batch_size(dataset, 3, 6, loss_fn=nn.functional.mse_loss) == 6


def test_a_layer_that_refuses_a_batch_of_one_gets_two() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 64)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.norm(self.layer(numbers.float())))
            return logits

    state = State(model := Normed(), dataset := of_eight(5))
    finder = BatchSizeOptimizer(model, say=lambda text: None)
    assert finder.find_optimal_batch_size(dataset, max_batch_size=5) == 5
    assert [trial.verdict for trial in finder.trials][:2] == ["crash", "ok"]
    state.assert_unchanged()


def test_an_optimizer_that_exists_lends_its_kind_and_is_not_stepped() -> None:
    model, _optimizer = of_a_notebook(99)
    mine = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    assert BatchSizeOptimizer(model, optimizer=mine, say=lambda text: None).find_optimal_batch_size(of_eight(4), 2, 4) == 4
    assert not mine.state


def test_a_model_that_always_fails_says_why() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such layer")

    with pytest.raises(RunError, match="no such layer"):
        BatchSizeOptimizer(Broken(), say=lambda text: None).find_optimal_batch_size(of_eight(4), 2, 4)
    model, optimizer = of_a_notebook(0)
    with pytest.raises(OutOfMemoryError, match="Not even a batch of 1 trains here: out of memory in forward"):
        BatchSizeOptimizer(model, optimizer=optimizer, say=lambda text: None).find_optimal_batch_size(of_eight(4), 2, 4)


def test_accumulation_in_the_words_that_people_use() -> None:
    finder = BatchSizeOptimizer(Plain())
    found: Any = finder.calculate_gradient_accumulation(target_batch_size=64, actual_batch_size=12)
    assert {"accumulation_steps", "effective_batch_size", "batch_size_difference"} <= set(found)
    assert (found["batch_size"], found["accumulation_steps"], found["effective_batch_size"]) == (8, 8, 64)
    assert found["batch_size_difference"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start_batch_size": 0}, "start_batch_size"),
        ({"max_batch_size": True}, "max_batch_size"),
        ({"max_batch_size": 2.5}, "max_batch_size"),
        ({"start_batch_size": 9, "max_batch_size": 8}, "more than max_batch_size"),
        ({"dataset": []}, "empty"),
        ({"dataset": iter([1])}, "no length"),
    ],
    ids=["zero", "truth", "fraction", "start above most", "empty", "stream"],
)
def test_a_wrong_wish_is_told(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BatchSizeOptimizer(Plain()).find_optimal_batch_size(**{"dataset": pairs(2), **arguments})


def test_what_is_no_model_or_no_device_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a torch.nn.Module"):
        BatchSizeOptimizer("gpt2")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no parameters"):
        BatchSizeOptimizer(nn.ReLU())
    with pytest.raises(UsageError, match="no device of torch"):
        BatchSizeOptimizer(Plain(), "toaster")
    with pytest.raises(UsageError, match="meta"):
        BatchSizeOptimizer(Plain(), "meta")
