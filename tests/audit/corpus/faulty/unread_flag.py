"""NER with a token classifier."""
import argparse

from datasets import load_dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification, Trainer, TrainingArguments


def cli():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", default="bert-base-cased")
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--eval_batch_size", type=int, default=64)  # expect: setting-unused
    parser.add_argument("--grad_acc", type=int, default=1)  # expect: setting-unused
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args()


def align(tokenizer):
    def inner(rows):
        enc = tokenizer(rows["tokens"], truncation=True, is_split_into_words=True)
        enc["labels"] = []
        for i, tags in enumerate(rows["ner_tags"]):
            enc["labels"].append([-100 if w is None else tags[w] for w in enc.word_ids(i)])
        return enc

    return inner


def main():
    args = cli()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    data = load_dataset("conll2003").map(align(tokenizer), batched=True)
    model = AutoModelForTokenClassification.from_pretrained(args.checkpoint, num_labels=9)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="ner",
            per_device_train_batch_size=args.train_batch_size,
            num_train_epochs=args.epochs,
            eval_strategy="epoch",
        ),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorForTokenClassification(tokenizer),
    )
    trainer.train()


if __name__ == "__main__":
    main()
