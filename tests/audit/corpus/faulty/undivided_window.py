# 单卡训练, 梯度累积
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from ocr import Lines, Recogniser

MICRO = 4
WINDOW = 16


def cycle(loader):
    while True:
        yield from loader


def train_step(model, source, criterion, optimizer):
    optimizer.zero_grad(set_to_none=True)
    for _ in range(WINDOW):
        image, text = next(source)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(image.cuda(non_blocking=True)), text.cuda(non_blocking=True))
        loss.backward()  # expect: loss-undivided
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def main():
    loader = DataLoader(Lines("train"), batch_size=MICRO, shuffle=True, num_workers=4, pin_memory=True)
    model = Recogniser().cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    source = cycle(loader)
    for step in range(20_000):
        loss = train_step(model, source, criterion, optimizer)
        if step % 200 == 0:
            print(step, loss.item())
            torch.save(model.state_dict(), "recogniser.pt")


if __name__ == "__main__":
    main()
