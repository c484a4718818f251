import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_linear_schedule_with_warmup

CONFIG = {"lr": 2e-5, "num_epochs": 3, "batch_size": 16, "eval_batch_size": 32, "seed": 42}


def dataloaders(accelerator, tokenizer, config):
    data = load_dataset("glue", "mrpc")
    with accelerator.main_process_first():
        data = data.map(lambda r: tokenizer(r["sentence1"], r["sentence2"], truncation=True, max_length=None), batched=True, remove_columns=["idx", "sentence1", "sentence2"])
    data = data.rename_column("label", "labels")
    collate = DataCollatorWithPadding(tokenizer, padding="longest")
    train = DataLoader(data["train"], shuffle=True, collate_fn=collate, batch_size=config["batch_size"])
    dev = DataLoader(data["validation"], collate_fn=collate, batch_size=config["eval_batch_size"])
    return train, dev


def main(config=CONFIG):
    accelerator = Accelerator(mixed_precision="fp16")
    torch.manual_seed(config["seed"])
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    train, dev = dataloaders(accelerator, tokenizer, config)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, len(train) * config["num_epochs"])
    model, optimizer, train, dev, scheduler = accelerator.prepare(model, optimizer, train, dev, scheduler)
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        hits = seen = 0
        for batch in dev:
            with torch.no_grad():
                logits = model(**batch).logits
            guess, truth = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            hits += (guess == truth).sum()
            seen += len(truth)
        accelerator.print(f"epoch {epoch}: {float(hits) / seen:.3f}")


if __name__ == "__main__":
    main()
