import argparse

import torch
from datasets import load_dataset
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = torch.tensor(class_weights)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        criterion = nn.CrossEntropyLoss(weight=self.class_weights.to(outputs.logits.device))
        loss = criterion(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="roberta-base")
    p.add_argument("--train_bs", type=int, default=16)
    p.add_argument("--eval_bs", type=int, default=32)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--lr", type=float, default=2e-5)
    args = p.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = load_dataset("tweet_eval", "offensive").map(lambda r: tokenizer(r["text"], truncation=True), batched=True)
    trainer = WeightedTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2),
        args=TrainingArguments(
            output_dir="offensive",
            per_device_train_batch_size=args.train_bs,
            per_device_eval_batch_size=args.eval_bs,
            dataloader_num_workers=args.workers,
            learning_rate=args.lr,
            num_train_epochs=4,
            eval_strategy="epoch",
            bf16=True,
        ),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
        class_weights=[1.0, 2.0],
    )
    trainer.train()


if __name__ == "__main__":
    main()
