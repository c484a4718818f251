"""Plain training steps on several ranks, one CUDA device each: reads a file of cases, prints torch's own peaks as JSON lines.

    python -m brim.emulator --gpu t4 --count 2 --memory 1024GiB -- \\
        python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/emulated/sharded_training.py cases.jsonl

brim is not imported here. torch, transformers, peft and deepspeed are called as their users call them, with the settings of `brim train`
and of the files that brim emits (brim/trainer/sharding, brim/planner/emit/deepspeed.py). DDP is torch's own class. Model, batch and
optimizer are those of the reference training on one device (brim/emulator/training.py).

Every case runs in forks of the ranks, so that the libraries are imported once per card. Rank 0 prints a line for each case.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

# mypy: disable-error-code="no-untyped-call"

_STEPS = 3
_CASE_SECONDS = 400
"""Timeout of a case: a rank may wait for another that never arrives."""
_PAUSE_SECONDS = 0.3
"""After each step. NCCL's watchdog polls every 100 ms and holds the tensors of a finished collective until then. Without a pause, DDP's
first bucket, which the second step replaces, is sometimes still allocated in that step."""
_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f")
_HALVES = {"amp-bf16": torch.bfloat16, "bf16": torch.bfloat16, "amp-fp16": torch.float16, "fp16": torch.float16}


def _load_reference() -> Any:
    """Load the training from its path: `import brim.emulator` would import brim in the measured process."""
    path = Path(__file__).resolve().parents[2] / "src" / "brim" / "emulator" / "training.py"
    spec = importlib.util.spec_from_file_location("reference_training", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = _load_reference()


def measure(case: dict[str, Any], config: dict[str, Any], *, history: str | None = None) -> dict[str, Any]:
    """Train three optimizer steps on this rank."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if history:
        torch.cuda.memory._record_memory_history(context="alloc", stacks=history, max_entries=10_000_000)
    reference.mark("build", history)
    kind = case["sharding"]
    step = (_ddp if kind == "ddp" else _fsdp if kind == "fsdp" else _zero)(case, config, history)
    resting = torch.cuda.memory_allocated()
    steps = []
    for number in range(_STEPS):
        torch.cuda.reset_peak_memory_stats()
        step(number)
        time.sleep(_PAUSE_SECONDS)
        steps.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    result = {
        "allocated": max(peak for peak, _reserved in steps),
        "reserved": max(reserved for _peak, reserved in steps),
        "steps": steps,
        "resting": resting,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "torch": torch.__version__,
    }
    if history:
        result["history"] = reference.read_history()
    return result


def _micro_batches(
    case: dict[str, Any], config: dict[str, Any], history: str | None, forward: Callable[..., Any], backward: Callable[..., None]
) -> Callable[[int, int], None]:
    options = {} if case["task"] == "classification" else {"use_cache": False}

    def run(step: int, micro: int) -> None:
        reference.mark(f"forward {step} {micro}", history)
        batch = {name: tensor.to("cuda") for name, tensor in reference.make_batch(case, config).items()}
        loss = forward(**batch, **options).loss
        reference.mark(f"backward {step} {micro}", history)
        backward(loss)

    return run


def _ddp(case: dict[str, Any], config: dict[str, Any], history: str | None) -> Callable[[int], None]:
    """DistributedDataParallel, with the precision settings of one device."""
    amp = reference.HALVES.get(case["precision"])
    compute = amp or reference.DTYPES[case["precision"]]
    inner = reference.build(case, config, torch.float32 if amp and case["method"] == "full" else compute, compute)
    model = nn.parallel.DistributedDataParallel(
        inner, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=case["gradient_as_bucket_view"]
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = reference.make_optimizer(case["optimizer"], trained)
    scaler = torch.amp.GradScaler("cuda", enabled=case["precision"] == "amp-fp16")
    accumulation = case["accumulation"]

    def forward(**batch: Any) -> Any:
        with torch.autocast("cuda", amp, enabled=amp is not None):
            return model(**batch)

    def backward(loss: torch.Tensor) -> None:
        scaler.scale(loss / accumulation if accumulation > 1 else loss).backward()

    run = _micro_batches(case, config, history, forward, backward)

    def step(number: int) -> None:
        for micro in range(accumulation):
            with contextlib.nullcontext() if micro == accumulation - 1 else model.no_sync():
                run(number, micro)
        reference.mark(f"clip {number}", history)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, case["max_grad_norm"])
        reference.mark(f"optimizer {number}", history)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def _fsdp(case: dict[str, Any], config: dict[str, Any], history: str | None) -> Callable[[int], None]:
    """FSDP units, mixed-precision policy and a reduction after every micro-batch, as in brim/trainer/sharding/fsdp.py."""
    amp = reference.HALVES.get(case["precision"])
    compute = amp or reference.DTYPES[case["precision"]]
    dtype = torch.float32 if amp and case["method"] == "full" else compute
    model = reference.build(case, config, dtype, compute, device="cpu")
    _shard(model, half=amp)
    optimizer = reference.make_optimizer(
        case["optimizer"], [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    accumulation = case["accumulation"]
    run = _micro_batches(
        case, config, history, model, lambda loss: (loss / accumulation if accumulation > 1 else loss).backward()
    )

    def step(number: int) -> None:
        for micro in range(accumulation):
            run(number, micro)
        reference.mark(f"clip {number}", history)
        nn.utils.clip_grad_norm_(model.parameters(), case["max_grad_norm"])
        reference.mark(f"optimizer {number}", history)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _shard(model: nn.Module, *, half: torch.dtype | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(half, torch.float32) if half else MixedPrecisionPolicy()
    shared: dict[str, Any] = {"mesh": init_device_mesh("cuda", (dist.get_world_size(),)), "mp_policy": policy}
    layers = _layers(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    for layer in layers:
        fully_shard(layer, **shared, reshard_after_forward=True)
    norms = [module for name, module in model.named_modules() if name.rpartition(".")[2] in _NORMS and id(module) not in inside]
    tail = norms[-1:] if len(norms) == 1 else []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if id(embedding) in inside:  # BERT's embeddings and their norm are one unit
        embedding = None
    if embedding is not None and head is not None and embedding.weight is head.weight:
        tail += [embedding, head]
    else:
        if embedding is not None:
            fully_shard(embedding, **shared, reshard_after_forward=True)
        tail += [head] if head is not None else []
    if tail:
        fully_shard(tail, **shared, reshard_after_forward=False)
    fully_shard(model, **shared)


def _layers(model: nn.Module) -> list[nn.Module]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    inside = {id(module) for outer in blocks for module in outer.modules() if module is not outer}
    if blocks:
        return [module for module in blocks if id(module) not in inside]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    outermost = [inner for inner in lists if not any(inner is not outer and inner in set(outer.modules()) for outer in lists)]
    return [layer for layers in outermost for layer in layers]


def _zero(case: dict[str, Any], config: dict[str, Any], history: str | None) -> Callable[[int], None]:
    """DeepSpeed's engine, with the settings that brim/planner/emit/deepspeed.py writes and an optimizer of torch."""
    import deepspeed

    half = _HALVES.get(case["precision"])
    # Loaded in float32, as in `brim train`; the engine converts it. With adapters, the frozen base is already in half precision.
    dtype = half if half and case["method"] != "full" else torch.float32
    model = reference.build(case, config, dtype, dtype, device="cpu")
    optimizer = reference.make_optimizer(
        case["optimizer"], [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    engine, *_others = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_deepspeed_config(case, config, half), dist_init_required=False
    )
    run = _micro_batches(case, config, history, engine, engine.backward)

    def step(number: int) -> None:
        for micro in range(case["accumulation"]):
            run(number, micro)
            reference.mark(f"optimizer {number}", history)
            engine.step()

    return step


def _deepspeed_config(case: dict[str, Any], config: dict[str, Any], half: torch.dtype | None) -> dict[str, Any]:
    stage = int(case["sharding"][-1])
    hidden = next(config[key] for key in ("hidden_size", "d_model", "n_embd", "dim") if key in config)
    zero: dict[str, Any] = {
        "stage": stage, "overlap_comm": False, "contiguous_gradients": True, "reduce_bucket_size": hidden * hidden,
    }  # fmt: skip
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": int(0.9 * hidden * hidden), "stage3_param_persistence_threshold": 10 * hidden}
    scaling = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}
    return {
        "train_micro_batch_size_per_gpu": case["micro_batch"],
        "gradient_accumulation_steps": case["accumulation"],
        "gradient_clipping": case["max_grad_norm"],
        "steps_per_print": 1 << 62,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}} if half == torch.bfloat16 else scaling if half == torch.float16 else {}),
        "zero_optimization": zero,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, help="JSON lines; the ranks exchange files in the folder of this file")
    parser.add_argument("--history", choices=("python", "all"), help="also record every allocation")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    requests = [json.loads(line) for line in options.cases.read_text().splitlines()]
    _import_libraries(requests)
    folder = options.cases.parent
    for number, request in enumerate(requests):
        began = time.time()
        _in_fork(request, options.history, folder, number)
        answers = [_read(folder / f"{number}.{other}") for other in range(world)]  # every rank waits for all others
        if rank == 0:
            row = _of_all_ranks(answers) | {"seconds": round(time.time() - began, 1)}
            print(json.dumps({"case": request["case"], **row}), flush=True)


def _import_libraries(requests: list[dict[str, Any]]) -> None:
    os.environ |= {"DS_ACCELERATOR": "cuda", "DS_IGNORE_CUDA_DETECTION": "1"}
    warnings.simplefilter("ignore")
    import peft  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers

    if any(request["case"]["sharding"].startswith("zero") for request in requests):
        import deepspeed  # noqa: F401
        from deepspeed.utils.logging import logger

        logger.setLevel("ERROR")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _of_all_ranks(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the rank with the highest peak, and those of each rank in `ranks`."""
    errors = [answer for answer in answers if "error" in answer]
    if errors:
        return next((answer for answer in errors if "another rank" not in answer["error"]), errors[0])
    largest = max(answers, key=lambda answer: answer["allocated"])
    ranks = [{name: answer[name] for name in ("allocated", "reserved", "steps", "resting")} for answer in answers]
    reserved = max(answer["reserved"] for answer in answers)
    return {**largest, "reserved": reserved, "ranks": ranks}


def _in_fork(request: dict[str, Any], history: str | None, folder: Path, number: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own_path = folder / f"{number}.{rank}"
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # libraries print to stdout, which is for results
        torch.cuda._is_in_bad_fork = lambda: False  # nothing was allocated on the device before the fork
        try:
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", init_method=f"file://{folder}/{number}.store", rank=rank, world_size=world)
            _write(own_path, measure(request["case"], request["config"], history=history))
        except BaseException as error:  # any failure is reported to the parent
            _write(own_path, {"error": f"{type(error).__name__}: {error}"[:400], "where": traceback.format_exc()[-3000:]})
        os._exit(0)
    end = time.monotonic() + _CASE_SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        others = [folder / f"{number}.{other}" for other in range(world)]
        if time.monotonic() > end or any("error" in _read(path) for path in others if path.exists()):
            os.kill(child, 9)
            os.waitpid(child, 0)
            break
        time.sleep(0.1)
    if not own_path.exists():
        _write(own_path, {"error": "killed: timeout, or another rank failed"})


def _write(path: Path, answer: dict[str, Any]) -> None:
    partial = path.with_suffix(f"{path.suffix}.partial")
    partial.write_text(json.dumps(answer))
    partial.rename(path)


def _read(path: Path) -> dict[str, Any]:
    while not path.exists():
        time.sleep(0.1)
    answer: dict[str, Any] = json.loads(path.read_text())
    return answer


if __name__ == "__main__":
    main()
