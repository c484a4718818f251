"""What in a model makes a step depend on how it is sliced, told before the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Mapping


def noise_notes(config: Mapping[str, Any], lora_dropout: float = 0.0) -> list[str]:
    """What in a model's config, and in its adapters, makes a step depend on its slices, and what that means."""
    found = {**config, **(config.get("text_config") or {})}
    rates = {name: value for name, value in found.items() if _is_dropout(name) and isinstance(value, int | float) and value > 0}
    if lora_dropout:
        rates["lora_dropout"] = lora_dropout
    notes = []
    if rates:
        said = ", ".join(f"{name} {value:g}" for name, value in rates.items())
        text = _(
            "This model has dropout ({rates}): other slices draw other noise, so that runs on other memory see the same sequences in "
            "the same steps and differ by that noise. A resumed run on the same memory is exact."
        )
        notes.append(text.format(rates=said))
    if found.get("output_router_logits") and found.get("router_aux_loss_coef"):
        notes.append(_("The balance loss of this mixture of experts is no sum over tokens: it differs a little with the slices."))
    return notes


def _is_dropout(name: str) -> bool:
    return ("dropout" in name or name.endswith("_pdrop")) and not name.startswith("classifier")
