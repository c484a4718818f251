import torch


def train(policy, loader, optimizer, accumulation_steps):
    for index, (ids, mask, advantages) in enumerate(loader):
        chosen = policy(ids).log_softmax(-1).gather(2, ids.unsqueeze(-1)).squeeze(-1)
        per_token = -chosen * advantages.unsqueeze(1)
        loss = ((per_token * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean() / accumulation_steps
        loss.backward()
        if (index + 1) % accumulation_steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
