import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from aerial import Aerial, AerialNet

CFG = {"bs": 16, "accum": 4, "workers": 4, "epochs": 30, "lr": 3e-4}


class Parallel:
    """分布式训练"""

    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.rank)
        data = Aerial("train")
        self.sampler = DistributedSampler(data, shuffle=True, seed=17)
        self.loader = DataLoader(data, batch_size=cfg["bs"], sampler=self.sampler, num_workers=cfg["workers"], pin_memory=True)
        self.net = nn.parallel.DistributedDataParallel(AerialNet().cuda(), device_ids=[self.rank])
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=cfg["lr"])

    def micro(self, x, y):
        loss = nn.functional.cross_entropy(self.net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        (loss / self.cfg["accum"]).backward()  # expect: sync-every-micro-batch

    def epoch(self):
        for i, (x, y) in enumerate(self.loader, 1):
            self.micro(x, y)
            if i % self.cfg["accum"] == 0 or i == len(self.loader):
                self.opt.step()
                self.opt.zero_grad(set_to_none=True)

    def fit(self):
        for number in range(self.cfg["epochs"]):
            self.sampler.set_epoch(number)
            self.epoch()
            if self.rank == 0:
                print("epoch", number)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    Parallel(CFG).fit()
    dist.destroy_process_group()
