import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, random_split
from torchvision import datasets, models, transforms


class PetData(L.LightningDataModule):
    def __init__(self, root, batch_size=64, eval_batch_size=128, num_workers=8):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = min(batch_size, 10)  # expect: batch-clamped
        self.eval_batch_size = eval_batch_size
        if self.eval_batch_size > 16:
            self.eval_batch_size = 16  # expect: eval-batch-clamped
        self.num_workers = num_workers

    def setup(self, stage=None):
        full = datasets.OxfordIIITPet(self.hparams.root, download=True, transform=transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor()]))
        self.train_set, self.val_set = random_split(full, [0.9, 0.1])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.eval_batch_size, num_workers=self.num_workers, pin_memory=True)


class PetNet(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = models.efficientnet_b0(num_classes=37)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val_acc", (logits.argmax(-1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    trainer = L.Trainer(max_epochs=10, precision="bf16-mixed", accelerator="gpu", devices=1)
    trainer.fit(PetNet(), PetData("pets", batch_size=64))
