"""Smallest possible training script."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

torch.manual_seed(0)
ds = datasets.CIFAR10("data", download=True, transform=transforms.ToTensor())
loader = DataLoader(ds, batch_size=8, shuffle=True)
model = models.resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

for epoch in range(3):
    model.train()
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")

model.eval()
test = DataLoader(datasets.CIFAR10("data", train=False, transform=transforms.ToTensor()), batch_size=100)
correct = 0
with torch.no_grad():
    for x, y in test:
        correct += (model(x).argmax(1) == y).sum()
print("accuracy", float(correct) / len(test.dataset))
torch.save(model.state_dict(), "resnet18.pt")
