"""Fine-tune a ViT on an image folder."""
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--num_workers", type=int, default=8)
    args = parser.parse_args()
    if args.batch_size > 32:
        args.batch_size = 32  # expect: batch-clamped
    return args


def make_loader(root, args, train):
    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
    if train:
        steps.insert(2, transforms.RandomHorizontalFlip())
    folder = datasets.ImageFolder(root, transforms.Compose(steps))
    return DataLoader(folder, batch_size=args.batch_size, shuffle=train, num_workers=args.num_workers, pin_memory=True)


def main():
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_loader = make_loader(f"{args.data}/train", args, True)
    val_loader = make_loader(f"{args.data}/val", args, False)
    model = models.vit_b_16(weights="DEFAULT")
    model.heads.head = torch.nn.Linear(768, len(train_loader.dataset.classes))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        hits = 0
        with torch.inference_mode():
            for images, labels in val_loader:
                hits += (model(images.to(device)).argmax(-1) == labels.to(device)).sum()
        print(epoch, float(hits) / len(val_loader.dataset))


if __name__ == "__main__":
    main()
