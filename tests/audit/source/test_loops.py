"""Training loops are judged by what they do to the gradient of a step, however they are written."""

from __future__ import annotations

import ast

import pytest

from brim.audit.found import Found
from brim.audit.rules import RULES
from brim.audit.rules.rule import Rule
from brim.audit.source import calls, loops
from tests.audit.source.clean_loops import CLEAN
from tests.audit.source.modules import found_by, mended, module_of, names, project_of

ALL = (*loops.CHECKS, *calls.CHECKS)
NAMES = (
    "loss-undivided",
    "loss-divided-twice",
    "mean-of-means",
    "zero-grad-misplaced",
    "step-every-micro-batch",
    "scheduler-every-micro-batch",
    "clip-before-window-ends",
    "last-window-dropped",
    "sync-every-micro-batch",
    "gradients-not-exchanged",
    "window-off-by-one",
    "zero-grad-missing",
    "clip-before-unscale",
    "graph-kept",
    "empty-cache-in-loop",
    "item-every-step",
    "set-epoch-missing",
    "fp16-without-scaler",
    "scaler-update-missing",
    "clip-beside-engine",
)
EXAMPLES = [RULES[name] for name in NAMES]

WINDOW = """
import torch
from torch import nn
def train(model, loader, optimizer, scheduler, accum, scaler=None, device="cuda"):
    for i, batch in enumerate(loader):
{body}
"""
END = "if (i + 1) % accum == 0 or i + 1 == len(loader):"


def loop(*lines: str) -> str:
    """A loop over `loader` with these lines as its body."""
    return WINDOW.format(body="\n".join("        " + line for line in lines))


def rules_in(text: str) -> list[str]:
    return names(found_by(loops.CHECKS, project_of(module_of(text))))


def first(text: str, rule: str) -> Found:
    return next(each for each in found_by(loops.CHECKS, project_of(module_of(text))) if each.rule == rule)


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.name)
def test_a_rule_finds_its_bad_example_and_leaves_its_good_one_alone(rule: Rule) -> None:
    bad = [module_of(text, name.removesuffix(".py")) for name, text in rule.bad.items()]
    good = [module_of(text, name.removesuffix(".py")) for name, text in rule.good.items()]
    assert rule.name in names(found_by(ALL, project_of(*bad)))
    assert names(found_by(ALL, project_of(*good))) == []


@pytest.mark.parametrize("style", CLEAN, ids=lambda style: style.replace(" ", "-"))
def test_a_clean_loop_gets_silence(style: str) -> None:
    assert found_by(ALL, project_of(module_of(CLEAN[style]))) == []


UNDIVIDED = {
    "model-loss": loop("loss = model(**batch).loss", "loss.backward()", END, "    optimizer.step()", "    optimizer.zero_grad()"),
    "criterion": loop(
        "loss = criterion(model(batch.x), batch.y)", "loss.backward()", END, "    optimizer.step()", "    optimizer.zero_grad()"
    ),
    "scaler": loop(
        "loss = model(**batch).loss",
        "scaler.scale(loss).backward()",
        END,
        "    scaler.step(optimizer)",
        "    scaler.update()",
        "    optimizer.zero_grad()",
    ),
    "continue": loop(
        "loss = model(**batch).loss",
        "loss.backward()",
        "if (i + 1) % accum:",
        "    continue",
        "optimizer.step()",
        "optimizer.zero_grad()",
    ),
    "last-index": loop(
        "loss = model(**batch).loss",
        "loss.backward()",
        "if i % accum == accum - 1:",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ),
    "named-condition": loop(
        "loss = model(**batch).loss",
        "loss.backward()",
        "is_last = (i + 1) % accum == 0",
        "if is_last:",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ),
    "micro-mean": loop(
        "losses = model(batch)",
        "loss = (losses * mask).sum() / mask.sum()",
        "loss.backward()",
        END,
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ),
    "literal": loop(
        "loss = model(**batch).loss",
        "loss.backward()",
        "if (i + 1) % 8 == 0:",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ),
    "only-the-log-is-divided": loop(
        "loss = model(**batch).loss",
        "loss.backward()",
        "print(loss.item() / accum)",
        END,
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ),
    "divided-too-late": loop(
        "loss = model(**batch).loss",
        "loss.backward()",
        "loss = loss / accum",
        END,
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    ),
    "window-of-a-function": """
        def step(model, batch, optimizer, size):
            optimizer.zero_grad()
            for micro in batch.split(size):
                model(micro).mean().backward()
            optimizer.step()
        """,
    "inner-loop": """
        def train(model, data, optimizer, accumulation):
            for step in range(1000):
                for _ in range(accumulation):
                    loss = model(**next(data)).loss
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
    "methods": """
        class Loop:
            def fit(self):
                for i, batch in enumerate(self.loader):
                    self.forward_backward(batch)
                    if (i + 1) % self.cfg.accum == 0 or i + 1 == len(self.loader):
                        self.apply()
            def forward_backward(self, batch):
                loss = self.model(**batch).loss
                loss.backward()
            def apply(self):
                self.optimizer.step()
                self.optimizer.zero_grad()
        """,
    "lightning-by-hand": """
        class Net(LightningModule):
            def training_step(self, batch, batch_idx):
                opt = self.optimizers()
                loss = self.net(**batch).loss
                self.manual_backward(loss)
                if (batch_idx + 1) % self.accumulate == 0:
                    opt.step()
                    opt.zero_grad()
        """,
}


@pytest.mark.parametrize("text", UNDIVIDED.values(), ids=UNDIVIDED)
def test_a_loss_that_nobody_divides_is_found(text: str) -> None:
    assert "loss-undivided" in rules_in(text)


def test_the_patch_divides_by_the_users_own_name_and_silences_the_rule() -> None:
    text = UNDIVIDED["scaler"]
    found = first(text, "loss-undivided")
    assert found.is_safe
    assert "accum" in found.message
    patched = mended(text, found.edits)
    assert "scaler.scale(loss / accum).backward()" in patched
    assert "loss-undivided" not in rules_in(patched)


@pytest.mark.parametrize(
    "lines",
    [
        ("loss = model(**batch).loss / accum", "(loss / accum).backward()"),
        ("loss = model(**batch).loss", "loss /= accum", "loss = loss / accum", "loss.backward()"),
        ("loss = model(**batch).loss", "loss = loss * (1 / accum)", "(loss / accum).backward()"),
        ("loss = model(**batch).loss.div(accum)", "scaler.scale(loss / accum).backward()"),
        ("loss = share(model, batch, accum)", "loss = loss / accum", "loss.backward()"),
    ],
    ids=["then-inline", "two-statements", "reciprocal", "div", "in-a-function"],
)
def test_two_divisions_in_a_row_are_found(lines: tuple[str, ...]) -> None:
    helper = "def share(model, batch, n):\n    return model(**batch).loss / n\n"
    assert "loss-divided-twice" in rules_in(loop(*lines, END, "    optimizer.step()", "    optimizer.zero_grad()") + helper)


def test_parts_of_a_sum_that_are_each_divided_once_are_not_divided_twice() -> None:
    lines = (
        "loss = model(batch).ce / accum + model(batch).aux / accum",
        "loss.backward()",
        END,
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    )
    assert rules_in(loop(*lines)) == []


def test_two_branches_that_divide_once_each_are_not_divided_twice() -> None:
    lines = (
        "if batch.is_long:",
        "    loss = model(batch).a / accum",
        "else:",
        "    loss = model(batch).b / accum",
        "loss.backward()",
    )
    assert "loss-divided-twice" not in rules_in(loop(*lines, END, "    optimizer.step()", "    optimizer.zero_grad()"))


MISPLACED = {
    "every-micro-batch": loop(
        "optimizer.zero_grad()", "loss = model(batch) / accum", "loss.backward()", END, "    optimizer.step()"
    ),
    "by-the-model": loop("model.zero_grad()", "loss = model(batch) / accum", "loss.backward()", END, "    optimizer.step()"),
    "at-the-end": loop("loss = model(batch) / accum", "loss.backward()", END, "    optimizer.step()", "optimizer.zero_grad()"),
    "before-the-step": loop("loss = model(batch)", "loss.backward()", "optimizer.zero_grad()", "optimizer.step()"),
    "before-the-scaled-step": loop(
        "loss = model(batch)",
        "scaler.scale(loss).backward()",
        "optimizer.zero_grad()",
        "scaler.step(optimizer)",
        "scaler.update()",
    ),
    "in-the-inner-loop": """
        def train(model, data, optimizer, accum):
            for step in range(100):
                for _ in range(accum):
                    optimizer.zero_grad()
                    loss = model(next(data)) / accum
                    loss.backward()
                optimizer.step()
        """,
}


@pytest.mark.parametrize("text", MISPLACED.values(), ids=MISPLACED)
def test_gradients_that_are_cleared_too_early_are_found(text: str) -> None:
    assert "zero-grad-misplaced" in rules_in(text)


def test_clearing_moves_behind_the_step() -> None:
    text = MISPLACED["every-micro-batch"]
    found = first(text, "zero-grad-misplaced")
    patched = mended(text, found.edits)
    ast.parse(patched)
    assert found.is_safe
    assert "            optimizer.step()\n            optimizer.zero_grad()" in patched
    assert rules_in(patched) == []


NEVER_CLEARED = {
    "plain": loop("loss = model(batch)", "loss.backward()", "optimizer.step()"),
    "attribute": """
        class Job:
            def run(self):
                for batch in self.loader:
                    loss = self.model(batch)
                    loss.backward()
                    self.optim.step()
        """,
    "scaler": loop("scaler.scale(model(batch)).backward()", "scaler.step(optimizer)", "scaler.update()"),
    "window": loop("(model(batch) / accum).backward()", END, "    optimizer.step()"),
    "step-in-a-function": loop("advance(model, batch, optimizer)")
    + "def advance(model, batch, optimizer):\n    model(batch).backward()\n    optimizer.step()\n",
}


@pytest.mark.parametrize("text", NEVER_CLEARED.values(), ids=NEVER_CLEARED)
def test_gradients_that_are_never_cleared_are_found(text: str) -> None:
    assert "zero-grad-missing" in rules_in(text)


@pytest.mark.parametrize(
    "clear",
    ["optimizer.zero_grad()", "model.zero_grad(set_to_none=True)", "for p in model.parameters(): p.grad = None", "wipe(model)"],
    ids=["optimizer", "model", "none", "function"],
)
def test_any_way_to_clear_is_good(clear: str) -> None:
    helper = "def wipe(model):\n    for p in model.parameters():\n        p.grad.zero_()\n"
    assert rules_in(loop("loss = model(batch)", "loss.backward()", "optimizer.step()", clear) + helper) == []


EACH = {
    "divided": loop("loss = model(batch) / accum", "loss.backward()", "optimizer.step()", "optimizer.zero_grad()"),
    "named": """
        def train(model, loader, optimizer, args):
            for batch in loader:
                loss = model(batch)
                loss = loss / args.gradient_accumulation_steps
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
    "inner-loop": """
        def train(model, data, optimizer, cfg):
            for step in range(100):
                for _ in range(cfg.accumulation_steps):
                    optimizer.zero_grad()
                    model(next(data)).backward()
                    optimizer.step()
        """,
    "accelerate-without-accumulate": """
        from accelerate import Accelerator
        def train(model, loader, optimizer):
            accelerator = Accelerator(gradient_accumulation_steps=8)
            for batch in loader:
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        """,
    "method": """
        class Job:
            def run(self):
                for batch in self.loader:
                    self.one(batch)
            def one(self, batch):
                loss = self.model(batch) / self.grad_accum
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        """,
}


@pytest.mark.parametrize("text", EACH.values(), ids=EACH)
def test_an_optimizer_that_steps_in_spite_of_accumulation_is_found(text: str) -> None:
    assert rules_in(text) == ["step-every-micro-batch"]


CLIPPED = {
    "norm": loop(
        "scaler.scale(model(batch)).backward()",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "scaler.step(optimizer)",
        "scaler.update()",
    ),
    "value": loop(
        "scaler.scale(model(batch)).backward()",
        "nn.utils.clip_grad_value_(model.parameters(), 1.0)",
        "scaler.step(optimizer)",
        "scaler.update()",
    ),
    "unscaled-later": loop(
        "scaler.scale(model(batch)).backward()",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "scaler.unscale_(optimizer)",
        "scaler.step(optimizer)",
        "scaler.update()",
    ),
    "under-a-condition": loop(
        "scaler.scale(model(batch)).backward()",
        "if accum:",
        "    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "scaler.step(optimizer)",
        "scaler.update()",
    ),
    "method": """
        class Job:
            def run(self):
                for batch in self.loader:
                    self.opt.zero_grad()
                    self.scaler.scale(self.net(batch)).backward()
                    self.update()
            def update(self):
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                self.scaler.step(self.opt)
                self.scaler.update()
        """,
}


@pytest.mark.parametrize("text", CLIPPED.values(), ids=CLIPPED)
def test_clipping_a_scaled_gradient_is_found(text: str) -> None:
    assert "clip-before-unscale" in rules_in(text)


def test_unscaling_is_written_before_the_clip() -> None:
    text = CLIPPED["norm"]
    found = first(text, "clip-before-unscale")
    assert "scaler.unscale_(optimizer)\n        nn.utils.clip_grad_norm_" in mended(text, found.edits)
    assert "clip-before-unscale" not in rules_in(mended(text, found.edits))


KEPT = {
    "sum": ("total += loss",),
    "sum-written-out": ("total = total + loss",),
    "mean": ("total += loss / len(loader)",),
    "list": ("history.append(loss)",),
    "moved": ("total += loss.cpu()",),
    "dict": ("sums['loss'] += loss",),
}


@pytest.mark.parametrize("lines", KEPT.values(), ids=KEPT)
def test_a_loss_that_is_kept_with_its_graph_is_found(lines: tuple[str, ...]) -> None:
    text = """
def train(model, loader, optimizer):
    total, history, sums = 0.0, [], {}
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
""" + "\n".join("        " + line for line in lines)
    found = [each for each in found_by(loops.CHECKS, project_of(module_of(text))) if each.rule == "graph-kept"]
    assert len(found) == 1
    assert found[0].is_safe
    assert "loss.detach()" in mended(text, found[0].edits)
    assert "graph-kept" not in rules_in(mended(text, found[0].edits))


@pytest.mark.parametrize(
    "line",
    [
        "total += loss.item()",
        "total += loss.detach()",
        "total += float(loss)",
        "history.append(loss.data)",
        "meter.update(loss)",
        "loss += 1",
        "count += 1",
    ],
)
def test_a_loss_without_its_graph_may_be_kept(line: str) -> None:
    text = """
def train(model, loader, optimizer):
    total, history, count = 0.0, [], 0
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
"""
    assert rules_in(f"{text}        {line}\n") == []


SCHEDULED = {
    "unknown-horizon": loop(
        "(model(batch) / accum).backward()", END, "    optimizer.step()", "    optimizer.zero_grad()", "scheduler.step()"
    ),
    "horizon-in-steps": """
        def train(model, loader, optimizer, accum, epochs):
            total = len(loader) // accum * epochs
            lr_scheduler = get_linear_schedule_with_warmup(optimizer, 100, total)
            for i, batch in enumerate(loader):
                (model(batch) / accum).backward()
                lr_scheduler.step()
                if (i + 1) % accum == 0 or i + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
        """,
}


@pytest.mark.parametrize("text", SCHEDULED.values(), ids=SCHEDULED)
def test_a_schedule_that_runs_ahead_is_found(text: str) -> None:
    assert rules_in(text) == ["scheduler-every-micro-batch"]


def test_a_schedule_by_fractions_of_an_epoch_may_move_with_micro_batches() -> None:
    lines = (
        "(model(batch) / accum).backward()",
        END,
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        "scheduler.step(epoch + i / len(loader))",
    )
    assert rules_in(loop(*lines)) == []


@pytest.mark.parametrize(
    "text",
    [
        loop(
            "(model(batch) / accum).backward()", "if (i + 1) % accum == 0:", "    optimizer.step()", "    optimizer.zero_grad()"
        ),
        loop(
            "(model(batch) / accum).backward()",
            "if (i + 1) % accum != 0:",
            "    continue",
            "optimizer.step()",
            "optimizer.zero_grad()",
        ),
        """
        def train(model, loader, optimizer, accumulate):
            done = 0
            for batch in loader:
                (model(batch) / accumulate).backward()
                done += 1
                if done == accumulate:
                    optimizer.step()
                    optimizer.zero_grad()
                    done = 0
        """,
    ],
    ids=["modulo", "continue", "counter"],
)
def test_a_last_window_that_nobody_steps_is_found(text: str) -> None:
    assert rules_in(text) == ["last-window-dropped"]


def test_stepping_at_the_end_of_the_data_is_offered_and_not_called_safe() -> None:
    text = loop(
        "(model(batch) / accum).backward()", "if (i + 1) % accum == 0:", "    optimizer.step()", "    optimizer.zero_grad()"
    )
    found = found_by(loops.CHECKS, project_of(module_of(text)))[0]
    assert not found.is_safe
    assert "if (i + 1) % accum == 0 or i + 1 == len(loader):" in mended(text, found.edits)


@pytest.mark.parametrize(
    "wrap", ["model = DDP(model)", "model = nn.parallel.DistributedDataParallel(model, device_ids=[0])"], ids=["short", "long"]
)
def test_ddp_that_exchanges_every_micro_batch_is_found(wrap: str) -> None:
    body = loop("(model(batch) / accum).backward()", END, "    optimizer.step()", "    optimizer.zero_grad()").replace(
        "    for i", f"    {wrap}\n    for i"
    )
    assert rules_in(body) == ["sync-every-micro-batch"]


@pytest.mark.parametrize(
    "context",
    [
        'torch.autocast("cuda")',
        'torch.autocast("cuda", torch.float16)',
        "torch.cuda.amp.autocast()",
        'torch.autocast(device_type="cuda", dtype=torch.half)',
    ],
)
def test_float16_without_a_scaler_is_found(context: str) -> None:
    text = loop(
        f"with {context}:", "    loss = model(batch)", "loss.backward()", "optimizer.step()", "optimizer.zero_grad()"
    ).replace(", scaler=None", "")
    assert rules_in(text) == ["fp16-without-scaler"]


@pytest.mark.parametrize(
    "context",
    [
        'torch.autocast("cpu")',
        'torch.autocast("cuda", dtype=torch.bfloat16)',
        "torch.autocast(device, enabled=False)",
        "torch.autocast(device, dtype)",
    ],
)
def test_other_precisions_need_no_scaler(context: str) -> None:
    text = loop(
        f"with {context}:", "    loss = model(batch)", "loss.backward()", "optimizer.step()", "optimizer.zero_grad()"
    ).replace(", scaler=None", "")
    assert rules_in(text) == []


def test_the_cache_may_be_emptied_after_a_failure_and_once_in_a_while() -> None:
    now_and_then = loop(
        "model(batch).backward()", "optimizer.step()", "optimizer.zero_grad()", "if i % 100 == 0:", "    torch.cuda.empty_cache()"
    )
    assert rules_in(now_and_then) == []


def test_a_helper_that_empties_the_cache_is_blamed_where_it_is_called() -> None:
    helper = module_of(
        "import torch\ndef tidy():\n    if torch.cuda.is_available():\n        torch.cuda.empty_cache()\n", "memory"
    )
    text = "from memory import tidy\n" + loop("model(batch).backward()", "optimizer.step()", "optimizer.zero_grad()", "tidy()")
    found = found_by(loops.CHECKS, project_of(module_of(text), helper))
    assert names(found) == ["empty-cache-in-loop"]
    assert (found[0].file, found[0].line) == ("train.py", text.split("\n").index("        tidy()") + 1)


def test_a_sampler_is_told_the_epoch_by_whoever_loops() -> None:
    data = module_of("def build(train_set):\n    sampler = DistributedSampler(train_set)\n    return sampler\n", "data")
    silent = "from data import build\ndef main(x, step):\n    s = build(x)\n    for epoch in range(3):\n        step(s)\n"
    telling = silent.replace("        step(s)", "        s.set_epoch(epoch)\n        step(s)")
    found = found_by(loops.CHECKS, project_of(module_of(silent), data))
    assert [(each.rule, each.file, each.line) for each in found] == [("set-epoch-missing", "train.py", 4)]
    assert found_by(loops.CHECKS, project_of(module_of(telling), data)) == []


def test_a_loop_spread_over_files_reads_like_one() -> None:
    steps = module_of(
        "def micro(model, batch):\n    loss = model(**batch).loss\n    loss.backward()\n    return loss.detach()\n", "steps"
    )
    main = module_of(
        "from steps import micro\n" + loop("micro(model, batch)", END, "    optimizer.step()", "    optimizer.zero_grad()")
    )
    found = found_by(loops.CHECKS, project_of(main, steps))
    assert [(each.rule, each.file, each.line) for each in found] == [("loss-undivided", "steps.py", 3)]


def test_an_object_of_a_class_of_the_project_is_followed() -> None:
    text = """
        class Stepper:
            def __init__(self, optimizer, scaler):
                self.optimizer, self.scaler = optimizer, scaler
            def backward(self, loss):
                self.scaler.scale(loss).backward()
            def update(self):
                self.scaler.step(self.optimizer)
                self.optimizer.zero_grad()
        def train(model, loader, optimizer, scaler):
            stepper = Stepper(optimizer, scaler)
            for batch in loader:
                loss = model(batch)
                stepper.backward(loss)
                stepper.update()
        """
    assert rules_in(text) == ["scaler-update-missing"]


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.name)
def test_code_with_lines_missing_does_not_break_the_checks(rule: Rule) -> None:
    lines = "".join(rule.bad.values()).splitlines(keepends=True)
    for index in range(len(lines)):
        text = "".join(lines[:index] + lines[index + 1 :])
        try:
            module = module_of(text)
        except SyntaxError:
            continue
        found_by(ALL, project_of(module))


STEPPER = """
def one(model, batch, optimizer):
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    optimizer.step()
    return {returned}
def train(model, loader, optimizer):
    total = 0.0
    for batch in loader:
        loss = one(model, batch, optimizer)
        total += loss
"""


@pytest.mark.parametrize(
    ("returned", "expected"), [("loss", ["graph-kept"]), ("loss.item()", []), ("loss.detach()", []), ("float(loss)", [])]
)
def test_what_a_step_gives_back_is_followed(returned: str, expected: list[str]) -> None:
    assert rules_in(STEPPER.format(returned=returned)) == expected


def test_losses_of_several_tasks_may_be_summed() -> None:
    text = """
        def train(model, sampler, optimizer, num_tasks):
            for step in range(1000):
                for task in range(num_tasks):
                    model(sampler(task)).backward()
                optimizer.step()
                optimizer.zero_grad()
        """
    assert rules_in(text) == []


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.name)
def test_a_patch_leaves_code_that_parses_and_that_the_rule_no_longer_finds(rule: Rule) -> None:
    text = "".join(rule.bad.values())
    for found in found_by(ALL, project_of(module_of(text))):
        if found.rule == rule.name and found.edits:
            patched = mended(text, found.edits)
            ast.parse(patched)
            assert rule.name not in rules_in(patched)


def test_clipping_under_accelerate_waits_for_the_end_of_the_window() -> None:
    text = """
        from accelerate import Accelerator
        def train(model, loader, optimizer, n):
            accelerator = Accelerator(gradient_accumulation_steps=n)
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        """
    found = first(text, "clip-before-window-ends")
    assert found.is_safe
    assert rules_in(mended(text, found.edits)) == []
