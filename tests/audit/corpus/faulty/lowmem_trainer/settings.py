from dataclasses import dataclass, field


@dataclass
class DataSettings:
    train_file: str = "data/train.jsonl"
    eval_file: str = "data/eval.jsonl"
    block_size: int = 1024
    num_workers: int = 8
    pin_memory: bool = True


@dataclass
class RunSettings:
    model_name: str = "Qwen/Qwen2.5-0.5B"
    batch_size_per_gpu: int = 64
    eval_batch_size_per_gpu: int = 64
    gradient_accumulation_steps: int = 1
    learning_rate: float = 2e-5
    num_epochs: int = 3
    output_dir: str = "out"
    data: DataSettings = field(default_factory=DataSettings)
