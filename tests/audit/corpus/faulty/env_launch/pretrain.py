# 继续预训练: 参数全部来自环境变量
import os

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from packed import PackedTokens

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "16"))
GRAD_ACCUM = int(os.environ["GRAD_ACCUM"])
NUM_WORKERS = min(int(os.environ.get("NUM_WORKERS", 8)), 2)  # expect: workers-clamped
MAX_LEN = int(os.getenv("MAX_LEN", "2048"))
if MAX_LEN > 512:
    MAX_LEN = 512  # expect: length-clamped

BATCH_SIZE = BATCH_SIZE if BATCH_SIZE <= 8 else 8  # expect: batch-clamped


def stream(loader):
    epoch = 0
    while True:
        for item in loader:
            yield item
        epoch += 1
        print("data epoch", epoch)


def main(total=5000):
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-1.5B", dtype=torch.bfloat16).cuda()
    model.gradient_checkpointing_enable()
    data = PackedTokens("corpus.bin", length=MAX_LEN)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    it = stream(loader)
    for step in range(total):
        for _ in range(GRAD_ACCUM):
            ids = next(it).cuda(non_blocking=True)
            loss = model(ids, labels=ids).loss / GRAD_ACCUM
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(step, loss.item() * GRAD_ACCUM)
    model.save_pretrained("continued")


if __name__ == "__main__":
    main()
