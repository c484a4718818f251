import random
from collections import deque

import gymnasium as gym
import torch
from torch import nn

BATCH_SIZE = 128
GAMMA = 0.99
EPS_START, EPS_END, EPS_DECAY = 0.9, 0.05, 1000

env = gym.make("LunarLander-v3")
online = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 4))
target = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 4))
target.load_state_dict(online.state_dict())
optimizer = torch.optim.AdamW(online.parameters(), lr=1e-4)
memory = deque([], maxlen=10_000)
steps = 0


def select(state):
    global steps
    eps = max(EPS_END, EPS_START - steps / EPS_DECAY)
    steps += 1
    if random.random() < eps:
        return env.action_space.sample()
    with torch.no_grad():
        return online(torch.as_tensor(state)).argmax().item()


def learn():
    if len(memory) < BATCH_SIZE:
        return
    batch = random.sample(memory, min(BATCH_SIZE, len(memory)))
    s, a, r, s2, d = (torch.as_tensor(v, dtype=torch.float32) for v in zip(*batch))
    q = online(s).gather(1, a.long().unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        goal = r.clamp(-1, 1) + GAMMA * target(s2).max(1).values * (1 - d)
    loss = nn.functional.smooth_l1_loss(q, goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(online.parameters(), 100)
    optimizer.step()


for episode in range(600):
    state, _ = env.reset()
    done = False
    while not done:
        action = select(state)
        following, reward, ended, cut, _ = env.step(action)
        done = ended or cut
        memory.append((state, action, reward, following, float(done)))
        state = following
        learn()
    if episode % 10 == 0:
        target.load_state_dict(online.state_dict())
