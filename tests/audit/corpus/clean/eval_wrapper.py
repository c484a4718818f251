import torch
from torch import nn
from torch.utils.data import DataLoader

from handwriting import Words, WordNet


def accuracy(model, loader):
    hits = torch.zeros((), device="cuda")
    for image, word in loader:
        hits += (model(image.cuda()).argmax(-1) == word.cuda()).sum()
    return hits.item() / len(loader.dataset)


def main(batch_size=64, eval_batch_size=256, workers=4):
    model = WordNet().cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_loader = DataLoader(Words("train"), batch_size=batch_size, shuffle=True, num_workers=workers, pin_memory=True)
    val_loader = DataLoader(Words("val"), batch_size=eval_batch_size, num_workers=workers, pin_memory=True)
    for epoch in range(50):
        model.train()
        for image, word in train_loader:
            loss = criterion(model(image.cuda(non_blocking=True)), word.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            score = accuracy(model, val_loader)
        print(epoch, score)


if __name__ == "__main__":
    main()
