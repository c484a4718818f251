"""Proximal policy optimisation, minibatch epochs over one rollout."""
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from policy import ActorCritic


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    num_envs: int = 8
    num_steps: int = 128
    num_minibatches: int = 4
    update_epochs: int = 4
    total_timesteps: int = 500_000
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    clip_coef: float = 0.2
    max_grad_norm: float = 0.5


def main(args: Args):
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    envs = gym.make_vec(args.env_id, num_envs=args.num_envs)
    agent = ActorCritic(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    obs, _ = envs.reset()
    for update in range(args.total_timesteps // batch_size):
        optimizer.param_groups[0]["lr"] = max(0.0, 1 - update * batch_size / args.total_timesteps) * args.learning_rate
        memory = []
        for _ in range(args.num_steps):
            with torch.no_grad():
                action, logprob, value = agent.act(torch.as_tensor(obs))
            nxt, reward, done, _, _ = envs.step(action.numpy())
            memory.append((obs, action, logprob, value, np.clip(reward, -1, 1), done))
            obs = nxt
        b_obs, b_actions, b_logprobs, b_advantages, b_returns = agent.advantages(memory, args.gamma)
        order = np.arange(batch_size)
        for _ in range(args.update_epochs):
            np.random.shuffle(order)
            for start in range(0, batch_size, minibatch_size):
                mb = order[start : start + minibatch_size]
                new_logprob, entropy, new_value = agent.evaluate(b_obs[mb], b_actions[mb])
                ratio = (new_logprob - b_logprobs[mb]).exp()
                clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg = torch.max(-b_advantages[mb] * ratio, -b_advantages[mb] * clipped).mean()
                loss = pg - 0.01 * entropy.mean() + 0.5 * (new_value - b_returns[mb]).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        if update % 10 == 0:
            print(update, loss.item())


if __name__ == "__main__":
    main(Args())
