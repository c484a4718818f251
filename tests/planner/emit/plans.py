"""Plans made by hand, one for every kind of thing that a format must say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from brim.machine.catalogue import find_gpu
from brim.machine.records import Machine
from brim.records import Candidate, Plan
from brim.step.cuts import cut
from brim.workload.records import Workload

_WORKLOAD = {"model", "task", "max_length", "target_length", "samples", "epochs", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets",
             "lora_dtype", "base_dtype", "freeze", "loss", "max_grad_norm", "seed"}  # fmt: skip


def make_plan(
    effective_batch: int = 64, micro_batch: int = 4, gpus: str | None = "rtx-3080-20gb*2", nodes: int = 1, **settings: Any
) -> Plan:
    """A plan with this batch; settings go to the workload or to the configuration, whichever knows them."""
    machine = find_gpu(gpus).machine(nodes=nodes) if gpus else Machine()
    of_the_workload = {name: settings.pop(name) for name in list(settings) if name in _WORKLOAD}
    workload = Workload(
        **{"model": "llama-3.1-8b", "task": "causal-lm", "max_length": 512, **of_the_workload},
        effective_batch=effective_batch, method=settings.get("method", "full"), optimizer=settings.get("optimizer", "adamw"),
    )  # fmt: skip
    made = cut(effective_batch, micro_batch, machine.world_size)
    settings.setdefault("sharding", "ddp" if machine.world_size > 1 else "none")
    best = Candidate(
        micro_batch=made.micro_batch, accumulation=made.accumulation, slices=made.slices, world_size=machine.world_size,
        effective_batch=effective_batch, **{"precision": "amp-bf16", **settings},
    )  # fmt: skip
    return Plan(workload=workload, machine=machine, fits=True, best=best, brim_version="0.1.0")


def without_best(plan: Plan) -> Plan:
    """The same question, and nothing that fits."""
    return replace(plan, fits=False, best=None)


LORA: dict[str, Any] = {"method": "lora", "lora_rank": 16, "lora_alpha": 32}
PLANS: dict[str, Plan] = {
    "full, ddp": make_plan(num_workers=4, pin_memory=True, prefetch_factor=2, eval_batch=16),
    "full in bf16, one card": make_plan(gpus="a100-80gb", precision="bf16", checkpointing="full"),
    "full in fp32 on the cpu": make_plan(8, 2, gpus=None, precision="fp32", model="gpt2"),
    "lora, every second layer": make_plan(**LORA, checkpointing="every:2", lora_targets=("q_proj", "v_proj")),
    "lora in fp16 on a t4": make_plan(gpus="t4", precision="amp-fp16", checkpointing="full", **LORA),
    "qlora, paged": make_plan(gpus="rtx-4090", method="qlora", optimizer="paged-adamw-8bit", lora_targets=("all-linear",)),
    "lora on 8 bits": make_plan(gpus="rtx-4090", method="lora-8bit", optimizer="adamw-8bit", attention="flash2"),
    "zero 2, optimizer on the host": make_plan(sharding="zero2", offload="optimizer"),
    "zero 3, parameters on the host": make_plan(gpus="a100-80gb*8", sharding="zero3", offload="parameters", checkpointing="full"),
    "zero 1, lion": make_plan(sharding="zero1", optimizer="lion", precision="amp-fp16"),
    "fsdp, offload": make_plan(gpus="a100-80gb*8", sharding="fsdp", offload="parameters", checkpointing="full"),
    "qlora, fsdp": make_plan(method="qlora", sharding="fsdp", checkpointing="full"),
    "two nodes": make_plan(128, 4, gpus="a100-80gb*8", nodes=2, loss="chunked", optimizer="adamw-fused"),
    "momentum, no clipping": make_plan(gpus="a100-80gb", optimizer="sgd-momentum", max_grad_norm=None, precision="bf16", epochs=2.5),
    "adafactor, seq2seq": make_plan(
        256, 64, task="seq2seq", model="chatlm-mini-chinese", max_length=256, target_length=256, optimizer="adafactor",
        freeze=("shared", "encoder"), samples=5000,
    ),
    "classification": make_plan(task="classification", model="bert-base-uncased", optimizer="adamw-loop", learning_rate=3e-5),
    "uneven, 50 by 8": make_plan(50, 8, gpus="rtx-4090", **LORA),
}  # fmt: skip
