from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="gpt2")
    torch_dtype: str = field(default="auto")


@dataclass
class DataArguments:
    dataset_name: str = field(default="roneneldan/TinyStories")
    max_length: int = field(default=512)
    preprocessing_num_workers: int = field(default=8)


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=model_args.torch_dtype)
    block = min(data_args.max_length, tokenizer.model_max_length)
    raw = load_dataset(data_args.dataset_name)
    with training_args.main_process_first():
        data = raw.map(
            lambda rows: tokenizer(rows["text"], truncation=True, max_length=block),
            batched=True,
            batch_size=1000,
            num_proc=data_args.preprocessing_num_workers,
            remove_columns=["text"],
        )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
