from dataclasses import dataclass, field

from transformers import HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ScriptSettings:
    learning_rate: float = field(default=5e-4)
    output_dir: str = field(default="out")


def main(model, dataset):
    (settings,) = HfArgumentParser(ScriptSettings).parse_args_into_dataclasses()
    arguments = TrainingArguments(
        output_dir=settings.output_dir,
        learning_rate=1e-5,  # expect: learning-rate-hard-coded
    )
    Trainer(model=model, args=arguments, train_dataset=dataset).train()
