from types import SimpleNamespace


def default():
    return SimpleNamespace(
        root="/datasets/coco",
        bs=16,
        eval_bs=16,
        num_workers=8,
        lr=0.02,
        epochs=24,
    )
