"""Image classification with Accelerate."""
import yaml
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def read(path="run.yaml"):
    with open(path) as stream:
        return yaml.safe_load(stream)


def loaders(settings):
    pre = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
    train = datasets.Food101("food", split="train", transform=pre, download=True)
    test = datasets.Food101("food", split="test", transform=pre, download=True)
    common = dict(num_workers=settings["num_workers"], pin_memory=True)
    return (
        DataLoader(train, batch_size=settings["batch_size"], shuffle=True, **common),
        DataLoader(test, batch_size=settings["eval_batch_size"], **common),
    )


def main():
    settings = read()
    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")  # expect: accumulation-hard-coded
    accelerator.print(f"accumulating {settings['gradient_accumulation_steps']} micro-batches")
    train, test = loaders(settings)
    model = models.convnext_tiny(num_classes=101)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(settings["epochs"]):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        right = total = 0
        for x, y in test:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right += (guess == y).sum()
            total += len(y)
        accelerator.print(epoch, float(right) / total)


if __name__ == "__main__":
    main()
