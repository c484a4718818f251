import torch
from torch.utils.data import DataLoader, Dataset


class BlockDataset(Dataset):
    """Token ids cut into blocks of equal length."""

    def __init__(self, ids, block_size):
        usable = len(ids) // block_size * block_size
        self.blocks = torch.tensor(ids[:usable]).view(-1, block_size)

    def __len__(self):
        return self.blocks.size(0)

    def __getitem__(self, index):
        block = self.blocks[index]
        return {"input_ids": block, "labels": block.clone()}


def build_loaders(train_set, eval_set, config, batch_size, eval_batch_size):
    print(f"workers requested: {config.data.num_workers}, pinned: {config.data.pin_memory}")
    # keep host memory low on shared machines
    num_workers = 0  # expect: workers-hard-coded
    train_loader = DataLoader(
        train_set,
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        pin_memory=False,  # expect: pinning-off
    )
    eval_loader = DataLoader(eval_set, batch_size=eval_batch_size, num_workers=config.data.num_workers, pin_memory=config.data.pin_memory)
    return train_loader, eval_loader
