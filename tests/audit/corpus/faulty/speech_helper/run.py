import argparse

import torch
import torch.nn.functional as F

from asr_model import Conformer
from dataset import loader

parser = argparse.ArgumentParser()
parser.add_argument("manifest")
parser.add_argument("--batch", type=int, default=24)
parser.add_argument("--workers", type=int, default=12)
parser.add_argument("--epochs", type=int, default=30)


def main(argv=None):
    args = parser.parse_args(argv)
    data = loader(args.manifest, args.batch, args.workers, True)
    model = Conformer(vocab=512).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for epoch in range(args.epochs):
        for waves, wave_lengths, tokens, token_lengths in data:
            log_probs, lengths = model(waves.cuda(), wave_lengths.cuda())
            loss = F.ctc_loss(log_probs.transpose(0, 1), tokens.cuda(), lengths, token_lengths.cuda(), zero_infinity=True)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        print(f"finished epoch {epoch}")
        torch.save(model.state_dict(), "conformer.pt")


if __name__ == "__main__":
    main()
