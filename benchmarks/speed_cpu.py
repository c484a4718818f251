"""Whether the speed model knows the fastest micro-batch: five small models, trained for real on the CPU at one effective batch.

    python benchmarks/speed_cpu.py [PATTERN]

The CPU runs as brim's trials run on it (`brim.machine.budget`): glibc gives memory back at once, so that a limit means something and every
result costs new pages; the process starts itself again in that environment. The machine is measured for two seconds and one micro-batch of
each model (4 sequences) is timed; that is all the prediction gets to know.
Then whole optimizer steps of 32 sequences are run in micro-batches of 1 to 32, in turns, and their medians compared. What counts is the
micro-batch that the model calls fastest: its tokens per second against the best that was measured. Exit 1 if one is below 95 %.
One thread, because threads that wait for each other on a busy machine take ten times as long in one run as in the next. PATTERN keeps the
models whose name contains it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers

from brim.machine.budget import MALLOC_ENVIRONMENT
from brim.memory.family import trace_family
from brim.memory.setup import Setup, Target
from brim.memory.tracing.building import build_model, make_batch
from brim.speed.communication import ALONE
from brim.speed.measured import calibrated, measure_cpu
from brim.speed.roofline import Roofline
from brim.speed.step import StepSpeed

if TYPE_CHECKING:
    from collections.abc import Callable

    from brim.speed.rates import Rates
    from brim.workload.words import Task

EFFECTIVE_BATCH = 32
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CALIBRATION_BATCH = 4
CALIBRATION_REPEATS = 9
REPEATS = 7
"""Short steps and many of them: on a shared host one sample is off by a tenth, and the next minute is slower than this one."""
LEAST_SHARE = 0.95

_LLAMA = {
    "hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 432,
    "vocab_size": 3000,
}  # fmt: skip
_GPT2 = {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 6000, "n_positions": 512, "bos_token_id": 0, "eos_token_id": 0}
_BERT = {"hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 640, "vocab_size": 5000}
_T5 = {
    "d_model": 128, "d_kv": 32, "d_ff": 384, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 3000,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_QWEN2 = {
    "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
    "vocab_size": 16000, "tie_word_embeddings": True,
}  # fmt: skip


def _setup(name: str, task: Task, length: int, config: dict[str, Any]) -> Setup:
    return Setup(config={"model_type": name, **config}, task=task, micro_batch=2, length=length)


MODELS: dict[str, Setup] = {
    "llama": _setup("llama", "causal-lm", 80, _LLAMA),
    "gpt2": _setup("gpt2", "causal-lm", 64, _GPT2),
    "bert": _setup("bert", "classification", 64, _BERT),
    "t5": _setup("t5", "seq2seq", 40, _T5),
    "qwen2": _setup("qwen2", "causal-lm", 56, _QWEN2),
}


@dataclass(frozen=True)
class Result:
    """One model; seconds are those of an optimizer step, by micro-batch."""

    name: str
    tokens: int
    scale: float
    predicted_seconds: dict[int, float]
    measured_seconds: dict[int, float]

    @property
    def chosen(self) -> int:
        return min(self.predicted_seconds, key=self.predicted_seconds.__getitem__)

    @property
    def share(self) -> float:
        """Of the best measured tokens per second."""
        return min(self.measured_seconds.values()) / self.measured_seconds[self.chosen]

    def lines(self) -> list[str]:
        rows = [
            f"{self.name:<8} {size:>11} {1e3 * predicted:>9.0f} ms {1e3 * measured:>9.0f} ms {predicted / measured:>7.2f}"
            f" {self.tokens / measured:>10.0f}"
            for (size, predicted), measured in zip(self.predicted_seconds.items(), self.measured_seconds.values(), strict=True)
        ]
        return [*rows, f"{self.name:<8} called fastest: {self.chosen}, {100 * self.share:.1f} % of the best measured"]


class Run:
    """A model that trains on the CPU."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(0)
        self._model: Any = build_model(setup, device="cpu")
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batches = {size: make_batch(replace(setup, micro_batch=size), device="cpu") for size in MICRO_BATCHES}

    def micro_batch(self, size: int) -> None:
        (self._model(**self._batches[size]).loss * (size / EFFECTIVE_BATCH)).backward()

    def step(self, size: int) -> None:
        for _slice in range(EFFECTIVE_BATCH // size):
            self.micro_batch(size)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)


def seconds_of(call: Callable[[int], None], size: int) -> float:
    began = time.perf_counter()
    call(size)
    return time.perf_counter() - began


def time_one_micro_batch(run: Run) -> float:
    """What the calibration gets: the gradients of each are made anew, as they are for the first micro-batch of a step."""
    times = []
    for _repeat in range(CALIBRATION_REPEATS + 1):
        times.append(seconds_of(run.micro_batch, CALIBRATION_BATCH))
        run.forget()
    return statistics.median(times[1:])


def sweep(run: Run) -> dict[int, float]:
    times: dict[int, list[float]] = {size: [] for size in MICRO_BATCHES}
    run.step(max(MICRO_BATCHES))  # makes the optimizer's state, and the heap as large as it gets
    for repeat in range(REPEATS):
        for size in MICRO_BATCHES if repeat % 2 else reversed(MICRO_BATCHES):
            times[size].append(seconds_of(run.step, size))
    return {size: statistics.median(some) for size, some in times.items()}


def judge(name: str, setup: Setup, machine: Rates) -> Result:
    family = trace_family(replace(setup, accumulation=2), Target("cpu", threads=torch.get_num_threads()), one_length=True)
    run = Run(setup)
    rates = calibrated(machine, family.work, CALIBRATION_BATCH, setup.length, time_one_micro_batch(run))
    speed = StepSpeed(Roofline(family.work, rates), ALONE, 4.0 * family.facts.trainable_parameters, setup.length)
    predicted = {size: speed.step_seconds([[size] * (EFFECTIVE_BATCH // size)]) for size in MICRO_BATCHES}
    return Result(name, EFFECTIVE_BATCH * setup.length, rates.scale, predicted, sweep(run))


def describe(rates: Rates) -> str:
    slowest, fastest = (pick(rate for _size, rate in rates.bandwidth) for pick in (min, max))
    assert rates.new_pages is not None
    return (
        f"this CPU: {rates.flops['fp32'] / 1e9:.0f} GFLOP/s, {slowest / 1e9:.1f} to {fastest / 1e9:.1f} GB/s,"
        f" {1e6 * rates.kernel_seconds:.1f} us a call, new pages {rates.new_pages[1] / 1e9:.1f} GB/s"
    )


def main() -> int:
    if any(os.environ.get(name) != value for name, value in MALLOC_ENVIRONMENT.items()):
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC_ENVIRONMENT}
        )  # glibc reads it at the start
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    began = time.perf_counter()
    machine = measure_cpu(2.0, half=False)
    print(f"{describe(machine)}; calibrated at micro-batch {CALIBRATION_BATCH}, median of {CALIBRATION_REPEATS}")
    print(f"{'model':<8} {'micro-batch':>11} {'predicted':>12} {'measured':>12} {'ratio':>7} {'tokens/s':>10}")
    results: list[Result] = []
    for name, setup in MODELS.items():
        if pattern in name:
            results.append(judge(name, setup, machine))
            print("\n".join(results[-1].lines()), flush=True)
    passed = all(result.share >= LEAST_SHARE for result in results)
    seconds = time.perf_counter() - began
    print(f"{seconds:.0f} s; the bar of {100 * LEAST_SHARE:.0f} % is {'kept' if passed else 'MISSED'}")
    document = {
        "torch": torch.__version__,
        "passed": passed,
        "seconds": round(seconds, 1),
        "models": {
            result.name: {
                "chosen": result.chosen,
                "share": round(result.share, 4),
                "scale": round(result.scale, 3),
                "predicted_seconds": {size: round(value, 4) for size, value in result.predicted_seconds.items()},
                "measured_seconds": {size: round(value, 4) for size, value in result.measured_seconds.items()},
            }
            for result in results
        },
    }
    print(json.dumps(document))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
