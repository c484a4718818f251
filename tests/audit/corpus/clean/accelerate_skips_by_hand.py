from contextlib import nullcontext

import torch
from accelerate import Accelerator


def train(model, loader, optimizer, accumulation_steps, epochs):
    accelerator = Accelerator()
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
    for _epoch in range(epochs):
        for index, (images, labels) in enumerate(loader):
            is_last = (index + 1) % accumulation_steps == 0 or index + 1 == len(loader)
            with nullcontext() if is_last else accelerator.no_sync(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels) / accumulation_steps
                accelerator.backward(loss)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    accelerator.unwrap_model(model).save_pretrained("out")
