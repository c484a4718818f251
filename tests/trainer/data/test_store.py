"""The cache: found again by what shapes it, whole or made anew, one for all who make it at once, and mapped rather than loaded."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from brim.errors import RunError, UsageError
from brim.records.runs import DataCard
from brim.trainer.data.prepare import prepare_data
from brim.trainer.data.tokens import IGNORED, Collate, TokenData
from tests.trainer.data.tokenizers_here import CHATML, tokenizer

ROWS = [{"prompt": f"the river {number}", "response": f"a stone {number}"} for number in range(40)]


def written(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(path: Path, cache: Path, *, words: Any = None, said: list[str] | None = None, **changes: Any) -> DataCard:
    say = (lambda _text: None) if said is None else said.append
    asked: dict[str, Any] = {"task": "causal-lm", "max_length": 64, "say": say, "cache": cache, **changes}
    return prepare_data(path, tokenizer=words or tokenizer(), tokenizer_name="words", **asked)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path / "a.jsonl")


def test_the_same_data_are_found_again_under_any_path(data: Path, tmp_path: Path) -> None:
    cache, said = tmp_path / "cache", list[str]()
    first = prepared(data, cache)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    again = prepared(Path(shutil.move(data, moved / "b.jsonl")), cache, said=said)
    assert (again.fingerprint, again.folder) == (first.fingerprint, first.folder)
    assert again.source.endswith("b.jsonl")
    assert "read from the cache" in said[0]
    assert [path.name for path in cache.iterdir()] == [first.fingerprint]


def test_without_a_folder_brims_own_is_used(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "own"))
    card = prepare_data(data, tokenizer=tokenizer(), tokenizer_name="w", task="causal-lm", max_length=64, say=print)
    assert card.folder == str(tmp_path / "own" / "data" / card.fingerprint)


def test_whatever_shapes_the_tokens_changes_the_fingerprint(data: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    changed: list[dict[str, Any]] = [
        {}, {"max_length": 32}, {"loss_on": "all"}, {"words": tokenizer("$A")}, {"words": tokenizer(template=CHATML)},
        {"task": "seq2seq"}, {"task": "seq2seq", "target_length": 9}, {"columns": {"source": "response", "target": "prompt"}},
    ]  # fmt: skip
    names = [prepared(data, cache, **changes).fingerprint for changes in changed]
    names.append(prepared(written(data, ROWS[:-1]), cache).fingerprint)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["ids", "offsets", "supervised", "card"])
@pytest.mark.parametrize("damage", ["missing", "short", "longer", "empty"])
def test_a_damaged_folder_is_made_anew(data: Path, tmp_path: Path, name: str, damage: str) -> None:
    cache = tmp_path / "cache"
    card = prepared(data, cache)
    expected = [row["labels"].tolist() for row in TokenData.open(card)]
    file = Path(card.folder) / (f"{name}.json" if name == "card" else f"{name}.npy")
    whole = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes({"short": whole[:-3], "longer": whole + b"xx", "empty": b""}[damage])
    again = prepared(data, cache)
    assert [row["labels"].tolist() for row in TokenData.open(again)] == expected
    assert file.read_bytes() == whole
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(("name", "number"), [("ids", 99_999), ("ids", -1), ("offsets", 0), ("largest", 3)])
def test_numbers_that_were_never_written_are_not_trusted(data: Path, tmp_path: Path, name: str, number: int) -> None:
    card = prepared(data, tmp_path / "cache")
    file = Path(card.folder) / f"{name}.npy"
    whole = file.read_bytes()
    array = np.load(file, mmap_mode="r+")
    array[min(5, len(array) - 1)] = number
    array.flush()
    prepared(data, tmp_path / "cache")
    assert file.read_bytes() == whole


def test_a_folder_that_is_gone_is_told_when_it_is_opened(data: Path, tmp_path: Path) -> None:
    card = prepared(data, tmp_path / "cache")
    shutil.rmtree(card.folder)
    with pytest.raises(UsageError, match="are no longer in"):
        TokenData.open(card)


def test_a_cache_that_cannot_be_written_is_one_clear_error(data: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(RunError, match="The tokens cannot be written"):
        prepared(data, tmp_path / "cache")


def _make(path: str, cache: str, results: Any) -> None:
    card = prepared(Path(path), Path(cache))
    results.put([row["input_ids"].tolist() for row in TokenData.open(card)])


def test_two_processes_that_make_the_same_at_once_both_end_well(data: Path, tmp_path: Path) -> None:
    # Fresh ones: a fork does not take along the threads that tokenizers believes in.
    fresh = multiprocessing.get_context("spawn")
    results = fresh.Queue()
    makers = [fresh.Process(target=_make, args=(str(data), str(tmp_path / "cache"), results)) for _maker in range(2)]
    for maker in makers:
        maker.start()
    first, second = results.get(timeout=200), results.get(timeout=200)
    for maker in makers:
        maker.join(200)
        assert maker.exitcode == 0
    assert first == second
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_data_go_into_another_process_as_their_card_and_are_mapped_there_anew(data: Path, tmp_path: Path) -> None:
    opened = TokenData.open(prepared(data, tmp_path / "cache"))
    packed = pickle.dumps(opened)
    assert len(packed) < 20_000
    other = pickle.loads(packed)
    assert [row["labels"].tolist() for row in other] == [row["labels"].tolist() for row in opened]
    assert other[-1]["input_ids"].tolist() == opened[len(opened) - 1]["input_ids"].tolist()
    with pytest.raises(IndexError):
        opened[len(opened)]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), split=st.one_of(st.integers(1, 39), st.floats(0.01, 0.9)))
def test_what_is_held_out_follows_from_the_seed_and_is_not_trained_on(shared_data: TokenData, seed: int, split: float) -> None:
    train, evaluation = shared_data.held_out(split, seed)
    again = shared_data.held_out(split, seed)
    ids = [[tuple(row["input_ids"]) for row in part] for part in (train, evaluation, *again)]
    assert ids[:2] == ids[2:]
    assert set(ids[0]) | set(ids[1]) == {tuple(row["input_ids"]) for row in shared_data}
    assert not set(ids[0]) & set(ids[1])
    assert len(evaluation) == (split if isinstance(split, int) else max(1, round(40 * split)))
    assert train.lengths.tolist() == [len(each) for each in ids[0]]


@pytest.fixture(scope="module")
def shared_data(tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    folder = tmp_path_factory.mktemp("data")
    return TokenData.open(prepared(written(folder / "a.jsonl"), folder / "cache"))


def test_as_much_as_all_cannot_be_held_out(shared_data: TokenData) -> None:
    assert shared_data.held_out(7, 0)[1].card == shared_data.card
    for split, said in (
        (40, "nothing would be left"),
        (1.0, "cannot hold out"),
        (0, "cannot hold out"),
        (0.0, "cannot hold out"),
    ):
        with pytest.raises(UsageError, match=said):
            shared_data.held_out(split, 0)


def test_a_batch_is_padded_at_the_right_with_a_mask_and_labels_that_are_ignored() -> None:
    rows = [
        {"input_ids": np.array([5, 6, 7]), "labels": np.array([IGNORED, 6, 7])},
        {"input_ids": np.array([8]), "labels": np.array([8])},
    ]
    batch = Collate(0, has_targets=False, is_classifier=False)(rows)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[IGNORED, 6, 7], [8, IGNORED, IGNORED]],
    }
    packed = Collate(0, has_targets=False, is_classifier=False, packed=True)(rows)
    assert {name: value.tolist() for name, value in packed.items()} == {
        "input_ids": [[5, 6, 7, 8]],
        "position_ids": [[0, 1, 2, 0]],
        "labels": [[IGNORED, 6, 7, IGNORED]],
    }
    assert rows[1]["labels"].tolist() == [8]


def test_targets_are_padded_to_a_length_of_their_own_and_classes_not_at_all() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [5], "labels": [1, 2, 3]}, {"input_ids": [6, 7], "labels": [4]}]
    batch = Collate(0, has_targets=True, is_classifier=False)(rows)
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[5, 0], [6, 7]], [[1, 2, 3], [4, IGNORED, IGNORED]])
    classified = Collate(0, has_targets=False, is_classifier=True)(
        [{"input_ids": [5], "labels": 2}, {"input_ids": [6, 7], "labels": 0}]
    )
    assert classified["labels"].tolist() == [2, 0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is counted in KiB on Linux only")
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_a_large_file_costs_no_more_memory_than_a_small_one(tmp_path: Path, kind: str) -> None:
    """In a process of its own: what it grew beyond a small file's peak while it read 150 MB more."""
    program = "import sys; from tests.trainer.data.test_store import grown; print(grown(*sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), kind],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ended.stdout.split()[-1]) < 60 << 20


def grown(folder: str, kind: str) -> int:
    words = tokenizer()
    peaks = []
    for name, rows in (("small", 2_000), ("large", 30_000)):
        path = Path(folder) / f"{name}.{kind}"
        _write_many(path, rows)
        assert prepared(path, Path(folder) / "cache", words=words, max_length=2048).sequences == rows
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return peaks[1] - peaks[0]


def _write_many(path: Path, rows: int) -> None:
    """Most of each row is in a column that is read and not tokenised, which would take minutes."""
    made = (
        {"prompt": f"the river {number}", "response": "the stone " * 40, "from": f"{number} " * 900} for number in range(rows)
    )
    if path.suffix == ".parquet":
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet

        schema = pa.schema([("prompt", pa.string()), ("response", pa.string()), ("from", pa.string())])
        with parquet.ParquetWriter(path, schema) as writer:
            while part := list(itertools.islice(made, 1000)):
                writer.write_table(pa.Table.from_pylist(part, schema))
        return
    with path.open("w") as file:
        is_list = path.suffix == ".json"
        file.write("[" if is_list else "")
        for place, row in enumerate(made):
            file.write((", " if place and is_list else "") + json.dumps(row) + ("" if is_list else "\n"))
        file.write("]" if is_list else "")
