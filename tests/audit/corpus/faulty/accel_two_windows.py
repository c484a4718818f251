# 使用 accelerate 训练推荐模型
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ranking import DeepFM, Impressions

CFG = {"bs": 2048, "accum": 8, "workers": 8, "lr": 1e-3, "epochs": 3}


class Job:
    def __init__(self):
        self.acc = Accelerator(gradient_accumulation_steps=CFG["accum"])
        data = Impressions("log.parquet")
        loader = DataLoader(data, batch_size=CFG["bs"], shuffle=True, num_workers=CFG["workers"])
        model = DeepFM(data.fields)
        optimizer = torch.optim.Adam(model.parameters(), lr=CFG["lr"])
        self.model, self.optimizer, self.loader = self.acc.prepare(model, optimizer, loader)
        self.criterion = nn.BCEWithLogitsLoss()

    def micro(self, features, click):
        with self.acc.accumulate(self.model):
            loss = self.criterion(self.model(features), click)
            self.acc.backward(loss / CFG["accum"])  # expect: accumulation-twice
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def run(self):
        for epoch in range(CFG["epochs"]):
            for n, (features, click) in enumerate(self.loader):
                loss = self.micro(features, click)
                if n % 500 == 0:
                    self.acc.print(epoch, n, loss.item())


if __name__ == "__main__":
    Job().run()
