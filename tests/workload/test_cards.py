"""The model catalogue: enough models, found by every name that people use for them."""

from __future__ import annotations

import re

import pytest

from brim import ModelCard, models
from brim.sizes import format_count
from brim.workload.cards import find_card, nearest_models

ALL = models()
PROMISED = [
    "tinyllama", "llama-2-7b", "llama-2-13b", "llama-3-8b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b",
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-4b", "qwen3-8b", "mistral-7b-v0.1", "mixtral-8x7b", "gemma-2-2b", "phi-2",
    "gpt2", "gpt2-xl", "distilgpt2", "opt-1.3b", "pythia-1.4b", "deepseek-r1-distill-qwen-1.5b", "t5-small", "bert-large-uncased",
    "chatlm-mini-chinese",
]  # fmt: skip
# Totals that the models' own pages and papers print to the digit.
KNOWN_TOTALS = {
    "llama-3.1-8b": 8_030_261_248, "llama-2-7b": 6_738_415_616, "mistral-7b-v0.1": 7_241_732_096, "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512, "gpt2": 124_439_808, "phi-2": 2_779_683_840, "tinyllama": 1_100_048_384, "opt-1.3b": 1_315_758_080,
    "pythia-1.4b": 1_414_647_808, "gemma-2-2b": 2_614_341_888, "t5-small": 60_506_624,
}  # fmt: skip


def test_the_catalogue_is_large_enough() -> None:
    assert len(ALL) >= 60


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_short_name_resolves(name: str) -> None:
    card = find_card(name)
    assert card is not None
    assert card.name == name


@pytest.mark.parametrize(("name", "total"), KNOWN_TOTALS.items())
def test_totals_that_are_known_to_the_digit_are_met(name: str, total: int) -> None:
    card = find_card(name)
    assert card is not None
    assert card.parameters == total


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"), ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"), ("LLAMA-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("Qwen/Qwen2.5-7B", "qwen2.5-7b"), ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("openai-community/gpt2", "gpt2"), ("google-bert/bert-large-uncased", "bert-large-uncased"),
        ("charent/ChatLM-mini-Chinese", "chatlm-mini-chinese"), ("Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
    ],
)  # fmt: skip
def test_hub_ids_and_short_names_both_resolve(name: str, short: str) -> None:
    card = find_card(name)
    assert card is not None
    assert card.name == short


def test_no_name_belongs_to_two_models() -> None:
    owners: dict[str, str] = {}
    for card in ALL:
        for name in {text.lower() for text in (card.name, card.hub_id, *card.aliases, *card.same_architecture)}:
            assert owners.setdefault(name, card.name) == card.name


@pytest.mark.parametrize("card", ALL, ids=lambda card: card.name)
def test_a_published_figure_stands_beside_the_count_and_a_difference_is_explained(card: ModelCard) -> None:
    assert card.published
    assert card.published_source
    found = re.search(r"([\d.,]+)\s*([BMKT]?)", card.published.replace("billion", "B").replace("million", "M"))
    assert found is not None, card.published
    figure = float(found[1].replace(",", "")) * {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1}[found[2]]
    digits = len(found[1].replace(",", "").partition(".")[2])
    unit = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3, "": 1}[found[2]]
    if abs(figure - card.parameters) > 0.51 * unit * 10**-digits:
        assert card.note, (
            f"{card.name}: published {card.published}, counted {format_count(card.parameters)}, and no note says why"
        )


def test_the_chinese_model_of_the_brief_is_there() -> None:
    card = find_card("chatlm-mini-chinese")
    assert card is not None
    wanted = {
        "d_model": 768,
        "d_ff": 3072,
        "num_heads": 12,
        "d_kv": 64,
        "num_layers": 10,
        "num_decoder_layers": 10,
        "vocab_size": 29298,
    }
    assert {key: card.config[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("qwen2.5-8b", "qwen2.5-7b"),
        ("tiny-lama", "tinyllama"),
        ("bert-large", "bert-large-uncased"),
    ],
)
def test_a_misspelt_name_is_near_the_right_one(name: str, near: str) -> None:
    assert near in nearest_models(name)
