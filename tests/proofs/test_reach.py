"""What the proofs reach: faults of training mode, of labelled calls, behind wrappers, behind weights that hide them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from brim.errors import UnsupportedError
from brim.proofs.verify import verify
from brim.records import Verification


class Decoder(nn.Module):
    """One layer of attention, right in every way; each fault below changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(61, 24), nn.Embedding(40, 24)
        self.qkv, self.out, self.head = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 61)

    def may_see(self, length: int, labels: torch.Tensor | None) -> torch.Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        length = input_ids.shape[1]
        hidden = self.embed(input_ids) + self.places(torch.arange(length))
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        mask = self.may_see(length, labels)
        hidden = hidden + self.out(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))
        logits = self.head(self.between(hidden))
        if labels is None:
            return logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def failed(found: Verification) -> dict[str, str | None]:
    return {proof.name: proof.signature for proof in found.failures()}


def test_the_right_one_passes() -> None:
    assert failed(verify(Decoder())) == {}


def test_a_model_that_is_bidirectional_in_training_only() -> None:
    class Model(Decoder):
        def may_see(self, length: int, labels: torch.Tensor | None) -> torch.Tensor:
            return super().may_see(length, labels) | self.training

    found = verify(Model())
    assert failed(found)["causality"] == "mask-not-causal"
    assert "not in training mode" in found.proofs[0].diagnosis


def test_a_model_that_is_bidirectional_where_labels_are_given() -> None:
    class Model(Decoder):
        def may_see(self, length: int, labels: torch.Tensor | None) -> torch.Tensor:
            return super().may_see(length, labels) | (labels is not None)

    assert failed(verify(Model()))["causality"] == "mask-not-causal"


def test_batch_statistics_behind_dropout_whose_rate_nobody_sees() -> None:
    class Model(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(24)

        def between(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = functional.dropout(hidden, 0.1, self.training)
            normed: torch.Tensor = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
            return normed

    assert failed(verify(Model()))["batch"] == "batch-norm"


def test_noise_that_nothing_switches_off_is_no_fault_and_is_said() -> None:
    class Model(Decoder):
        def between(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 0.1 * torch.randn_like(hidden) * self.training

    found = verify(Model())
    assert failed(found) == {}
    assert all("training mode" in proof.diagnosis for proof in found.proofs if proof.verdict == "pass")


def test_numbers_that_are_none_in_training() -> None:
    class Model(Decoder):
        def between(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden / (0.0 if self.training else 1.0) * (0.0 if self.training else 1.0)

    assert "batch" in failed(verify(Model()))


@pytest.mark.parametrize("unused", [-1e4, torch.finfo(torch.float32).min, float("-inf")])
@pytest.mark.parametrize("is_right", [True, False])
def test_words_that_are_not_used_hide_nothing(unused: float, is_right: bool) -> None:
    class Model(Decoder):
        def may_see(self, length: int, labels: torch.Tensor | None) -> torch.Tensor:
            return super().may_see(length, labels) | (not is_right)

        def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(input_ids).clone()
            logits[..., 50:] = unused
            return logits

    assert ("causality" not in failed(verify(Model()))) == is_right


@pytest.mark.parametrize("part", ["out", "head"])
def test_weights_that_are_zero_hide_nothing(part: str) -> None:
    class Model(Decoder):
        def may_see(self, length: int, labels: torch.Tensor | None) -> torch.Tensor:
            return torch.ones(length, length, dtype=torch.bool)

    model = Model()
    for parameter in getattr(model, part).parameters():
        nn.init.zeros_(parameter)
    found = verify(model)
    assert "causality" in failed(found)
    assert any("fresh ones were drawn" in note for note in found.notes)
    assert not any(parameter.any() for parameter in getattr(model, part).parameters())


@pytest.mark.parametrize("hide", [nn.DataParallel, lambda model: Handing(model)])
def test_a_wrapper_hides_neither_labels_nor_faults(hide: Any) -> None:
    class Model(Decoder):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            answer = super().forward(input_ids, labels)
            return answer if labels is None else (answer[0] * labels.numel(), answer[1])

    assert failed(verify(hide(Model()))) == {"accumulation": "loss-summed"}


class Handing(nn.Module):
    """Hands everything on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.inside(*given, **named)


def test_labels_under_another_name_and_logits_that_need_them() -> None:
    class Model(Decoder):
        def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            if targets is None:
                return super().forward(idx)[:, -1:], None
            loss, logits = super().forward(idx, targets)
            return logits, loss

    assert failed(verify(Model())) == {}


BERT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("settings", [{"num_labels": 1}, {"num_labels": 3, "problem_type": "multi_label_classification"}])
def test_classifiers_of_every_sort(settings: dict[str, Any]) -> None:
    class Own(BertForSequenceClassification):  # type: ignore[no-untyped-call]
        pass

    torch.manual_seed(0)
    assert failed(verify(Own(BertConfig(**BERT, **settings)))) == {}  # type: ignore[no-untyped-call]


def test_a_head_that_is_not_known_and_too_few_positions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="head of BertForQuestionAnswering"):
        verify(BertForQuestionAnswering(BertConfig(**BERT)))  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedError, match="rows of 12 tokens"):
        verify(GPT2LMHeadModel(GPT2Config(n_positions=8, n_embd=32, n_layer=1, n_head=2, vocab_size=61)))  # type: ignore[no-untyped-call]


def test_a_mask_that_kills_even_one_row_is_still_told(broken_by_long_mask: nn.Module) -> None:
    found = verify(broken_by_long_mask)
    assert failed(found)["causality"] == "mask-2d"
    assert failed(found)["batch"] == "mask-2d"


@pytest.fixture
def broken_by_long_mask() -> nn.Module:
    """As a tokenizer gives it, in integers, which SDPA refuses at any batch size."""
    from tests.cli.stitched_by_hand import StitchedByHand

    class Model(StitchedByHand):
        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
        ) -> torch.Tensor:
            hidden = self.embed(input_ids)
            rotary = self.rotary(hidden, torch.arange(input_ids.shape[1])[None])
            for layer in self.layers:
                hidden = layer(hidden, attention_mask=attention_mask, position_embeddings=rotary)
            logits: torch.Tensor = self.head(self.norm(hidden))
            return logits

    return Model(is_mended=False)
