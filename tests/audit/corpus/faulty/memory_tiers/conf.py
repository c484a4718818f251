from dataclasses import dataclass


@dataclass
class TrainConfig:
    model: str = "meta-llama/Llama-3.2-1B"
    dataset: str = "tatsu-lab/alpaca"
    per_gpu_batch: int = 32
    grad_accum: int = 2
    lr: float = 1e-4
    max_steps: int = 2000
    workers: int = 4
