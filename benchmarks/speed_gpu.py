"""Predicted seconds of a step against throughput that others published for real GPUs, row by row. For information: there is no bar.

    python benchmarks/speed_gpu.py [--only PREFIX]

The rows are figures whose configuration is known well enough to predict (model, method, precision, micro-batch, length,
checkpointing, cards), of eager PyTorch and the Hugging Face stack or near it. They were chosen before any of them was predicted, and
the constants of `brim.speed` come from other sources (see there), with one exception: the rows of `a800` are one of two sources of
`HOST_OPTIMIZER_BYTES_PER_SECOND`. What was changed with errors in view is said in `HINDSIGHT`. Left out: figures with torch.compile or
kernels of their own (Unsloth, most of torchtune's), GPTQ, and those whose lengths or cards are not said.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import brim
from brim.memory.estimate import Question
from brim.memory.obtain import obtain_family
from brim.memory.where import Where
from brim.speed.communication import traffic
from brim.speed.rates import rates_of_gpu
from brim.speed.roofline import Roofline
from brim.speed.step import StepSpeed
from brim.workload.resolve import Model
from brim.workload.settings import Settings

Unit = Literal["s/step", "sequences/s", "tokens/s", "s/1024 sequences"]
FACTORS = (1.3, 1.5, 2.0)
HALF_PARAMETERS = {"bf16": 2, "fp16": 2}

SOURCES = {
    "qwen": (
        "QwenLM/Qwen, README, Profiling of Memory and Speed: one A100-SXM4-80G, torch 2.0, flash attention 2, finetune.py (Trainer's bf16,"
        " checkpointing, rank 64 on all linear layers), 8 micro-batches of one sequence. A Phi-3 of the same sizes stands for Qwen-1, which"
        " is not in transformers"
    ),
    "v100": (
        "huggingface/transformers, docs/source/en/perf_train_gpu_one.mdx @0016acf: bert-large-uncased, 512 sequences of 512 random tokens,"
        " V100-SXM2 16 GB; attention as in 2022 (eager), AdamW of transformers (a loop over the parameters)"
    ),
    "answer": (
        "AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md: train.py on dummy data of 2048 tokens, bfloat16, rank 64 on all but o_proj,"
        " checkpointing; seconds for 1024 sequences on all cards together. Two RTX 3090 held at 280 W, two RTX 4090, no NVLink; 70B on"
        " A100 40GB SXM and H100 SXM"
    ),
    "peft": (
        "huggingface/peft, method_comparison/MetaMathQA/results @0a179c1: its own loop on one L40S, batches of 4, 250 steps in 30.9 s"
        " (LoRA) and 90.6 s (full). 4,198,051 tokens in 20,000 sequences, batches sorted by length: taken as 210 tokens without padding"
    ),
    "a800": (
        "gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a: LLaMA-7B, 4096 tokens, eight A800, DeepSpeed 0.14, 64 sequences a"
        " step. Its unit is not in the text that was found: read as sequences per second of all cards; nor is its attention: flash"
    ),
    "torchtune": (
        "pytorch/torchtune, README @a9ea6d5, Optimization flags: Llama 3.2 3B, 2 packed sequences of 4096, A100, bfloat16, before the row"
        " that compiles; an 80 GB SXM card is assumed"
    ),
    "torchtitan": (
        "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1 without compile: Llama 3.1 8B, 8192 tokens, eight H100"
        " with 2.4 TB/s, held at 500 W. Selective checkpointing (every second product) is taken as every second layer"
    ),
    "t4": (
        "earino.github.io/applied-deep-learning, blog 05: ModernBERT-base, 32 sequences of 128 tokens, Kaggle's T4, fp16 autocast, 0.30 s a"
        " batch; all batches taken as full"
    ),
}
HINDSIGHT = (
    "answer: its 4-bit rows were first predicted with norms, embeddings and head in float32, as peft prepares a model (1.4 to 2.1 times"
    " the published seconds; 17 of all 29 rows within a factor 1.3, median factor 1.18). Its train.py does not prepare the model: all is"
    " bfloat16, as memory_gpu.py has it. No constant was changed."
)
"""What was changed after the rows were first predicted."""

QWEN = {
    "model_type": "phi3", "max_position_embeddings": 8192, "pad_token_id": 0, "resid_pdrop": 0.0,
}  # fmt: skip
QWEN_7B = {
    **QWEN, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 151936,
}  # fmt: skip
QWEN_14B = {
    **QWEN, "hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40, "vocab_size": 152064,
}  # fmt: skip
"""Sizes from the config.json of Qwen/Qwen-7B and Qwen/Qwen-14B."""


@dataclass(frozen=True)
class Row:
    """One published figure."""

    source: str
    model: str
    gpu: str
    settings: dict[str, Any]
    published: float
    unit: Unit
    config: dict[str, Any] | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    """What the source says of its cards that differs from the catalogue."""
    prepared: bool = True
    """Quantised base: whether the rest of it is held in float32, as peft's `prepare_model_for_kbit_training` does."""

    @property
    def sequences(self) -> int:
        """Of one optimizer step on all cards."""
        given = self.settings
        return int(given["micro_batch"] * given.get("accumulation", 1) * given.get("gpus", 1))

    @property
    def published_seconds(self) -> float:
        """Of one optimizer step."""
        match self.unit:
            case "s/step":
                return self.published
            case "sequences/s":
                return self.sequences / self.published
            case "tokens/s":
                return float(self.sequences * self.settings["seq_len"] / self.published)
            case "s/1024 sequences":
                return self.published * self.sequences / 1024

    def predicted_seconds(self) -> float:
        """The same, as a plan would have it."""
        gpu = replace(brim.find_gpu(self.gpu).gpu, **self.changes)
        model = (
            Model(given=self.model, origin="config", name=self.model, config=self.config)
            if self.config
            else brim.find_model(self.model)
        )
        question = Question.ask(model, Settings(**{"padded": False, **self.settings}), Where(gpu, gpu.usable_bytes))
        settings, rates = question.settings, rates_of_gpu(gpu)
        family = obtain_family(replace(question.setup(), micro_batch=2, prepared=self.prepared), question.where.target)
        assert family is not None, "these models all have families"
        facts = family.facts
        moved = traffic(settings, rates, parameters=facts.total_parameters, trainable=facts.trainable_parameters)
        width = HALF_PARAMETERS.get(settings.precision if settings.method == "full" else "", 4)
        assert settings.seq_len is not None
        speed = StepSpeed(Roofline(family.work, rates), moved, facts.trainable_parameters * width, settings.seq_len)
        return speed.step_seconds([[settings.micro_batch] * settings.accumulation] * settings.ranks)


def _qwen(name: str, config: dict[str, Any], length: int, seconds: float) -> Row:
    settings = {
        "task": "causal-lm", "method": "lora", "lora_rank": 64, "precision": "amp-bf16", "checkpointing": "full", "micro_batch": 1,
        "lora_targets": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "accumulation": 8, "seq_len": length,
    }  # fmt: skip
    return Row("qwen", name, "a100-80gb", settings, seconds, "s/step", config)


def _v100(sequences_per_second: float, **settings: Any) -> Row:
    every = {"task": "classification", "seq_len": 512, "attention": "eager", "optimizer": "adamw-loop"}
    return Row("v100", "bert-large-uncased", "v100-16gb", {**every, **settings}, sequences_per_second, "sequences/s")


def _answer(seconds: float, gpu: str, gpus: int, model: str = "llama-2-7b", **settings: Any) -> Row:
    every = {
        "lora_rank": 64, "lora_targets": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"), "precision": "bf16",
        "lora_dtype": "bfloat16", "checkpointing": "full", "seq_len": 2048, "gpus": gpus,
    }  # fmt: skip
    no_bridge = {"peer_link": None, "peer_bytes_per_second": None}
    changes = {**no_bridge, "watts": 280} if gpu == "rtx-3090" else {}
    return Row("answer", model, gpu, {**every, **settings}, seconds, "s/1024 sequences", changes=changes, prepared=False)


def _a800(sequences_per_second: float, sharding: str, micro_batch: int, **settings: Any) -> Row:
    every = {"precision": "bf16", "seq_len": 4096, "gpus": 8, "sharding": sharding, "micro_batch": micro_batch}
    every["accumulation"] = 64 // (8 * micro_batch)
    return Row("a800", "llama-2-7b", "a800-80gb", {**every, **settings}, sequences_per_second, "sequences/s")


ROWS = [
    _qwen("qwen-7b", QWEN_7B, 256, 1.2),
    _qwen("qwen-7b", QWEN_7B, 1024, 2.8),
    _qwen("qwen-7b", QWEN_7B, 2048, 5.2),
    _qwen("qwen-7b", QWEN_7B, 8192, 21.3),
    _qwen("qwen-14b", QWEN_14B, 512, 2.4),
    _qwen("qwen-14b", QWEN_14B, 2048, 8.4),
    _v100(8.86, precision="fp32", micro_batch=4),
    _v100(7.75, precision="fp32", micro_batch=1, accumulation=4),
    _v100(5.99, precision="fp32", micro_batch=1, accumulation=4, checkpointing="full"),
    _v100(18.64, precision="amp-fp16", micro_batch=4),
    _v100(10.09, precision="amp-fp16", micro_batch=1, accumulation=4, checkpointing="full"),
    _answer(881, "rtx-3090", 2, method="lora", sharding="ddp", micro_batch=4),
    _answer(875, "rtx-3090", 2, method="qlora", sharding="ddp", micro_batch=8),
    _answer(437, "rtx-4090", 2, method="lora", sharding="ddp", micro_batch=4),
    _answer(481, "rtx-4090", 2, method="lora", sharding="fsdp", micro_batch=6),
    _answer(450, "rtx-4090", 2, method="qlora", sharding="ddp", micro_batch=8),
    _answer(466, "rtx-4090", 2, method="qlora", sharding="fsdp", micro_batch=10),
    _answer(1266, "a100-40gb", 4, "llama-2-70b", method="qlora", sharding="fsdp", micro_batch=4),
    _answer(672, "a100-40gb", 8, "llama-2-70b", method="qlora", sharding="fsdp", micro_batch=4),
    _answer(667, "h100-sxm-80gb", 4, "llama-2-70b", method="qlora", sharding="fsdp", micro_batch=8),
    Row(
        "peft", "llama-3.2-3b", "l40s",
        {"method": "lora", "lora_rank": 32, "lora_targets": ("q_proj", "v_proj"), "precision": "bf16", "micro_batch": 4, "seq_len": 210},
        30.9 / 250, "s/step",
    ),
    Row("peft", "llama-3.2-3b", "l40s", {"precision": "bf16", "micro_batch": 4, "seq_len": 210}, 90.6 / 250, "s/step"),
    _a800(5.33, "zero2", 1),
    _a800(4.69, "zero2", 4, checkpointing="full"),
    _a800(1.81, "zero2", 1, checkpointing="full", offload="optimizer"),
    _a800(4.45, "zero3", 2, checkpointing="full"),
    Row("torchtune", "llama-3.2-3b", "a100-80gb", {"precision": "bf16", "micro_batch": 2, "seq_len": 4096}, 7075, "tokens/s"),
    Row(
        "torchtitan", "llama-3.1-8b", "h100-sxm-80gb",
        {"precision": "amp-bf16", "micro_batch": 2, "seq_len": 8192, "gpus": 8, "sharding": "fsdp", "checkpointing": "every:2"},
        8 * 5762, "tokens/s", changes={"watts": 500, "bandwidth_bytes_per_second": 2.4e12},
    ),
    Row(
        "t4", "modernbert-base", "t4",
        {"task": "classification", "precision": "amp-fp16", "micro_batch": 32, "seq_len": 128}, 0.30, "s/step",
    ),
]  # fmt: skip


def _print_row(row: Row) -> float:
    predicted, published = row.predicted_seconds(), row.published_seconds
    given = row.settings
    how = f"{given.get('method', 'full')} {given['precision']} {given.get('sharding', '')}"
    how += " offload" if "offload" in given else ""
    how += f" ckpt {given['checkpointing']}" if "checkpointing" in given else ""
    shape = f"{given['micro_batch']} x {given['seq_len']}" + (
        f" x {given['accumulation']}" if given.get("accumulation", 1) > 1 else ""
    )
    cards = f"{given.get('gpus', 1)} {row.gpu}"
    ratio = predicted / published
    print(
        f"{row.source:10} {row.model:18} {cards:16} {how:34} {shape:>13} {predicted:8.3f} s {published:8.3f} s {ratio:6.2f}",
        flush=True,
    )
    return ratio


def _summary(ratios: list[float]) -> str:
    logs = [abs(math.log(ratio)) for ratio in ratios]
    within = ", ".join(f"{sum(log <= math.log(factor) for log in logs)} within a factor {factor}" for factor in FACTORS)
    return (
        f"{len(ratios):3} rows: median ratio {statistics.median(ratios):.2f}, median factor {math.exp(statistics.median(logs)):.2f},"
        f" worst {max(ratios, key=lambda ratio: abs(math.log(ratio))):.2f}; {within}"
    )


def main() -> int:
    """Print every row and what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only sources whose name begins like this")
    only = parser.parse_args().only
    rows = [row for row in ROWS if row.source.startswith(only)]
    print(f"{'source':10} {'model':18} {'cards':16} {'how':34} {'shape':>13} {'predicted':>10} {'published':>10} {'ratio':>6}")
    found = [(row.source, _print_row(row)) for row in rows]
    print("\nBy source: predicted over published seconds of an optimizer step")
    for source in dict.fromkeys(row.source for row in rows):
        print(f"  {source:10} {_summary([ratio for name, ratio in found if name == source])}")
    if found:
        print(f"\n{_summary([ratio for _, ratio in found])}")
    print("\nSources")
    for source in dict.fromkeys(row.source for row in rows):
        print(f"  {source}: {SOURCES[source]}")
    print(f"\nChosen with the errors in view\n  {HINDSIGHT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
