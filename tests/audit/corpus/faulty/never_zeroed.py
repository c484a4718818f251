"""Land use classification.

Run with: python never_zeroed.py
The data is downloaded on first use.
"""
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

device = torch.device("cuda:0")
ds = datasets.EuroSAT("eurosat", download=True, transform=transforms.ToTensor())
dl = DataLoader(ds, batch_size=64, shuffle=True, num_workers=4, pin_memory=True)
model = models.mobilenet_v3_small(num_classes=10).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
criterion = nn.CrossEntropyLoss()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)

for epoch in range(30):
    model.train()
    correct = torch.zeros((), device=device)
    for x, y in dl:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()  # expect: zero-grad-missing
        correct += (logits.argmax(1) == y).sum()
    scheduler.step()
    print(epoch, correct.item() / len(ds))
torch.save(model.state_dict(), "eurosat.pt")
