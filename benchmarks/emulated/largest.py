"""Finds the largest micro-batch that trains, by brute force. Reads one JSON line (a case and the model's config), prints another.

    python -m brim.emulator --gpu t4 --memory 2GiB -- python benchmarks/emulated/largest.py < case.jsonl

brim is not imported here. Every size runs in two forks of this process, which has imported the libraries and has no context on the card.
One trains without a mask, one with a mask, because attention may use a different kernel. A size trains if in both forks three optimizer
steps finish without an out-of-memory error and the allocator does not have to release its cache in every step. If it released the cache in
the first three steps, one of the two following pairs of steps must run without a release.

The result is a size that trains while the next two sizes do not. A guess, if given, is tried first; otherwise sizes are bisected.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

_SPEC = importlib.util.spec_from_file_location(
    "training", Path(__file__).resolve().parents[2] / "src" / "brim" / "emulator" / "training.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
training: Any = importlib.util.module_from_spec(_SPEC)  # loaded from its path: the package itself is not imported
_SPEC.loader.exec_module(training)
DTYPES, HALVES = training.DTYPES, training.HALVES
build, make_batch, make_optimizer = training.build, training.make_batch, training.make_optimizer

# mypy: disable-error-code="no-untyped-call"

_LARGEST_SIZE = 256
_MARGIN, _LEAST_MARGIN = 0.02, 2 << 20


def trains(case: dict[str, Any], config: dict[str, Any]) -> bool:
    """Run three steps under the limit: the card's memory minus the margin and minus the CUDA context of this process."""
    free, total = torch.cuda.mem_get_info()
    room = total - max(int(_MARGIN * total), _LEAST_MARGIN) - (total - free)
    torch.cuda.set_per_process_memory_fraction(room / total)
    amp = HALVES.get(case["precision"])
    compute = amp or DTYPES[case["precision"]]
    model = build(case, config, torch.float32 if amp and case["method"] == "full" else compute, compute)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(case["optimizer"], trained)
    scaler = torch.amp.GradScaler("cuda", enabled=case["precision"] == "amp-fp16")
    options = {} if case["task"] == "classification" else {"use_cache": False}

    def retries() -> int:
        return int(torch.cuda.memory_stats()["num_alloc_retries"])

    def step() -> None:
        for _micro_batch in range(case["accumulation"]):
            batch = {name: tensor.to("cuda") for name, tensor in make_batch(case, config).items()}
            with torch.autocast("cuda", amp, enabled=amp is not None):
                loss = model(**batch, **options).loss
            scaler.scale(loss / case["accumulation"]).backward()
            del loss, batch
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    for _step in range(3):
        step()
    new_retries = retries_before = retries()
    for _round in range(2):
        if not new_retries:
            break
        for _step in range(2):
            step()
        new_retries, retries_before = retries() - retries_before, retries()
    return not new_retries


def trains_in_fork(case: dict[str, Any], config: dict[str, Any], size: int) -> bool:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        torch.cuda._is_in_bad_fork = lambda: False  # nothing was allocated on the device before the fork
        try:
            result = {"trains": trains({**case, "micro_batch": size}, config)}
        except torch.OutOfMemoryError:
            result = {"trains": False}
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"[:400]}  # type: ignore[dict-item]
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    report = json.loads(text) if text else {"error": "the process died"}
    if "error" in report:
        raise RuntimeError(report["error"])
    return bool(report["trains"])


def largest(case: dict[str, Any], config: dict[str, Any], guess: int | None) -> dict[str, Any]:
    def fits(size: int) -> bool:
        return all(trains_in_fork({**case, "padded": padded}, config, size) for padded in (False, True))

    if guess is not None and fits(guess) and not any(fits(guess + more) for more in (1, 2)):
        return {"largest": guess, "is_monotonic": True}
    low, high = 0, 1
    while high <= _LARGEST_SIZE and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    above = [low + 2] if fits(low + 2) else []
    return {"largest": max([low, *above]), "is_monotonic": not above}


def main() -> None:
    import peft  # noqa: F401  (imported once, before the forks)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    request = json.loads(sys.stdin.readline())
    try:
        result = largest(request["case"], request["config"], request.get("guess"))
    except RuntimeError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
