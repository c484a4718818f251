import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from plants import Leaves, LeafNet


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    running_loss = 0.0
    for images, labels in tqdm(loader):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss  # expect: graph-kept
    return running_loss / len(loader)


def main():
    device = torch.device("cuda")
    loader = DataLoader(Leaves("train"), batch_size=48, shuffle=True, num_workers=6, pin_memory=True)
    model = LeafNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(25):
        average = train_one_epoch(model, loader, optimizer, device)
        print(f"epoch {epoch} loss {float(average):.4f}")


if __name__ == "__main__":
    main()
