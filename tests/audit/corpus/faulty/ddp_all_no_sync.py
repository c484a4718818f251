import torch
from torch.nn.parallel import DistributedDataParallel


def fit(model, loader, optimizer, accumulation_steps):
    model = DistributedDataParallel(model)
    for index, (images, labels) in enumerate(loader):
        with model.no_sync():  # expect: gradients-not-exchanged
            loss = torch.nn.functional.cross_entropy(model(images), labels) / accumulation_steps
            loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
