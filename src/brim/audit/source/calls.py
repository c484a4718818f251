"""All checks of calls."""

from __future__ import annotations

from brim.audit.source import call_arguments, call_data, call_evaluation, call_layers, call_padding, call_precision
from brim.audit.source.loops import once

_ALL = (
    *call_arguments.CHECKS,
    *call_layers.CHECKS,
    *call_data.CHECKS,
    *call_padding.CHECKS,
    *call_precision.CHECKS,
    *call_evaluation.CHECKS,
)
CHECKS = tuple(map(once, _ALL))
