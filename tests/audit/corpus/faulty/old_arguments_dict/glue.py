import yaml
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments


def load_config(path="config.yaml"):
    with open(path) as f:
        return yaml.safe_load(f)


def arguments(conf):
    options = dict(
        output_dir=f"out/{conf['task']}",
        per_device_train_batch_size=conf["train_bs"],
        per_gpu_eval_batch_size=conf["eval_bs"],  # expect: dead-argument
        learning_rate=conf["lr"],
        num_train_epochs=conf["epochs"],
        eval_strategy="epoch",
        save_total_limit=1,
    )
    return TrainingArguments(**options)


def main():
    conf = load_config()
    tokenizer = AutoTokenizer.from_pretrained(conf["model"])
    model = AutoModelForSequenceClassification.from_pretrained(conf["model"], num_labels=2)
    data = load_dataset("glue", conf["task"])
    data = data.map(lambda r: tokenizer(r["sentence1"], r["sentence2"], truncation=True), batched=True)
    trainer = Trainer(
        model,
        arguments(conf),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
