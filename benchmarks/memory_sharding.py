"""How near the model of data-parallel training comes to real runs: two or three processes on this CPU, every allocation recorded.

    python benchmarks/memory_sharding.py [PATTERN ...] [--json]

Small models are trained for three steps by each engine (DDP, FSDP2, DeepSpeed's ZeRO) over gloo. The peak of the last step, on the rank
that needs most, is set against the trace of one process, sharded by `brim.memory.sharding`. PATTERN keeps the case of that name, or all
whose name contains it. Cases of DeepSpeed are left out where it is not installed. Exit 1 if a bar is missed: 3 % for DDP and FSDP2, 5 %
for ZeRO.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from brim.memory.setup import Setup, Target
from brim.memory.sharding.shard import Parallel, shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from brim.memory.stream import Trace

RANKS = 2
BARS_PERCENT = {"ddp": 3.0, "fsdp": 3.0}
ZERO_BAR_PERCENT = 5.0
_MARK = "the step that counts"

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "pad_token_id": 0,
}
FULL = Setup(config=LLAMA, task="causal-lm", micro_batch=2, length=128, padded=False)
LORA = replace(FULL, method="lora", lora_targets=("all-linear",))
SHORT = replace(FULL, micro_batch=1, length=16)
LONG = replace(FULL, micro_batch=4, length=256)
TIED = replace(FULL, config={**LLAMA, "tie_word_embeddings": True})
GPT2 = replace(
    FULL,
    config={
        "model_type": "gpt2",
        "n_embd": LLAMA["hidden_size"],
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 2000,
        "n_positions": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)
T5 = replace(
    FULL,
    task="seq2seq",
    target_length=64,
    config={
        "model_type": "t5",
        "d_model": LLAMA["hidden_size"],
        "d_kv": 64,
        "d_ff": 704,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": 2000,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
)
DEEP = replace(SHORT, config={**LLAMA, "num_hidden_layers": 12, "vocab_size": 500})


@dataclass(frozen=True)
class Case:
    setup: Setup
    parallel: Parallel
    settings: dict[str, Any] = field(default_factory=dict)
    """Of DeepSpeed, beside those that follow from `parallel`."""


def _parallel(sharding: Any, ranks: int = RANKS, **settings: Any) -> Parallel:
    return Parallel(sharding, ranks, hidden=LLAMA["hidden_size"], **settings)


# As in a model that is much larger than what may be gathered.
_TIGHT = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 500_000}
_TIGHTLY: dict[str, Any] = {"reuse_elements": 0, "live_elements": 500_000}
CASES: dict[str, Case] = {
    "ddp": Case(FULL, _parallel("ddp")),
    "ddp, bucket view": Case(FULL, _parallel("ddp", gradient_as_bucket_view=True)),
    "ddp, short": Case(SHORT, _parallel("ddp")),
    "ddp, short, bucket view": Case(SHORT, _parallel("ddp", gradient_as_bucket_view=True)),
    "ddp, tied, bucket view": Case(TIED, _parallel("ddp", gradient_as_bucket_view=True)),
    "ddp, accumulated": Case(replace(FULL, accumulation=2), _parallel("ddp")),
    "ddp, accumulated, bucket view": Case(replace(SHORT, accumulation=2), _parallel("ddp", gradient_as_bucket_view=True)),
    "ddp, lora": Case(LORA, _parallel("ddp")),
    "fsdp": Case(FULL, _parallel("fsdp")),
    "fsdp, short": Case(SHORT, _parallel("fsdp")),
    "fsdp, long": Case(LONG, _parallel("fsdp")),
    "fsdp, deep": Case(DEEP, _parallel("fsdp")),
    "fsdp, tied": Case(TIED, _parallel("fsdp")),
    "fsdp, lora": Case(LORA, _parallel("fsdp")),
    "fsdp, checkpointed": Case(replace(FULL, checkpointing="full"), _parallel("fsdp")),
    "fsdp, accumulated": Case(replace(SHORT, accumulation=2), _parallel("fsdp")),
    "fsdp, accumulated, synchronised": Case(replace(SHORT, accumulation=2), _parallel("fsdp", synchronise_each=True)),
    "fsdp, bf16, master": Case(replace(FULL, precision="bf16"), _parallel("fsdp", master=True)),
    "fsdp, bf16, master, short": Case(replace(SHORT, precision="bf16"), _parallel("fsdp", master=True)),
    **{
        f"{stage}{name}": Case(setup, _parallel(stage))
        for stage in ("zero1", "zero2", "zero3")
        for name, setup in (
            ("", FULL),
            (", short", SHORT),
            (", long", LONG),
            (", bf16", replace(FULL, precision="bf16")),
            (", bf16, short", replace(SHORT, precision="bf16")),
            (", bf16, lora", replace(LORA, precision="bf16", lora_dtype="bfloat16")),
            (", accumulated", replace(SHORT, accumulation=2)),
        )
    },
    "zero2, overlap": Case(SHORT, _parallel("zero2", overlap=True)),
    "zero3, tight": Case(FULL, _parallel("zero3", **_TIGHTLY), _TIGHT),
    "zero3, short, tight": Case(SHORT, _parallel("zero3", **_TIGHTLY), _TIGHT),
    "zero3, deep, tight": Case(DEEP, _parallel("zero3", **_TIGHTLY), _TIGHT),
    "ddp, three ranks": Case(SHORT, _parallel("ddp", 3)),
    "fsdp, bf16": Case(replace(SHORT, precision="bf16"), _parallel("fsdp")),
    "fsdp, bf16, lora": Case(replace(LORA, precision="bf16", lora_dtype="bfloat16"), _parallel("fsdp")),
    **{
        f"{engine}{name}": Case(setup, _parallel(engine, ranks))
        for engine in ("fsdp", "zero1", "zero2", "zero3")
        for name, setup, ranks in (
            (", lora, accumulated 4", replace(LORA, accumulation=4), 2),
            (", bf16, accumulated 4", replace(SHORT, precision="bf16", accumulation=4), 2),
            (", gpt2", GPT2, 2),
            (", gpt2, bf16, accumulated 4", replace(GPT2, precision="bf16", accumulation=4), 2),
            (", gpt2, lora", replace(GPT2, method="lora", lora_targets=("c_attn", "c_fc")), 2),
            (", three ranks", SHORT, 3),
            (", bf16, lora, three ranks", replace(LORA, precision="bf16", lora_dtype="bfloat16"), 3),
            (", gpt2, accumulated 4, three ranks", replace(GPT2, accumulation=4), 3),
        )
    },
    # Not under FSDP2: accelerate's wrapping leaves T5's shared embedding in two groups, which torch 2.13 refuses.
    **{f"{engine}, t5": Case(T5, _parallel(engine)) for engine in ("zero1", "zero2", "zero3")},
}


@dataclass(frozen=True)
class Result:
    name: str
    sharding: str
    alone_bytes: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted_bytes / self.measured_bytes - 1)

    @property
    def is_near(self) -> bool:
        return abs(self.error_percent) <= BARS_PERCENT.get(self.sharding, ZERO_BAR_PERCENT)

    def line(self) -> str:
        sizes = f"{self.alone_bytes:>12,} {self.predicted_bytes:>12,} {self.measured_bytes:>12,}"
        return f"{self.name:<36} {sizes} {self.error_percent:+8.2f} %"


def predicted(case: Case) -> tuple[int, int]:
    """Peak of the second step: of one process alone, and of a rank."""
    trace = _trace(repr(case.setup))
    return _second_step(trace), _second_step(shard(trace, case.parallel)[0])


_SETUPS = {repr(case.setup): case.setup for case in CASES.values()}


@cache
def _trace(described: str) -> Trace:
    from brim.memory.tracing.reference import trace_step

    # The trace must choose the optimizer's implementation that a rank has: torch picks the for-loop on the CPU, and so do both.
    return trace_step(_SETUPS[described], Target("cpu", threads=1)).trace


def _second_step(trace: Trace) -> int:
    first = (max(place.round for place in trace.places) + 1) // 2
    return max(live for place, live in trace.peaks().items() if place.phase != "build" and place.round >= first)


def measured(names: Sequence[str], ranks: int) -> Iterator[int]:
    """Peak of the last step of each case, on the rank that needs most."""
    common = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    common |= {"DS_ACCELERATOR": "cpu", "DS_IGNORE_CUDA_DETECTION": "1"}
    common["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    noise = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed below, with the workers
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for name in names:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            for worker in workers:
                assert worker.stdin is not None
                print(name, port, sep="\t", file=worker.stdin, flush=True)
            said = [worker.stdout.readline().strip() for worker in workers if worker.stdout is not None]
            if not all(said):
                noise.seek(0)
                raise RuntimeError(f"{name}: a rank failed\n{noise.read()[-6000:]}")
            yield max(int(each) for each in said)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        noise.close()


def _serve() -> None:
    """A rank: what is dear is imported once, and every case is run by a child that begins with nothing but that."""
    import torch
    import transformers

    import brim.memory.tracing.building

    torch.set_num_threads(1)
    _be_patient()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    assert brim.memory.tracing.building
    if importlib.util.find_spec("deepspeed") is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module("deepspeed")
    for line in sys.stdin:
        name, port = line.rstrip("\n").split("\t")
        child = os.fork()
        if not child:
            os.environ["MASTER_PORT"] = port
            _work(name)
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(1)


def _work(name: str) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.manual_seed(0)
    case = CASES[name]
    torch.distributed.init_process_group("gloo")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with contextlib.redirect_stdout(io.StringIO()):
            step = _ENGINES.get(case.parallel.sharding, _deepspeed)(case)
            step()
            step()
        gc.collect()
        with record_function(_MARK):
            step()
    print(_peak(profiler.profiler))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class _Patient:
    """A collective that counts as done when gloo's threads have let go of its tensors.

    They do so a moment after the result is there, and what they are the last to hold is then given back by them, where the profiler
    does not see it: the figure would be too high by whatever was lost that way.
    """

    def __init__(self, function: Callable[..., Any], *given: Any, **named: Any) -> None:
        import torch

        self._holders: list[tuple[Any, int]] = []

        def alias(value: Any) -> Any:
            if isinstance(value, list):
                return [alias(each) for each in value]
            if not isinstance(value, torch.Tensor):
                return value
            self._holders.append((value.untyped_storage(), _holders(value.untyped_storage())))
            return value.detach()

        self.work = function(*[alias(value) for value in given], **{name: alias(value) for name, value in named.items()})
        self.is_done = self.work is None
        if self.is_done:
            self._settle(5.0)

    def wait(self, *given: Any) -> bool:
        if not self.is_done:
            self.work.wait(*given)
            self.is_done, self.work = True, None
            self._settle(0.05)  # its caller may have made further views of them
        return True

    def is_completed(self) -> bool:
        return self.is_done or bool(self.work.is_completed())

    def _settle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(_holders(storage) > before for storage, before in self._holders):
            time.sleep(0.0002)
        self._holders.clear()


def _holders(storage: Any) -> int:
    import torch

    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined,unused-ignore]


def _be_patient() -> None:
    import torch

    def patient(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            made = _Patient(function, *given, **named)
            return None if made.work is None and made.is_done else made

        return call

    for name in ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(torch.distributed, name, patient(getattr(torch.distributed, name)))


def _peak(results: Any) -> int:
    """Most bytes alive at once inside the mark, without the copies in which gloo stages what it sends: NCCL has none."""
    from torch._C._profiler import _EventType

    def visit(events: Iterable[Any]) -> Iterator[Any]:
        for event in events:
            yield event
            yield from visit(event.children)

    changes: list[tuple[int, int, int, bool]] = []
    start = 0
    for event in visit(results.kineto_results.experimental_event_tree()):
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.alloc_size, fields.ptr, _is_staging(event)))
        elif event.name == _MARK:
            start = event.start_time_ns
    live = peak = 0
    held: dict[int, int] = {}
    for moment, size, pointer, is_staging in sorted(changes):
        live -= held.pop(pointer, 0)  # what gloo's threads give back is not recorded: the next owner of the address tells
        if size > 0:
            held[pointer] = 0 if is_staging else size
            live += held[pointer]
        peak = max(peak, live) if moment >= start else 0
    return peak


def _is_staging(event: Any) -> bool:
    parent = event.parent
    while parent is not None:
        if parent.name.startswith(("c10d::", "gloo:")):
            return True
        parent = parent.parent
    return False


def _model(case: Case) -> Any:
    from brim.memory.tracing.building import build_model

    return build_model(case.setup, device="cpu")


def _loop(case: Case, model: Any, batch: Any, optimizer: Any, quiet: Callable[[], Any]) -> Callable[[], None]:
    """The reference step; `quiet` is around the micro-batches that are not synchronised."""
    import torch

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    micros = case.setup.accumulation

    def step() -> None:
        for micro in range(micros):
            last = micro == micros - 1 or case.parallel.synchronise_each
            with contextlib.nullcontext() if last else quiet():
                loss = model(**batch).loss / micros
                loss.backward()
                del loss
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _ddp(case: Case) -> Callable[[], None]:
    import torch

    from brim.memory.tracing.building import make_batch

    model = torch.nn.parallel.DistributedDataParallel(
        _model(case), gradient_as_bucket_view=case.parallel.gradient_as_bucket_view, broadcast_buffers=False
    )
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    return _loop(case, model, make_batch(case.setup, device="cpu"), optimizer, model.no_sync)


def _fsdp(case: Case) -> Callable[[], None]:
    """Wrapped as accelerate does (accelerate/utils/fsdp_utils.py, `fsdp2_prepare_model`)."""
    import torch
    from accelerate.utils.fsdp_utils import _find_final_norm
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from brim.memory.tracing.building import find_layers, make_batch

    whole = _model(case)
    settings: dict[str, Any] = {"mesh": init_device_mesh("cpu", (case.parallel.ranks,))}
    if case.parallel.master:
        whole.to(torch.float32)
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in find_layers(whole):
        fully_shard(layer, **settings)
    inner = whole.get_base_model() if case.setup.method == "lora" else whole
    embedding, norm, head = inner.get_input_embeddings(), _find_final_norm(whole), inner.get_output_embeddings()
    if embedding.weight is head.weight:
        fully_shard([each for each in (norm, embedding, head) if each is not None], **settings, reshard_after_forward=False)
    else:
        fully_shard(embedding, **settings)
        fully_shard([each for each in (norm, head) if each is not None], **settings, reshard_after_forward=False)
    fully_shard(whole, **settings)
    for module in whole.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    optimizer = torch.optim.AdamW([parameter for parameter in whole.parameters() if parameter.requires_grad])

    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        whole.set_requires_gradient_sync(False)
        yield
        whole.set_requires_gradient_sync(True)

    return _loop(case, whole, make_batch(case.setup, device="cpu"), optimizer, quiet)


def _deepspeed(case: Case) -> Callable[[], None]:
    import deepspeed  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import torch

    from brim.memory.tracing.building import make_batch

    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # plain gloo, nothing to compile

    assert case.parallel.hidden is not None
    hidden = case.parallel.hidden
    model = _model(case)
    micros = case.setup.accumulation
    config = {
        "train_micro_batch_size_per_gpu": case.setup.micro_batch,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": case.setup.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": int(case.parallel.sharding[-1]),
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
            **({"overlap_comm": True} if case.parallel.overlap else {}),
            **case.settings,
        },
    }
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    engine, *_rest = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    batch = make_batch(case.setup, device="cpu")
    del model

    def step() -> None:
        for _micro in range(micros):
            loss = engine(**batch).loss
            engine.backward(loss)
            del loss
            engine.step()

    return step


_ENGINES: dict[str, Callable[[Case], Callable[[], None]]] = {"ddp": _ddp, "fsdp": _fsdp}


def judge(names: Iterable[str]) -> Iterator[Result]:
    by_ranks: dict[int, list[str]] = defaultdict(list)
    for name in names:
        by_ranks[CASES[name].parallel.ranks].append(name)
    for ranks, chosen in by_ranks.items():
        for name, bytes_ in zip(chosen, measured(chosen, ranks), strict=True):
            alone, rank = predicted(CASES[name])
            yield Result(name, CASES[name].parallel.sharding, alone, rank, bytes_)


def main() -> int:
    arguments = [word for word in sys.argv[1:] if word != "--json"]
    if arguments[:1] == ["--worker"]:
        _serve()
        return 0
    warnings.simplefilter("ignore")
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    chosen = [
        name
        for name, case in CASES.items()
        if (not arguments or name in arguments or any(word not in CASES and word in name for word in arguments))
        and (has_deepspeed or case.parallel.sharding in _ENGINES)
    ]
    results: list[Result] = []
    if "--json" not in sys.argv:
        print(f"{'case':<36} {'alone':>12} {'predicted':>12} {'measured':>12}    error")
    for result in judge(chosen):
        results.append(result)
        if "--json" not in sys.argv:
            print(result.line(), flush=True)
    if "--json" in sys.argv:
        print(json.dumps([{**vars(result), "error_percent": result.error_percent} for result in results]))
    elif not has_deepspeed:
        print("DeepSpeed is not installed: its cases were left out.", file=sys.stderr)
    return 0 if all(result.is_near for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
