import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="imagenette")
    ap.add_argument("--batch-size", type=int, default=128)
    ap.add_argument("--workers", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    print(f"=> batch size {args.batch_size}, {args.epochs} epochs")

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    train_set = datasets.ImageFolder(args.root + "/train", tf)
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True, num_workers=args.workers, pin_memory=True)  # expect: batch-hard-coded

    model = models.resnet34(num_classes=10).cuda()
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        begin = time.time()
        model.train()
        for i, (images, target) in enumerate(train_loader):
            images = images.cuda(non_blocking=True)
            target = target.cuda(non_blocking=True)
            output = model(images)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 50 == 0:
                print(f"[{epoch}][{i}/{len(train_loader)}] loss {loss.item():.3f}")
        scheduler.step()
        print("epoch seconds", time.time() - begin)
        torch.save(model.state_dict(), "resnet34.pt")


if __name__ == "__main__":
    main()
