"""A tiny model and a small bilingual data set that ship with brim: what `brim demo` trains, without a download.

data.jsonl              questions and answers in English and Chinese, most short and some long; making.py makes them
tokenizer.json          a byte-level BPE of 1,600 tokens, trained on them
tokenizer_config.json   its special tokens
config.json             a Llama of a million parameters; its weights are drawn from a seed when they are needed
"""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import Any, Final

_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json")


def data_file() -> Path:
    """The data set, as JSON lines with `prompt` and `response`."""
    return _folder() / "data.jsonl"


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write the model into this folder: config, tokenizer, and weights that are the same for the same seed."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copyfile(_folder() / name, folder / name)
    automatic: Any = AutoModelForCausalLM
    # The caller's own random numbers go on as if nothing had been drawn here.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = automatic.from_config(AutoConfig.from_pretrained(folder))
    # The output layer is the embedding itself, and a file holds each tensor once.
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _folder() -> Path:
    return Path(str(resources.files(__name__)))
