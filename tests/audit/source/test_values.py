"""A user's setting, followed through the code: what changes it, where, and what is in force then."""

from __future__ import annotations

import json
import time
from pathlib import Path
from textwrap import dedent

import pytest

from brim.audit.doctor import doctor
from brim.audit.found import Found
from brim.audit.publishing import severity_of
from brim.audit.source.examine import examine_source, flow_of
from brim.audit.source.files import read_project
from brim.audit.source.quantities import quantity_of
from brim.audit.source.settings import configured

CONFIG = """
    from dataclasses import dataclass

    @dataclass
    class TrainConfig:
        batch_size_per_gpu: int = 64
        eval_batch_size: int = 64
        gradient_accumulation_steps: int = 1
        num_workers: int = 4
        pin_memory: bool = True
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path = path if path.suffix else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"), encoding="utf-8")
    return folder


def found_in(folder: Path, **files: str) -> list[Found]:
    return sorted(examine_source([write(folder, **files)])[1], key=lambda each: (each.file, each.line))


def rows(found: Found) -> dict[str, list[tuple[object, object]]]:
    """What is in force, by condition."""
    table: dict[str, list[tuple[object, object]]] = {}
    for row in found.in_force:
        table.setdefault(row.when, []).append((row.set, row.in_force))
    return table


@pytest.mark.parametrize(
    ("code", "in_force"),
    [
        ("min(args.batch_size, 2)", [2, 2, 2]),
        ("min(2, args.batch_size)", [2, 2, 2]),
        ("max(args.batch_size, 16)", [16, 32, 64]),
        ("args.batch_size if args.batch_size < 4 else 4", [4, 4, 4]),
        ("4 if args.batch_size > 4 else args.batch_size", [4, 4, 4]),
        ("max(1, min(args.batch_size, 16))", [8, 16, 16]),
        ("int(np.clip(args.batch_size, 1, 10))", [8, 10, 10]),
        ("np.clip(args.batch_size, a_min=1, a_max=10)", [8, 10, 10]),
        ("sorted((1, args.batch_size, 12))[1]", [8, 12, 12]),
        ("min([args.batch_size, 3])", [3, 3, 3]),
        ("args.batch_size % 48", [8, 32, 16]),
        ("min(getattr(args, 'batch_size'), 5)", [5, 5, 5]),
        ("min(vars(args)['batch_size'], 5)", [5, 5, 5]),
    ],
)
def test_an_expression_that_clamps_is_found_with_what_is_in_force(tmp_path: Path, code: str, in_force: list[int]) -> None:
    [found] = found_in(
        tmp_path, train=f"import numpy as np\ndef loader(args, data):\n    return DataLoader(data, batch_size={code})\n"
    )
    assert (found.rule, found.line) == ("batch-clamped", 3)
    assert [row.in_force for row in found.in_force][: len(in_force)] == in_force
    assert {row.setting for row in found.in_force} == {"batch_size"}


def test_rounding_is_shown_at_sizes_that_are_rounded(tmp_path: Path) -> None:
    for code in ("args.batch_size // 8 * 8", "args.batch_size - args.batch_size % 8"):
        [found] = found_in(tmp_path, train=f"def loader(args, data):\n    return DataLoader(data, batch_size={code})\n")
        assert found.rule == "batch-clamped"
        assert all(row.set != row.in_force for row in found.in_force)


@pytest.mark.parametrize(
    "body",
    [
        "bs = args.batch_size\n    if bs > 2:\n        bs = 2\n    return DataLoader(data, batch_size=bs)",
        "if args.batch_size > 2:\n        args.batch_size = 2\n    return DataLoader(data, batch_size=args.batch_size)",
        "if args.batch_size > 2:\n        bs = 2\n    else:\n        bs = args.batch_size\n    return DataLoader(data, batch_size=bs)",
        "bs = args.batch_size\n    while bs > 2:\n        bs = bs - 1\n    return DataLoader(data, batch_size=bs)",
        "bs = args.batch_size\n    if bs >= 3:\n        print('too large')\n        bs = 2\n    return DataLoader(data, batch_size=bs)",
    ],
)
def test_a_statement_that_clamps_is_found_and_mended(tmp_path: Path, body: str) -> None:
    [found] = found_in(tmp_path, train=f"def loader(args, data):\n    {body}\n")
    assert found.rule == "batch-clamped"
    assert [row.in_force for row in found.in_force][:3] == [2, 2, 2]
    assert found.edits
    assert found.is_safe


@pytest.mark.parametrize(
    "code",
    [
        "max(1, args.batch_size // world)",
        "min(args.batch_size, len(data))",
        "min(args.batch_size, args.max_batch_size)",
        "args.batch_size // torch.cuda.device_count()",
        "args.batch_size or 8",
        "int(args.batch_size)",
        "1 if args.debug else args.batch_size",
        "args.batch_size * 2",
        "max(args.batch_size, 1)",
    ],
)
def test_what_only_guards_or_shares_is_no_clamp(tmp_path: Path, code: str) -> None:
    text = f"import torch\ndef loader(args, data, world):\n    return DataLoader(data, batch_size={code})\n"
    assert found_in(tmp_path, train=text) == []


def test_an_error_instead_of_a_clamp_is_right(tmp_path: Path) -> None:
    text = """
        def loader(args, data):
            if args.batch_size > 64:
                raise ValueError("too large")
            return DataLoader(data, batch_size=args.batch_size)
    """
    assert found_in(tmp_path, train=text) == []


def test_a_value_is_followed_through_files_attributes_and_calls(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        config=CONFIG,
        sizes="def fitting(n, most=2):\n    return min(n, most)\n",
        trainer="""
            from torch.utils.data import DataLoader
            from sizes import fitting

            class Trainer:
                def __init__(self, config, data):
                    self.cfg = config
                    self.data = data
                    self.micro = fitting(self.cfg.batch_size_per_gpu)

                def loader(self):
                    return DataLoader(self.data, batch_size=self.micro, num_workers=self.cfg.num_workers, pin_memory=self.cfg.pin_memory)
        """,
        main="""
            from config import TrainConfig
            from trainer import Trainer

            def main():
                config = TrainConfig(batch_size_per_gpu=100)
                train(config.gradient_accumulation_steps, config.eval_batch_size)
                Trainer(config, []).loader()

            if __name__ == "__main__":
                main()
        """,
    )
    [clamp] = found
    assert (Path(clamp.file).name, clamp.line, clamp.rule) == ("sizes.py", 2, "batch-clamped")
    assert ("", [(8, 2), (32, 2), (64, 2), (100, 2)]) in rows(clamp).items()
    assert "100" in clamp.message
    assert "main.py:5" in clamp.message


TIERS = {
    "chain": """
        def pick(cfg):
            free = torch.cuda.mem_get_info()[0] / 1e9
            if free < 8:
                batch_size = 1
            elif free < 13:
                batch_size = min(cfg.batch_size, 4)
            else:
                batch_size = cfg.batch_size
            return DataLoader(data, batch_size=batch_size)
    """,
    "returns": """
        def pick_batch_size(cfg):
            gb = torch.cuda.get_device_properties(0).total_memory / 2**30
            if gb < 8:
                return 1
            if gb < 13:
                return min(cfg.batch_size, 4)
            return cfg.batch_size

        def loader(cfg, data):
            return DataLoader(data, batch_size=pick_batch_size(cfg))
    """,
    "ternary": """
        def loader(cfg, data, free_gb):
            return DataLoader(data, batch_size=1 if free_gb < 8 else min(cfg.batch_size, 4) if free_gb < 13 else cfg.batch_size)
    """,
    "one after another": """
        def loader(cfg, data, free_memory_gb):
            batch_size = cfg.batch_size
            if free_memory_gb < 13:
                batch_size = min(batch_size, 4)
            if free_memory_gb < 8:
                batch_size = 1
            return DataLoader(data, batch_size=batch_size)
    """,
}


@pytest.mark.parametrize("spelling", list(TIERS))
def test_a_clamp_by_free_memory_is_reported_tier_by_tier(tmp_path: Path, spelling: str) -> None:
    [found] = found_in(tmp_path, train="import torch\n" + dedent(TIERS[spelling]))
    assert found.rule == "batch-clamped"
    table = list(rows(found).values())
    assert [[now for _set, now in tier] for tier in table] == [[1, 1, 1], [4, 4, 4], [8, 32, 64]]
    assert [("8" in when, "13" in when) for when in rows(found)][:2] == [(True, False), (False, True)]


def test_a_launchers_number_is_followed_into_the_script(tmp_path: Path) -> None:
    write(
        tmp_path,
        train="""
            import argparse
            from torch.utils.data import DataLoader

            parser = argparse.ArgumentParser()
            parser.add_argument("--batch-size", type=int, required=True)
            args = parser.parse_args()
            loader = DataLoader([], batch_size=min(args.batch_size, 2))
        """,
    )
    (tmp_path / "train.sh").write_text('#!/bin/sh\npython train.py --batch-size "$1"\n')
    (tmp_path / "all.sh").write_text("#!/bin/sh\nbash train.sh 64\n")
    [found] = examine_source([tmp_path])[1]
    assert found.rule == "batch-clamped"
    assert "64" in found.message
    assert "all.sh:2" in found.message


@pytest.mark.parametrize(
    ("shell", "script"),
    [
        ("python train.py 64\n", "import sys\nbatch_size = min(int(sys.argv[1]), 2)\n"),
        ("BATCH_SIZE=64 python train.py\n", "import os\nbatch_size = min(int(os.environ['BATCH_SIZE']), 2)\n"),
        ("export BATCH_SIZE=64\npython train.py\n", "import os\nbatch_size = min(int(os.getenv('BATCH_SIZE', 8)), 2)\n"),
        ("B=${1:-64}\npython train.py $B\n", "import sys\nbatch_size = min(int(sys.argv[1]), 2)\n"),
    ],
)
def test_arguments_and_environment_of_a_launcher_count(tmp_path: Path, shell: str, script: str) -> None:
    (tmp_path / "run.sh").write_text(shell)
    [found] = found_in(tmp_path, train=script)
    assert found.rule == "batch-clamped"
    assert "64" in found.message


def test_a_launcher_that_clamps_is_found_itself(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text('BS=$1\n[ "$BS" -gt 16 ] && BS=16\npython train.py --batch-size $BS\n')
    [found] = examine_source([tmp_path])[1]
    assert (Path(found.file).name, found.line, found.rule) == ("run.sh", 2, "batch-clamped")
    assert [row.in_force for row in found.in_force] == [8, 16, 16]


def test_cells_of_a_notebook_are_one_program(tmp_path: Path) -> None:
    cells = ["BATCH_SIZE = 64", "!nvidia-smi\n%matplotlib inline", "loader = DataLoader(data, batch_size=min(BATCH_SIZE, 2))"]
    document = {"cells": [{"cell_type": "code", "source": cell} for cell in cells], "nbformat": 4}
    (tmp_path / "train.ipynb").write_text(json.dumps(document))
    [found] = examine_source([tmp_path])[1]
    assert (found.rule, found.line) == ("batch-clamped", 4)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        ("DataLoader(data, batch_size=8, num_workers=config.num_workers, pin_memory=config.pin_memory)", "batch-hard-coded"),
        (
            "DataLoader(data, batch_size=config.batch_size_per_gpu, num_workers=0, pin_memory=config.pin_memory)",
            "workers-hard-coded",
        ),
        (
            "DataLoader(data, batch_size=config.batch_size_per_gpu, num_workers=config.num_workers, pin_memory=False)",
            "pinning-off",
        ),
    ],
)
def test_a_literal_in_the_place_of_a_setting_is_found_and_mended(tmp_path: Path, call: str, rule: str) -> None:
    text = f"from torch.utils.data import DataLoader\nfrom config import TrainConfig\n\ndef loader(data, config: TrainConfig):\n    train(config.eval_batch_size, config.gradient_accumulation_steps, config.batch_size_per_gpu, config.num_workers, config.pin_memory)\n    return {call}\n"
    [found] = found_in(tmp_path, config=CONFIG, train=text)
    assert (found.rule, found.line) == (rule, 6)
    assert found.is_safe
    assert found.edits[0].text.startswith("config.")


def test_a_script_without_any_setting_may_write_its_batch_down(tmp_path: Path) -> None:
    assert found_in(tmp_path, train="loader = DataLoader(data, batch_size=8, shuffle=True)\n") == []


def test_what_the_source_is_set_to_is_known(tmp_path: Path) -> None:
    write(
        tmp_path,
        config=CONFIG,
        train="""
            from torch.utils.data import DataLoader
            from config import TrainConfig

            def train(config: TrainConfig, data, optimizer):
                accumulation = max(config.gradient_accumulation_steps, 16)
                for index, batch in enumerate(DataLoader(data, batch_size=min(config.batch_size_per_gpu, 2))):
                    if (index + 1) % accumulation == 0:
                        optimizer.step()
        """,
    )
    found = configured(flow_of(read_project([tmp_path])))
    assert found.batch is not None
    assert found.accumulation is not None
    assert (found.batch.name, found.batch.value, found.batch.line) == ("batch_size_per_gpu", 64, 5)
    assert (found.accumulation.name, found.accumulation.value) == ("gradient_accumulation_steps", 1)


def test_a_file_that_is_no_python_is_a_note_in_a_project(tmp_path: Path) -> None:
    write(tmp_path, good="x = 1\n", bad="def broken(:\n")
    project, found = examine_source([tmp_path])
    assert found == []
    assert any("bad.py:1" in note for note in project.notes)


@pytest.mark.parametrize("division", ["64 // args.batch_size", "TARGET // args.batch_size", "args.total // args.batch_size"])
def test_an_accumulation_that_is_divided_down_is_found_whatever_is_divided(tmp_path: Path, division: str) -> None:
    [found] = found_in(
        tmp_path, train=f"TARGET = 64\ndef plan(args):\n    accumulation_steps = {division}\n    return accumulation_steps\n"
    )
    assert (found.rule, found.line) == ("accumulation-floored", 3)


def test_a_function_that_is_only_handed_on_is_read_too(tmp_path: Path) -> None:
    text = """
        def main(args, data, tokenizer):
            def encode(row):
                return tokenizer(row["text"], truncation=True, max_length=min(args.max_length, 512))

            return data.map(encode)
    """
    [found] = found_in(tmp_path, train=text)
    assert (found.rule, found.line) == ("length-clamped", 3)


def test_a_config_that_is_handed_over_is_known_without_an_import(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        config=CONFIG,
        data="""
            from torch.utils.data import DataLoader

            def loaders(data, config):
                train(config.pin_memory, config.gradient_accumulation_steps)
                train = DataLoader(data, batch_size=config.batch_size_per_gpu, num_workers=0, pin_memory=config.pin_memory)
                return train, DataLoader(data, batch_size=config.eval_batch_size)
        """,
        main="from config import TrainConfig\nfrom data import loaders\n\nif __name__ == '__main__':\n    loaders([], TrainConfig())\n",
    )
    assert [(Path(each.file).name, each.line, each.rule, each.is_safe) for each in found] == [
        ("data.py", 5, "workers-hard-coded", True)
    ]


def test_each_of_two_clamps_is_told_and_what_is_in_force_is_what_both_leave(tmp_path: Path) -> None:
    text = """
        def loader(args, data):
            bs = min(args.batch_size, 16)
            bs = min(bs, 8)
            return DataLoader(data, batch_size=bs)
    """
    first, second = found_in(tmp_path, train=text)
    assert (first.line, second.line) == (2, 3)
    assert [row.in_force for row in first.in_force] == [row.in_force for row in second.in_force] == [8, 8, 8]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("if (b := args.batch_size) > 10:\n        b = 10\n    batch_size = b", "a name is born in what would go"),
        ("batch_size = 8 * (args.batch_size // 8)", "the setting is not where the patch would look"),
        ("batch_size = np.clip(args.batch_size, 1, 8)", "its lower bound would go too"),
        (
            "batch_size = args.batch_size\n    if batch_size > 8:\n        open('x', 'w').write('x')\n        batch_size = 8",
            "it does something else",
        ),
    ],
)
def test_a_patch_that_would_change_something_else_is_not_offered(tmp_path: Path, body: str, why: str) -> None:
    text = f"import numpy as np\ndef loader(args, data):\n    {body}\n    return DataLoader(data, batch_size=batch_size)\n"
    [found] = found_in(tmp_path, train=text)
    assert found.edits == (), why


def test_a_helper_that_others_call_too_is_not_mended_by_itself(tmp_path: Path) -> None:
    text = """
        def small(n, top=4):
            return min(n, top)

        def loader(args, data):
            print(data[: small(20)])
            return DataLoader(data, batch_size=small(args.batch_size))
    """
    [found] = found_in(tmp_path, train=text)
    assert found.edits
    assert not found.is_safe


def test_a_step_that_is_only_sliced_is_as_it_was_asked_for(tmp_path: Path) -> None:
    text = """
        def plan(args):
            micro_batch_size = min(args.batch_size, 4)
            accumulation_steps = args.batch_size // micro_batch_size
            assert micro_batch_size * accumulation_steps == args.batch_size
            return micro_batch_size, accumulation_steps
    """
    assert found_in(tmp_path, train=text) == []


@pytest.mark.parametrize(
    "code",
    [
        "max(size for size in (1, 2, 4) if size <= args.batch_size)",
        "[size for size in SIZES if size <= args.batch_size][-1]",
        "args.batch_size if args.batch_size in (1, 2, 4) else 4",
        "torch.tensor(args.batch_size).clamp(max=4).item()",
        "2 ** int(math.log2(args.batch_size))",
    ],
)
def test_other_ways_to_write_a_clamp_are_followed(tmp_path: Path, code: str) -> None:
    text = (
        f"import math\nimport torch\nSIZES = (1, 2, 4)\ndef loader(args, data):\n    return DataLoader(data, batch_size={code})\n"
    )
    [found] = found_in(tmp_path, train=text)
    assert (found.rule, found.line) == ("batch-clamped", 5)


def test_a_condition_that_reading_cannot_decide_stands_beside_what_is_in_force(tmp_path: Path) -> None:
    text = """
        def loader(args, data):
            batch_size = args.batch_size
            if args.sharded:
                batch_size = min(batch_size, 4)
            return DataLoader(data, batch_size=batch_size)
    """
    [found] = found_in(tmp_path, train=text)
    assert list(rows(found)) == ["args.sharded"]


@pytest.mark.parametrize(
    "shell", ['ARGS=(--batch-size 64)\npython train.py "${ARGS[@]}"\n', 'OPTS="--batch-size 64"\npython train.py $OPTS\n']
)
def test_options_in_a_variable_of_the_launcher_count(tmp_path: Path, shell: str) -> None:
    (tmp_path / "run.sh").write_text(shell)
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--batch-size', dest='bsz', type=int, default=8)\nbatch_size = min(p.parse_args().bsz, 2)\n"
    [found] = found_in(tmp_path, train=text)
    assert "64" in found.message


@pytest.mark.parametrize(
    "cell",
    [
        "loader = DataLoader(data, batch_size=min(BATCH_SIZE, 2))  # enough?",
        "files = !ls\nloader = DataLoader(data, batch_size=min(BATCH_SIZE, 2))",
        "!python prepare.py \\\n  --all\nloader = DataLoader(data, batch_size=min(BATCH_SIZE, 2))",
        "if True:\n    !nvidia-smi\nloader = DataLoader(data, batch_size=min(BATCH_SIZE, 2))",
        "BATCH_SIZE?\nloader = DataLoader(data, batch_size=min(BATCH_SIZE, 2))",
    ],
)
def test_magic_and_shell_lines_do_not_hide_the_rest_of_a_cell(tmp_path: Path, cell: str) -> None:
    cells = ["BATCH_SIZE = 64", "this is no python", cell]
    document = {"cells": [{"cell_type": "code", "source": each} for each in cells], "nbformat": 4}
    (tmp_path / "train.ipynb").write_text(json.dumps(document))
    project, found = examine_source([tmp_path])
    assert [each.rule for each in found] == ["batch-clamped"]
    assert any("cell 2" in note for note in project.notes)


def test_a_link_that_leads_to_itself_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "self.py").symlink_to(tmp_path / "self.py")
    project, found = examine_source([write(tmp_path, train="batch_size = min(args.batch_size, 2)\n")])
    assert [each.rule for each in found] == ["batch-clamped"]
    assert any("self.py" in note for note in project.notes)


def test_classes_that_inherit_crosswise_take_no_time(tmp_path: Path) -> None:
    classes = ["class C0:\n    pass\n", "class C1(C0):\n    pass\n"]
    classes += [f"class C{n}(C{n - 1}, C{n - 2}):\n    pass\n" for n in range(2, 200)]
    text = "".join(classes) + "def loader(data):\n    return DataLoader(data, batch_size=min(C199().batch_size, 2))\n"
    assert [each.rule for each in found_in(tmp_path, train=text)] == ["batch-clamped"]


def severities(folder: Path, **files: str) -> list[tuple[str, str]]:
    return [(each.rule, severity_of(each)) for each in found_in(folder, **files)]


@pytest.mark.parametrize(
    "text",
    [
        """
        from transformers import TrainingArguments
        arguments = TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=2e-4)
        print(f"Effective batch size: {arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps}")
        """,
        """
        from dataclasses import dataclass
        @dataclass
        class DPOConfig:
            batch_size: int = 8
        class DPOTrainer:
            def __init__(self, config):
                self.loader = DataLoader([], batch_size=config.batch_size)
        DPOTrainer(DPOConfig(batch_size=4))
        """,
        """
        from dataclasses import dataclass
        @dataclass
        class Config:
            batch_size: int = 8
        def train(config):
            return DataLoader([], batch_size=config.batch_size)
        config = Config()
        config.batch_size = 16
        train(config)
        """,
        """
        from dataclasses import dataclass
        from transformers import Seq2SeqTrainingArguments
        @dataclass
        class Config:
            per_device_train_batch_size: int = 8
        def arguments(config):
            return Seq2SeqTrainingArguments(
                per_device_train_batch_size=config.per_device_train_batch_size, auto_find_batch_size=True
            )
        """,
    ],
)
def test_a_number_that_is_itself_the_setting_is_not_hard_coded(tmp_path: Path, text: str) -> None:
    assert [each.rule for each in found_in(tmp_path, train=text) if each.rule.endswith("hard-coded")] == []


def test_the_workers_of_a_web_server_are_not_those_of_a_loader(tmp_path: Path) -> None:
    text = """
        from dataclasses import dataclass
        from torch.utils.data import DataLoader
        @dataclass
        class TrainConfig:
            epochs: int = 8
        @dataclass
        class ServeConfig:
            port: int = 8000
            workers: int = 4
        def train(train_config: TrainConfig, data):
            for epoch in range(train_config.epochs):
                for batch in DataLoader(data, num_workers=0):
                    step(batch)
    """
    [found] = found_in(tmp_path, train=text)
    assert (found.rule, severity_of(found), found.edits) == ("workers-hard-coded", "low", ())
    for name in ("max_workers", "preprocessing_num_workers", "auto_find_batch_size", "persistent_workers", "map_num_workers"):
        assert quantity_of(name) is None


def test_a_patch_never_reads_a_field_of_another_config(tmp_path: Path) -> None:
    text = """
        from dataclasses import dataclass
        from torch.utils.data import DataLoader
        @dataclass
        class Paths:
            root: str = "."
            epochs: int = 1
        @dataclass
        class TrainConfig:
            batch_size: int = 64
            epochs: int = 8
        def train(paths, data):
            print(paths.root, paths.epochs)
            return DataLoader(data, batch_size=8)
    """
    [found] = found_in(tmp_path, train=text)
    assert (found.rule, found.edits) == ("batch-hard-coded", ())


def test_a_patch_is_not_an_assignment_to_itself(tmp_path: Path) -> None:
    text = """
        import argparse
        from torch.utils.data import DataLoader
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int, default=64)
        args = parser.parse_args()
        print(args.batch_size)
        args.batch_size = 8
        loader = DataLoader([], batch_size=args.batch_size)
    """
    [found] = found_in(tmp_path, train=text)
    assert (found.rule, found.line, found.edits) == ("batch-hard-coded", 7, ())


@pytest.mark.parametrize(
    "code",
    [
        "args.batch_size * args.gradient_accumulation_steps",
        "args.batch_size or args.micro_batch_size * (args.gradient_accumulation_steps or 1)",
        "args.batch_size or args.micro_batch_size * max(1, args.total // args.micro_batch_size)",
        "min(args.batch_size, max(1, len(data)))",
        "min(args.batch_size, 4096 // len(data[0]))",
        "max(args.batch_size, min(4, len(data)))",
    ],
)
def test_a_table_that_changes_nothing_is_no_finding(tmp_path: Path, code: str) -> None:
    text = f"import torch\ndef loader(args, data):\n    return DataLoader(data, batch_size={code})\n"
    assert [each.rule for each in found_in(tmp_path, train=text) if each.rule != "accumulation-floored"] == []


def test_tiers_that_are_equal_are_no_finding(tmp_path: Path) -> None:
    text = """
        def loader(args, data, free_gb):
            if free_gb < 8:
                batch_size = args.batch_size * 2 // 2
            else:
                batch_size = args.batch_size
            return DataLoader(data, batch_size=batch_size)
    """
    assert found_in(tmp_path, train=text) == []


@pytest.mark.parametrize(
    "text",
    [
        """
        def get_lr(step, args):
            if step < 100:
                return args.learning_rate * step / 100
            return max(args.learning_rate * 0.5 ** (step // 1000), 1e-5)
        def train(args, optimizer):
            for step in range(1000):
                lr = get_lr(step, args)
                optimizer.step()
        """,
        """
        def train(args, optimizer, progress):
            lr = max(args.learning_rate * (1 - progress), 1e-5)
            optimizer.step()
        """,
    ],
)
def test_a_learning_rate_schedule_is_no_clamp(tmp_path: Path, text: str) -> None:
    assert [each.rule for each in found_in(tmp_path, train=text)] == []


def test_a_model_that_is_cropped_to_the_length_is_no_clamp_of_the_length(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        model="""
            from dataclasses import dataclass
            @dataclass
            class ModelConfig:
                block_size: int = 1024
            class Model:
                def __init__(self, config):
                    self.config = config
        """,
        train="""
            from model import Model, ModelConfig
            block_size = 1024
            model_args = dict(block_size=block_size)
            if resume:
                model_args["block_size"] = load()["block_size"]
            model = Model(ModelConfig(**model_args))
            if block_size < model.config.block_size:
                model.crop(block_size)
                model_args["block_size"] = block_size
        """,
    )
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "batch_size = 4\nmicro_batch_size = batch_size\ngradient_accumulation_steps = batch_size // micro_batch_size\n",
        "TOTAL_BATCH = 64\nmicro_batch_size = 4\ngradient_accumulation_steps = TOTAL_BATCH // micro_batch_size\n",
        """
        from dataclasses import dataclass
        @dataclass
        class Args:
            global_batch_size: int = 64
            micro_batch_size: int = 4
            def __post_init__(self):
                assert self.global_batch_size % self.micro_batch_size == 0
        def train(args: Args):
            gradient_accumulation_steps = args.global_batch_size // args.micro_batch_size
        """,
    ],
)
def test_a_division_without_a_remainder_drops_nothing(tmp_path: Path, text: str) -> None:
    assert [each for each in found_in(tmp_path, train=text) if each.rule == "accumulation-floored"] == []


def test_a_second_floor_division_that_reaches_zero_is_found(tmp_path: Path) -> None:
    text = """
        import os
        def train(batch_size: int = 128, micro_batch_size: int = 4):
            gradient_accumulation_steps = batch_size // micro_batch_size
            world_size = int(os.environ.get("WORLD_SIZE", 1))
            if world_size != 1:
                gradient_accumulation_steps = gradient_accumulation_steps // world_size
            return gradient_accumulation_steps
    """
    first, second = found_in(tmp_path, train=text)
    assert (first.line, second.line, {first.rule, second.rule}) == (3, 6, {"accumulation-floored"})
    assert [row.in_force for row in second.in_force] == [0, 0, 1]


@pytest.mark.parametrize("mode", ["if args.debug:\n        ", "if args.smoke_test:\n        "])
def test_a_debug_mode_may_have_its_own_batch(tmp_path: Path, mode: str) -> None:
    text = f"def loader(args, data):\n    {mode}return DataLoader(data, batch_size=min(args.batch_size, 2))\n    return DataLoader(data, batch_size=args.batch_size)\n"
    assert found_in(tmp_path, train=text) == []


def test_functions_that_test_or_demonstrate_are_left_alone(tmp_path: Path) -> None:
    text = "import torch\n{}(args, data):\n    return DataLoader(data, batch_size=min(args.batch_size, 2))\n"
    for name in ("def test_loader", "def run_demo", "def smoke_test"):
        assert found_in(tmp_path / name.replace(" ", "_"), train=text.format(name)) == []


def test_high_needs_a_value_that_reaches_a_loader_or_the_step(tmp_path: Path) -> None:
    clamp = "def loader(args, data):\n    batch_size = min(args.batch_size, 2)\n    return {}\n"
    assert severities(tmp_path / "a", train=clamp.format("DataLoader(data, batch_size=batch_size)")) == [
        ("batch-clamped", "high")
    ]
    assert severities(tmp_path / "b", train=clamp.format("batch_size")) == [("batch-clamped", "medium")]


def test_an_unused_class_or_dict_is_reported_once(tmp_path: Path) -> None:
    text = """
        ds_config = {
            "zero_optimization": {"offload_optimizer": {"pin_memory": False}, "offload_param": {"pin_memory": False}},
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
        }
        def train(model, loader, optimizer):
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    [found] = found_in(tmp_path, train=text)
    assert (found.rule, found.line, found.end_line) == ("setting-unused", 3, 4)
    assert "train_micro_batch_size_per_gpu" in found.message


def test_a_dict_that_is_handed_on_is_used(tmp_path: Path) -> None:
    text = """
        ds_config = {"train_batch_size": 8}
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=ds_config)
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
    """
    assert [each.rule for each in found_in(tmp_path, train=text)] == []


@pytest.mark.parametrize("shown", ["print(args)", "print(args.gradient_accumulation_steps)", "wandb.init(config=vars(args))"])
def test_an_accumulation_that_is_offered_and_only_shown_is_unused(tmp_path: Path, shown: str) -> None:
    text = f"""
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
        args = parser.parse_args()
        {shown}
        def train(model, loader, optimizer):
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    """
    assert [each.rule for each in found_in(tmp_path, train=text)] == ["setting-unused"]


def test_time_grows_with_the_findings_and_not_with_their_square(tmp_path: Path) -> None:
    text = "from torch.utils.data import DataLoader\n\n\ndef main(args, data):\n"
    text += "".join(f"    DataLoader(data, batch_size=min(args.batch_size_{n}, 4))\n" for n in range(2000))
    (tmp_path / "train.py").write_text(text)
    began = time.process_time()
    diagnosis = doctor(tmp_path, predict=False)
    assert len(diagnosis.findings) == 2000
    assert all(each.patch and each.patch.count("@@") == 2 for each in diagnosis.findings)
    assert time.process_time() - began < 15


def test_what_is_too_deep_to_read_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text("batch_size = x" + " + 1" * 5000 + "\n")
    (tmp_path / "large.py").write_text("x = 1\n" * 1_700_000)
    notes = doctor(tmp_path, predict=False).notes
    assert any("deep.py" in note and "nested" in note for note in notes)
    assert any("large.py" in note and "MiB" in note for note in notes)
