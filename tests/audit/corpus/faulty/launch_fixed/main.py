import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--workers", type=int, default=4)
    return p.parse_args()


def main():
    args = cli()
    accelerator = Accelerator(mixed_precision="bf16")
    ds = datasets.FakeData(50_000, transform=transforms.ToTensor())
    loader = DataLoader(ds, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    model = models.resnet50()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    model.train()
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        accelerator.backward(loss)
        opt.step()
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "resnet50.pt")


if __name__ == "__main__":
    main()
