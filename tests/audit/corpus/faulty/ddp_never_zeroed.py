import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from graphs import GraphData, Gnn


def setup():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


class Loop:
    def __init__(self, model, loader, sampler):
        self.model = model
        self.loader = loader
        self.sampler = sampler
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def _run_batch(self, graph, target):
        loss = torch.nn.functional.mse_loss(self.model(graph), target)
        loss.backward()
        self.optimizer.step()  # expect: zero-grad-missing

    def run(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for graph, target in self.loader:
                self._run_batch(graph.cuda(), target.cuda())
            if dist.get_rank() == 0:
                print("epoch", epoch)


def main():
    setup()
    data = GraphData("zinc")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=128, sampler=sampler, num_workers=4, pin_memory=True)
    model = DistributedDataParallel(Gnn().cuda(), device_ids=[int(os.environ["LOCAL_RANK"])])
    Loop(model, loader, sampler).run(100)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
