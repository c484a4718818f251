from datasets import load_dataset
from torch.utils.data import DataLoader


def prepare(tokenizer, args):
    raw = load_dataset("Anthropic/hh-rlhf")

    def scores(row):
        good = tokenizer(row["chosen"], truncation=True, max_length=args.seq_len, padding="max_length")  # expect: padding-to-maximum
        bad = tokenizer(row["rejected"], truncation=True, max_length=args.seq_len, padding="max_length")  # expect: padding-to-maximum
        return {"good": good["input_ids"], "good_mask": good["attention_mask"], "bad": bad["input_ids"], "bad_mask": bad["attention_mask"]}

    return raw.map(scores, remove_columns=["chosen", "rejected"]).with_format("torch")


def loaders(data, args):
    train = DataLoader(data["train"], args.train_batch_size, shuffle=True, num_workers=args.num_workers, pin_memory=True)
    test = DataLoader(data["test"], args.eval_batch_size, num_workers=args.num_workers, pin_memory=True)
    return train, test
