"""Attacks need gradients of the input while the model is in evaluation mode."""
import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def fgsm(model, x, y, eps):
    x = x.clone().requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    (grad,) = torch.autograd.grad(loss, x)
    return (x + eps * grad.sign()).clamp(0, 1).detach()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--weights", default="resnet18.pt")
    p.add_argument("--eps", type=float, default=8 / 255)
    p.add_argument("--batch_size", type=int, default=128)
    args = p.parse_args()
    model = models.resnet18(num_classes=10).cuda()
    model.load_state_dict(torch.load(args.weights, weights_only=True))
    model.eval()
    loader = DataLoader(datasets.CIFAR10("data", train=False, transform=transforms.ToTensor()), batch_size=args.batch_size, num_workers=2)
    clean = attacked = 0
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        adv = fgsm(model, x, y, args.eps)
        with torch.no_grad():
            clean += (model(x).argmax(1) == y).sum()
            attacked += (model(adv).argmax(1) == y).sum()
    n = len(loader.dataset)
    print(f"clean {clean.item() / n:.3f} attacked {attacked.item() / n:.3f}")


if __name__ == "__main__":
    main()
