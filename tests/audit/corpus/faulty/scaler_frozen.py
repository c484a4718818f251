"""Heart beats, five classes."""
import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from ecg import Beats, EcgNet

config = {"batch_size": 256, "workers": 4, "lr": 1e-3, "epochs": 50}


def main():
    loader = DataLoader(Beats("ptb"), batch_size=config["batch_size"], shuffle=True, num_workers=config["workers"], pin_memory=True)
    model = EcgNet(classes=5).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scaler = GradScaler()
    for epoch in range(config["epochs"]):
        for signal, label in loader:
            optimizer.zero_grad(set_to_none=True)
            with autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(signal.cuda()), label.cuda())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)  # expect: scaler-update-missing
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
