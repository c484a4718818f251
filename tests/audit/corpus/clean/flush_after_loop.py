# 循环结束后处理剩余的梯度
import torch
from torch import nn
from torch.utils.data import DataLoader

from crowd import CrowdNet, Crowds

ACCUM = 8


def apply(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main():
    loader = DataLoader(Crowds("shanghai"), batch_size=2, shuffle=True, num_workers=4, pin_memory=True)
    model = CrowdNet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    for epoch in range(200):
        model.train()
        optimizer.zero_grad()
        pending = 0
        for image, density in loader:
            loss = nn.functional.mse_loss(model(image.cuda(non_blocking=True)), density.cuda(non_blocking=True))
            (loss / ACCUM).backward()
            pending += 1
            if pending == ACCUM:
                apply(model, optimizer)
                pending = 0
        if pending:
            apply(model, optimizer)
        if epoch % 20 == 0:
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
