"""DCGAN: two optimizers in one loop."""
import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from dcgan_nets import Discriminator, Generator

parser = argparse.ArgumentParser()
parser.add_argument("--dataroot", default="celeba")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--batchSize", type=int, default=64)
parser.add_argument("--nz", type=int, default=100)
parser.add_argument("--niter", type=int, default=25)
parser.add_argument("--lr", type=float, default=0.0002)
opt = parser.parse_args()

device = torch.device("cuda:0")
dataset = datasets.ImageFolder(opt.dataroot, transforms.Compose([transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor()]))
dataloader = DataLoader(dataset, batch_size=opt.batchSize, shuffle=True, num_workers=opt.workers, pin_memory=True)
netG, netD = Generator(opt.nz).to(device), Discriminator().to(device)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))

for epoch in range(opt.niter):
    for i, (real, _) in enumerate(dataloader):
        real = real.to(device, non_blocking=True)
        n = real.size(0)
        netD.zero_grad()
        errD_real = criterion(netD(real).view(-1), torch.ones(n, device=device))
        errD_real.backward()
        fake = netG(torch.randn(n, opt.nz, 1, 1, device=device))
        errD_fake = criterion(netD(fake.detach()).view(-1), torch.zeros(n, device=device))
        errD_fake.backward()
        optimizerD.step()

        netG.zero_grad()
        errG = criterion(netD(fake).view(-1), torch.ones(n, device=device))
        errG.backward()
        optimizerG.step()

        if i % 100 == 0:
            print(f"[{epoch}/{opt.niter}][{i}] D {(errD_real + errD_fake).item():.4f} G {errG.item():.4f}")
    torch.save(netG.state_dict(), f"netG_{epoch}.pth")
