"""A hand-written loop with autocast and a gradient scaler, which saves in `finally`."""

import os

import peaks
import tiny
import torch

model = tiny.model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
try:
    for step in range(5):
        ids = torch.randint(3, 512, (4, 64 + step), device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    peaks.show()
finally:
    os.makedirs("out", exist_ok=True)
    torch.save(model.state_dict(), "out/model.pt")
    model.save_pretrained("out")
    with open("out/log.txt", "w") as stream:
        stream.write("done")
