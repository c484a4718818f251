import json

import torch
import torchaudio
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from common.sizes import safe_batch, safe_workers


class Utterances(Dataset):
    def __init__(self, manifest):
        with open(manifest) as handle:
            self.rows = [json.loads(line) for line in handle]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        wave, _rate = torchaudio.load(self.rows[i]["audio"])
        return wave[0], torch.tensor(self.rows[i]["tokens"])


def collate(items):
    waves, tokens = zip(*items)
    wave_lengths = torch.tensor([len(w) for w in waves])
    token_lengths = torch.tensor([len(t) for t in tokens])
    return pad_sequence(waves, batch_first=True), wave_lengths, pad_sequence(tokens, batch_first=True), token_lengths


def loader(manifest, batch_size, workers, shuffle):
    return DataLoader(
        Utterances(manifest),
        batch_size=safe_batch(batch_size),
        shuffle=shuffle,
        collate_fn=collate,
        num_workers=safe_workers(workers),
        pin_memory=True,
    )
