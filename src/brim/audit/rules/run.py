"""The rules about runs: what a ledger tells after the fact, or while the run goes on.

Their examples are ledgers of a run that was watched, twenty-some steps each, in which one thing is wrong.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from brim.audit.rules.rule import Rule
from brim.locale import N_

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS: Final = 24
_LINE: Final[dict[str, Any]] = {"schema": "brim.ledger/1"}


def _ledger(change: Callable[[int], dict[str, Any]] = lambda _step: {}, *, steps: int = _STEPS, **header: Any) -> str:
    """A healthy run of steps of 32 sequences, changed step by step."""
    begin = {
        **_LINE, "kind": "header", "started_at": "2026-11-20T09:30:00+00:00", "observed": True, "seed": 0, "effective_batch": 32,
        "device": "cuda:0", "memory_limit_bytes": 15_000_000_000, **header,
    }  # fmt: skip
    lines = [begin, *({**_step(number), **change(number)} for number in range(1, steps + 1))]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _step(number: int) -> dict[str, Any]:
    return {
        **_LINE, "kind": "step", "step": number, "epoch": 0, "promised_sequences": 32, "sequence_ids": [], "sequences": 32, "tokens": 8000,
        "padded_tokens": 8192, "supervised_tokens": 4000, "compute_seconds": 1.0, "wait_seconds": 0.01,
    }  # fmt: skip


def _loss(value: Callable[[int], float]) -> Callable[[int], dict[str, Any]]:
    return lambda step: {"loss": round(value(step), 4), "learning_rate": 0.0002}


def _pulse(**fields: Any) -> dict[str, Any]:
    return {"wait_seconds": 0.5, "pulse": {"seconds": 1.5, **fields}}


def _wobble(step: int) -> float:
    """Small changes from step to step, the same at every call: between -1 and 1."""
    return (step * 37 % 11) / 5 - 1


def _noise(scale: float) -> Callable[[int], dict[str, Any]]:
    """Two micro-batches of 2000 supervised tokens whose gradients show this noise scale."""

    def change(step: int) -> dict[str, Any]:
        noise = scale * (1 + 0.05 * _wobble(step))
        half = {"rank": 0, "sequences": 16, "length": 256, "items": 2000, "gradient_square": round(1 + noise / 2000, 6)}
        return {"slices": [half, half], "grad_norm": round((1 + noise / 4000) ** 0.5, 6)}

    return change


def _held(peak_bytes: int) -> Callable[[int], dict[str, Any]]:
    part = {"rank": 0, "sequences": 8, "length": 256}
    return lambda _step: {"slices": [part] * 4, "peak_reserved_bytes": peak_bytes}


_FALLING: Final = _ledger(_loss(lambda step: 1.2 + 1.5 * 0.96**step + 0.02 * _wobble(step)), steps=60)

_PYTORCH_TUNING: Final = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
_PYTORCH_LOADER: Final = "https://docs.pytorch.org/docs/stable/data.html"
_PYTORCH_MEMORY: Final = "https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management"
_PYTORCH_FAQ: Final = "https://docs.pytorch.org/docs/stable/notes/faq.html"
_LEARNING_RATES: Final = "https://arxiv.org/abs/1206.5533"

RULES: Final = (
    Rule(
        name="run-promise-broken",
        group="run",
        severity="high",
        title=N_("Steps did not hold the configured batch"),
        why=N_(
            "The effective batch is the number of sequences in every optimizer step, each once in an epoch. The ledger shows steps "
            "with other sequences or another number of them; for a run of `brim observe`, the configured batch and the one that reached "
            "the model are compared. The learning rate and every comparison with another run assume a batch that was not used."
        ),
        mend=N_(
            "Find the cause: `brim doctor` on the training script names the line. Then resume from a checkpoint before the first such step."
        ),
        sources=(
            "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation",
            "https://huggingface.co/blog/gradient_accumulation",
        ),
        bad=_ledger(lambda _step: {"sequences": 2}),
        good=_ledger(),
        example_name="ledger.jsonl",
    ),
    Rule(
        name="run-headroom",
        group="run",
        severity="low",
        title=N_("The device has room for larger micro-batches"),
        why=N_(
            "The run cuts each step into several micro-batches, and at its peak it held less than 70 percent of the device's "
            "memory. Larger micro-batches use the device better, and the optimizer step stays what it is: the same sequences, "
            "the same gradient."
        ),
        mend=N_(
            "Raise the budget, or the micro-batch size while accumulation falls by as much. `brim probe` finds the largest that runs."
        ),
        sources=(_PYTORCH_TUNING, "https://huggingface.co/docs/transformers/perf_train_gpu_one"),
        bad=_ledger(_held(6_000_000_000)),
        good=_ledger(_held(12_500_000_000)),
        example_name="ledger.jsonl",
    ),
    Rule(
        name="run-data-bound",
        group="run",
        severity="medium",
        title=N_("Steps wait for their data"),
        why=N_(
            "A tenth of the time or more goes into waiting for the next batch, while the device does nothing. Which knob ends "
            "it depends on who is busy: workers that compute all the time are too few, and without workers the training "
            "process loads between steps. More workers than needed cost memory and slow the launch of kernels, so it is not a "
            "matter of setting as many as possible."
        ),
        mend=N_(
            "Set num_workers as the finding says, set persistent_workers=True where epochs are short, or tokenize the data "
            "once beforehand. `brim probe --data` measures it."
        ),
        sources=(_PYTORCH_TUNING, _PYTORCH_LOADER, "https://github.com/pytorch/pytorch/issues/23048"),
        bad=_ledger(lambda _step: _pulse(workers=2, worker_cpu=0.99, main_cpu=0.4, blocked_seconds=0.0, read_bytes=0)),
        good=_ledger(lambda _step: {"pulse": {"seconds": 1.01, "workers": 4, "worker_cpu": 0.6}}),
        example_name="ledger.jsonl",
    ),
    Rule(
        name="run-disk-bound",
        group="run",
        severity="medium",
        title=N_("Steps wait for a slow disk"),
        why=N_(
            "The run waits for its data, and those who load it wait for the disk: they are idle, and the system counts the "
            "time for which it blocked them. More workers do not help where the disk gives no more bytes a second; on disks "
            "that turn they make it worse."
        ),
        mend=N_("Copy the data to a local disk or into memory before the run, or store it in fewer, larger files."),
        sources=("https://docs.kernel.org/accounting/psi.html", "https://docs.kernel.org/accounting/delay-accounting.html"),
        bad=_ledger(lambda _step: _pulse(workers=4, worker_cpu=0.1, main_cpu=0.4, blocked_seconds=1.2, read_bytes=20_000_000)),
        good=_ledger(lambda _step: {"pulse": {"seconds": 1.01, "workers": 4, "worker_cpu": 0.3, "blocked_seconds": 0.02}}),
        example_name="ledger.jsonl",
    ),
    Rule(
        name="run-thrashing",
        group="run",
        severity="high",
        title=N_("Memory is so full that the run fights for it"),
        why=N_(
            "The device's allocator has to give its cache back again and again before it can serve a request, or the host "
            "moves the run's memory to swap and back. Both keep the run alive and make it many times slower, and nothing in "
            "the loss shows it."
        ),
        mend=N_(
            "Make micro-batches a little smaller at the same effective batch; on the host, use fewer workers and memory-mapped "
            "data. expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF helps where memory is in pieces."
        ),
        sources=(_PYTORCH_MEMORY, "https://docs.kernel.org/admin-guide/mm/concepts.html"),
        bad=_ledger(lambda step: {"pulse": {"seconds": 1.0, "retries": 2 + step % 3}}),
        good=_ledger(lambda step: {"pulse": {"seconds": 1.0, "retries": int(step == 1)}}),
        example_name="ledger.jsonl",
    ),
    Rule(
        name="run-slowing",
        group="run",
        severity="medium",
        title=N_("The run gets slower"),
        why=N_(
            "The last third of the run does a tenth less work a second than the first, beyond what varies from step to step, "
            "and its sequences are no longer than before. Cards that get hot lower their clock, loaders that read further into "
            "slower files fall behind, and lists that keep the graphs of old losses grow."
        ),
        mend=N_("See whether waiting or computing has grown, as the finding says. Keep loss.detach(), never the loss itself."),
        sources=(
            _PYTORCH_FAQ,
            "https://docs.nvidia.com/deploy/nvml-api/api/group__nvmlClocksEventReasons.html",
        ),
        bad=_ledger(lambda step: {"compute_seconds": round(1 + 0.01 * step + 0.01 * _wobble(step), 3)}, steps=45),
        good=_ledger(lambda step: {"compute_seconds": round(1 + 0.05 * _wobble(step), 3)}, steps=45),
        example_name="ledger.jsonl",
    ),
    Rule(
        name="run-splits",
        group="run",
        severity="low",
        title=N_("Many steps run out of memory and are split"),
        why=N_(
            "brim splits a micro-batch that does not fit and goes on: nothing is lost but the time of the failed attempt. "
            "Where that happens in many steps, the budget promises more than the memory holds, and each time costs a forward "
            "or the whole step again."
        ),
        mend=N_("Give the budget that the finding names, or let `brim plan` and `brim probe` find one."),
        sources=(_PYTORCH_FAQ, _PYTORCH_MEMORY),
        bad=_ledger(
            lambda step: {"splits": [{"rank": 0, "phase": "forward", "sequences": 16, "into": 2}] if step % 3 == 0 else []}
        ),
        good=_ledger(lambda step: {"splits": [{"rank": 0, "phase": "forward", "sequences": 16, "into": 2}] if step == 1 else []}),
        example_name="ledger.jsonl",
    ),
    Rule(
        name="run-skipped",
        group="run",
        severity="high",
        title=N_("Most optimizer steps were skipped"),
        why=N_(
            "A scaler of fp16 gradients skips a step whose gradients are not finite, and halves its scale. A few steps at the start "
            "are how it finds its scale. Where most steps are skipped, the weights hardly change while data, time and often the "
            "schedule go by, and the loss, which is finite all the while, does not tell. A step without any supervised token is "
            "skipped as well."
        ),
        mend=N_(
            "Train in bf16 where the card has it. Else look for the layer that overflows in fp16, for parameters that are held in "
            "fp16 themselves, and for a learning rate that is too high."
        ),
        sources=(
            "https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling",
            "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
        ),
        bad=_ledger(lambda step: {"skipped": step > 6, "loss": 2.0}),
        good=_ledger(lambda step: {"skipped": step < 3, "loss": round(2.0 - 0.03 * step, 4)}),
        example_name="ledger.jsonl",
    ),
    Rule(
        name="loss-diverges",
        group="run",
        severity="high",
        title=N_("The loss runs away"),
        why=N_(
            "The loss is not a number any more, or ends far above the lowest level that it had reached, and had never swung "
            "like that before. What is trained from here on is not what was learned before. A learning rate that is too high, "
            "fp16 without a scaler, or one broken sequence are the usual causes."
        ),
        mend=N_("Go back to a checkpoint before it, with a lower learning rate or a longer warm-up, and with gradients clipped."),
        sources=(_LEARNING_RATES, "https://arxiv.org/abs/2204.02311"),
        bad=_ledger(_loss(lambda step: 2.0 - 0.02 * step if step < 16 else 1.7 + 0.4 * (step - 15))),
        good=_FALLING,
        example_name="ledger.jsonl",
    ),
    Rule(
        name="loss-oscillates",
        group="run",
        severity="medium",
        title=N_("The loss swings instead of falling"),
        why=N_(
            "The loss goes up and down by more than a quarter of all that it has fallen, with a memory from step to step that "
            "the noise of batches does not have. A learning rate that is too high does that: each step jumps over the valley."
        ),
        mend=N_("Lower the learning rate by the step that the finding names, or raise the effective batch."),
        sources=(_LEARNING_RATES,),
        bad=_ledger(_loss(lambda step: 2.0 + 0.5 * (-1) ** (step // 2) + 0.02 * _wobble(step)), steps=40),
        good=_FALLING,
        example_name="ledger.jsonl",
    ),
    Rule(
        name="loss-crawls",
        group="run",
        severity="low",
        title=N_("The loss falls very slowly"),
        why=N_(
            "The loss falls, by less than a tenth in all these steps, and as slowly at the beginning as at the end: the curve "
            "has not begun to flatten. That is the sign of a learning rate that is too low. A model that has little left to "
            "learn looks the same."
        ),
        mend=N_("Raise the learning rate by the step that the finding names, and compare at equal tokens."),
        sources=(_LEARNING_RATES,),
        bad=_ledger(_loss(lambda step: 2.0 - 0.002 * step + 0.004 * _wobble(step)), steps=60),
        good=_FALLING,
        example_name="ledger.jsonl",
    ),
    Rule(
        name="loss-flat",
        group="run",
        severity="medium",
        also=N_("High if the learning rate is 0 in all steps, or the loss exactly 0 for long: then nothing is trained."),
        title=N_("The loss does not fall at all"),
        why=N_(
            "No fall can be told from the noise. Either the learning rate is far too low or zero, or what should train is "
            "frozen or not in the optimizer, or the labels are masked, or nothing is left to learn."
        ),
        mend=N_(
            "See that the learning rate in force is not zero, that the optimizer holds the parameters that train, and that "
            "supervised tokens are counted. Then raise the learning rate."
        ),
        sources=(_LEARNING_RATES, _PYTORCH_FAQ),
        bad=_ledger(_loss(lambda step: 2.0 + 0.05 * _wobble(step)), steps=60),
        good=_FALLING,
        example_name="ledger.jsonl",
    ),
    Rule(
        name="batch-beyond-noise",
        group="run",
        severity="low",
        title=N_("The effective batch is far from the gradient's noise scale"),
        why=N_(
            "The gradients of a step's micro-batches differ, and how much they differ tells at which batch noise and signal "
            "are equally large. Far above it, a step costs more and learns hardly more. Far below it, a larger batch would "
            "need fewer steps, which pays only where it is faster for each token: small batches are as good for each token. "
            "The estimate rests on strong assumptions and is a guide, not a law."
        ),
        mend=N_(
            "Compare two batches at equal tokens before you change it, and let the learning rate follow: `brim plan --from-batch` "
            "tells how."
        ),
        sources=("https://arxiv.org/abs/1812.06162", "https://arxiv.org/abs/2505.23971", "https://arxiv.org/abs/2507.07101"),
        bad=_ledger(_noise(100.0), steps=120),
        good=_ledger(_noise(4000.0), steps=120),
        example_name="ledger.jsonl",
    ),
)
