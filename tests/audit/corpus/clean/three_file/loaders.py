from torch.utils.data import DataLoader

from options import Options
from vocdata import Voc


def build(o: Options):
    shared = dict(num_workers=o.num_workers, pin_memory=o.pin_memory, persistent_workers=o.num_workers > 0)
    train = DataLoader(Voc(o.root, "train"), batch_size=o.batch_size, shuffle=True, **shared)
    val = DataLoader(Voc(o.root, "val"), batch_size=o.eval_batch_size, **shared)
    return train, val
