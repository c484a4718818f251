"""Tokenise and cut a corpus into blocks of equal length."""
import argparse
import itertools
import os

from datasets import load_dataset
from transformers import AutoTokenizer


def group(block_size):
    def inner(rows):
        joined = {k: list(itertools.chain(*rows[k])) for k in rows}
        total = len(joined["input_ids"]) // block_size * block_size
        out = {k: [v[i : i + block_size] for i in range(0, total, block_size)] for k, v in joined.items()}
        out["labels"] = [list(ids) for ids in out["input_ids"]]
        return out

    return inner


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dataset", default="wikitext")
    p.add_argument("--name", default="wikitext-103-raw-v1")
    p.add_argument("--tokenizer", default="gpt2")
    p.add_argument("--block-size", type=int, default=1024)
    p.add_argument("--procs", type=int, default=16)
    p.add_argument("--out", default="blocks")
    args = p.parse_args()
    procs = min(args.procs, os.cpu_count())
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    raw = load_dataset(args.dataset, args.name)
    ids = raw.map(
        lambda rows: tokenizer(rows["text"], return_attention_mask=False),
        batched=True,
        batch_size=1000,
        num_proc=procs,
        remove_columns=["text"],
    )
    blocks = ids.map(group(args.block_size), batched=True, batch_size=2000, num_proc=procs)
    for split, rows in blocks.items():
        print(split, len(rows), "blocks")
    blocks.save_to_disk(args.out)


if __name__ == "__main__":
    main()
