import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms

GLOBAL_BATCH = 1000
PER_GPU = 48
WORKERS = 8


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    world = dist.get_world_size()
    torch.cuda.set_device(rank)
    accum = max(1, GLOBAL_BATCH // (PER_GPU * world))  # expect: accumulation-floored

    dataset = datasets.ImageFolder("/imagenet/train", transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=PER_GPU, sampler=sampler, num_workers=WORKERS, pin_memory=True)
    model = DDP(models.resnet50().cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()

    for epoch in range(90):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % accum == 0 or i + 1 == len(loader)
            model.require_backward_grad_sync = last
            loss = criterion(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)) / accum
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            torch.save(model.module.state_dict(), f"resnet50-{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
