import torch
from accelerate import Accelerator


def train(model, loader, optimizer, accumulation_steps, epochs):
    accelerator = Accelerator()
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
    for _epoch in range(epochs):
        for index, (images, labels) in enumerate(loader):
            loss = torch.nn.functional.cross_entropy(model(images), labels) / accumulation_steps
            accelerator.backward(loss)  # expect: sync-every-micro-batch
            if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
