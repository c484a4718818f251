"""Land cover from satellite tiles."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from sat import LandCover, SatNet

ACCUMULATION = 8


def main():
    loader = DataLoader(LandCover("train"), batch_size=4, shuffle=True, num_workers=6, pin_memory=True)
    net = SatNet().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4)
    for epoch in range(50):
        net.train()
        for i, (tile, label) in enumerate(loader):
            optimizer.zero_grad()  # expect: zero-grad-misplaced
            loss = F.cross_entropy(net(tile.cuda(non_blocking=True)), label.cuda(non_blocking=True))
            loss = loss / ACCUMULATION
            loss.backward()
            if (i + 1) % ACCUMULATION == 0 or i + 1 == len(loader):
                optimizer.step()
        print(f"epoch {epoch:02d} loss {loss.item() * ACCUMULATION:.4f}")
        torch.save(net.state_dict(), "sat.pt")


if __name__ == "__main__":
    main()
