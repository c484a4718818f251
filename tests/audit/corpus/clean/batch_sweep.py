"""How fast is one training step at several batch sizes?"""
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
WORKERS = [0, 2, 4]


def measure(batch_size, num_workers, steps=20):
    data = datasets.FakeData(batch_size * (steps + 5), (3, 224, 224), 1000, transforms.ToTensor())
    loader = DataLoader(data, batch_size=batch_size, num_workers=num_workers, pin_memory=True)
    model = models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = None
    for i, (x, y) in enumerate(loader):
        if i == 5:
            torch.cuda.synchronize()
            began = time.perf_counter()
        loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return batch_size * steps / (time.perf_counter() - began)


def main():
    for workers in WORKERS:
        for size in BATCH_SIZES:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                rate = measure(size, workers)
            except torch.cuda.OutOfMemoryError:
                print(workers, size, "out of memory")
                break
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"workers {workers} batch {size:4d}: {rate:8.1f} images/s, {peak:.2f} GiB")


if __name__ == "__main__":
    main()
