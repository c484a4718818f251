import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from pairs import ImagePairs, PatchGan, UnetGenerator


class Pix2Pix(L.LightningModule):
    """Two optimizers, manual optimisation with accumulation."""

    def __init__(self, lr=2e-4, accumulate=4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen, self.disc = UnetGenerator(), PatchGan()
        self.bce = nn.BCEWithLogitsLoss()

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        n = self.hparams.accumulate
        x, y = batch
        fake = self.gen(x)
        judged = self.disc(x, fake)
        g_loss = self.bce(judged, torch.ones_like(judged)) + 100 * nn.functional.l1_loss(fake, y)
        self.toggle_optimizer(g_opt)
        self.manual_backward(g_loss / n)
        self.untoggle_optimizer(g_opt)

        real, false = self.disc(x, y), self.disc(x, fake.detach())
        d_loss = (self.bce(real, torch.ones_like(real)) + self.bce(false, torch.zeros_like(false))) / 2
        self.toggle_optimizer(d_opt)
        self.manual_backward(d_loss / n)
        self.untoggle_optimizer(d_opt)

        if (batch_idx + 1) % n == 0 or self.trainer.is_last_batch:
            for opt in (g_opt, d_opt):
                opt.step()
                opt.zero_grad()
        self.log_dict({"g": g_loss, "d": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        lr = self.hparams.lr
        return (
            torch.optim.Adam(self.gen.parameters(), lr=lr, betas=(0.5, 0.999)),
            torch.optim.Adam(self.disc.parameters(), lr=lr, betas=(0.5, 0.999)),
        )


if __name__ == "__main__":
    loader = DataLoader(ImagePairs("facades"), batch_size=4, shuffle=True, num_workers=4, pin_memory=True)
    L.Trainer(max_epochs=100).fit(Pix2Pix(), loader)
