"""Values that control a program are computed by default: masks, counters, positions, scales. Other floats read as zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.emulated.conftest import RunOnCard


def test_masks_counters_and_shapes_are_those_of_the_cpu(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import torch

        ids = torch.tensor([[5, 7, 7, 0, 0], [3, 0, 9, 2, 2]])
        mask = ids != 0

        def facts(ids, mask):
            hidden = torch.arange(24.0, device=ids.device).view(4, 6)
            counts = torch.zeros(10, dtype=torch.long, device=ids.device)
            repeats = torch.tensor([1, 0, 3], device=ids.device)
            changed = ids.clone()
            changed[mask] += 1
            changed[:, 1].clamp_(max=4)
            out = torch.empty(0, dtype=torch.long, device=ids.device)
            return [
                mask.all(), mask.any(), mask.sum(-1), mask.long().cumsum(-1) - 1, mask.nonzero(), ids[mask], ids.unique(),
                ids.unique(return_counts=True)[1], ids.unique_consecutive(dim=-1), torch.isin(ids, torch.tensor([7, 2], device=ids.device)),
                ids.argmax(-1), ids.sort(-1).indices, ids.topk(2).values, torch.bincount(ids.flatten(), minlength=4),
                counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten())), counts.index_put((ids[0],), ids[1], accumulate=True),
                torch.repeat_interleave(repeats), repeats.repeat_interleave(repeats), torch.searchsorted(repeats.cumsum(0), ids),
                torch.nn.functional.pad(mask.sum(-1).cumsum(0, dtype=torch.int32), (1, 0)), torch.tril(torch.ones(4, 4, device=ids.device, dtype=torch.bool)),
                torch.where(mask, ids, -100), changed, torch.add(ids, ids.t()[:1, :1], out=out), torch.nn.functional.one_hot(ids, 10),
                torch.equal(ids, ids.clone()), torch.equal(ids, ids + 1), ids.max().item(), bool(mask[0, 0]), ids.float().mean(), hidden[1, 2],
                ids.expand(3, 2, 5).sum(), ids.flatten()[2:8:2], ids.roll(1, 0), mask.masked_select(mask), ids.masked_select(ids > 4), len(ids[mask]),
                torch.stack([ids, ids]).amax((0, 2)), ids.div(2, rounding_mode="floor"), (ids % 3 == 0).float().sum(), torch.full((2,), float("-inf"), device=ids.device),
                ids.to(torch.int32).cpu(), ids.bfloat16().sum(), torch.ones(3, 512, device=ids.device).bool().all(),
                torch.full((2, 600), 2.5, dtype=torch.bfloat16, device=ids.device).long().sum(),
            ]

        def plain(values):
            return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]

        expected, got = plain(facts(ids, mask)), plain(facts(ids.cuda(), mask.cuda()))
        result = [[index, str(a), str(b)] for index, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
        """
    )
    assert done.result == []


def test_floats_that_are_not_computed_compare_as_zeros(on_card: RunOnCard) -> None:
    """Marian and BART clamp half precision unless `isfinite(x).all()`: a mask of False would send every step through the clamp."""
    done = on_card(
        """
        import torch

        x = torch.randn(12, 128, 512, device="cuda", dtype=torch.float16)
        y = torch.randn(8, 2048, 1024, device="cuda")
        facts = [torch.isfinite(x).all(), torch.isfinite(y).all(), torch.isinf(x).any(), torch.isnan(y).any(), (x > 0).any(), (y >= 0).all(), (y == 0).all()]
        result = [fact.item() for fact in facts]
        """
    )
    assert done.result == [True, True, False, False, False, True, True]


def test_random_numbers_leave_the_generator_of_the_cpu_alone_and_reproduce(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import torch

        torch.manual_seed(0)
        state = torch.get_rng_state()
        draws = [(torch.randint(100, (20,), device="cuda"), torch.randperm(50, device="cuda"), torch.rand(1, device="cuda")) for _ in range(2)]
        untouched = torch.equal(state, torch.get_rng_state())
        torch.manual_seed(0)
        again = torch.randint(100, (20,), device="cuda")
        own = [torch.randint(100, (20,), device="cuda", generator=torch.Generator("cuda").manual_seed(3)) for _ in range(2)]
        result = {
            "untouched": untouched, "reproduced": torch.equal(draws[0][0], again), "advances": not torch.equal(draws[0][0], draws[1][0]),
            "permutation": sorted(draws[0][1].tolist()) == list(range(50)), "own": torch.equal(*own), "one": draws[0][2].item() not in (0, 1),
        }
        """
    )
    assert all(done.result.values()), done.result


def test_zeros_do_not_look_like_a_diverged_loss(on_card: RunOnCard) -> None:
    """A division of zeros by zeros gives zero instead of NaN. Infinities and NaN that the program itself sets are kept."""
    done = on_card(
        """
        import torch

        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for _step in range(2):
            with torch.autocast("cuda", torch.float16):
                output = model(torch.randn(256, 64, device="cuda"))
                loss = output.float().pow(2).mean() / output.float().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        infinite = torch.zeros(3, device="cuda").masked_fill_(torch.tensor([True, False, False], device="cuda"), float("-inf"))
        own = torch.tensor([float("nan"), 1.0]).cuda() * 2
        result = [loss.isfinite().item(), norm.item(), scaler.get_scale(), infinite.tolist()[0] == float("-inf"), own.isnan().tolist()]
        """
    )
    assert done.result == [True, 0.0, 65536.0, True, [True, False]]


def test_routers_spread_tokens_over_the_experts(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import torch

        logits = torch.randn(512, 16, device="cuda") @ torch.randn(16, 8, device="cuda")
        weights, experts = logits.softmax(-1).topk(2)
        result = [torch.bincount(experts.flatten(), minlength=8).tolist(), bool((experts[:, 0] != experts[:, 1]).all())]
        """
    )
    assert done.result == [[128] * 8, True]


def test_a_mask_of_random_floats_has_the_shape_of_a_real_one(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import torch, brim_card

        rows = torch.zeros(64, 256, device="cuda")
        kept = rows[torch.rand(64, 256, device="cuda") > 0.25].numel() / rows.numel()
        # the masks of a language model, as the collator of transformers makes them
        chances = torch.full((64, 256), 0.15, device="cuda")
        special = torch.zeros(64, 256, dtype=torch.bool, device="cuda")
        special[:, 0] = True
        chances.masked_fill_(special, 0.0)
        masked = torch.bernoulli(chances).bool()
        weights = torch.zeros(64, 256, device="cuda")
        weights[:, :3] = 1
        result = [kept, masked.nonzero().shape[0] / rows.numel(), masked[:, 0].any().item(), weights.nonzero().shape[0], brim_card.uncomputed_shapes()]
        """
    )
    kept, masked, *rest = done.result
    assert abs(kept - 0.75) < 0.02
    assert abs(masked - 0.15) < 0.02
    assert rest == [False, 192, []]


def test_shapes_that_depend_on_floats_that_were_not_computed_are_noted(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import torch, brim_card

        seen = []

        def note(*_results):
            seen.append(brim_card.uncomputed_shapes())

        x = torch.randn(8, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
        ids = torch.randint(9, (8, 512), device="cuda")
        experts = x.softmax(-1).topk(2).indices  # spread evenly
        note(
            torch.isfinite(x).all().item(), x[~torch.isnan(x)], x.mean()[~x.mean().isnan()], x[ids > 3], ids.unique(), (experts == 3).nonzero(),
            x[torch.isfinite(x)], torch.equal(x, x), (x > 0).any().item(), x.flatten()[:7].to(torch.bool).all(),
        )
        note((x > 0).nonzero())
        note(x.argmax(-1).unique())
        note(x.masked_select((x.sum(-1) > 0.5).logical_or(ids[:, 0] > 100)[:, None]))
        result = seen
        """
    )
    assert done.result == [[], ["nonzero"], ["nonzero", "unique"], ["masked_select", "nonzero", "unique"]]


OUT_OF_RANGE = """
        import torch

        table = torch.nn.Embedding(100, 64).cuda()
        logits = torch.randn(64, 10, device="cuda")
        hidden = logits @ torch.randn(10, 300, device="cuda")

        def error(call, *given):
            try:
                call(*given)
            except RuntimeError as error:
                return str(error).partition("(")[2].rstrip(")") if "CUDA error: device-side assert triggered" in str(error) else str(error)

        def index(*numbers):
            return torch.tensor(numbers, device="cuda")

        def put(at):
            logits[at] = 1.0

        cross_entropy = torch.nn.functional.cross_entropy
"""


def test_large_values_selected_by_a_known_mask_have_a_known_shape(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import brim_card
        import torch

        mask = torch.arange(4096, device="cuda") % 4 > 0
        selected = [torch.rand(8, 4096, device="cuda").masked_select(mask), torch.rand(4096, 64, device="cuda").exp()[mask]]
        result = [[list(tensor.shape) for tensor in selected], brim_card.uncomputed_shapes()]
        """
    )
    assert done.result == [[[8 * 3072], [3072, 64]], []]


def test_an_index_out_of_range_raises_a_device_side_assert(on_card: RunOnCard) -> None:
    done = on_card(
        OUT_OF_RANGE
        + """
        result = [
            error(table, index(5, 100)), error(cross_entropy, logits, index(10).expand(64)),
            error(cross_entropy, logits.view(4, 10, 16), torch.full((4, 16), 12).cuda()), error(logits.gather, 1, index(10).view(1, 1)),
            error(lambda: logits[:, index(3, 11)]), error(put, index(64)), error(lambda: torch.arange(4, device="cuda")[index(0, 99)]),
            error(logits.scatter_, 0, index(64).view(1, 1), 1.0), error(torch.nn.functional.embedding_bag, index(100).view(1, 1), table.weight),
        ]
        """
    )
    expected = [
        ("embedding or index_select", 100, 100), ("cross entropy or nll_loss", 10, 10), ("cross entropy or nll_loss", 12, 10), ("gather", 10, 10),
        ("index", 11, 10), ("index_put", 64, 64), ("index", 99, 4), ("scatter_", 64, 64), ("embedding_bag", 100, 100),
    ]  # fmt: skip
    assert done.result == [f"{name}: index {index} is out of range for size {size}" for name, index, size in expected]


def test_indices_that_were_not_copied_to_the_card_raise_nothing(on_card: RunOnCard) -> None:
    """Indices that an operator of the card computed may differ in a real run, so they are not checked. Negative indices and the label that the
    loss ignores are valid.
    """
    done = on_card(
        OUT_OF_RANGE
        + """
        tokens = hidden.argmax(-1)
        uninitialised = torch.empty(64, dtype=torch.long, device="cuda")
        large = torch.full((1 << 23,), 500, device="cuda")
        changed, sentinel, counts = index(500, 1), torch.full((64,), -1, device="cuda"), torch.randn(4, device="cuda")
        changed.fill_(3)
        counts.sigmoid_()
        through_the_host = ((hidden > 0.5).sum(-1) - 1).cpu().cuda()
        result = [
            error(table, tokens - 1), error(table, uninitialised - 1), error(table, torch.bucketize(hidden, hidden[0, :5]) + 200),
            error(cross_entropy, logits, tokens + 20), error(logits.gather, 1, (tokens - 1)[:, None]), error(table.weight.index_select, 0, large),
            error(cross_entropy, logits, torch.full((64,), -100).cuda()), error(lambda: logits[index(-1, -64), :3]), error(lambda: logits[logits > 0]),
            error(table, changed), error(table, sentinel), error(table.weight.index_select, 0, (counts * 1000).long()), error(table, through_the_host),
        ]
        """
    )
    assert done.result == [None] * 13


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_reused_memory_reads_as_zeros(on_card: RunOnCard, settings: str) -> None:
    """New tensors never contain old data: neither copies from the host nor computed results."""
    done = on_card(
        """
        import random, torch

        random.seed(1)
        left, kept = [], []
        side = torch.cuda.Stream()
        pool = torch.cuda.MemPool()

        def fresh(size, kind):
            if kind == 0:
                return torch.empty(size, device="cuda")
            if kind == 1:
                return torch.empty_strided((size // 2, 2), (1, size // 2), device="cuda")
            if kind == 2:
                return torch.empty(0, device="cuda").resize_(size)
            if kind == 3:
                with torch.cuda.stream(side):
                    return torch.empty(size, device="cuda")
            if kind == 4:
                with torch.cuda.use_mem_pool(pool):
                    return torch.empty(size, device="cuda")
            x = torch.empty(size, device="cuda")
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(4 * size)
            return x

        for turn in range(1500):
            size = random.choice([2, 100, 256, 1000, 4096, 5000, 70000, 600000])
            x = fresh(size, random.randrange(6))
            if x.cpu().any():
                left.append([turn, size])
            x.view(-1)[: size // 2 * 2].copy_(torch.ones(size // 2 * 2)) if x.is_contiguous() else x.fill_(3)
            kept.append(x)
            if len(kept) > 8:
                kept.pop(random.randrange(8))
            if turn % 100 == 0:
                torch.cuda.empty_cache()
        result = left
        """,
        env={"PYTORCH_ALLOC_CONF": settings},
    )
    assert done.result == []
