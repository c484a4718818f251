import torch
from torch.utils.data import DataLoader

from packed import PackedTokens
from minigpt import MiniGPT

cfg = dict(micro_batch=8, grad_accum=5, lr=6e-4, steps=600, workers=4)


def endless(loader):
    while True:
        for item in loader:
            yield item


model = MiniGPT(layers=12, width=768).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.95), weight_decay=0.1)
loader = DataLoader(PackedTokens("owt.bin", length=1024), batch_size=cfg["micro_batch"], shuffle=True, num_workers=cfg["workers"], pin_memory=True)
source = endless(loader)

for step in range(cfg["steps"]):
    optimizer.zero_grad(set_to_none=True)
    for micro_step in range(cfg["grad_accum"]):
        ids = next(source).cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:]) / cfg["grad_accum"]
        loss.backward()
        optimizer.step()  # expect: step-every-micro-batch
    if step % 50 == 0:
        print(f"step {step}: {loss.item() * cfg['grad_accum']:.3f}")
torch.save(model.state_dict(), "minigpt.pt")
