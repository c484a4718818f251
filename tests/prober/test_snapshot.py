"""A live module is trained, broken and run out of memory in this process, and is afterwards what it was, to the bit."""

from __future__ import annotations

import random
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from brim.errors import RunError
from brim.machine.budget import ForkServer
from brim.machine.device import CpuDevice
from brim.prober import snapshot
from brim.prober.snapshot import fingerprint, unchanged
from brim.sizes import MIB
from tests.prober.recoveries import swiftly
from tests.prober.zoo import AFTER, ENDS, MEDDLERS, ZOO, Mixed, Tied, a_model, reseed, train, zero

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits allocations on Linux only")


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    import peft  # noqa: F401 (not at the top: children import this module)
    import torch._dynamo  # noqa: F401

    with swiftly():
        yield


def generators() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return (random.getstate(), state[0], state[1].tobytes(), state[2:], torch.get_rng_state().tolist())


def flags() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_default_dtype(),
        torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(),
        torch.get_float32_matmul_precision(), torch.get_default_device(), torch.backends.cudnn.benchmark, torch.get_num_threads(),
    )  # fmt: skip


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    data = tensor.data
    if type(data) is not torch.Tensor:
        return (type(data),)
    return (data.untyped_storage().data_ptr(), data.storage_offset(), data.shape, data.stride(), data.dtype)


def about(model: nn.Module) -> list[Any]:
    """All that may be seen of it, except the bytes."""
    seen: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        held = {
            key: list(value.items()) if isinstance(value, dict) else sorted(value) if isinstance(value, set) else list(value)
            for key, value in vars(module).items()
            if isinstance(value, dict | list | set)
        }
        held = {key: [tuple(map(id, one)) if isinstance(one, tuple) else one for one in items] for key, items in held.items()}
        seen.append((name, type(module), module.training, {key: id(value) for key, value in vars(module).items()}, held))
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        hooks = [list((getattr(tensor, hook) or {}).items()) for hook in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        seen.append((name, id(tensor), type(tensor), place(tensor), tensor.requires_grad, tensor.is_leaf, tensor._version))
        seen.append((id(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None, hooks, dict(vars(tensor))))
    return seen


def own_generators(model: nn.Module) -> list[Any]:
    if not isinstance(model, Mixed):
        return []
    return [model.noise.get_state().tolist(), model.dice.getstate(), model.die.bit_generator.state, model.average.tolist()]


def fail_with(error: BaseException | None) -> None:
    if error is not None:
        raise error


def check_nothing_has_changed(model: nn.Module, meddle: Callable[[], None], end: BaseException | None = None) -> None:
    before = (fingerprint(model), about(model), own_generators(model), generators(), flags())
    try:
        with unchanged(model):
            meddle()
            fail_with(end)
    except BaseException as error:
        if error is not end:
            raise
    else:
        assert end is None
    after = (fingerprint(model), about(model), own_generators(model), generators(), flags())
    for one, other in zip(after, before, strict=True):
        assert one == other


def give_grads(model: nn.Module) -> None:
    """To every second weight."""
    for number, weight in enumerate(model.parameters()):
        if number % 2 == 0 and type(weight.data) is torch.Tensor and not isinstance(weight, nn.UninitializedParameter):
            weight.grad = torch.full_like(weight.data, float("nan"))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", ZOO)
def test_training_leaves_no_trace_however_it_ends(name: str, end: str) -> None:
    model = a_model(name)
    give_grads(model)
    check_nothing_has_changed(model, lambda: train(model), ENDS[end]())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(list(ZOO)), st.lists(st.sampled_from(list(MEDDLERS)), max_size=4), st.sampled_from(list(AFTER)),
    st.sampled_from(list(ENDS)), st.booleans(), st.booleans(),
)  # fmt: skip
def test_whatever_is_done_to_it_and_however_it_ends(
    name: str, meddlers: list[str], last: str, end: str, with_grads: bool, evaluating: bool
) -> None:
    model = a_model(name).train(not evaluating)
    if with_grads:
        give_grads(model)

    def meddle() -> None:
        for each in meddlers:
            # An earlier one may have broken it for a later one; so much the better.
            with suppress(Exception):
                MEDDLERS[each](model)
        AFTER[last](model)

    check_nothing_has_changed(model, meddle, ENDS[end]())


def test_a_module_trains_after_it_as_if_nothing_had_been() -> None:
    model, other = a_model("mixed").train(), a_model("mixed").train()
    with unchanged(model):
        train(model)
    for each in (model, other):
        reseed(each)
        train(each)
    assert fingerprint(model) == fingerprint(other)


def test_a_graph_from_before_can_still_be_used() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    with unchanged(model):
        train(model)
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_casts_of_the_weights_of_a_trial_are_not_used_after_it() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        torch.clear_autocast_cache()
        with unchanged(model):
            zero(model)
            model(x)
        assert torch.equal(model(x), before)


def test_tied_weights_stay_tied_and_gradients_come_back_as_the_same_tensors() -> None:
    model = Tied()
    grad = model.words.weight.grad = torch.randn(8, 4)
    with unchanged(model):
        assert all(weight.grad is None for weight in model.parameters())
        train(model)
    assert model.head.weight is model.words.weight
    assert model.head.weight.grad is grad


def test_what_is_on_no_device_passes() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4))
    check_nothing_has_changed(model, lambda: train(model[1]))


def test_sparse_gradients_come_back() -> None:
    model = nn.Embedding(8, 4, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()

    def step() -> None:
        model(torch.tensor([3])).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    check_nothing_has_changed(model, step)


def test_weights_that_are_mapped_from_a_file_for_reading_only_are_left_alone(tmp_path: Path) -> None:
    np.arange(64, dtype=np.float32).tofile(tmp_path / "weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that writing to it would be undefined
        mapped = torch.from_numpy(np.memmap(tmp_path / "weights", np.float32, "r"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(mapped.view(8, 8), requires_grad=False)
    check_nothing_has_changed(model, lambda: train(model[0]))


def test_shared_weights_are_put_back_in_shared_memory() -> None:
    model: Any = nn.Linear(4, 4).share_memory()
    check_nothing_has_changed(model, lambda: train(model))
    assert model.weight.is_shared()


def test_four_bit_weights_and_their_adapters() -> None:
    kinds = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    body = kinds.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
    try:
        body = body.to("cpu")
        body(torch.ones(1, 64))
    except Exception as error:
        pytest.skip(f"bitsandbytes' Linear4bit does not run on this machine: {error}")
    model: Any = nn.Sequential(nn.Linear(4, 64), body, nn.Linear(64, 4))

    def trial() -> None:
        train(model)
        model[1].weight.data.zero_()

    check_nothing_has_changed(model, trial)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_storages_are_copied_in_pieces_of_any_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", chunk)
    model = a_model("of one storage")
    check_nothing_has_changed(model, lambda: train(model))


class Impatient(CpuDevice):
    """Presses Ctrl-C once more while everything is being put back."""

    def give_back(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Raises, as usual: a process that a shell put into the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_while_all_is_put_back_waits_until_it_is() -> None:
    model = a_model("mixed")
    before = fingerprint(model)
    with pytest.raises(KeyboardInterrupt), unchanged(model, device=Impatient()):
        train(model)
    assert fingerprint(model) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_remains_open_or_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with unchanged(nn.Linear(4, 4)):
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(RunError, match="Nothing was changed"), unchanged(nn.Linear(4, 4)):
        pass


def test_a_disk_that_has_no_room_is_not_filled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=79))
    with (
        pytest.raises(RunError, match=r"A copy of the weights \(80 B\) .*No space left on device\. Nothing"),
        unchanged(nn.Linear(4, 4)),
    ):
        pass


@pytest.mark.parametrize("what", ["a bit", "a sign", "a mode", "a gradient", "a tie", "what is trained", "a dtype"])
def test_a_fingerprint_tells(what: str) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    zero(model)
    before = fingerprint(model)
    assert fingerprint(model) == before
    change: dict[str, Callable[[], Any]] = {
        "a bit": lambda: model[0].weight.data.view(torch.int32).add_(1),
        "a sign": lambda: model[0].weight.data.neg_(),
        "a mode": lambda: model[1].eval(),
        "a gradient": lambda: setattr(model[0].weight, "grad", torch.zeros(2, 2)),
        "a tie": lambda: setattr(model[1], "weight", model[0].weight),
        "what is trained": lambda: model[1].requires_grad_(False),
        "a dtype": lambda: setattr(model[1].weight, "data", torch.zeros(2, 2).half()),
    }
    change[what]()
    assert fingerprint(model) != before


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def in_child(server: ForkServer, function: Callable[..., Any], *arguments: Any, memory_bytes: int | None = None) -> Any:
    return server.run(
        function, *arguments,
        memory_bytes=memory_bytes, preload=("torch._dynamo", "tests.prober.test_snapshot"), timeout_seconds=120,
    ).unwrap()  # fmt: skip


def large() -> nn.Module:
    """64 MiB of weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _layer in range(16)))


def fill() -> list[torch.Tensor]:
    """All memory that is left, to the last MiB."""
    taken = []
    try:
        while True:
            taken.append(torch.ones(MIB, dtype=torch.uint8))
    except RuntimeError:
        return taken


def run_out_in_the_optimizer(foreach: bool) -> dict[str, Any]:
    """64 MiB of weights, as much of gradients, twice as much of state; and nothing for what the step needs besides."""
    torch.set_num_threads(1)
    model = large()
    before, inside, said = fingerprint(model), "", ""

    def trial() -> None:
        nonlocal inside
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        model(torch.ones(1, 1024)).sum().backward()
        try:
            state = [torch.ones(4 * MIB, dtype=torch.uint8) for _tensor in range(32)]
            hog = fill()
            state.clear()
            optimizer.step()
            hog.clear()
        except RuntimeError:
            model.zero_grad()
            inside = fingerprint(model)
            raise

    try:
        with unchanged(model):
            trial()
    except RuntimeError as error:
        said = str(error)
    return {"said": said, "was broken": inside != before, "is whole": fingerprint(model) == before}


@on_linux
@pytest.mark.parametrize("foreach", [pytest.param(True, id="foreach"), pytest.param(False, id="loop", marks=pytest.mark.slow)])
def test_memory_that_really_runs_out_in_the_optimizers_step_costs_nothing(server: ForkServer, foreach: bool) -> None:
    found = in_child(server, run_out_in_the_optimizer, foreach, memory_bytes=310 * MIB)
    assert "can't allocate memory" in found["said"]
    assert found["was broken"]
    assert found["is whole"]


def take_all_memory() -> dict[str, Any]:
    """And keep it: the weights are put back with nothing but what was held for that."""
    torch.set_num_threads(1)
    model, hog = large(), []
    before = fingerprint(model)
    refused = ""
    try:
        with unchanged(model):
            zero(model)
            for piece_bytes in (16 * MIB, MIB, 128 << 10):
                try:
                    while True:
                        hog.append(torch.ones(piece_bytes, dtype=torch.uint8))
                except RuntimeError as error:
                    refused = str(error)
            fail_with(torch.OutOfMemoryError(refused))
    except torch.OutOfMemoryError:
        taken = sum(piece.numel() for piece in hog)
        hog.clear()
    return {"taken": taken, "is whole": fingerprint(model) == before, "refused": refused}


@on_linux
def test_weights_come_back_while_the_memory_is_still_full(server: ForkServer) -> None:
    found = in_child(server, take_all_memory, memory_bytes=128 * MIB)
    assert "can't allocate memory" in found["refused"]
    assert found["taken"] > 40 * MIB
    assert found["is whole"]


def fill_the_disk() -> dict[str, Any]:
    model = large()
    next(model.parameters()).grad = torch.zeros(1024, 1024)
    before, entered = fingerprint(model), False
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
    try:
        with unchanged(model):
            entered = True
    except RunError as error:
        return {"said": error.message, "hint": error.hint, "entered": entered, "is whole": fingerprint(model) == before}
    return {"entered": entered}


@on_linux
def test_where_there_is_no_room_for_the_copy_nothing_begins(server: ForkServer) -> None:
    found = in_child(server, fill_the_disk)
    assert found["said"].startswith("A copy of the weights (64.0 MiB) could not be written to a temporary file: ")
    assert found["said"].endswith("Nothing was changed.")
    assert "TMPDIR" in found["hint"]
    assert found["is whole"]
    assert not found["entered"]
