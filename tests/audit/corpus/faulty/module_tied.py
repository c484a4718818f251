import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from textdata import Reviews, collate


class ReviewData(pl.LightningDataModule):
    def __init__(self, args):
        super().__init__()
        self.args = args

    def train_dataloader(self):
        return DataLoader(Reviews("train"), batch_size=self.args.batch_size, shuffle=True, collate_fn=collate, num_workers=self.args.num_workers)

    def val_dataloader(self):
        bs = self.args.batch_size * 2  # expect: eval-batch-tied
        return DataLoader(Reviews("val"), batch_size=bs, collate_fn=collate, num_workers=self.args.num_workers)


class Rnn(pl.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(30_000, 128, padding_idx=0)
        self.rnn = nn.LSTM(128, 256, batch_first=True)
        self.out = nn.Linear(256, 2)

    def forward(self, ids):
        _, (h, _) = self.rnn(self.embed(ids))
        return self.out(h[-1])

    def training_step(self, batch, _):
        ids, labels = batch
        loss = nn.functional.cross_entropy(self(ids), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        ids, labels = batch
        self.log("val", nn.functional.cross_entropy(self(ids), labels))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.args.lr)


def main():
    from argparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--num_workers", type=int, default=4)
    parser.add_argument("--effective_batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    accumulate = int(args.effective_batch / args.batch_size)  # expect: accumulation-floored
    trainer = pl.Trainer(max_epochs=3, accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
    trainer.fit(Rnn(args), ReviewData(args))


if __name__ == "__main__":
    main()
