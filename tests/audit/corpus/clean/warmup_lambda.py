import math

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from minigpt import MiniGPT
from packed import PackedTokens

BATCH, STEPS, WARMUP, LR = 16, 10_000, 500, 6e-4


def schedule(step):
    ramp = min(1.0, (step + 1) / WARMUP)
    progress = max(0.0, (step - WARMUP) / (STEPS - WARMUP))
    return ramp * max(0.1, 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def endless(loader):
    while True:
        yield from loader


model = MiniGPT(layers=12, width=768).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
scheduler = LambdaLR(optimizer, schedule)
loader = DataLoader(PackedTokens("train.bin", length=1024), batch_size=BATCH, shuffle=True, num_workers=4, pin_memory=True)

for step, ids in zip(range(STEPS), endless(loader)):
    ids = ids.cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(ids[:, :-1], ids[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step % 100 == 0:
        print(step, loss.item(), scheduler.get_last_lr()[0])
