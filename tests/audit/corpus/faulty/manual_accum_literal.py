"""Semantic segmentation with accumulation."""
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.models.segmentation import deeplabv3_resnet50

from vocdata import Voc

parser = argparse.ArgumentParser(description="VOC segmentation")
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--grad_accum", type=int, default=4)
parser.add_argument("--num_workers", type=int, default=8)
parser.add_argument("--no_pin", action="store_true")
parser.add_argument("--lr", type=float, default=1e-4)


def train(args):
    print("effective batch", args.batch_size * args.grad_accum, "pinned", not args.no_pin)
    loader = DataLoader(
        Voc("train"),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.num_workers,
        pin_memory=False,  # expect: pinning-off
    )
    model = deeplabv3_resnet50(num_classes=21).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    accum = 2  # expect: accumulation-hard-coded
    for epoch in range(40):
        for k, (x, y) in enumerate(loader):
            out = model(x.cuda())["out"]
            loss = F.cross_entropy(out, y.cuda()) / accum
            loss.backward()
            if (k + 1) % accum == 0 or k + 1 == len(loader):
                opt.step()
                opt.zero_grad(set_to_none=True)
        print("epoch", epoch, "done")
    torch.save(model.state_dict(), "deeplab.pt")


if __name__ == "__main__":
    train(parser.parse_args())
