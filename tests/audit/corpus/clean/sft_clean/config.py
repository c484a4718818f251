from dataclasses import dataclass, field


@dataclass
class LoraSettings:
    r: int = 16
    alpha: int = 32
    dropout: float = 0.05


@dataclass
class SftSettings:
    model: str = "Qwen/Qwen2.5-7B"
    dataset: str = "HuggingFaceH4/no_robots"
    micro_batch: int = 2
    eval_micro_batch: int = 4
    accumulation: int = 16
    max_length: int = 2048
    workers: int = 4
    lr: float = 2e-4
    epochs: int = 2
    lora: LoraSettings = field(default_factory=LoraSettings)
