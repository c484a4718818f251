"""Every word of the estimate is an optimizer that trains, and goes on exactly from what it saved."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import Trainer

from brim.errors import UnsupportedError, UsageError
from brim.trainer.hf import BrimTrainer
from brim.trainer.optimizing import grouped, make_optimizer
from brim.workload.words import Optimizer
from tests.trainer.small import arguments, llama, logged, pad, ragged, trainer_of, weights

RUN_HERE = [word for word in get_args(Optimizer) if not word.startswith("paged")]
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Matrices of 4,096 numbers and more: smaller ones have no 8-bit state."""


def made(word: Any, model: nn.Module) -> Any:
    return make_optimizer(word, model, learning_rate=1e-2, weight_decay=0.1)


def step(model: Any, optimizer: Any, seed: int) -> None:
    model(**pad(ragged(2, seed))).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("word", RUN_HERE)
def test_an_optimizer_goes_on_exactly_from_its_saved_state(word: str) -> None:
    model = llama(**WIDE)
    optimizer = made(word, model)
    for seed in (0, 1):
        step(model, optimizer, seed)
    again = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh = made(word, again)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    before = weights(model)
    step(model, optimizer, 2)
    step(again, fresh, 2)
    assert not torch.equal(before, weights(model))
    assert torch.equal(weights(model), weights(again))


@pytest.mark.parametrize("word", ["adamw", "adamw-fused", "adamw-loop", "adamw-8bit"])
def test_adamw_has_the_betas_and_the_epsilon_that_are_given(word: Any) -> None:
    model = llama(**WIDE)
    usual = made(word, model).param_groups[0]
    assert (tuple(usual["betas"]), usual["eps"]) == ((0.9, 0.999), 1e-8)
    given = make_optimizer(word, model, learning_rate=1e-2, weight_decay=0.0, betas=(0.8, 0.95), epsilon=1e-6).param_groups[0]
    assert (tuple(given["betas"]), given["eps"]) == ((0.8, 0.95), 1e-6)


def test_eight_bits_are_eight_bits() -> None:
    model = llama(**WIDE)
    optimizer = made("adamw-8bit", model)
    step(model, optimizer, 0)
    assert optimizer.state[model.model.layers[0].mlp.up_proj.weight]["state1"].dtype == torch.uint8


@pytest.mark.parametrize(
    "word", ["adamw-8bit", "lion", *(pytest.param(word, marks=pytest.mark.slow) for word in ("adafactor", "sgd-momentum"))]
)
def test_the_step_engine_trains_with_it(word: Any, tmp_path: Path) -> None:
    class Chosen(BrimTrainer):
        def create_optimizer(self, *_details: Any, **_keywords: Any) -> Any:
            assert self.model is not None
            self.optimizer = make_optimizer(word, self.model, learning_rate=3e-3, weight_decay=0.0)
            return self.optimizer

    rows = ragged(8)
    trainer = trainer_of(tmp_path, rows, model=llama(**WIDE), kind=Chosen, num_train_epochs=4, learning_rate=3e-3)
    trainer.train()
    losses = logged(trainer)
    assert losses[-1] < losses[0]


def test_matrices_decay_and_norms_and_biases_do_not_as_in_the_trainer(tmp_path: Path) -> None:
    for model in (llama(attention_bias=True), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))):
        trainer = Trainer(model, arguments(tmp_path, weight_decay=0.1))
        theirs = trainer.create_optimizer().param_groups
        ours = grouped(model, 0.1)
        assert [(group["weight_decay"], list(map(id, group["params"]))) for group in ours] == [
            (group["weight_decay"], list(map(id, group["params"]))) for group in theirs
        ]


def test_what_is_frozen_is_not_in_it() -> None:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    held = {id(one) for group in made("adamw", model).param_groups for one in group["params"]}
    assert id(model.model.embed_tokens.weight) not in held
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="Nothing trains"):
        made("adamw", model)


def test_a_paged_optimizer_is_refused_where_nothing_is_paged() -> None:
    with pytest.raises(UnsupportedError, match="nothing to page") as caught:
        made("paged-adamw-8bit", llama())
    assert "adamw-8bit" in (caught.value.hint or "")


def test_the_words_mean_what_they_say() -> None:
    model = llama()
    assert made("adamw-loop", model).param_groups[0]["foreach"] is False
    assert made("adamw-fused", model).param_groups[0]["fused"] is True
    assert made("sgd-momentum", model).param_groups[0]["momentum"] == 0.9
    assert made("sgd", model).param_groups[0]["momentum"] == 0
    factored = made("adafactor", model).param_groups[0]
    assert (factored["relative_step"], factored["scale_parameter"]) == (False, False)


def test_lion_moves_by_the_sign_of_a_blend_and_decays_by_itself() -> None:
    layer = nn.Linear(4, 4, bias=False)
    start = layer.weight.detach().double()
    optimizer = make_optimizer("lion", layer, learning_rate=0.01, weight_decay=0.5)
    moment, expected = torch.zeros(4, 4, dtype=torch.double), start
    for seed in range(4):
        gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        layer.weight.grad = gradient.clone()
        optimizer.step()
        blend = 0.9 * moment + 0.1 * gradient.double()
        expected = expected * (1 - 0.01 * 0.5) - 0.01 * blend.sign()
        moment = 0.99 * moment + 0.01 * gradient.double()
    torch.testing.assert_close(layer.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
