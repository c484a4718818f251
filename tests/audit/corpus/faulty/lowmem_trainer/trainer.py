import json
import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from loaders import BlockDataset, build_loaders
from settings import RunSettings


class LMTrainer:
    def __init__(self, config: RunSettings):
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(config.model_name)
        self.model = AutoModelForCausalLM.from_pretrained(config.model_name).to(self.device)
        self.batch_size = min(config.batch_size_per_gpu, 2)  # expect: batch-clamped
        self.eval_batch_size = min(config.eval_batch_size_per_gpu, 2)  # expect: eval-batch-clamped
        self.accumulation = max(config.gradient_accumulation_steps, 16)  # expect: accumulation-clamped

    def _read(self, path):
        ids = []
        with open(path) as handle:
            for line in handle:
                ids.extend(self.tokenizer(json.loads(line)["text"])["input_ids"])
                ids.append(self.tokenizer.eos_token_id)
        return BlockDataset(ids, self.config.data.block_size)

    def train(self):
        train_loader, eval_loader = build_loaders(
            self._read(self.config.data.train_file),
            self._read(self.config.data.eval_file),
            self.config,
            self.batch_size,
            self.eval_batch_size,
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.learning_rate)
        steps_per_epoch = math.ceil(len(train_loader) // self.accumulation)  # expect: steps-miscounted
        total_steps = steps_per_epoch * self.config.num_epochs
        scheduler = get_cosine_schedule_with_warmup(optimizer, int(0.03 * total_steps), total_steps)
        for epoch in range(self.config.num_epochs):
            self.model.train()
            for index, batch in enumerate(train_loader):
                batch = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
                with torch.autocast(self.device.type, dtype=torch.bfloat16):
                    loss = self.model(**batch).loss / self.accumulation
                loss.backward()
                if (index + 1) % self.accumulation == 0 or index + 1 == len(train_loader):
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad(set_to_none=True)
            print(f"epoch {epoch}: eval loss {self.evaluate(eval_loader):.4f}")
        self.model.save_pretrained(self.config.output_dir)

    @torch.no_grad()
    def evaluate(self, loader):
        self.model.eval()
        total = torch.zeros((), device=self.device)
        count = 0
        for batch in loader:
            batch = {k: v.to(self.device) for k, v in batch.items()}
            total += self.model(**batch).loss * batch["input_ids"].size(0)
            count += batch["input_ids"].size(0)
        return (total / count).item()


if __name__ == "__main__":
    LMTrainer(RunSettings()).train()
