import torch


def tune(cfg):
    name = torch.cuda.get_device_name(0)
    if "A100" not in name and "H100" not in name:
        cfg.bs = 2  # expect: batch-clamped
        cfg.eval_bs = 1  # expect: eval-batch-clamped
    torch.backends.cuda.matmul.allow_tf32 = True
    return cfg
