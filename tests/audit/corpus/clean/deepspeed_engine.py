"""deepspeed deepspeed_engine.py --deepspeed_config ds.json"""
import argparse

import deepspeed
import torch
from transformers import AutoModelForCausalLM

from packed import PackedTokens


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--gas", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=PackedTokens("tokens.bin", length=4096),
        config={
            "train_micro_batch_size_per_gpu": args.micro,
            "gradient_accumulation_steps": args.gas,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": args.lr}},
        },
    )
    for epoch in range(args.epochs):
        for step, ids in enumerate(loader):
            ids = ids.to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            if engine.is_gradient_accumulation_boundary() and engine.global_steps % 50 == 0:
                print(epoch, engine.global_steps, loss.item())
        engine.save_checkpoint("checkpoints", tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
