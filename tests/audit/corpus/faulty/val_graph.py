import torch
from torch import nn
from torch.utils.data import DataLoader

from handwriting import Words, WordNet


def evaluate(model, loader, criterion):
    model.eval()
    total = torch.zeros((), device="cuda")
    for image, word in loader:
        output = model(image.cuda(non_blocking=True))  # expect: eval-with-gradients
        total += criterion(output, word.cuda(non_blocking=True)).detach()
    return total.item() / len(loader)


def train(model, loader, criterion, optimizer):
    model.train()
    for image, word in loader:
        loss = criterion(model(image.cuda(non_blocking=True)), word.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    model = WordNet().cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_loader = DataLoader(Words("train"), batch_size=64, shuffle=True, num_workers=4, pin_memory=True)
    val_loader = DataLoader(Words("val"), batch_size=64, num_workers=4, pin_memory=True)
    for epoch in range(50):
        train(model, train_loader, criterion, optimizer)
        print(epoch, evaluate(model, val_loader, criterion))


if __name__ == "__main__":
    main()
