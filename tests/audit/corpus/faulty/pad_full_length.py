from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

MODEL = "bert-base-multilingual-cased"
MAX_LENGTH = 512
BATCH_SIZE = 16

tokenizer = AutoTokenizer.from_pretrained(MODEL)


def preprocess(rows):
    return tokenizer(rows["premise"], rows["hypothesis"], truncation=True, padding="max_length", max_length=MAX_LENGTH)  # expect: padding-to-maximum


def main():
    data = load_dataset("xnli", "de").map(preprocess, batched=True)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=3)
    args = TrainingArguments(
        output_dir="xnli-de",
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=2e-5,
        num_train_epochs=2,
        bf16=True,
        dataloader_num_workers=4,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["validation"])
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
