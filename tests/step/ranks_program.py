"""What two ranks do in the tests of accumulation: torchrun starts this file, and each rank writes what it found.

    torchrun --standalone --nproc-per-node=2 -m tests.step.ranks_program FOLDER SCENARIO...

The model, the data and the comparison stand here too, so that all tests compare with one large batch of the very same.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from brim.errors import BrimError
from brim.machine import child
from brim.step.accumulate import GradientAccumulator
from brim.step.ranks import Ranks
from tests.torchrun import leave

Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""Sequences: their tokens, and their labels, -100 where nothing is learnt."""
Gradients = dict[str, torch.Tensor | None]

VOCABULARY = 97


def llama(*, tied: bool = False) -> nn.Module:
    """A small Llama, the same at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def ragged_rows(count: int, seed: int = 0) -> Rows:
    """Questions of random length, which are not learnt, and answers of 1 to 24 tokens. The first rows have the long answers."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        question = int(torch.randint(1, 9, (1,), generator=random))
        answer = int(torch.randint(14, 25, (1,), generator=random)) if index < count // 2 else 1 + index % 4
        tokens = torch.randint(0, VOCABULARY, (question + answer,), generator=random)
        labels = tokens.clone()
        labels[:question] = -100
        rows.append((tokens, labels))
    return rows


def equal_rows(count: int, seed: int = 0) -> Rows:
    """All of 12 tokens, all learnt."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, 12), generator=random)
    return [(row, row.clone()) for row in tokens]


def padded(rows: Rows) -> dict[str, torch.Tensor]:
    """One batch, padded on the right, where a causal model needs no mask."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([tokens for tokens, _labels in rows], batch_first=True),
        "labels": pad([labels for _tokens, labels in rows], batch_first=True, padding_value=-100),
    }


def items_in(rows: Rows) -> torch.Tensor:
    return (padded(rows)["labels"][:, 1:] != -100).sum()


def mean_loss(model: nn.Module, rows: Rows) -> torch.Tensor:
    loss: torch.Tensor = model(**padded(rows)).loss
    return loss


def bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def kept(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Gradients]:
    """The gradients that each optimizer step gets, in a list that grows."""
    found: list[Gradients] = []

    def look(*_arguments: Any) -> None:
        named = bare(model).named_parameters()
        found.append({name: None if p.grad is None else p.grad.detach().clone() for name, p in named})

    optimizer.register_step_pre_hook(look)
    return found


def run_windows(
    model: nn.Module, micro_batches: list[Rows], steps: int, *, counted: bool = True, **options: Any
) -> dict[str, Any]:
    """Train over these micro-batches, then finish the last window."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradients = kept(optimizer, model)
    accumulator = GradientAccumulator(model, optimizer, steps, **options)
    answers = [accumulator.step(mean_loss(model, rows), items_in(rows) if counted else None) for rows in micro_batches]
    answers.append(accumulator.finalize())
    weights = {name: parameter.detach().clone() for name, parameter in bare(model).named_parameters()}
    return {"gradients": gradients, "answers": answers, "weights": weights, "norm": accumulator.last_grad_norm}


def agreement(found: Gradients, wanted: Gradients) -> tuple[float, float]:
    """Cosine of two gradients, and the ratio of their norms."""
    names = [name for name, gradient in wanted.items() if gradient is not None]
    assert {name for name, gradient in found.items() if gradient is not None} == set(names)
    ours, theirs = (torch.cat([part[name].double().ravel() for name in names]) for part in (found, wanted))  # type: ignore[union-attr]
    return float(torch.cosine_similarity(ours, theirs, dim=0)), float(ours.norm() / theirs.norm())


def is_exact(found: Gradients, wanted: Gradients) -> bool:
    cosine, ratio = agreement(found, wanted)
    return cosine >= 0.99999 and abs(ratio - 1) <= 1e-4


def big_batch_gradient(model: nn.Module, rows: Rows, max_norm: float | None = None) -> tuple[Gradients, float]:
    """The gradient of all rows in one batch, and their mean loss."""
    loss = mean_loss(model, rows)
    loss.backward()  # type: ignore[no-untyped-call]
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return {name: parameter.grad for name, parameter in model.named_parameters()}, float(loss.detach())


def of_two(micro_batches: list[Rows], rank: int) -> list[Rows]:
    """Two thirds of the micro-batches are rank 0's, which so has more tokens, and a window that is longer."""
    cut = 2 * len(micro_batches) // 3
    return micro_batches[:cut] if rank == 0 else micro_batches[cut:]


def single(rows: Rows) -> list[Rows]:
    return [[row] for row in rows]


def plain(rank: int) -> Any:
    return run_windows(llama(), of_two(single(ragged_rows(12)), rank), 8, max_norm=None)


def wrapped(rank: int) -> Any:
    """Eight micro-batches against four; the wrapper's own reduction would wait for ever, or average."""
    return run_windows(DistributedDataParallel(llama()), of_two(single(ragged_rows(12)), rank), 8, max_norm=None)


def wrapped_and_several_windows(rank: int) -> Any:
    halves = [single(ragged_rows(10, seed))[5 * rank : 5 * rank + 5] for seed in range(3)]
    return run_windows(DistributedDataParallel(llama()), [rows for half in halves for rows in half], 5)


def uncounted(rank: int) -> Any:
    return run_windows(llama(), single(equal_rows(8))[rank::2], 4, counted=False)


def nothing_on_one(rank: int) -> Any:
    return run_windows(llama(), single(ragged_rows(6)) if rank == 0 else [], 8, max_norm=None)


def half_precision(rank: int) -> Any:
    """A loss scale, and a rank that never has a loss to scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return run_windows(llama(), single(ragged_rows(6)) if rank == 0 else [], 8, max_norm=None, scaler=scaler)


def overflow_on_one(rank: int) -> Any:
    """Only rank 1's numbers are too large, and no rank may step."""
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    accumulator = GradientAccumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), 1, scaler=scaler)
    before = model.weight.detach().clone()
    loss = model(torch.ones(4)).sum() * (1e38 if rank else 1.0)
    return accumulator.step(loss)[0], torch.equal(before, model.weight), scaler.get_scale()


class Branches(nn.Module):
    """Each rank uses another branch; one is used by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(3, 1) for _branch in range(3))

    def forward(self, branch: int) -> torch.Tensor:
        answer: torch.Tensor = self.branches[branch](torch.ones(2, 3)).mean()
        return answer


def other_branches(rank: int) -> Any:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    gradients = kept(optimizer, model)
    GradientAccumulator(model, optimizer, 1, max_norm=None).step(model(rank), num_items=3 - 2 * rank)
    return gradients, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def message_of(work: Callable[[], object]) -> str:
    try:
        work()
    except BrimError as error:
        return f"{type(error).__name__}: {error.message}"
    return "no error"


def sparse(rank: int) -> Any:
    """Both ranks have a sparse gradient, then only one."""
    model = nn.Embedding(7, 2, sparse=True)
    accumulator = GradientAccumulator(model, torch.optim.SGD(model.parameters()), 1)
    both = message_of(lambda: accumulator.step(model(torch.tensor([rank])).mean(), num_items=1))
    accumulator.discard()
    loss = model(torch.tensor([0])).mean()
    one = message_of(lambda: accumulator.step(loss, num_items=rank))
    return both, one


def mixed_use(rank: int) -> Any:
    model = nn.Linear(2, 1)
    accumulator = GradientAccumulator(model, torch.optim.SGD(model.parameters()), 1)
    return message_of(lambda: accumulator.step(model(torch.ones(2)).sum(), num_items=4 if rank else None))


def other_scales(rank: int) -> Any:
    model = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + rank))
    accumulator = GradientAccumulator(model, torch.optim.SGD(model.parameters()), 1, scaler=scaler)
    return message_of(lambda: accumulator.step(model(torch.ones(2)).sum()))


def other_models(rank: int) -> Any:
    return message_of(lambda: Ranks(list(nn.Linear(2, 1 + rank).parameters())))


def trained_on(count: int, updates: list[bool]) -> None:
    """So many equal micro-batches, two in a window."""
    model = nn.Linear(2, 1)
    accumulator = GradientAccumulator(model, torch.optim.SGD(model.parameters()), 2)
    for _micro_batch in range(count):
        updates += accumulator.step(model(torch.ones(2)).sum())[:1]
    updates += accumulator.finalize()[:1]


WINDOWS = [(4, 4), (3, 4), (4, 3), (2, 4), (0, 1), (0, 0), (2, 5), (6, 1)]
"""Micro-batches of rank 0 and of rank 1."""


def windows_differ(rank: int) -> Any:
    """What this rank was told, and how many optimizer steps it took."""
    found = []
    for counts in WINDOWS:
        updates: list[bool] = []
        found.append((message_of(partial(trained_on, counts[rank], updates)), sum(updates)))
    return found


def tensors(rank: int) -> dict[str, torch.Tensor | None]:
    """Gradients of every sort: of three types, large, transposed, scalar, empty, absent here, absent everywhere."""
    random = torch.Generator().manual_seed(rank)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    return {
        "matrix": numbers(5, 7),
        "transposed": numbers(9, 11).t(),
        "long": numbers(301),
        "deep": numbers(3, 2, 50),
        "bfloat16": numbers(33).bfloat16(),
        "float16": numbers(4, 4).half() * 30000,
        "float64": numbers(6).double(),
        "scalar": numbers(1)[0],
        "empty": numbers(0, 3),
        "on rank 0": numbers(8) if rank == 0 else None,
        "on rank 1": numbers(8).bfloat16() if rank == 1 else None,
        "nowhere": None,
    }


SCALES = (0.25, 0.7)


def sums(rank: int) -> Any:
    """Through buffers of every size, from one number on."""
    found = {}
    for bucket_bytes in (4, 100, 1000, 1 << 20):
        shapes = tensors(0) | {"on rank 1": tensors(1)["on rank 1"], "nowhere": torch.zeros(2)}
        parameters = {name: nn.Parameter(torch.zeros_like(tensor)) for name, tensor in shapes.items() if tensor is not None}
        whole = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
        # The first one again, as tied weights are.
        ranks = Ranks([*parameters.values(), whole, next(iter(parameters.values()))], bucket_bytes=bucket_bytes)
        for name, gradient in tensors(rank).items():
            parameters[name].grad = gradient
        ranks.reduce(SCALES[rank])
        found[bucket_bytes] = {name: parameter.grad for name, parameter in parameters.items()}
    return found


def talk(rank: int) -> Any:
    ranks = Ranks([])
    return ranks.rank, ranks.size, ranks.gather({"rank": rank, "text": "ab" * rank})


def other_weights(rank: int) -> Any:
    """Nobody set the same seed."""
    torch.manual_seed(rank)
    try:
        Ranks(list(nn.Linear(4, 4).parameters()))
    except BrimError as error:
        return str(error)


def no_memory_on_one(rank: int) -> Any:
    """Rank 1 must make room for a gradient of 128 MiB and cannot: rank 0 hears of it, and neither sums."""
    parameter = nn.Parameter(torch.zeros(32, 1 << 20))
    ranks = Ranks([parameter])
    parameter.grad = torch.ones_like(parameter) if rank == 0 else None
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_DATA, (child.data_bytes() + (64 << 20), unlimited[1]))
    try:
        ranks.reduce(0.5)
    except (BrimError, RuntimeError) as error:
        return type(error).__name__, str(error), None if parameter.grad is None else float(parameter.grad.mean())
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in sys.argv[2:]:
        print(f"rank {rank}: {name}", flush=True)
        torch.manual_seed(0)
        torch.save(globals()[name](rank), Path(sys.argv[1]) / f"{name}-{rank}.pt")
    leave()


if __name__ == "__main__":
    main()
