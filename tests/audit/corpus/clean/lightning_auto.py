import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


class Cifar(L.LightningDataModule):
    def __init__(self, batch_size: int, eval_batch_size: int, num_workers: int):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        datasets.CIFAR10("data", download=True)

    def train_dataloader(self):
        ds = datasets.CIFAR10("data", transform=transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()]))
        return DataLoader(ds, batch_size=self.hparams.batch_size, shuffle=True, num_workers=self.hparams.num_workers, pin_memory=True)

    def val_dataloader(self):
        ds = datasets.CIFAR10("data", train=False, transform=transforms.ToTensor())
        return DataLoader(ds, batch_size=self.hparams.eval_batch_size, num_workers=self.hparams.num_workers, pin_memory=True)


class Net(L.LightningModule):
    def __init__(self, lr: float):
        super().__init__()
        self.save_hyperparameters()
        self.net = models.resnet18(num_classes=10)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.log("val/loss", F.cross_entropy(out, y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", type=int, default=128)
    p.add_argument("--eval_batch_size", type=int, default=256)
    p.add_argument("--num_workers", type=int, default=4)
    p.add_argument("--accumulate", type=int, default=2)
    p.add_argument("--lr", type=float, default=1e-3)
    a = p.parse_args()
    trainer = L.Trainer(max_epochs=20, accumulate_grad_batches=a.accumulate, gradient_clip_val=1.0, precision="16-mixed")
    trainer.fit(Net(a.lr), Cifar(a.batch_size, a.eval_batch_size, a.num_workers))
