"""Collectives between the processes of a session: results of small messages, no deadlocks, ranks that die, memory of communicators."""

from __future__ import annotations

import re
import time

import pytest
from tests.emulated.conftest import RunOnCard

from brim.emulator.build import NATIVE
from brim.memory.outside import NCCL_GROUP_BYTES, NCCL_PAIR_BYTES

START = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
size = dist.get_world_size()
"""


def snippet(code: str, *, destroy: bool = True) -> str:
    return START + code + ("\ndist.destroy_process_group()\n" if destroy else "")


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_move_bytes_and_reduce(on_card: RunOnCard, ranks: int) -> None:
    done = on_card(
        snippet("""
def numbers(n, dtype, r=rank):
    return ((torch.arange(n) % 7) * (r + 1) + r).to(dtype)

def same(tensor, expected):
    return torch.equal(tensor.cpu(), expected)

result = {}
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
    for n in (7, 300_000) if dtype in (torch.float32, torch.bfloat16) else (1000,):
        parts = [numbers(n, dtype, r) for r in range(size)]
        exact = torch.stack([part.double() for part in parts])
        for op, expected in ((dist.ReduceOp.SUM, exact.sum(0)), (dist.ReduceOp.MAX, exact.amax(0)), (dist.ReduceOp.MIN, exact.amin(0)), (dist.ReduceOp.PRODUCT, exact.prod(0))):
            if op == dist.ReduceOp.PRODUCT and dtype in (torch.uint8, torch.float16, torch.bfloat16):
                continue
            x = numbers(n, dtype).cuda()
            dist.all_reduce(x, op)
            result[f"all_reduce {dtype} {n} {op}"] = same(x, expected.to(dtype))
        x = torch.empty(size * n, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(x, numbers(n, dtype).cuda())
        result[f"all_gather {dtype} {n}"] = same(x, torch.cat(parts))
        x = torch.empty(n, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(x, torch.cat([numbers(n, dtype) + d for d in range(size)]).to(dtype).cuda())
        result[f"reduce_scatter {dtype} {n}"] = same(x, sum(p.double() for p in [(numbers(n, dtype, r) + rank).to(dtype) for r in range(size)]).to(dtype))
        x = torch.empty(size * n, dtype=dtype, device="cuda")
        dist.all_to_all_single(x, torch.cat([numbers(n, dtype) + d for d in range(size)]).to(dtype).cuda())
        result[f"all_to_all {dtype} {n}"] = same(x, torch.cat([(numbers(n, dtype, r) + rank).to(dtype) for r in range(size)]))
        x = numbers(n, dtype).cuda()
        dist.broadcast(x, size - 1)
        result[f"broadcast {dtype} {n}"] = same(x, parts[size - 1])
        x = numbers(n, dtype).cuda()
        dist.reduce(x, 0)
        result[f"reduce {dtype} {n}"] = same(x, exact.sum(0).to(dtype)) if rank == 0 else True
x = torch.full((3,), float(rank + 1), device="cuda")
dist.all_reduce(x, dist.ReduceOp.AVG)
result["average"] = same(x, torch.full((3,), (size + 1) / 2))
x = torch.full((3,), float(rank + 1), device="cuda")
dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
result["premultiplied"] = same(x, torch.full((3,), size * (size + 1) / 4))
out = [torch.empty(2, device="cuda") for _ in range(size)]
dist.gather(torch.full((2,), float(rank), device="cuda"), out if rank == 0 else None, 0)
result["gather"] = rank != 0 or [float(t[0]) for t in out] == list(range(size))
x = torch.empty(2, device="cuda")
dist.scatter(x, [torch.full((2,), float(d), device="cuda") for d in range(size)] if rank == 0 else None, 0)
result["scatter"] = float(x[1]) == rank
dist.barrier()
result = [name for name, ok in result.items() if not ok]
"""),
        nproc=ranks,
    )
    assert done.results == ([],) * ranks


def test_objects_groups_and_splits(on_card: RunOnCard) -> None:
    done = on_card(
        snippet("""
gathered = [None] * size
dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (rank * 1000)})
objects = [f"from {rank}", {"n": rank}]
dist.broadcast_object_list(objects, src=1)
half = dist.new_group([0, 1]), dist.new_group([2, 3])
x = torch.tensor([rank + 1.0], device="cuda")
dist.all_reduce(x, group=half[rank // 2])
split = dist.split_group(split_ranks=[[0, 2], [1, 3]])
y = torch.tensor([rank + 1.0], device="cuda")
dist.all_reduce(y, group=split)
result = [[entry["rank"] for entry in gathered], [len(entry["text"]) for entry in gathered], objects, x.item(), y.item(), dist.get_rank(split)]
""").replace('init_process_group("nccl")', 'init_process_group("nccl", device_id=torch.device("cuda", rank))'),
        nproc=4,
    )
    for rank, result in enumerate(done.results):
        assert result[:3] == [[0, 1, 2, 3], [0, 1000, 2000, 3000], ["from 1", {"n": 1}]]
        assert result[3:] == [3.0 if rank < 2 else 7.0, 4.0 if rank % 2 == 0 else 6.0, rank // 2]


def test_grouped_sends_and_receives_do_not_deadlock(on_card: RunOnCard) -> None:
    """Every rank sends more than the buffers can hold to all others before it receives."""
    done = on_card(
        snippet("""
n = 400_000
sent = [torch.full((n,), float(10 * rank + peer)).cuda() for peer in range(size)]
received = [torch.empty(n, device="cuda") for _ in range(size)]
work = [dist.P2POp(dist.isend, sent[p], p) for p in range(size) if p != rank] + [dist.P2POp(dist.irecv, received[p], p) for p in range(size) if p != rank]
for request in dist.batch_isend_irecv(work):
    request.wait()
ring = torch.full((5,), float(rank), device="cuda")
if rank == 0:
    dist.send(ring, 1); dist.recv(ring, size - 1)
else:
    received_ring = torch.empty(5, device="cuda"); dist.recv(received_ring, rank - 1); ring += received_ring; dist.send(ring, (rank + 1) % size)
result = [[received[p][-1].item() for p in range(size) if p != rank], [received[p][0].item() for p in range(size) if p != rank], ring[0].item()]
"""),
        nproc=4,
    )
    for rank, result in enumerate(done.results):
        expected = [10 * peer + rank for peer in range(4) if peer != rank]
        assert result[:2] == [expected, expected]
    assert done.results[0][2] == sum(range(4))


def test_large_messages_are_copied_only_in_compute_mode(on_card: RunOnCard) -> None:
    code = snippet("""
x = torch.full((5 << 20,), 0.0, device="cuda")
torch.cuda.synchronize()
import ctypes
ctypes.c_float.from_address(x.data_ptr()).value = rank + 1.0
dist.all_reduce(x)
result = ctypes.c_float.from_address(x.data_ptr()).value
""")
    assert on_card(code, nproc=2).results == (1.0, 2.0)
    assert on_card(code, nproc=2, compute=True).results == (3.0, 3.0)


def test_a_communicator_takes_device_memory_at_its_first_use(on_card: RunOnCard) -> None:
    done = on_card(
        snippet("""
before = torch.cuda.mem_get_info()[0]
dist.barrier()
result = before - torch.cuda.mem_get_info()[0]
"""),
        nproc=2,
    )
    assert NCCL_PAIR_BYTES <= min(done.results) <= max(done.results) < NCCL_PAIR_BYTES + (32 << 20)
    source = (NATIVE / "nccl.c").read_text()
    assert [int(n) for n in re.findall(r"define (?:PAIR|GROUP)_BYTES \(\(size_t\)(\d+)\)", source)] == [
        NCCL_PAIR_BYTES,
        NCCL_GROUP_BYTES,
    ]


def test_two_ranks_on_one_card_are_refused(on_card: RunOnCard) -> None:
    done = on_card(
        START.replace("set_device(rank)", "set_device(0)") + "dist.all_reduce(torch.ones(1, device='cuda'))", nproc=2, check=False
    )
    assert done.returncode
    assert "Duplicate GPU detected" in done.stderr


def test_a_rank_that_dies_does_not_hang_the_others(on_card: RunOnCard) -> None:
    started = time.monotonic()
    done = on_card(
        snippet(
            """
import signal, time
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(3, device="cuda"))
except dist.DistBackendError as error:
    result = str(error)
    import json
    json.dump(result, open(os.environ["BRIM_TEST_RESULT"] + ".0", "w"))
    os._exit(3)
""",
            destroy=False,
        ),
        nproc=2,
        check=False,
        timeout=120,
    )
    assert "rank 1 has exited" in (done.results[0] or "") or "SIGKILL" in done.stderr
    assert time.monotonic() - started < 110


def test_ddp_checks_shapes_and_averages_gradients(on_card: RunOnCard) -> None:
    """Only rank 1 compares. Rank 0 continues with the broadcast of its weights and does not wait for a rank that has failed."""
    done = on_card(
        snippet("""
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(rank)
model = DDP(torch.nn.Linear(8, 8).cuda())
model(torch.ones(2, 8, device="cuda")).sum().backward()
torch.optim.AdamW(model.parameters()).step()
try:
    DDP(torch.nn.Linear(8, 8 + rank).cuda())
    message = ""
except RuntimeError as error:
    message = str(error)
result = message
"""),
        nproc=2,
    )
    assert done.results[0] == ""
    assert "appears not to match sizes" in done.results[1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_trains(on_card: RunOnCard, ranks: int) -> None:
    """Weights, gradients in buckets and two moments. Peaks differ between ranks: NCCL's watchdog thread releases the first buckets."""
    done = on_card(
        snippet("""
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda(), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(4, 512, device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
result = torch.cuda.max_memory_allocated()
"""),
        "rtx-3090",
        nproc=ranks,
    )
    weights = 4 * 512 * 513 * 4
    assert all(4 * weights < peak < 6 * weights + (32 << 20) for peak in done.results)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2_trains(on_card: RunOnCard, ranks: int) -> None:
    done = on_card(
        snippet("""
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
for layer in model:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(4, 512, device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
result = torch.cuda.max_memory_allocated()
"""),
        "rtx-3090",
        nproc=ranks,
    )
    assert len(set(done.results)) == 1
    assert 4 * 512 * 513 * 4 * 3 // ranks < done.results[0] < 64 << 20


@pytest.mark.slow
def test_the_watchdog_stays_quiet_for_a_minute(on_card: RunOnCard) -> None:
    done = on_card(
        snippet("""
import time
for _ in range(12):
    dist.all_reduce(torch.ones(10, device="cuda"))
    time.sleep(5)
result = True
"""),
        nproc=2,
        env={"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "20"},
    )
    assert done.results == (True, True)
    assert "Watchdog" not in done.stderr
    assert "heartbeat" not in done.stderr.lower()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_zero_trains(on_card: RunOnCard, stage: int, ranks: int) -> None:
    pytest.importorskip("deepspeed")
    done = on_card(
        f"""
import os, torch, deepspeed
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
deepspeed.init_distributed("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={{
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {{"stage": {stage}}}, "bf16": {{"enabled": True}},
    "optimizer": {{"type": "AdamW", "params": {{"torch_adam": True}}}}, "zero_allow_untested_optimizer": True}})
for _ in range(2):
    loss = engine(torch.ones(2, 256, device="cuda", dtype=torch.bfloat16)).sum()
    engine.backward(loss)
    engine.step()
result = [engine.global_steps, torch.cuda.max_memory_allocated()]
torch.distributed.destroy_process_group()
""",
        "rtx-3090",
        nproc=ranks,
    )
    assert all(steps == 2 for steps, _peak in done.results)
