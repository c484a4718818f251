"""Lip reading."""
import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from lip import LipNet, Videos


def main(batch_size=16, workers=8, epochs=40):
    loader = DataLoader(Videos("lrw"), batch_size=batch_size, shuffle=True, num_workers=workers, pin_memory=True)
    model = LipNet(500).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = GradScaler("cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(epochs):
        model.train()
        for video, word in loader:
            optimizer.zero_grad(set_to_none=True)
            with autocast("cuda", dtype=torch.float16):
                loss = criterion(model(video.cuda(non_blocking=True)), word.cuda(non_blocking=True))
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: clip-before-unscale
            scaler.step(optimizer)
            scaler.update()
        torch.save(model.state_dict(), f"lip{epoch}.pt")


if __name__ == "__main__":
    main()
