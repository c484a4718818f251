"""Image classifier with every option that people ask for."""
import argparse
import contextlib
import json
import logging
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

log = logging.getLogger(__name__)


def arguments():
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("data")
    p.add_argument("--arch", default="resnet50")
    p.add_argument("--batch-size", type=int, default=64, help="per GPU")
    p.add_argument("--eval-batch-size", type=int, default=256, help="per GPU")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--no-pin-memory", dest="pin_memory", action="store_false")
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--warmup-epochs", type=int, default=5)
    p.add_argument("--epochs", type=int, default=90)
    p.add_argument("--amp", choices=["none", "fp16", "bf16"], default="fp16")
    p.add_argument("--clip", type=float, default=0.0)
    p.add_argument("--print-freq", type=int, default=50)
    p.add_argument("--out", default="run")
    args = p.parse_args()
    if args.accumulate < 1:
        p.error("--accumulate must be at least 1")
    return args


class Average:
    def __init__(self, device):
        self.total = torch.zeros((), device=device)
        self.count = 0

    def add(self, value, n):
        self.total += value.detach() * n
        self.count += n

    def value(self):
        return self.total.item() / max(1, self.count)


class Run:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", self.local)
        torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("nccl")
        self.train_loader, self.val_loader, self.sampler = self.loaders()
        self.model = models.get_model(args.arch, num_classes=len(self.train_loader.dataset.classes)).to(self.device)
        if self.world > 1:
            self.model = DistributedDataParallel(self.model, device_ids=[self.local])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
        self.updates_per_epoch = math.ceil(len(self.train_loader) / args.accumulate)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        self.dtype = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}[args.amp]
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.amp == "fp16")

    def loaders(self):
        norm = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        train_tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), norm])
        val_tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), norm])
        train = datasets.ImageFolder(os.path.join(self.args.data, "train"), train_tf)
        val = datasets.ImageFolder(os.path.join(self.args.data, "val"), val_tf)
        sampler = DistributedSampler(train) if self.world > 1 else None
        common = {"num_workers": self.args.workers, "pin_memory": self.args.pin_memory}
        train_loader = DataLoader(train, batch_size=self.args.batch_size, shuffle=sampler is None, sampler=sampler, **common)
        val_loader = DataLoader(val, batch_size=self.args.eval_batch_size, **common)
        return train_loader, val_loader, sampler

    def factor(self, update):
        epoch = update / self.updates_per_epoch
        if epoch < self.args.warmup_epochs:
            return max(0.01, epoch / self.args.warmup_epochs)
        done = (epoch - self.args.warmup_epochs) / max(1, self.args.epochs - self.args.warmup_epochs)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def autocast(self):
        return torch.autocast("cuda", dtype=self.dtype) if self.dtype else contextlib.nullcontext()

    def quiet(self, ends):
        return self.model.no_sync() if self.world > 1 and not ends else contextlib.nullcontext()

    def train_epoch(self, epoch):
        self.model.train()
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)
        average = Average(self.device)
        n, last = self.args.accumulate, len(self.train_loader)
        self.optimizer.zero_grad(set_to_none=True)
        for i, (x, y) in enumerate(self.train_loader, start=1):
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            ends = i % n == 0 or i == last
            with self.quiet(ends):
                with self.autocast():
                    loss = F.cross_entropy(self.model(x), y)
                self.scaler.scale(loss / n).backward()
            if ends:
                if self.args.clip > 0:
                    self.scaler.unscale_(self.optimizer)
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.optimizer.zero_grad(set_to_none=True)
            average.add(loss, len(x))
            if i % self.args.print_freq == 0 and self.rank == 0:
                log.info("epoch %d %d/%d loss %.4f", epoch, i, last, average.value())
        return average.value()

    @torch.inference_mode()
    def validate(self):
        self.model.eval()
        right = torch.zeros((), device=self.device)
        for x, y in self.val_loader:
            with self.autocast():
                out = self.model(x.to(self.device, non_blocking=True))
            right += (out.argmax(1) == y.to(self.device)).sum()
        return right.item() / len(self.val_loader.dataset)

    def fit(self):
        best = 0.0
        os.makedirs(self.args.out, exist_ok=True)
        for epoch in range(self.args.epochs):
            began = time.time()
            loss = self.train_epoch(epoch)
            accuracy = self.validate()
            if self.rank == 0:
                record = {"epoch": epoch, "loss": loss, "accuracy": accuracy, "seconds": time.time() - began}
                with open(os.path.join(self.args.out, "log.jsonl"), "a") as f:
                    f.write(json.dumps(record) + "\n")
                if accuracy > best:
                    torch.save(self.model.state_dict(), os.path.join(self.args.out, "best.pt"))
            best = max(best, accuracy)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    Run(arguments()).fit()
