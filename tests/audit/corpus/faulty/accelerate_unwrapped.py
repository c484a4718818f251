import torch
from accelerate import Accelerator


def train(model, loader, optimizer, epochs):
    accelerator = Accelerator()
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
    for _epoch in range(epochs):
        for images, labels in loader:
            scores = accelerator.unwrap_model(model)(images)  # expect: gradients-not-exchanged
            loss = torch.nn.functional.cross_entropy(scores, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
