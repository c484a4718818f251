"""A remembered result has the shape, the memory order and the dtype of a real one, and is a storage of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from brim.memory.tracing import results

aten = torch.ops.aten


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


CASES: list[Any] = [
    pytest.param(aten.mul.Tensor, lambda: (_new(3, 4), _new(4)), id="broadcast"),
    pytest.param(aten.mul.Tensor, lambda: (_new(3, 4, dtype=torch.bfloat16), _new(3, 4)), id="promoted"),
    pytest.param(aten.add.Tensor, lambda: (_new(3, 4, dtype=torch.int64), 1.5), id="integers and a float"),
    pytest.param(aten.add.Tensor, lambda: (_new(3, 4, dtype=torch.int64), 1), id="integers and an integer"),
    pytest.param(aten.mm.default, lambda: (_new(3, 4), _new(5, 4).t()), id="product"),
    pytest.param(aten.exp.default, lambda: (_new(2, 3, 4).transpose(1, 2),), id="memory order"),
    pytest.param(aten.native_layer_norm.default, lambda: (_new(2, 3), [3], _new(3), None, 1e-5), id="three results"),
    pytest.param(aten._foreach_sqrt.default, lambda: ([_new(2), _new(3, 4)],), id="a list"),
]


def _shape(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.shape, result.stride(), result.dtype, result.untyped_storage().nbytes()
    return type(result), [_shape(item) for item in result]


@pytest.mark.parametrize(("operator", "arguments"), CASES)
def test_a_remembered_result_is_like_a_real_one(operator: Any, arguments: Any) -> None:
    results._calls.clear()
    real = operator(*arguments())
    first, second = (results.call(operator, arguments(), {}) for _time in range(2))
    assert len(results._calls) == 1
    assert _shape(first) == _shape(second) == _shape(real)


def test_an_operator_in_place_gives_its_first_argument() -> None:
    x, y = _new(3), _new(3)
    for _time in range(2):
        assert results.call(aten.add_.Tensor, (x, y), {}) is x
    assert results.call(aten._foreach_add_.Scalar, ([x, y], 1), {}) is None


def test_views_are_really_made() -> None:
    x = _new(3, 4)
    for operator, arguments in ((aten.t.default, (x,)), (aten._unsafe_view.default, (x, [12]))):
        for _time in range(2):
            assert results.call(operator, arguments, {}).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_a_factory_follows_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    found = []
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            found.append(results.call(aten.div.Tensor, (_new(3, dtype=torch.int64), 2), {}).dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.bfloat16, torch.float32]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_MOST", 3)
    for size in range(1, 9):
        results.call(aten.exp.default, (_new(size),), {})
        assert len(results._calls) <= 3
