"""bfloat16 on a card that does not have it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_reach import reach_of
from brim.audit.source.module import keyword_of
from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.source.module import Module
    from brim.audit.source.project import Project
    from brim.machine.records import GPU

_NAMES_A_CARD: Final = frozenset({"gpu", "gpu_type", "gpu_name", "accelerator_type", "accelerators"})
"""Keywords by which code asks a provider for a card."""
_NO_CARD: Final = re.compile(r"[0-9.]+\s*([gmt]i?b?)?|auto|any|cuda|cpu|gpu", re.IGNORECASE)
_DTYPES: Final = frozenset({"dtype", "torch_dtype", "bnb_4bit_compute_dtype", "param_dtype", "compute_dtype"})


def check_bf16(module: Module, project: Project) -> Iterator[Found]:
    """The card computes bfloat16 in float32, or not at all."""
    if not re.search(r"bf16|bfloat16", module.source.text) or re.search(
        r"is_bf16_supported|get_device_capability", module.source.text
    ):
        return
    gpu = _card(project.gpu) if project.gpu else _named_in(reach_of(project).calls(module))
    if gpu is None or gpu.bf16 or gpu.vendor == "unknown":
        return
    message = _(
        "{code} asks for bfloat16, and {gpu} has none: it is emulated at the speed of float32 or refused. Use float16 with a GradScaler."
    )
    for call in reach_of(project).calls(module):
        for keyword in call.keywords:
            if _asks(keyword, module):
                yield module.found("bf16-unsupported", keyword, message.format(code=module.text_of(keyword), gpu=gpu.label))


def _asks(keyword: ast.keyword, module: Module) -> bool:
    value = keyword.value
    if keyword.arg == "bf16":
        return isinstance(value, ast.Constant) and value.value is True
    if keyword.arg in {"mixed_precision", "precision"}:
        return isinstance(value, ast.Constant) and value.value in {"bf16", "bf16-mixed", "bf16-true"}
    return keyword.arg in _DTYPES and module.dotted(value) == "torch.bfloat16"


def _card(name: str) -> GPU | None:
    from brim.machine.catalogue import find_gpu

    try:
        return find_gpu(name).gpu
    except UsageError:
        return None


def _named_in(calls: list[ast.Call]) -> GPU | None:
    """The card that the code asks for, if it asks for one only."""
    keywords = [keyword_of(call, name) for call in calls for name in _NAMES_A_CARD]
    values = [each.value.value for each in keywords if each is not None and isinstance(each.value, ast.Constant)]
    names = {each for each in values if isinstance(each, str) and not _NO_CARD.fullmatch(each)}
    found = [each for each in map(_card, sorted(names)) if each is not None]
    return found[0] if len(found) == 1 else None


CHECKS = (check_bf16,)
