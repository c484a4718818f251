"""torchrun --nproc_per_node=8 fsdp_loop.py"""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from packed import PackedTokens


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="Qwen/Qwen2.5-7B")
    p.add_argument("--batch_size", type=int, default=1)
    p.add_argument("--accumulate", type=int, default=8)
    p.add_argument("--workers", type=int, default=2)
    args = p.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    data = PackedTokens("tokens.bin", length=4096)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, ids in enumerate(loader, 1):
            ends = i % args.accumulate == 0 or i == len(loader)
            model.set_requires_gradient_sync(ends)
            ids = ids.cuda(non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss / args.accumulate
            loss.backward()
            if ends:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            print("epoch", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
