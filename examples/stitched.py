"""Two models of different families and widths, stitched into one that trains at any batch size.

Look at the two columns of losses: batch size 1 and batch size 4, with the same 8 sequences in a step, give the same training. Before it
begins, five proofs run on the model itself. Real donors are folders with weights; here two tiny ones are made first.
"""

import argparse
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import brim

TEXTS = [
    f"The {what} {does} {where}."
    for what in ("ferry", "clock", "kettle", "red kite")
    for does in ("waits", "sings")
    for where in ("here", "below the bridge", "until somebody who knows its name comes by", "at noon")
]


def make_donors(folder: Path) -> dict[str, str]:
    """A Llama of width 48 and a Qwen of width 32, which know the same tokens: bytes."""
    torch.manual_seed(0)
    words = {
        "vocab_size": len(ByT5Tokenizer()),
        "eos_token_id": 1,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    llama = LlamaConfig(hidden_size=48, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=128, **words)
    qwen = Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=4, max_position_embeddings=128, **words)
    donors = {
        "llama": LlamaForCausalLM(llama),
        "qwen": Qwen2ForCausalLM(qwen),
    }
    for name, model in donors.items():
        model.save_pretrained(folder / name)
        ByT5Tokenizer().save_pretrained(folder / name)
    return {name: str(folder / name) for name in donors}


def main(words: list[str] | None = None) -> dict[int, list[float]]:
    """Stitch, train at two batch sizes, and return the losses of each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path, default=Path("build/stitched"), help="where donors and models go")
    choice = options.parse_args(words)

    recipe = {
        "name": "llama-qwen",
        "donors": make_donors(choice.output / "donors"),
        "layers": [
            {"donor": "llama", "layers": "0-1"},
            {"donor": "qwen", "layers": "2-3", "adapter": "linear"},  # 48 -> 32
        ],
        "train": ["adapters", "head"],
    }
    losses = {}
    for size in (1, 4):
        torch.manual_seed(0)
        model = brim.StitchLLM(recipe, TEXTS, ByT5Tokenizer())
        model.train(
            choice.output / f"batch-{size}", learning_rate=2e-2, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
            num_train_epochs=2, logging_steps=1, save_strategy="no", dataloader_num_workers=0, dataloader_prefetch_factor=None,
            use_cpu=True, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        assert model.trainer is not None
        losses[size] = [entry["loss"] for entry in model.trainer.state.log_history if "loss" in entry]
    print("step   batch 1 x 8   batch 4 x 2")
    for number, (one, four) in enumerate(zip(losses[1], losses[4], strict=True), 1):
        print(f"{number:4} {one:13.5f} {four:13.5f}")
    return losses


if __name__ == "__main__":
    main()
