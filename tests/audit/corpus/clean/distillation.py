import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="imagenet")
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--temperature", type=float, default=4.0)
    p.add_argument("--alpha", type=float, default=0.5)
    args = p.parse_args()
    teacher = models.resnet101(weights="DEFAULT").cuda().half().eval()
    teacher.requires_grad_(False)
    student = torch.compile(models.resnet18().cuda())
    data = datasets.ImageFolder(args.data, transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()]))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=True)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    t = args.temperature
    for epoch in range(30):
        student.train()
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with torch.no_grad():
                soft = teacher(x.half()).float()
            logits = student(x)
            kd = F.kl_div(F.log_softmax(logits / t, 1), F.softmax(soft / t, 1), reduction="batchmean") * t * t
            loss = args.alpha * kd + (1 - args.alpha) * F.cross_entropy(logits, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        torch.save(student.state_dict(), "student.pt")


if __name__ == "__main__":
    main()
