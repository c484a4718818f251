"""Rules about clamps: settings that are changed on their way to the step."""

from __future__ import annotations

from brim.audit.rules.rule import Rule
from brim.locale import N_

_LOADER = "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader"
_ARGUMENTS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
_SCHEDULES = "https://huggingface.co/docs/transformers/main_classes/optimizer_schedules"
_ACCUMULATION = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"

RULES: tuple[Rule, ...] = (
    Rule(
        name="batch-clamped",
        group="batch",
        severity="high",
        title=N_("The batch size is changed before it reaches the loader"),
        why=N_(
            "Somewhere between the setting and the data loader the batch size passes a limit. Whatever is set beyond that limit has no "
            "effect, and nothing says so: the run is slower and its optimizer steps hold fewer sequences than the user believes. People "
            "raise the setting, see no change, and look for the cause in the wrong place for weeks."
        ),
        mend=N_(
            "Take the limit away, or raise an error where the setting is too large. If memory is the reason, keep the batch and slice the "
            "step: `brim plan` says what fits."
        ),
        sources=("https://github.com/axolotl-ai-cloud/axolotl/issues/2688", _LOADER),
        bad="""\
import argparse
from torch.utils.data import DataLoader


def main(dataset):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    batch_size = min(args.batch_size, 2)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)
""",
        good="""\
import argparse
from torch.utils.data import DataLoader


def main(dataset):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    if args.batch_size > len(dataset):
        raise ValueError(f"--batch-size {args.batch_size} is larger than the data set")
    return DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
""",
    ),
    Rule(
        name="eval-batch-clamped",
        group="batch",
        severity="medium",
        title=N_("The evaluation batch size is changed before it reaches the loader"),
        why=N_(
            "The evaluation batch passes a limit that the user does not see. Evaluation keeps no gradients, so it can hold larger batches "
            "than training; a small limit makes every evaluation slower, without any effect on its result."
        ),
        mend=N_("Give evaluation its own setting and use it as it is."),
        sources=(_ARGUMENTS, "https://github.com/huggingface/transformers/issues/32215"),
        bad="""\
from dataclasses import dataclass
from torch.utils.data import DataLoader


@dataclass
class Config:
    eval_batch_size: int = 32


def eval_loader(dataset, config: Config):
    return DataLoader(dataset, batch_size=min(config.eval_batch_size, 4))
""",
        good="""\
from dataclasses import dataclass
from torch.utils.data import DataLoader


@dataclass
class Config:
    eval_batch_size: int = 32


def eval_loader(dataset, config: Config):
    return DataLoader(dataset, batch_size=config.eval_batch_size)
""",
    ),
    Rule(
        name="accumulation-clamped",
        group="accumulation",
        severity="high",
        title=N_("The number of accumulated micro-batches is changed"),
        why=N_(
            "Accumulation decides how many sequences one optimizer step holds. A limit on it changes the effective batch, and with it the "
            "learning rate that is right and the number of steps in an epoch, while logs still show the number that was set."
        ),
        mend=N_("Use the setting as it is, and raise an error if it makes no sense."),
        sources=(_ACCUMULATION, "https://github.com/huggingface/transformers/pull/33281"),
        bad="""\
from dataclasses import dataclass


@dataclass
class Config:
    gradient_accumulation_steps: int = 1


class Trainer:
    def __init__(self, config: Config):
        self.accumulation_steps = max(config.gradient_accumulation_steps, 16)
""",
        good="""\
from dataclasses import dataclass


@dataclass
class Config:
    gradient_accumulation_steps: int = 1


class Trainer:
    def __init__(self, config: Config):
        self.accumulation_steps = max(config.gradient_accumulation_steps, 1)
""",
    ),
    Rule(
        name="workers-clamped",
        group="loading",
        severity="low",
        title=N_("The number of loader workers is limited by a constant"),
        why=N_(
            "A fixed limit on workers was right for one machine. Elsewhere the device waits for data although there are "
            "cores to prepare it. "
            "A limit by the cores that the process may use is fine, and is not reported."
        ),
        mend=N_(
            "Limit by `len(os.sched_getaffinity(0))`, or measure: `brim probe` finds the smallest number that hides the waiting."
        ),
        sources=(_LOADER, "https://github.com/pytorch/pytorch/issues/23048"),
        bad="""\
from torch.utils.data import DataLoader


def loader(dataset, args):
    return DataLoader(dataset, batch_size=args.batch_size, num_workers=min(args.num_workers, 2))
""",
        good="""\
import os
from torch.utils.data import DataLoader


def loader(dataset, args):
    return DataLoader(dataset, batch_size=args.batch_size, num_workers=min(args.num_workers, os.cpu_count()))
""",
    ),
    Rule(
        name="learning-rate-clamped",
        group="step",
        severity="high",
        title=N_("The learning rate is changed before it reaches the optimizer"),
        why=N_(
            "The learning rate passes a limit on its way to the optimizer. A sweep over learning rates then compares runs that are the "
            "same, and the best of them is only the luckiest."
        ),
        mend=N_("Use the setting as it is. A schedule may move the rate during the run; the peak should be what was set."),
        sources=("https://docs.pytorch.org/docs/stable/optim.html",),
        bad="""\
import torch


def optimizer_of(model, args):
    lr = min(args.lr, 1e-4)
    return torch.optim.AdamW(model.parameters(), lr=lr)
""",
        good="""\
import torch


def optimizer_of(model, args):
    return torch.optim.AdamW(model.parameters(), lr=args.lr)
""",
    ),
    Rule(
        name="length-clamped",
        group="loading",
        severity="medium",
        title=N_("The sequence length is limited by a constant"),
        why=N_(
            "Sequences are cut at a length that the user did not set. Memory and speed then say nothing about the length "
            "in the config, and "
            "the ends of long examples, often the answers, are never learnt."
        ),
        mend=N_(
            "Limit by what the model can do (`tokenizer.model_max_length`, `config.max_position_embeddings`), and say how "
            "many sequences are cut."
        ),
        sources=("https://huggingface.co/docs/transformers/pad_truncation",),
        bad="""\
def encode(tokenizer, texts, args):
    max_length = min(args.max_seq_length, 512)
    return tokenizer(texts, truncation=True, max_length=max_length)
""",
        good="""\
def encode(tokenizer, texts, args):
    max_length = min(args.max_seq_length, tokenizer.model_max_length)
    return tokenizer(texts, truncation=True, max_length=max_length)
""",
    ),
)
