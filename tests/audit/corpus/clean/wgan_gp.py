import torch
from torch import autograd
from torch.utils.data import DataLoader

from shapes3d import Critic, Maker, Shapes

CONFIG = dict(batch_size=64, num_workers=4, critic_steps=5, lr=1e-4, weight=10.0, steps=100_000)


def penalty(critic, real, fake):
    t = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mixed = (t * real + (1 - t) * fake).requires_grad_(True)
    (grad,) = autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return ((grad.flatten(1).norm(dim=1) - 1) ** 2).mean()


def forever(loader):
    while True:
        for x in loader:
            yield x.cuda(non_blocking=True)


def main(c=CONFIG):
    data = forever(DataLoader(Shapes(), batch_size=c["batch_size"], shuffle=True, num_workers=c["num_workers"], pin_memory=True, drop_last=True))
    critic, maker = Critic().cuda(), Maker().cuda()
    critic_opt = torch.optim.Adam(critic.parameters(), lr=c["lr"], betas=(0.0, 0.9))
    maker_opt = torch.optim.Adam(maker.parameters(), lr=c["lr"], betas=(0.0, 0.9))
    for step in range(c["steps"]):
        for _ in range(c["critic_steps"]):
            real = next(data)
            with torch.no_grad():
                fake = maker.sample(real.size(0))
            loss = critic(fake).mean() - critic(real).mean() + c["weight"] * penalty(critic, real, fake)
            critic_opt.zero_grad()
            loss.backward()
            critic_opt.step()
        maker_loss = -critic(maker.sample(c["batch_size"])).mean()
        maker_opt.zero_grad()
        maker_loss.backward()
        maker_opt.step()
        if step % 500 == 0:
            print(step, loss.item(), maker_loss.item())


if __name__ == "__main__":
    main()
