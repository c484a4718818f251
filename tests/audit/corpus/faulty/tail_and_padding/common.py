from dataclasses import dataclass


@dataclass
class TrainArgs:
    model: str = "facebook/opt-350m"
    train_batch_size: int = 8
    eval_batch_size: int = 8
    grad_accum: int = 4
    seq_len: int = 512
    num_workers: int = 4
    lr: float = 2e-5
    epochs: int = 3
    warmup_ratio: float = 0.03
