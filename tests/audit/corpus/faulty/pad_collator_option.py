import argparse

from datasets import load_dataset
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification, Trainer, TrainingArguments


def labels_of(tokenizer):
    def inner(rows):
        enc = tokenizer(rows["tokens"], is_split_into_words=True, truncation=True, max_length=256)
        enc["labels"] = [[-100 if w is None else tags[w] for w in enc.word_ids(i)] for i, tags in enumerate(rows["pos_tags"])]
        return enc

    return inner


def main(args):
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = load_dataset("conll2003").map(labels_of(tokenizer), batched=True)
    collator = DataCollatorForTokenClassification(tokenizer, padding="max_length", max_length=256)  # expect: padding-to-maximum
    trainer = Trainer(
        model=AutoModelForTokenClassification.from_pretrained(args.model, num_labels=47),
        args=TrainingArguments(
            output_dir=args.out,
            per_device_train_batch_size=args.bs,
            gradient_accumulation_steps=args.accum,
            num_train_epochs=3,
        ),
        data_collator=collator,
        train_dataset=data["train"],
    )
    trainer.train()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--model", default="distilroberta-base")
    cli.add_argument("--bs", type=int, default=32)
    cli.add_argument("--accum", type=int, default=1)
    cli.add_argument("--out", default="pos")
    main(cli.parse_args())
