import ast
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from hparams import HParams
from vocoder import Mel, Vocoder


def parse(argv):
    return {k: ast.literal_eval(v) for k, v in (item.split("=", 1) for item in argv)}


def main():
    hp = HParams(**parse(sys.argv[1:]))
    train = DataLoader(Mel("train", hp.sample_rate), batch_size=hp.batch_size, shuffle=True, num_workers=hp.num_workers, pin_memory=True)
    valid = DataLoader(Mel("valid", hp.sample_rate), batch_size=hp.valid_batch_size, num_workers=hp.num_workers, pin_memory=True)
    net = Vocoder().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=hp.lr, betas=(0.8, 0.99))
    for epoch in range(hp.max_epochs):
        net.train()
        for i, (mel, wave) in enumerate(train):
            loss = F.l1_loss(net(mel.cuda()), wave.cuda()) / hp.accumulate
            loss.backward()
            if (i + 1) % hp.accumulate == 0 or i == len(train) - 1:
                opt.step()
                opt.zero_grad(set_to_none=True)
        net.eval()
        with torch.no_grad():
            errors = torch.stack([F.l1_loss(net(m.cuda()), w.cuda()) for m, w in valid])
        print(epoch, errors.mean().item())


if __name__ == "__main__":
    main()
