import torch
from torch.nn.parallel import DistributedDataParallel


def train(policy, prompts, optimizer, reward):
    policy = DistributedDataParallel(policy)
    sampler = policy.module if isinstance(policy, DistributedDataParallel) else policy
    for batch in prompts:
        with torch.no_grad():
            answers = sampler.generate(batch)
            before = sampler(answers)
        now = policy(answers)
        loss = -(reward(answers) * torch.exp(now - before)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_by_hand(policy, loader, optimizer, world):
    policy = DistributedDataParallel(policy)
    for batch in loader:
        loss = policy.module(batch).mean()
        loss.backward()
        for parameter in policy.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
