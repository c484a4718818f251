"""Rules about settings that do not count: numbers in the code, settings that nothing reads, steps that are miscounted."""

from __future__ import annotations

from brim.audit.rules.rule import Rule
from brim.locale import N_

_LOADER = "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader"
_ARGUMENTS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
_SCHEDULES = "https://huggingface.co/docs/transformers/main_classes/optimizer_schedules"
_ACCUMULATION = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"

RULES: tuple[Rule, ...] = (
    Rule(
        name="batch-hard-coded",
        group="batch",
        severity="high",
        title=N_("The loader takes a number, although there is a setting for the batch size"),
        why=N_(
            "The config offers a batch size, and the training loader is given a literal. The setting can be turned without any effect, and "
            "memory and speed never change."
        ),
        mend=N_("Hand the setting to the loader."),
        sources=(_LOADER,),
        bad="""\
import argparse
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()


def train_loader(dataset):
    return DataLoader(dataset, batch_size=8, shuffle=True)
""",
        good="""\
import argparse
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()


def train_loader(dataset):
    return DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
""",
    ),
    Rule(
        name="accumulation-hard-coded",
        group="accumulation",
        severity="high",
        title=N_("The loop accumulates a fixed number of micro-batches, although there is a setting for it"),
        why=N_(
            "The config offers a number of micro-batches to accumulate, and the loop steps after a literal one. The effective batch is not "
            "the product that the config promises."
        ),
        mend=N_("Use the setting, both where the loss is divided and where the optimizer steps."),
        sources=(_ACCUMULATION,),
        bad="""\
def train(model, loader, optimizer, args):
    print(f"accumulating {args.gradient_accumulation_steps} micro-batches")
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / 4
        loss.backward()
        if (index + 1) % 4 == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def arguments(parser):
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
""",
        good="""\
def train(model, loader, optimizer, args):
    steps = args.gradient_accumulation_steps
    for index, batch in enumerate(loader):
        loss = model(**batch).loss / steps
        loss.backward()
        if (index + 1) % steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def arguments(parser):
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
""",
    ),
    Rule(
        name="learning-rate-hard-coded",
        group="batch",
        severity="medium",
        title=N_("The optimizer takes a number, although there is a setting for the learning rate"),
        why=N_(
            "The config or the command line offers a learning rate, and the optimizer or the trainer is given a literal. A search over the "
            "setting compares equal runs."
        ),
        mend=N_("Pass the setting to the optimizer or to the arguments of the trainer."),
        sources=(_ARGUMENTS,),
        bad="""\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=5e-4)
args = parser.parse_args()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-5)
""",
        good="""\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=5e-4)
args = parser.parse_args()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
""",
    ),
    Rule(
        name="workers-hard-coded",
        group="loading",
        severity="low",
        also=N_("Low if the project has no setting for it: then nobody was promised another number."),
        title=N_("The number of loader workers is a number in the code"),
        why=N_(
            "With no workers every batch is prepared in the training process, while the device waits; with a fixed number "
            "the setting has no "
            "effect. Workers are often switched off by hand for a machine with little memory, and stay off."
        ),
        mend=N_(
            "Hand the setting to the loader. `brim probe` measures how many workers hide the waiting, and what they cost in memory."
        ),
        sources=(_LOADER, "https://github.com/pytorch/pytorch/issues/13246"),
        bad="""\
from dataclasses import dataclass
from torch.utils.data import DataLoader


@dataclass
class Config:
    batch_size: int = 16
    num_workers: int = 4


def loader(dataset, config: Config):
    return DataLoader(dataset, batch_size=config.batch_size, shuffle=True, num_workers=0)
""",
        good="""\
from dataclasses import dataclass
from torch.utils.data import DataLoader


@dataclass
class Config:
    batch_size: int = 16
    num_workers: int = 4


def loader(dataset, config: Config):
    return DataLoader(dataset, batch_size=config.batch_size, shuffle=True, num_workers=config.num_workers)
""",
    ),
    Rule(
        name="pinning-off",
        group="loading",
        severity="low",
        also=N_("Low if the project has no setting for it: then nobody was promised otherwise."),
        title=N_("Pinned memory is switched off by hand"),
        why=N_(
            "Without pinned memory a copy to the GPU cannot overlap with computing, even with non_blocking. Where the config has a setting "
            "for it, a literal False takes the choice away."
        ),
        mend=N_("Hand the setting to the loader, or pin where there is a GPU: `pin_memory=torch.cuda.is_available()`."),
        sources=("https://docs.pytorch.org/docs/stable/data.html#memory-pinning",),
        bad="""\
from dataclasses import dataclass
from torch.utils.data import DataLoader


@dataclass
class Config:
    batch_size: int = 16
    pin_memory: bool = True


def loader(dataset, config: Config):
    return DataLoader(dataset, batch_size=config.batch_size, shuffle=True, pin_memory=False)
""",
        good="""\
from dataclasses import dataclass
from torch.utils.data import DataLoader


@dataclass
class Config:
    batch_size: int = 16
    pin_memory: bool = True


def loader(dataset, config: Config):
    return DataLoader(dataset, batch_size=config.batch_size, shuffle=True, pin_memory=config.pin_memory)
""",
    ),
    Rule(
        name="eval-batch-tied",
        group="batch",
        severity="low",
        title=N_("The evaluation batch is computed from the training batch"),
        why=N_(
            "Training and evaluation have different peaks of memory: one holds gradients and activations, the other may hold logits for a "
            "whole epoch. Tied to each other, a training batch that fits can make evaluation run out of memory hours later."
        ),
        mend=N_("Give evaluation a setting of its own."),
        sources=("https://github.com/huggingface/transformers/issues/32215",),
        bad="""\
from torch.utils.data import DataLoader


def loaders(train_set, eval_set, args):
    train = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    evaluation = DataLoader(eval_set, batch_size=args.batch_size * 2)
    return train, evaluation
""",
        good="""\
from torch.utils.data import DataLoader


def loaders(train_set, eval_set, args):
    train = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    evaluation = DataLoader(eval_set, batch_size=args.eval_batch_size)
    return train, evaluation
""",
    ),
    Rule(
        name="accumulation-floored",
        group="accumulation",
        severity="medium",
        title=N_("The number of micro-batches is rounded down, and the effective batch with it"),
        why=N_(
            "The wanted batch is divided by the micro-batch, and the rest is dropped. With 48 wanted and 32 at a time, one micro-batch is "
            "accumulated, and every step holds 32 sequences: a third of the batch is gone."
        ),
        mend=N_(
            "Refuse sizes that do not divide, or let the last micro-batch be smaller and weigh it by its tokens, as `brim train` does."
        ),
        sources=("https://github.com/huggingface/transformers/pull/33281", _ACCUMULATION),
        bad="""\
def accumulation_of(args):
    gradient_accumulation_steps = args.target_batch_size // args.batch_size
    return gradient_accumulation_steps
""",
        good="""\
def accumulation_of(args):
    if args.target_batch_size % args.batch_size:
        raise ValueError("--target-batch-size must be a multiple of --batch-size")
    gradient_accumulation_steps = args.target_batch_size // args.batch_size
    return gradient_accumulation_steps
""",
    ),
    Rule(
        name="setting-unused",
        group="batch",
        severity="medium",
        title=N_("A setting that nothing reads"),
        why=N_(
            "The config or the command line offers a batch size, an accumulation or a number of workers, and no line of the program reads "
            "it. Users turn it and believe in it."
        ),
        mend=N_("Use it, or take it out."),
        sources=("https://github.com/axolotl-ai-cloud/axolotl/issues/2688",),
        bad="""\
from dataclasses import dataclass
from torch.utils.data import DataLoader


@dataclass
class Config:
    batch_size: int = 16
    gradient_accumulation_steps: int = 4


def train(model, dataset, optimizer, config: Config):
    for batch in DataLoader(dataset, batch_size=config.batch_size, shuffle=True):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
""",
        good="""\
from dataclasses import dataclass
from torch.utils.data import DataLoader


@dataclass
class Config:
    batch_size: int = 16


def train(model, dataset, optimizer, config: Config):
    for batch in DataLoader(dataset, batch_size=config.batch_size, shuffle=True):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
""",
    ),
    Rule(
        name="steps-miscounted",
        group="step",
        severity="medium",
        title=N_("Steps are rounded down before they are rounded up"),
        why=N_(
            "`ceil` of a floor division is the floor: the last, smaller batch of an epoch is not counted. Schedules end early, progress "
            "goes beyond its end, and runs that stop after that many steps never see the last sequences."
        ),
        mend=N_("Divide with `/` inside `ceil`, or write `-(-a // b)`."),
        sources=("https://docs.python.org/3/library/math.html#math.ceil",),
        bad="""\
import math


def steps_per_epoch(dataset, batch_size):
    return math.ceil(len(dataset) // batch_size)
""",
        good="""\
import math


def steps_per_epoch(dataset, batch_size):
    return math.ceil(len(dataset) / batch_size)
""",
    ),
    Rule(
        name="scheduler-steps-undivided",
        group="step",
        severity="medium",
        title=N_("The learning-rate schedule counts micro-batches, and is stepped by optimizer steps"),
        why=N_(
            "The schedule is told to last for all batches of the loader, and is stepped only when the optimizer is. With 8 "
            "micro-batches per "
            "step, an eighth of the schedule is gone through: warm-up lasts 8 times as long, and the rate never decays."
        ),
        mend=N_("Divide the number of steps by the accumulation, rounding up."),
        sources=(_SCHEDULES, _ACCUMULATION),
        bad="""\
from transformers import get_linear_schedule_with_warmup


def train(model, loader, optimizer, args):
    total_steps = len(loader) * args.epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, total_steps)
    for epoch in range(args.epochs):
        for index, batch in enumerate(loader):
            loss = model(**batch).loss / args.accumulation_steps
            loss.backward()
            if (index + 1) % args.accumulation_steps == 0 or index + 1 == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
""",
        good="""\
import math
from transformers import get_linear_schedule_with_warmup


def train(model, loader, optimizer, args):
    total_steps = math.ceil(len(loader) / args.accumulation_steps) * args.epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, total_steps)
    for epoch in range(args.epochs):
        for index, batch in enumerate(loader):
            loss = model(**batch).loss / args.accumulation_steps
            loss.backward()
            if (index + 1) % args.accumulation_steps == 0 or index + 1 == len(loader):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
""",
    ),
)
