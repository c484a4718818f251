import argparse
import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def main():
    args = parse_args()
    workers = min(args.num_workers, os.cpu_count() or 1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    data = datasets.GTSRB("gtsrb", download=True, transform=transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()]))
    loader = DataLoader(
        data,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=cuda,
        persistent_workers=workers > 0,
    )
    model = models.shufflenet_v2_x1_0(num_classes=43).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(10):
        model.train()
        for image, sign in loader:
            loss = F.cross_entropy(model(image.to(device, non_blocking=True)), sign.to(device, non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
