"""The whole config audit, on what real tools write."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from brim.audit.config.examine import examine_configs
from brim.audit.found import Found
from brim.audit.rules import RULES
from brim.audit.rules.rule import Rule
from brim.audit.source.module import Source
from brim.errors import UnsupportedError
from brim.planner.emit.write import FORMATS, files_of as emitted
from tests.audit.config.parts import examined_files, rules
from tests.planner.emit.plans import PLANS


def configs(texts: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if name.endswith((".yaml", ".json"))}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_what_brim_writes_itself_is_clean_in_every_format_and_all_together(name: str) -> None:
    plan = PLANS[name]
    card = plan.machine.accelerators[0].gpu.name if plan.machine.accelerators else None
    together: dict[str, str] = {}
    for format_name in FORMATS:
        try:
            texts = configs(emitted(plan, format_name))
        except UnsupportedError:
            continue
        together |= texts
        notes: list[str] = []
        assert examined_files(texts, gpu=card, gpus=plan.machine.world_size, notes=notes) == [], format_name
        assert not notes
    assert together
    assert examined_files(together, gpu=card, gpus=plan.machine.world_size) == []
    assert examined_files(together, gpu=card) == []


def test_configs_of_the_installed_packages_are_examined() -> None:
    found: list[Found] = []
    seen = 0
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*")):
        if path.suffix not in {".yaml", ".yml", ".json"} or not path.is_file() or path.stat().st_size > 1 << 20:
            continue
        seen += 1
        found += examine_configs([Source(path.name, path.read_text(encoding="utf-8", errors="replace"))], predict=False)
    assert seen
    # TRL's single_gpu.yaml asks for 8 processes and starts one, as its name says.
    assert [(each.rule, each.file) for each in found] in ([], [("config-cancels", "single_gpu.yaml")])


def asked_of(example: dict[str, str]) -> dict[str, str]:
    first = next(iter(example.values())).partition("\n")[0]
    return {"gpu": first.removeprefix("# gpu: ")} if first.startswith("# gpu: ") else {}


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.group == "config"], ids=lambda rule: rule.name)
def test_the_examples_of_a_rule_are_wrong_and_right(rule: Rule) -> None:
    predict = rule.name in {"config-over-memory", "config-under-used"}
    bad = examined_files(rule.bad, predict=predict, **asked_of(rule.bad))
    assert rule.name in rules(bad)
    assert examined_files(rule.good, predict=predict, **asked_of(rule.good)) == []


def test_no_heavy_package_is_imported_where_nothing_is_predicted() -> None:
    code = (
        "import sys\n"
        "from brim.audit.config.examine import examine_configs\n"
        "from brim.audit.source.module import Source\n"
        "text = 'per_gpu_train_batch_size: 4\\ngradient_accumulation_steps: 2\\nbf16: true\\n'\n"
        "assert len(list(examine_configs([Source('a.yaml', text)], gpu='t4', predict=False))) == 2\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'accelerate'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
