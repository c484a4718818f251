import torch


def collate(rows):
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, ids.masked_fill(ids == 0, -100)
