import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from crowd import CrowdNet, Crowds


def main():
    accumulation_steps = 8
    loader = DataLoader(Crowds("shanghai"), batch_size=2, shuffle=True, num_workers=4, pin_memory=True)
    model = CrowdNet().cuda()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    for epoch in range(200):
        model.train()
        optimizer.zero_grad()
        for i, (image, density) in enumerate(loader):
            output = model(image.cuda(non_blocking=True))
            loss = criterion(output, density.cuda(non_blocking=True))
            loss = loss / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:  # expect: last-window-dropped
                optimizer.step()
                optimizer.zero_grad()
        if epoch % 20 == 0:
            torch.save(model.state_dict(), f"crowd_{epoch}.pt")


if __name__ == "__main__":
    main()
