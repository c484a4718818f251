import torch
import torch.nn.functional as F


def train_epoch(model, loader, optimizer, accumulation):
    model.train()
    optimizer.zero_grad(set_to_none=True)
    last = len(loader) - 1
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        (loss / accumulation).backward()
        if i % accumulation == accumulation - 1 or i == last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def evaluate(model, loader):
    was_training = model.training
    model.eval()
    hits = torch.zeros((), device="cuda")
    with torch.inference_mode():
        for x, y in loader:
            hits += (model(x.cuda()).argmax(-1) == y.cuda()).sum()
    model.train(was_training)
    return hits.item() / len(loader.dataset)
