import torch
from torch.nn.parallel import DistributedDataParallel


def fit(model, batches, optimizer, micro_batches, steps):
    model = DistributedDataParallel(model)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for micro in range(micro_batches):
            model.require_backward_grad_sync = micro == micro_batches  # expect: gradients-not-exchanged
            tokens, labels = next(batches)
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            (loss / micro_batches).backward()
        optimizer.step()
