"""Plain training steps on a CUDA device: JSON lines of cases on stdin, JSON lines with torch's own peaks on stdout.

    python -m brim.emulator --gpu t4 --memory 1024GiB -- python src/brim/emulator/training.py < cases.jsonl

brim is not imported here. torch, transformers, peft and bitsandbytes are called as their users call them. Each line contains a case and the
model's config.json as a dictionary. Every case runs in a fork of this process, so that the libraries are imported once per card.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

# mypy: disable-error-code="no-untyped-call"

HALVES = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_STEPS = 3
_STEPS_WITH_LAYERDROP = 20
"""LayerDrop skips layers at random: often none of three steps uses all layers."""


def measure(case: dict[str, Any], config: dict[str, Any], *, history: str | None = None) -> dict[str, Any]:
    """Train for a few steps, usually three. `history` ("python" or "all") also records every allocation, with frames of that kind."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN, which torch would choose on Hopper, is not emulated
    amp = HALVES.get(case["precision"])
    compute = amp or DTYPES[case["precision"]]
    if history:
        torch.cuda.memory._record_memory_history(context="alloc", stacks=history, max_entries=10_000_000)
    mark("build", history)
    model = build(case, config, torch.float32 if amp and case["method"] == "full" else compute, compute)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(case["optimizer"], trained)
    scaler = torch.amp.GradScaler("cuda", enabled=case["precision"] == "amp-fp16")
    accumulation = case["accumulation"]
    options = {} if case["task"] == "classification" else {"use_cache": False}
    resting = torch.cuda.memory_allocated()
    loading = torch.cuda.max_memory_reserved()
    steps = []

    def run_micro_batch(micro: int) -> None:
        mark(f"forward {step} {micro}", history)
        batch = {name: tensor.to("cuda") for name, tensor in make_batch(case, config).items()}
        with torch.autocast("cuda", amp, enabled=amp is not None):
            loss = model(**batch, **options).loss
        if accumulation > 1:
            loss = loss / accumulation
        mark(f"backward {step} {micro}", history)
        scaler.scale(loss).backward()

    has_layerdrop = any(config.get(name) for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"))
    for step in range(_STEPS_WITH_LAYERDROP if has_layerdrop else _STEPS):
        torch.cuda.reset_peak_memory_stats()
        for micro in range(accumulation):
            run_micro_batch(micro)
        mark(f"clip {step}", history)
        if case["max_grad_norm"] is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained, case["max_grad_norm"])
        mark(f"optimizer {step}", history)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        steps.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    result = {
        "allocated": max(step[0] for step in steps),
        "reserved": max(loading, *(step[1] for step in steps)),  # the card must also hold the model while it loads
        "loading": loading,
        "steps": steps,
        "resting": resting,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "attention": getattr(model.config, "_attn_implementation", None),
        "torch": torch.__version__,
    }
    if history:
        result["history"] = read_history()
    return result


def mark(phase: str, history: str | None) -> None:
    """Label the following allocations with a phase in torch's memory history."""
    if history:
        torch._C._cuda_setMemoryMetadata(phase)


def read_history() -> list[list[Any]]:
    """`[action, address, bytes, phase, frames]` of every event of the device."""
    kept = {"alloc": "+", "free_requested": "-", "segment_alloc": "s"}
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    rows = []
    for event in events:
        if event["action"] in kept:
            frames = [
                f"{frame['filename']}:{frame['line']} {frame['name']}" if frame["line"] else frame["name"]
                for frame in event.get("frames", [])[:40]
            ]
            rows.append([kept[event["action"]], event["addr"], event["size"], event.get("user_metadata", ""), frames])
    return rows


def build(case: dict[str, Any], config: dict[str, Any], held: torch.dtype, compute: torch.dtype, *, device: str = "cuda") -> Any:
    """The model on the card, ready to train."""
    checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if case["method"] in {"qlora", "lora-8bit"}:
        model = load_quantized(case, config, compute)
    else:
        model = from_config(case, config, held).to(device)
    model.train()
    if case["checkpointing"] == "full":
        model.gradient_checkpointing_enable(**checkpointing)
    if case["method"] == "full":
        return model
    import peft

    if case["method"] != "lora":
        is_checkpointed = case["checkpointing"] == "full"
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=is_checkpointed, **checkpointing)
    tasks = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classification": "SEQ_CLS"}
    targets: Any = case["lora_targets"] or None
    targets = "all-linear" if targets == ["all-linear"] else targets
    known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    if targets is None and config["model_type"] not in known:
        targets = "all-linear"
    adapters = peft.LoraConfig(
        r=case["lora_rank"], lora_alpha=case.get("lora_alpha", 2 * case["lora_rank"]), lora_dropout=case.get("lora_dropout", 0.0),
        target_modules=targets, task_type=tasks[case["task"]],
    )  # fmt: skip
    return peft.get_peft_model(model, adapters)


def auto_class(task: str) -> Any:
    import transformers

    suffix = {"causal-lm": "CausalLM", "seq2seq": "Seq2SeqLM", "classification": "SequenceClassification"}[task]
    return getattr(transformers, f"AutoModelFor{suffix}")


def read_config(config: dict[str, Any]) -> Any:
    import transformers

    fields = {key: value for key, value in config.items() if key not in {"architectures", "torch_dtype", "dtype"}}
    return transformers.AutoConfig.for_model(**json.loads(json.dumps(fields)))


def from_config(case: dict[str, Any], config: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model that `from_pretrained(dtype=...)` returns, without a file. Weights are not initialised, so they take no RAM on the host."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = auto_class(case["task"]).from_config(read_config(config), dtype=dtype, attn_implementation=case["attention"])
    model.tie_weights()
    head = model.get_output_embeddings()
    if config.get("tie_word_embeddings") is False and head is not None:  # such checkpoints have a separate output weight
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if kept & set(name.split(".")):
            parameter.data = parameter.data.to(torch.float32)
    return model


def load_quantized(case: dict[str, Any], config: dict[str, Any], compute: torch.dtype) -> Any:
    """`from_pretrained(quantization_config=...)` from a sparse file of zeros, which takes no disk space."""
    import transformers

    if case["method"] == "qlora":
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
        )
    else:
        quantization = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with torch.device("meta"):
        skeleton = from_config(case, config, compute)
    with tempfile.TemporaryDirectory() as folder:
        read_config(config).save_pretrained(folder)
        write_zeros(Path(folder) / "model.safetensors", skeleton, compute)
        return auto_class(case["task"]).from_pretrained(
            folder, quantization_config=quantization, dtype=compute, attn_implementation=case["attention"]
        )


def write_zeros(path: Path, skeleton: Any, dtype: torch.dtype) -> None:
    """Write a sparse safetensors file: a header, then zeros that take no disk space."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    kept = skeleton.state_dict()
    tensors = [*skeleton.named_parameters(), *(pair for pair in skeleton.named_buffers() if pair[0] in kept)]
    for name, tensor in tensors:  # tied weights occur once
        size = tensor.numel() * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def make_batch(case: dict[str, Any], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    shape = case["micro_batch"], case["seq_len"]
    ids = torch.randint(3, config["vocab_size"], shape)
    batch = {"input_ids": ids}
    if case["padded"]:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, -1] = 0
    batch["labels"] = torch.zeros(shape[0], dtype=torch.long) if case["task"] == "classification" else ids.clone()
    return batch


def make_optimizer(name: str, trained: list[torch.nn.Parameter]) -> Any:
    if name.endswith("8bit"):
        import bitsandbytes

        optimizers: Any = bitsandbytes.optim
        return (optimizers.PagedAdamW8bit if name.startswith("paged") else optimizers.AdamW8bit)(trained, lr=1e-5)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(trained, lr=1e-5, scale_parameter=False, relative_step=False)
    if name.startswith("sgd"):
        return torch.optim.SGD(trained, lr=1e-5, momentum=0.9 if name == "sgd-momentum" else 0.0)
    options: dict[str, Any] = {"adamw": {}, "adamw-fused": {"fused": True}, "adamw-loop": {"foreach": False}}[name]
    return torch.optim.AdamW(trained, lr=1e-5, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", choices=("python", "all"), help="also record every allocation")
    arguments = parser.parse_args()
    import peft  # noqa: F401  (imported once, before the forks)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for line in sys.stdin:
        request = json.loads(line)
        began = time.time()
        result = in_fork(request, arguments.history)
        result["seconds"] = round(time.time() - began, 1)
        print(json.dumps({"case": request["case"], **result}), flush=True)


def in_fork(request: dict[str, Any], history: str | None) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        torch.cuda._is_in_bad_fork = lambda: False  # nothing was allocated on the device before the fork
        try:
            result = measure(request["case"], request["config"], history=history)
        except BaseException as error:  # any failure is reported to the parent
            result = {"error": f"{type(error).__name__}: {error}"[:400], "where": traceback.format_exc()[-2000:]}
        with os.fdopen(writer, "w") as pipe:
            pipe.write(json.dumps(result))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _pid, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"the process ended with status {os.waitstatus_to_exitcode(status)}"}


if __name__ == "__main__":
    main()
