import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForImageClassification

from shopping import Products


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    model = AutoModelForImageClassification.from_pretrained("facebook/convnext-tiny-224")
    model = model.half().cuda()  # expect: fp16-without-scaler
    loader = DataLoader(Products("train"), batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-4)
    model.train()
    for epoch in range(5):
        for image, kind in loader:
            logits = model(image.cuda(non_blocking=True).half()).logits
            loss = F.cross_entropy(logits.float(), kind.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.save_pretrained(f"products-{epoch}")


if __name__ == "__main__":
    main()
