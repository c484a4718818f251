"""Question answering trainer used by the whole team.

    python long_trainer.py --train-batch 64 --accumulate 2 --max-seq 384
"""
import argparse
import json
import logging
import math
import os
import random
import time

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
log = logging.getLogger("qa")

MAX_ON_CARD = 12


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def parse():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    data = parser.add_argument_group("data")
    data.add_argument("--train-file", default="squad-train.jsonl")
    data.add_argument("--dev-file", default="squad-dev.jsonl")
    data.add_argument("--max-seq", type=int, default=384)
    data.add_argument("--loader-workers", type=int, default=8)
    run = parser.add_argument_group("run")
    run.add_argument("--model", default="bert-large-uncased")
    run.add_argument("--train-batch", type=int, default=64)
    run.add_argument("--dev-batch", type=int, default=64)
    run.add_argument("--accumulate", type=int, default=1)
    run.add_argument("--lr", type=float, default=3e-5)
    run.add_argument("--warmup", type=float, default=0.1)
    run.add_argument("--epochs", type=int, default=2)
    run.add_argument("--seed", type=int, default=42)
    run.add_argument("--out", default="qa-model")
    return parser.parse_args()


class QaExamples(Dataset):
    def __init__(self, path):
        with open(path, encoding="utf-8") as handle:
            self.rows = [json.loads(line) for line in handle]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Collate:
    def __init__(self, tokenizer, max_seq):
        self.tokenizer = tokenizer
        self.max_seq = max_seq

    def __call__(self, rows):
        enc = self.tokenizer(
            [r["question"] for r in rows],
            [r["context"] for r in rows],
            truncation="only_second",
            max_length=self.max_seq,
            padding=True,
            return_tensors="pt",
        )
        starts, ends = [], []
        for i, row in enumerate(rows):
            first = enc.char_to_token(i, row["start"], sequence_index=1)
            last = enc.char_to_token(i, row["end"] - 1, sequence_index=1)
            starts.append(first if first is not None else 0)
            ends.append(last if last is not None else 0)
        batch = dict(enc)
        batch["start_positions"] = torch.tensor(starts)
        batch["end_positions"] = torch.tensor(ends)
        return batch


class QaTrainer:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.model = AutoModelForQuestionAnswering.from_pretrained(args.model).to(self.device)
        self.micro = self._micro_batch()
        self.window = args.accumulate
        if self.window < 4:
            self.window = 4  # expect: accumulation-clamped
        self.train_loader = self._loader(args.train_file, self.micro, shuffle=True)
        self.dev_loader = self._loader(args.dev_file, args.dev_batch, shuffle=False)
        self.optimizer = self._optimizer()
        self.scheduler = self._scheduler()

    def _micro_batch(self):
        wanted = self.args.train_batch
        if wanted > MAX_ON_CARD:
            log.info("using %d sequences a step", wanted)
            wanted = MAX_ON_CARD  # expect: batch-clamped
        return wanted

    def _loader(self, path, batch, shuffle):
        return DataLoader(
            QaExamples(path),
            batch_size=batch,
            shuffle=shuffle,
            collate_fn=Collate(self.tokenizer, self.args.max_seq),
            num_workers=self.args.loader_workers,
            pin_memory=self.device.type == "cuda",
        )

    def _optimizer(self):
        plain, decayed = [], []
        for name, parameter in self.model.named_parameters():
            (plain if "bias" in name or "LayerNorm" in name else decayed).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.args.lr)

    def _scheduler(self):
        total = math.ceil(len(self.train_loader) / self.window) * self.args.epochs
        warm = max(1, int(total * self.args.warmup))

        def factor(step):
            if step < warm:
                return step / warm
            return max(0.0, (total - step) / max(1, total - warm))

        return LambdaLR(self.optimizer, factor)

    def train(self):
        best = float("inf")
        for epoch in range(self.args.epochs):
            began = time.time()
            self._train_epoch(epoch)
            score = self.evaluate()
            log.info("epoch %d: dev %.4f in %.0fs", epoch, score, time.time() - began)
            if score < best:
                best = score
                self.save()

    def _train_epoch(self, epoch):
        self.model.train()
        for index, batch in enumerate(self.train_loader):
            batch = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = self.model(**batch).loss
            (loss / self.window).backward()
            if (index + 1) % self.window == 0 or index + 1 == len(self.train_loader):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad(set_to_none=True)
            if index % 200 == 0:
                log.info("epoch %d batch %d loss %.4f", epoch, index, loss.item())

    @torch.inference_mode()
    def evaluate(self):
        self.model.eval()
        losses = []
        for batch in self.dev_loader:
            losses.append(self.model(**{k: v.to(self.device) for k, v in batch.items()}).loss)
        return torch.stack(losses).mean().item()

    def save(self):
        os.makedirs(self.args.out, exist_ok=True)
        self.model.save_pretrained(self.args.out)
        self.tokenizer.save_pretrained(self.args.out)


if __name__ == "__main__":
    arguments = parse()
    seed_everything(arguments.seed)
    QaTrainer(arguments).train()
