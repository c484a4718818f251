"""Piano music."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from music import NoteBlocks, MusicTransformer

GRAD_ACCUM = 16
MAX_NORM = 1.0


def train():
    loader = DataLoader(NoteBlocks("maestro", 2048), batch_size=2, shuffle=True, num_workers=4, pin_memory=True)
    model = MusicTransformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(20):
        for idx, notes in enumerate(loader):
            notes = notes.cuda(non_blocking=True)
            logits = model(notes[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), notes[:, 1:].flatten())
            (loss / GRAD_ACCUM).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)  # expect: clip-before-window-ends
            if (idx + 1) % GRAD_ACCUM == 0 or (idx + 1) == len(loader):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        print(epoch, loss.item())


train()
