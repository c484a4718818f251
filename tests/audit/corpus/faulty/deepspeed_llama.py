import argparse

import deepspeed
import torch
from transformers import AutoModelForCausalLM

from packed import PackedTokens


def add_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--gas", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def ds_config(args):
    return {
        "train_micro_batch_size_per_gpu": min(args.micro_batch, 2),  # expect: batch-clamped
        "gradient_accumulation_steps": max(16, args.gas),  # expect: accumulation-clamped
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95]}},
    }


def main():
    args = add_arguments()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=PackedTokens("tokens.bin", length=4096),
        config=ds_config(args),
    )
    for step, ids in enumerate(loader):
        ids = ids.to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if step % 100 == 0 and engine.global_rank == 0:
            print(step, loss.item())
    engine.save_checkpoint("checkpoints")


if __name__ == "__main__":
    main()
