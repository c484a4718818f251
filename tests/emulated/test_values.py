"""Values that steer a program are computed on the card by default: masks, counters, positions, scales. Other floats read as zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """Where a division of zeros by zeros would print NaN, the card has zeros. A program's own infinities stay."""
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


def test_an_operator_that_fails_on_the_host_does_not_fail_on_the_card(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import torch

        indices = torch.tensor([0, 99], device="cuda")
        result = list(torch.arange(4, device="cuda")[indices].shape)  # an assertion inside a kernel, on a real card
        """
    )
    assert done.result == [2]
