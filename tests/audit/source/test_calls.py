"""Calls are judged by what they do to the batch, the mask, the precision and the memory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from brim.audit.found import Found
from brim.audit.rules import RULES
from brim.audit.rules.rule import Rule
from brim.audit.source import calls, loops
from tests.audit.source.modules import found_by, mended, module_of, names, project_of


def found_in(text: str, *, gpu: str | None = None) -> list[Found]:
    return found_by(calls.CHECKS, project_of(module_of(text), gpu=gpu))


def rules_in(text: str, *, gpu: str | None = None) -> list[str]:
    return names(found_in(text, gpu=gpu))


NAMES = (
    "dead-argument",
    "auto-batch-drift",
    "mask-2d-to-layer",
    "layer-output-indexed",
    "padding-to-maximum",
    "drop-last-small",
    "bf16-unsupported",
    "accumulation-twice",
    "eval-with-gradients",
)
EXAMPLES = [RULES[name] for name in NAMES]


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.name)
def test_a_rule_finds_its_bad_example_and_leaves_its_good_one_alone(rule: Rule) -> None:
    bad = [module_of(text, name.removesuffix(".py")) for name, text in rule.bad.items()]
    good = [module_of(text, name.removesuffix(".py")) for name, text in rule.good.items()]
    assert rule.name in names(found_by(calls.CHECKS, project_of(*bad)))
    assert names(found_by((*calls.CHECKS, *loops.CHECKS), project_of(*good))) == []


def arguments(extra: str) -> str:
    return f"from transformers import TrainingArguments\nargs = TrainingArguments(output_dir='out', {extra})\n"


@pytest.mark.parametrize(
    ("given", "severity"),
    [
        ("per_gpu_train_batch_size=4", "high"),
        ("per_gpu_eval_batch_size=4", "high"),
        ("evaluation_strategy='epoch'", "high"),
        ("warmup_ratio=0.1", "high"),
        ("group_by_length=True", "high"),
        ("no_cuda=True", "medium"),
        ("half_precision_backend='cpu_amp'", "medium"),
        ("overwrite_output_dir=True", "low"),
        ("logging_dir='logs'", "low"),
        ("group_by_length=False", "low"),
        ("evaluation_strategy='no'", "low"),
    ],
)
def test_arguments_that_are_gone_are_found(given: str, severity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text("transformers>=5.15\n")
    found = found_in(arguments(given))
    assert [(each.rule, each.severity) for each in found] == [("dead-argument", severity)]
    (tmp_path / "requirements.txt").write_text("transformers>=4.40\n")
    [ranged] = found_in(arguments(given))
    assert ranged.severity == {"high": "medium"}.get(severity, severity), "an admitted version has the argument"
    (tmp_path / "requirements.txt").write_text("transformers\n")
    [unpinned] = found_in(arguments(given))
    assert unpinned.severity == {"high": "medium"}.get(severity, "low")
    assert "pins no version of transformers" in unpinned.message
    assert not unpinned.is_safe or "per_gpu" in given, "what an old release may not have is not written into code"


@pytest.mark.parametrize(
    ("given", "pin"),
    [
        ("evaluation_strategy='epoch'", "==4.36.2"),
        ("evaluation_strategy='epoch'", ">=4.30,<4.51"),
        ("warmup_ratio=0.1", "==5.7.0"),
        ("logging_dir='logs'", "<5.15"),
        ("group_by_length=True", "~=4.50"),
        ("per_gpu_train_batch_size=4", "==4.50.0"),
    ],
)
def test_arguments_that_the_pinned_release_takes_are_left_alone(
    given: str, pin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text(f"transformers{pin}\n")
    assert found_in(arguments(given)) == []


@pytest.mark.parametrize(("pin", "is_safe"), [("==4.55.0", True), (">=4.41", True), (">=4.30", False)])
def test_a_name_that_the_pinned_release_may_not_have_is_no_safe_fix(
    pin: str, is_safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text(f"transformers{pin}\n")
    [found] = found_in(arguments("evaluation_strategy='epoch'"))
    assert found.is_safe == is_safe


def test_an_old_release_uses_the_old_batch_size_in_place_of_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text("transformers==4.36.2\n")
    [found] = found_in(arguments("per_gpu_train_batch_size=2, per_device_train_batch_size=16"))
    assert (found.rule, found.severity, found.is_safe) == ("dead-argument", "high", False)
    assert [(row.setting, row.set, row.in_force) for row in found.in_force] == [("per_device_train_batch_size", "16", "2")]
    assert found_in(arguments("per_gpu_train_batch_size=8, per_device_train_batch_size=8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    args = TrainingArguments('o', eval_strategy='epoch')\nexcept TypeError:\n    args = TrainingArguments('o', {old})\n",
        "try:\n    args = TrainingArguments('o', {old})\nexcept TypeError:\n    args = None\n",
        "import transformers\nif transformers.__version__ < '4.41':\n    args = TrainingArguments('o', {old})\n",
        "import inspect\nif 'eval_strategy' not in inspect.signature(TrainingArguments).parameters:\n    args = TrainingArguments('o', {old})\n",
    ],
    ids=["except", "try", "version", "signature"],
)
def test_a_call_that_is_chosen_by_the_release_is_left_alone(text: str) -> None:
    start = "from transformers import TrainingArguments\n"
    assert found_in(start + text.format(old="evaluation_strategy='epoch'")) == []


def test_arguments_of_trl_are_judged_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from trl import SFTConfig\nSFTConfig(max_seq_length=512)\n"
    (tmp_path / "requirements.txt").write_text("transformers==5.20.0\ntrl==0.15.2\n")
    assert found_in(text) == []
    (tmp_path / "requirements.txt").write_text("transformers==4.56.0\ntrl==0.22.0\n")
    [found] = found_in(text)
    assert "removed in trl 0.20: SFTConfig raises a TypeError" in found.message
    (tmp_path / "requirements.txt").write_text("transformers==4.41.2\ntrl>=0.8\n")
    assert found_in(text) == [], "trl 0.20 cannot be installed with this transformers"


@pytest.mark.parametrize(
    ("pin", "share"), [("==0.25.0", "half of"), (">=1.9", "90 percent of"), ("", "90 percent (half before accelerate 1.9) of")]
)
def test_how_far_the_batch_shrinks_is_of_the_pinned_accelerate(
    pin: str, share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text(f"accelerate{pin}\n")
    [found] = found_in(arguments("auto_find_batch_size=True"))
    assert f"retries with {share} the batch" in found.message


def test_every_argument_that_is_called_dead_is_refused_by_the_installed_release() -> None:
    import dataclasses

    from transformers import TrainingArguments

    from brim.audit.config.keys import REMOVED_ARGUMENTS
    from brim.audit.source import call_arguments

    known = {each.name for each in dataclasses.fields(TrainingArguments)}
    assert not known & set(REMOVED_ARGUMENTS)
    assert {each.instead for each in REMOVED_ARGUMENTS.values() if each.instead} <= known
    assert {name.partition("=")[0].partition(" ")[0] for name in call_arguments._SPELT.values()} <= known
    assert set(REMOVED_ARGUMENTS) >= call_arguments._HIGH | call_arguments._OVERRULING | set(call_arguments._SPELT)


@pytest.mark.parametrize(
    "text",
    [
        "import transformers\ntransformers.TrainingArguments(evaluation_strategy='no')\n",
        "from transformers import Seq2SeqTrainingArguments as A\nA(evaluation_strategy='no')\n",
        "from trl import SFTConfig\nSFTConfig(max_seq_length=512)\n",
        "from transformers import TrainingArguments\nsettings = dict(evaluation_strategy='no')\nTrainingArguments(**settings)\n",
        "from transformers import TrainingArguments\nsettings = {'evaluation_strategy': 'no'}\nTrainingArguments(**settings)\n",
        "from transformers import TrainingArguments\nTrainingArguments(**{'evaluation_strategy': 'no'})\n",
    ],
    ids=["module", "alias", "trl", "dict-call", "dict", "dict-in-place"],
)
def test_they_are_found_however_they_are_handed_over(text: str) -> None:
    assert rules_in(text) == ["dead-argument"]


@pytest.mark.parametrize("library", ["setfit", "mine", "sentence_transformers"])
def test_arguments_of_other_libraries_are_their_own(library: str) -> None:
    assert (
        rules_in(f"from {library} import TrainingArguments\nTrainingArguments(evaluation_strategy='epoch', warmup_ratio=0.1)\n")
        == []
    )


def test_a_renamed_argument_gets_its_new_name() -> None:
    text = arguments("per_gpu_train_batch_size=8")
    found = found_in(text)[0]
    assert found.is_safe
    assert "per_device_train_batch_size=8" in mended(text, found.edits)


@pytest.mark.parametrize(
    ("layout", "is_mended"),
    [
        ("TrainingArguments(\n    'out',\n    {old},\n    {new},\n)\n", True),
        ("TrainingArguments('out', {old}, {new})\n", False),
        ("settings = dict(\n    {old},\n    {new},\n)\nTrainingArguments('out', **settings)\n", True),
    ],
    ids=["lines", "one-line", "dict"],
)
@pytest.mark.parametrize("other", ["8", "16"])
def test_an_argument_whose_new_name_is_there_too_is_taken_away_and_never_given_twice(
    layout: str, is_mended: bool, other: str
) -> None:
    old, new = "per_gpu_train_batch_size=8", f"per_device_train_batch_size={other}"
    text = "from transformers import TrainingArguments\n" + layout.format(old=old, new=new)
    found = found_in(text)[0]
    assert found.is_safe == (is_mended and other == "8"), "which of two values was meant is not ours to say"
    after = mended(text, found.edits)
    compile(after, "train.py", "exec", dont_inherit=True)
    assert after.count(new) == 1
    assert (old in after) != is_mended


EXECUTABLE = """
from accelerate.utils import find_executable_batch_size
def main(model, optimizer, data):
    @find_executable_batch_size(starting_batch_size=64)
    def inner(batch_size):
        {line}
        for batch in loader(data, batch_size):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    inner()
"""


def test_a_batch_that_shrinks_without_more_micro_batches_is_found() -> None:
    assert rules_in(EXECUTABLE.format(line="pass")) == ["auto-batch-drift"]
    assert rules_in(EXECUTABLE.format(line="accumulation = 64 // batch_size")) == []


def test_a_shrinking_batch_is_no_matter_where_nothing_trains() -> None:
    text = """
        from accelerate.utils import find_executable_batch_size
        @find_executable_batch_size(starting_batch_size=64)
        def predict(batch_size, model, data):
            return [model(each) for each in loader(data, batch_size)]
        """
    assert rules_in(text) == []


LAYERS = """
import torch
from transformers import AutoModelForCausalLM
class Stitched(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        base = AutoModelForCausalLM.from_pretrained(name)
        self.base = base
        self.layers = torch.nn.ModuleList(base.model.layers)
    def forward(self, input_ids, attention_mask=None):
        hidden = self.base.model.embed_tokens(input_ids)
        {before}
        {loop}
            {call}
        return hidden
"""


def layers(call: str, *, before: str = "pass", loop: str = "for layer in self.layers:") -> str:
    return LAYERS.format(before=before, loop=loop, call=call)


@pytest.mark.parametrize(
    ("before", "mask"),
    [
        ("pass", "attention_mask"),
        ("mask = attention_mask.bool()", "mask"),
        ("attention_mask = attention_mask.to(hidden.dtype)", "attention_mask"),
        ("mask = (1.0 - attention_mask) * -10000.0", "mask"),
        ("mask = torch.ones_like(input_ids)", "mask"),
        ("mask = torch.ones(2, 16)", "mask"),
    ],
    ids=["parameter", "bool", "cast", "additive", "ones-like", "ones"],
)
def test_a_mask_of_two_dimensions_is_found(before: str, mask: str) -> None:
    found = found_in(layers(f"hidden = layer(hidden, attention_mask={mask})", before=before))
    assert names(found) == ["mask-2d-to-layer"]
    assert mask in found[0].message


@pytest.mark.parametrize(
    "container", ["self.base.model.layers", "self.base.model.layers[:4]", "enumerate(self.base.model.layers)"]
)
def test_it_is_found_over_the_layers_of_a_model(container: str) -> None:
    target = "i, layer" if container.startswith("enumerate") else "layer"
    assert "mask-2d-to-layer" in rules_in(
        layers("hidden = layer(hidden, attention_mask=attention_mask)", loop=f"for {target} in {container}:")
    )


def test_the_mask_of_a_batch_is_found_without_a_model_around_it() -> None:
    text = """
        from transformers import AutoModel
        def run(model, batch, hidden):
            for layer in model.model.layers:
                hidden = layer(hidden, attention_mask=batch["attention_mask"])
            return hidden
        """
    assert rules_in(text) == ["mask-2d-to-layer"]


@pytest.mark.parametrize(
    "before",
    [
        "mask = create_causal_mask(config=self.base.config, inputs_embeds=hidden, attention_mask=attention_mask)",
        "mask = attention_mask[:, None, None, :]",
        "mask = attention_mask.unsqueeze(1).unsqueeze(2)",
        "mask = self.base.model._update_causal_mask(attention_mask, hidden)",
        "mask = None",
    ],
    ids=["create", "index", "unsqueeze", "own-method", "none"],
)
def test_a_mask_that_was_made_for_layers_is_good(before: str) -> None:
    assert rules_in(layers("hidden = layer(hidden, attention_mask=mask)", before=before)) == []


def test_a_mask_further_inside_may_be_any() -> None:
    text = layers("hidden = layer(hidden, attention_mask=attention_mask)").replace(
        "input_ids, attention_mask=None", "embedded, attention_mask=None"
    )
    assert rules_in(text.replace("input_ids", "embedded")) == []


def test_layers_of_the_projects_own_classes_may_take_and_return_what_they_like() -> None:
    text = layers("hidden = layer(hidden, attention_mask=attention_mask)[0]").replace(
        "torch.nn.ModuleList(base.model.layers)", "torch.nn.ModuleList([Block(name) for _ in range(4)])"
    )
    assert rules_in(text) == []


@pytest.mark.parametrize(
    "call",
    [
        "hidden = layer(hidden)[0]",
        "out = layer(hidden); hidden = out[0]",
        "hidden = layer(hidden, attention_mask=None, use_cache=False)[0]",
    ],
)
def test_row_zero_of_the_batch_is_found(call: str) -> None:
    assert rules_in(layers(call)) == ["layer-output-indexed"]


@pytest.mark.parametrize(
    "call",
    [
        "hidden = layer(hidden)",
        "out = layer(hidden); hidden = out[0] if isinstance(out, tuple) else out",
        "hidden = layer(hidden)[:, 0]",
        "hidden = layer(hidden)['hidden_states']",
    ],
    ids=["whole", "asked", "slice", "key"],
)
def test_what_is_not_row_zero_is_good(call: str) -> None:
    assert rules_in(layers(call)) == []


def test_the_index_is_taken_away() -> None:
    text = layers("hidden = layer(hidden)[0]")
    found = found_in(text)[0]
    assert "hidden = layer(hidden)\n" in mended(text, found.edits)
    assert not found.is_safe  # an older transformers returns tuples


@pytest.mark.parametrize("model", ["tiiuae/falcon-7b", "EleutherAI/gpt-j-6b", "bigscience/bloom-560m"])
def test_families_that_return_tuples_are_left_alone(model: str) -> None:
    assert rules_in(layers("hidden = layer(hidden)[0]").replace("(name)", f"('{model}')")) == []


PADDED = "from transformers import Trainer\ndef tokenize(row):\n    return {call}\nTrainer(model, args, train_dataset=data.map(tokenize)).train()\n"


@pytest.mark.parametrize(
    "call",
    [
        'tokenizer(row["text"], padding="max_length", max_length=512, truncation=True)',
        'tok(row["text"], padding="max_length")',
        'self.tokenizer.encode_plus(row["text"], padding="max_length", max_length=MAX)',
        'processor.tokenizer(row["text"], padding="max_length", max_length=448)',
    ],
)
def test_padding_to_the_maximum_is_found(call: str) -> None:
    assert rules_in(PADDED.format(call=call)) == ["padding-to-maximum"]


@pytest.mark.parametrize(
    "text",
    [
        PADDED.format(call='tokenizer(row["text"], padding="longest")'),
        PADDED.format(call='tokenizer(row["text"], padding=True, max_length=512)'),
        PADDED.format(call='tokenizer(row["text"], padding="max_length", max_length=64)'),
        PADDED.format(call='tokenizer(row["text"], padding="max_length", max_length=512)') + "model = torch.compile(model)\n",
        PADDED.format(call='tokenizer(row["text"], padding="max_length", max_length=512)') + "import torch_xla\n",
        'def embed(texts):\n    return model(**tokenizer(texts, padding="max_length", max_length=512))\n',
    ],
    ids=["longest", "true", "short", "compile", "xla", "no-training"],
)
def test_padding_that_costs_little_or_is_needed_is_good(text: str) -> None:
    assert rules_in(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "val_loader = DataLoader(val_set, batch_size=n, drop_last=True)\n",
        "loader = DataLoader(test_data, n, shuffle=False, drop_last=True)\n",
        "class D:\n    def val_dataloader(self):\n        return DataLoader(self.data, batch_size=self.n, drop_last=True)\n",
        "loader = DataLoader(ds.select(range(100)), batch_size=64, drop_last=True, shuffle=True)\n",
        "SHOTS = 20\nsmall = Subset(ds, range(SHOTS))\nloader = DataLoader(small, batch_size=32, drop_last=True)\n",
        "from transformers import TrainingArguments\nTrainingArguments(output_dir='o', dataloader_drop_last=True, eval_strategy='epoch')\n",
    ],
    ids=["name", "positional", "method", "select", "constant", "trainer"],
)
def test_examples_that_are_dropped_and_missed_are_found(text: str) -> None:
    assert rules_in(text) == ["drop-last-small"]


@pytest.mark.parametrize(
    "text",
    [
        "loader = DataLoader(train_set, batch_size=n, shuffle=True, drop_last=True)\n",
        "val_loader = DataLoader(val_set, batch_size=n, drop_last=False)\n",
        "loader = DataLoader(ds.select(range(10000)), batch_size=64, drop_last=True)\n",
        "loader = DataLoader(ds, batch_size=64, drop_last=is_train)\n",
        "from transformers import TrainingArguments\nTrainingArguments(output_dir='o', dataloader_drop_last=True)\n",
    ],
    ids=["training", "kept", "large", "unknown", "trainer"],
)
def test_dropping_a_last_batch_that_is_not_missed_is_good(text: str) -> None:
    assert rules_in(text) == []


def test_a_batch_larger_than_the_set_is_worse() -> None:
    found = found_in("loader = DataLoader(ds.select(range(20)), batch_size=64, drop_last=True, shuffle=True)\n")
    assert [each.severity for each in found] == ["high"]


BF16 = [
    arguments("bf16=True"),
    "from accelerate import Accelerator\nAccelerator(mixed_precision='bf16')\n",
    "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16): pass\n",
    "import torch\nmodel = AutoModel.from_pretrained('m', torch_dtype=torch.bfloat16)\n",
    "import lightning\nlightning.Trainer(precision='bf16-mixed')\n",
]


@pytest.mark.parametrize("text", BF16, ids=["trainer", "accelerate", "autocast", "dtype", "lightning"])
def test_bfloat16_is_found_where_the_card_is_known_not_to_have_it(text: str) -> None:
    assert rules_in(text, gpu="t4") == ["bf16-unsupported"]
    assert rules_in(text, gpu="a100") == []
    assert rules_in(text, gpu="16GiB") == []
    assert rules_in(text) == []


def test_code_that_asks_the_card_is_good() -> None:
    assert rules_in("import torch\n" + arguments("bf16=True") + "torch.cuda.is_bf16_supported()\n", gpu="t4") == []


def test_the_card_that_the_code_asks_for_is_known() -> None:
    text = "import modal\n" + arguments("bf16=True") + "@app.function(gpu='{gpu}')\ndef f(): pass\n"
    assert rules_in(text.format(gpu="V100")) == ["bf16-unsupported"]
    assert rules_in(text.format(gpu="H100")) == []
    assert rules_in(text.format(gpu="any")) == []


TWICE = {
    "accelerate": """
        from accelerate import Accelerator
        def train(model, loader, optimizer, n):
            accelerator = Accelerator(gradient_accumulation_steps=n)
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss / n)
                    optimizer.step()
                    optimizer.zero_grad()
        """.replace("n)", "accumulation)")
    .replace("/ n", "/ accumulation")
    .replace(", n", ", accumulation"),
    "accelerate-by-another-name": """
        from accelerate import Accelerator
        class Job:
            def __init__(self, cfg):
                self.cfg = cfg
                self.acc = Accelerator(gradient_accumulation_steps=cfg.accum)
            def run(self):
                for batch in self.loader:
                    with self.acc.accumulate(self.model):
                        loss = self.model(**batch).loss
                        loss /= self.cfg.accum
                        self.acc.backward(loss)
                        self.optimizer.step()
                        self.optimizer.zero_grad()
        """,
    "deepspeed": """
        import deepspeed
        def train(net, loader, args):
            engine, _, _, _ = deepspeed.initialize(model=net, args=args)
            for batch in loader:
                loss = engine(batch) / args.gradient_accumulation_steps
                engine.backward(loss)
                engine.step()
        """,
    "trainer": """
        from transformers import Trainer
        class Mine(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
                outputs = model(**inputs)
                loss = outputs.loss / self.args.gradient_accumulation_steps
                return (loss, outputs) if return_outputs else loss
        """,
    "lightning": """
        import lightning as L
        class Net(L.LightningModule):
            def training_step(self, batch, batch_idx):
                loss = self.net(batch)
                return {"loss": loss / self.trainer.accumulate_grad_batches}
        """,
}


@pytest.mark.parametrize("text", TWICE.values(), ids=TWICE)
def test_a_division_that_the_library_does_too_is_found(text: str) -> None:
    assert rules_in(text) == ["accumulation-twice"]


@pytest.mark.parametrize("style", ["accelerate", "accelerate-by-another-name", "deepspeed"])
def test_without_the_division_it_is_good(style: str) -> None:
    text = TWICE[style]
    found = found_in(text)[0]
    patched = mended(text, found.edits)
    ast.parse(patched)
    assert found_by((*calls.CHECKS, *loops.CHECKS), project_of(module_of(patched))) == []


EVALUATED = {
    "function": "def evaluate(model, loader):\n    model.eval()\n    for batch in loader:\n        out.append(model(batch))\n",
    "method": "class J:\n    def validate(self):\n        self.net.eval()\n        for x in self.data:\n            self.total += self.net(x).sum()\n",
    "in-the-epoch": """
        def train(model, train_data, val_data, optimizer):
            for epoch in range(3):
                model.train()
                for batch in train_data:
                    optimizer.zero_grad()
                    model(batch).backward()
                    optimizer.step()
                model.eval()
                for batch in val_data:
                    print(model(batch))
        """,
    "script": "model.eval()\nfor batch in loader:\n    print(model(batch))\n",
    "assigned": "model = model.eval()\nfor batch in loader:\n    print(model(batch))\n",
}


@pytest.mark.parametrize("text", EVALUATED.values(), ids=EVALUATED)
def test_evaluation_with_gradients_is_found(text: str) -> None:
    assert rules_in(text) == ["eval-with-gradients"]


@pytest.mark.parametrize(
    "text",
    [
        "@torch.no_grad()\ndef evaluate(model, loader):\n    model.eval()\n    for batch in loader:\n        out.append(model(batch))\n",
        "def evaluate(model, loader):\n    model.eval()\n    with torch.inference_mode():\n        for batch in loader:\n            out.append(model(batch))\n",
        "def evaluate(model, loader):\n    model.eval()\n    for batch in loader:\n        with torch.no_grad():\n            out.append(model(batch))\n",
        "def evaluate(model, loader):\n    model.eval()\n    for batch in loader:\n        out.append(model.generate(batch))\n",
        "def attack(model, loader):\n    model.eval()\n    for x in loader:\n        x.requires_grad_(True)\n        torch.autograd.grad(model(x).sum(), x)\n",
        "def invert(model, data, opt):\n    model.eval()\n    for x in data:\n        opt.zero_grad()\n        model(x).backward()\n        opt.step()\n",
        "def score(model, loader):\n    model.eval()\n    for b in loader:\n        out.append(model(b))\ndef main():\n    with torch.no_grad():\n        score(m, data)\n",
        "model.eval()\nmodel.train()\nfor batch in loader:\n    print(model(batch))\n",
    ],
    ids=["decorator", "around", "inside", "generate", "attack", "inversion", "caller", "train-again"],
)
def test_evaluation_that_needs_gradients_or_has_none_is_good(text: str) -> None:
    assert rules_in(text) == []


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.name)
def test_code_with_lines_missing_does_not_break_the_checks(rule: Rule) -> None:
    lines = "".join(rule.bad.values()).splitlines(keepends=True)
    for index in range(len(lines)):
        try:
            module = module_of("".join(lines[:index] + lines[index + 1 :]))
        except SyntaxError:
            continue
        found_by((*calls.CHECKS, *loops.CHECKS), project_of(module))


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.name)
def test_a_patch_leaves_code_that_parses_and_that_the_rule_no_longer_finds(rule: Rule) -> None:
    text = "".join(rule.bad.values())
    for found in found_in(text):
        if found.edits:
            patched = mended(text, found.edits)
            ast.parse(patched)
            assert rule.name not in rules_in(patched)


def test_a_division_that_is_all_of_its_block_is_not_taken_away() -> None:
    text = TWICE["accelerate-by-another-name"].replace(
        "loss /= self.cfg.accum", "if self.cfg.accum > 1:\n                            loss /= self.cfg.accum"
    )
    found = found_in(text)[0]
    assert found.rule == "accumulation-twice"
    assert found.edits == ()
