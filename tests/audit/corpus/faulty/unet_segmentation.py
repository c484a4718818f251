import os

import torch
from torch import nn
from torch.utils.data import DataLoader

from segdata import SegmentationFolder
from unet import UNet

CONFIG = {
    "root": os.path.expanduser("~/data/cityscapes"),
    "batch_size": 12,
    "val_batch_size": 10,
    "crop": 512,
    "workers": 6,
    "lr": 1e-3,
    "epochs": 80,
}


def dice(pred, target, eps=1e-6):
    pred = pred.sigmoid()
    inter = (pred * target).sum((1, 2, 3))
    return 1 - ((2 * inter + eps) / (pred.sum((1, 2, 3)) + target.sum((1, 2, 3)) + eps)).mean()


def fit(config=CONFIG):
    bs = config["batch_size"] - config["batch_size"] % 8  # expect: batch-clamped
    val_bs = config["val_batch_size"] // 4 * 4  # expect: eval-batch-clamped
    train = SegmentationFolder(config["root"], "train", crop=config["crop"])
    val = SegmentationFolder(config["root"], "val", crop=config["crop"])
    train_dl = DataLoader(train, bs, shuffle=True, num_workers=config["workers"], pin_memory=True)
    val_dl = DataLoader(val, val_bs, num_workers=config["workers"], pin_memory=True)

    net = UNet(3, 1).cuda()
    bce = nn.BCEWithLogitsLoss()
    opt = torch.optim.Adam(net.parameters(), lr=config["lr"])
    best = float("inf")
    for epoch in range(config["epochs"]):
        net.train()
        for image, mask in train_dl:
            image, mask = image.cuda(non_blocking=True), mask.cuda(non_blocking=True)
            out = net(image)
            loss = bce(out, mask) + dice(out, mask)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        net.eval()
        losses = []
        with torch.no_grad():
            for image, mask in val_dl:
                losses.append(dice(net(image.cuda()), mask.cuda()))
        score = torch.stack(losses).mean().item()
        if score < best:
            best = score
            torch.save(net.state_dict(), "unet.pt")
        print(f"{epoch:03d} dice loss {score:.4f} best {best:.4f}")


if __name__ == "__main__":
    fit()
