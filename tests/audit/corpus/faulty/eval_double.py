"""Emotion classifier, Trainer API."""
import argparse

import numpy as np
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments


def metrics(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--model", default="distilbert-base-uncased")
    cli.add_argument("--batch_size", type=int, default=32)
    cli.add_argument("--lr", type=float, default=2e-5)
    cli.add_argument("--epochs", type=float, default=2)
    a = cli.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForSequenceClassification.from_pretrained(a.model, num_labels=6)
    data = load_dataset("dair-ai/emotion").map(lambda r: tokenizer(r["text"], truncation=True), batched=True)
    args = TrainingArguments(
        output_dir="emotion",
        per_device_train_batch_size=a.batch_size,
        per_device_eval_batch_size=a.batch_size * 2,  # expect: eval-batch-tied
        learning_rate=a.lr,
        num_train_epochs=a.epochs,
        eval_strategy="epoch",
        dataloader_num_workers=4,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=metrics,
    )
    trainer.train()
    print(trainer.evaluate(data["test"]))


if __name__ == "__main__":
    main()
