import argparse

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
set_seed(args.seed)

tokenizer = AutoTokenizer.from_pretrained("roberta-base")
model = AutoModelForSequenceClassification.from_pretrained("roberta-base", num_labels=4)
news = load_dataset("ag_news").map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)

training_args = TrainingArguments(
    output_dir=f"agnews-{args.seed}",
    per_device_train_batch_size=args.batch_size,
    gradient_accumulation_steps=args.accum,
    learning_rate=2e-5,
    num_train_epochs=2,
    bf16=True,
    logging_steps=50,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=news["train"],
    eval_dataset=news["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
)
trainer.train()
print(trainer.evaluate())
