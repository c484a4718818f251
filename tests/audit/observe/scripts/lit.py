"""A Lightning module: four rows, three times; forward and backward run inside the optimizer's step."""

# mypy: ignore-errors

import lightning
import torch
from parts import Tiny, loss_of, rows
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Tiny()

    def training_step(self, batch, _place):
        (input_ids,) = batch
        return loss_of(self.model(input_ids), input_ids)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer = lightning.Trainer(
    max_epochs=2, accumulate_grad_batches=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Module(), DataLoader(TensorDataset(rows(24)), batch_size=4))
