"""The model types that brim brings itself: transformers learns of them when their module is imported."""

from __future__ import annotations

import importlib
from typing import Final

from brim.extras import require_train
from brim.locale import _

_MODULES: Final = {"brim_stitched": "brim.stitching.model"}
"""By name, for the module stands above this room: it is code to run for a model, as `module:function` is."""


def make_known(model_type: object) -> None:
    """Let transformers build this type, if it is one of brim's own."""
    module = _MODULES.get(model_type) if isinstance(model_type, str) else None
    if module is not None:
        require_train(_("A stitched model"))
        importlib.import_module(module)
