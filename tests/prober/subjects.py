"""What the tests of trials try: children import it, so it lives in a module."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from brim.memory.setup import Setup
from brim.prober.shapes import Shape
from brim.prober.trainee import Trainee

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 2, "vocab_size": 128, "decoder_start_token_id": 0,
}  # fmt: skip


def setup(config: Mapping[str, Any] = LLAMA, **more: Any) -> Setup:
    return Setup(config=config, **{"task": "causal-lm", "micro_batch": 1, "length": 16, **more})


@dataclass(frozen=True)
class Toy:
    """One layer. Each part of its step may take more bytes or seconds per sequence, or do something worse.

    Troubles come with the full batch only, of more than one sequence.
    """

    takes_bytes: Mapping[str, int] = field(default_factory=dict)
    """For each sequence, by phase."""
    sleeps: Mapping[int, float] = field(default_factory=dict)
    """Seconds for each sequence of a batch, by its size."""
    trouble: str = ""
    where: str = "forward"

    def build(self, device: str) -> Trainee:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = Hungry(layer.parameters(), self)
        return Trainee(
            layer, optimizer, self._batch, lambda batch: self._loss(layer, optimizer, batch), "cpu", evaluation=self._evaluate
        )

    def _batch(self, shape: Shape) -> torch.Tensor:
        return torch.ones(shape.sequences, 8)

    def _loss(self, layer: nn.Module, optimizer: Hungry, batch: torch.Tensor) -> torch.Tensor:
        size = len(batch)
        optimizer.size, optimizer.largest = size, max(size, optimizer.largest)
        time.sleep(size * self.sleeps.get(size, 0.0))
        self.meet("forward", size)
        loss: torch.Tensor = layer(batch).pow(2).mean()
        return cast("Any", Meeting).apply(loss, self, size)  # type: ignore[no-any-return]

    def _evaluate(self, batch: torch.Tensor) -> None:
        self.meet("evaluation", len(batch))

    def meet(self, phase: str, size: int) -> None:
        """What this phase has in store."""
        if size == 1:
            return
        held = torch.ones(size * self.takes_bytes.get(phase, 0) // 4)
        del held
        if self.trouble and phase == self.where:
            TROUBLES[self.trouble]()


class Meeting(torch.autograd.Function):
    """In backward, the subject's own trouble."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, subject: Toy, size: int) -> torch.Tensor:
        context.subject, context.size = subject, size
        return loss.clone()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> Any:
        context.subject.meet("backward", context.size)
        return grad, None, None


class Hungry(torch.optim.SGD):
    """Takes more in its step and in its checkpoint."""

    def __init__(self, parameters: Any, subject: Toy) -> None:
        super().__init__(parameters, lr=0.01)
        self.subject, self.size, self.largest = subject, 1, 1

    def step(self, closure: Any = None) -> Any:
        self.subject.meet("optimizer", self.size)
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        self.subject.meet("saving", self.largest)
        return super().state_dict()


def _kill(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def _fail() -> None:
    raise ValueError("the shapes of my layers do not agree")


TROUBLES: dict[str, Callable[[], object]] = {
    "killed": lambda: _kill(signal.SIGKILL),
    "illegal": lambda: _kill(signal.SIGILL),
    "error": _fail,
    "hang": lambda: time.sleep(600),
    "exit": lambda: sys.exit(4),
    "exit without a word": lambda: sys.exit(0),
    "exit at once": lambda: os._exit(3),
}


def tiny_llama() -> Any:
    """As `module:function`."""
    import transformers

    made: Any = transformers
    return made.LlamaForCausalLM(made.LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "architectures"}))


def broken_llama() -> Any:
    """Cannot be called with a mask: an error that no size mends."""
    model = tiny_llama()
    model.forward = _no_forward
    return model


def _no_forward(**_batch: Any) -> Any:
    raise ValueError("expanded size (2048) must match (2)")


def plain() -> nn.Module:
    """As `module:function`; nothing says how to call it."""
    return Plain()


class Plain(nn.Module):
    """A model that is not of transformers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(64, width), nn.Linear(width, width), nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.body(self.words(tokens))))
        return logits


def plain_step(model: nn.Module, micro_batch: int, seq_len: int) -> torch.Tensor:
    tokens = torch.randint(0, 64, (micro_batch, seq_len))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Table(nn.Module):
    """Most of its weights are a table that does not train; a batch takes little beside it."""

    def __init__(self, rows: int = 100_000, width: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, width).requires_grad_(False)
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.relu(self.body(self.words(tokens))).mean(1))
        return found


def table_step(model: nn.Module, micro_batch: int, seq_len: int) -> torch.Tensor:
    tokens = torch.zeros(micro_batch, seq_len, dtype=torch.long)
    return nn.functional.cross_entropy(model(tokens), tokens[:, 0])


def hanging_step(model: nn.Module, micro_batch: int, seq_len: int) -> torch.Tensor:
    time.sleep(600)
    return plain_step(model, micro_batch, seq_len)


def noted_step(notes: str, model: nn.Module, micro_batch: int, seq_len: int) -> torch.Tensor:
    """Leaves the number of the process in which it runs."""
    with Path(notes).open("a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    return plain_step(model, micro_batch, seq_len)


class Layers(nn.Module):
    """Two layers of attention over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)
        self.body = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _layer in range(2)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.words(tokens)))
        return logits


def find_with_layers(memory: str, *, can_travel: bool) -> tuple[int, list[tuple[int, float]]]:
    """What `BatchSizeOptimizer` finds, with its history; of a class that no other process knows, in this very process."""
    from brim import BatchSizeOptimizer

    class OfANotebook(Layers):
        pass

    torch.set_num_threads(1)
    tokens = torch.arange(200)
    finder = BatchSizeOptimizer(Layers() if can_travel else OfANotebook(), "cpu", memory=memory, say=lambda text: None)
    found = finder.find_optimal_batch_size([(tokens, tokens)] * 64, start_batch_size=8, max_batch_size=24)
    return found, finder.memory_usage_history


def train_plainly(size: int, length: int, steps: int) -> int:
    """A loop that a person would write, of the tiny Llama: nothing of the prober is in it."""
    torch.manual_seed(0)
    model = tiny_llama()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    mask = torch.ones(size, length, dtype=torch.long)
    mask[:, -1] = 0
    for _step in range(steps):
        tokens = torch.randint(0, 256, (size, length))
        model(input_ids=tokens, attention_mask=mask, labels=tokens.clone()).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return steps
