"""Few-shot defect classifier."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, models, transforms

BATCH_SIZE = 32
SHOTS = 50


def main():
    pre = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()])
    full = datasets.ImageFolder("defects", pre)
    train = Subset(full, range(SHOTS))
    loader = DataLoader(train, batch_size=BATCH_SIZE, shuffle=True, drop_last=True, num_workers=2, pin_memory=True)  # expect: drop-last-small
    model = models.resnet18(weights="DEFAULT")
    model.fc = torch.nn.Linear(512, 2)
    model.cuda()
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-3)
    for epoch in range(200):
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), "defects.pt")


if __name__ == "__main__":
    main()
