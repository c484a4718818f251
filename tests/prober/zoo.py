"""Modules that are odd in one way or another, and what may be done to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.testing._internal.two_tensor import TwoTensor

from tests.prober.recoveries import out_of_memory


class Mixed(nn.Module):
    """Running statistics, dropout, a frozen layer, and counters of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)
        self.first.bias.requires_grad_(False)
        self.norm.eval()
        self.calls, self.seen, self.by_name, self.kinds = 0, [1], {"first": 1}, {"one"}
        self.noise, self.dice, self.die = torch.Generator().manual_seed(3), random.Random(1), np.random.default_rng(1)
        self.average = torch.zeros(4)
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.by_name["last"] = self.calls
        self.kinds.add(f"call {self.calls}")
        self.dice.random(), self.die.random()
        self.average += x.mean(0)
        self.get_buffer("scratch").mul_(2)
        if not hasattr(self, "made_later"):
            self.register_buffer("made_later", x.sum(0))
        y: torch.Tensor = self.last(self.drop(self.norm(self.first(x))))
        return y + torch.rand(4, generator=self.noise)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.words((x * 10).long() % 8)).mean(1)
        return y[:, :4]


class OfOneStorage(nn.Module):
    """Two weights that are parts of one flat tensor, and one that is not contiguous and overlaps them."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(40)
        self.one, self.two = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:32].view(4, 4))
        self.across = nn.Parameter(flat[8:24].view(4, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.one @ self.two @ self.across


class OddBits(nn.Module):
    """Numbers that a copy by value would not keep: NaNs with a payload, negative zeros, denormals."""

    def __init__(self) -> None:
        super().__init__()
        odd = torch.tensor([0x7FC0_1234, -0x0040_0001, -0x8000_0000, 1], dtype=torch.int32).view(torch.float32)
        self.odd = nn.Parameter(odd.repeat(4, 1))
        self.register_buffer("small", odd.to(torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("eight", torch.ones(4).to(torch.float8_e4m3fn))
        self.register_buffer("whole", torch.arange(3, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.get_buffer("flags").logical_not_()
            self.get_buffer("whole").add_(1)
            self.get_buffer("small").zero_()
            self.get_buffer("eight").copy_(torch.zeros(4))
        return x @ self.odd


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.cell(x[:, None])[0][:, 0]
        return y


class Differentiated(nn.Module):
    """A buffer that the graph writes to: it ceases to be a leaf."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state.detach_()
        self.state += (x @ self.weight).mean(0)
        return x + self.state


two: Any = TwoTensor


class Wrapped(nn.Module):
    """A weight that wraps two tensors, as sharded and quantised ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(two(torch.randn(4, 4), torch.randn(4, 4)), requires_grad=False)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        y: torch.Tensor = self.last(x)
        return y


def lora() -> nn.Module:
    import peft

    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model: nn.Module = peft.get_peft_model(body, peft.LoraConfig(target_modules=["0", "2"], r=2, lora_dropout=0.1))
    return model


ZOO: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "tied": Tied,
    "of one storage": OfOneStorage,
    "odd bits": OddBits,
    "recurrent": Recurrent,
    "buffer in the graph": Differentiated,
    "wrapped": Wrapped,
    "lora": lora,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(4)),
    "spectral norm by hook": lambda: spectral_norm(nn.Linear(4, 4)),
    "spectral norm by parametrization": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Dropout(0.3)),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
    "empty": nn.Identity,
}  # fmt: skip


def a_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ZOO[name]()


def train(model: nn.Module, steps: int = 2) -> None:
    model(torch.rand(3, 4))  # lazy weights come into being
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not trained:
        return
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for _step in range(steps):
        optimizer.zero_grad()
        model(torch.rand(3, 4)).pow(2).sum().backward()
        optimizer.step()


def scatter(model: nn.Module) -> None:
    """Modes, and what is trained."""
    for number, module in enumerate(model.modules()):
        module.training = bool(number % 2)
    for weight in model.parameters():
        weight.requires_grad_(not weight.requires_grad)


def replace(model: nn.Module) -> None:
    """Other weights in the place of these, and more of everything."""
    if isinstance(model, torch.jit.ScriptModule):
        return
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if name in vars(module)["_parameters"]:
                setattr(module, name, nn.Parameter(torch.zeros_like(weight.data), requires_grad=False))
        module.more = nn.Linear(2, 2)
        module.register_buffer("another", torch.zeros(2))
        module.register_forward_hook(lambda *_: None)
        vars(module)["note"] = "a trial was here"


def reach_in(model: nn.Module) -> None:
    """Other data under the same tensors; hooks, attributes and gradients on them."""
    weight: Any
    for weight in model.parameters():
        if type(weight.data) is not torch.Tensor or isinstance(weight, nn.UninitializedParameter):
            continue
        weight.data = torch.ones(3, dtype=torch.float16)
        weight.grad = torch.ones(3, dtype=torch.float16)
        weight.note = 1
        if weight.requires_grad:
            weight.register_hook(lambda grad: grad)
            weight.register_post_accumulate_grad_hook(lambda weight: None)


def parametrize(model: nn.Module) -> None:
    for module in list(model.modules()):
        if type(module) is nn.Linear and isinstance(getattr(module, "weight", None), nn.Parameter):
            parametrizations.weight_norm(module)


def turn_flags(model: nn.Module) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)
    torch.set_float32_matmul_precision("high")
    torch.set_default_device("meta")
    torch.backends.cudnn.benchmark = True


def reseed(model: nn.Module) -> None:
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)


def zero(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, nn.UninitializedParameter | nn.parameter.UninitializedBuffer):
                tensor.zero_()


def take_apart(model: nn.Module) -> None:
    if not isinstance(model, torch.jit.ScriptModule):
        for module in list(model.modules()):
            for name in ("_modules", "_parameters", "_buffers"):
                vars(module)[name] = {}


MEDDLERS = {"train": train, "scatter": scatter, "reseed": reseed, "zero": zero, "replace": replace, "parametrize": parametrize}
AFTER = {"nothing": lambda model: None, "flags": turn_flags, "reach in": reach_in, "take apart": take_apart}
ENDS: dict[str, Callable[[], BaseException | None]] = {
    "well": lambda: None,
    "with an error": lambda: ValueError("no"),
    "with Ctrl-C": KeyboardInterrupt,
    "with an exit": lambda: SystemExit(3),
    "out of memory": out_of_memory,
}
