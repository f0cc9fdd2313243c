"""Experts in a ModuleList train as in plain torch, and where an expert of another rank is."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from expert_cases import batch_of, make_model, save_and_load, settings_of, train, train_beside_torch, weights_of
from models import more, rank, start
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.moe import expert_layers
from onefold.plan.layout import Layout


def run(on_ranks: Any, world: int, kind: str, size: int, stage: int, changes: Any = None, **keys: Any) -> list[Any]:
    found: list[Any] = on_ranks(world, train_beside_torch, kind, size, stage, changes or {}, keys)
    return found


@pytest.mark.parametrize(("world", "size"), [(2, 2), more(4, 2), more(4, 4)])
@pytest.mark.parametrize("kind", ["listed", more("MoE")])
def test_lists_train_as_plain_torch_and_alike_in_stages(on_ranks, world, size, kind):
    found = [run(on_ranks, world, kind, size, stage, gradient_clipping=0.5) for stage in (3, 2, 1)]
    assert all(each[0]["divided"] for each in found)
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert one["losses"] == same["losses"]
            assert one["norms"] == same["norms"]
            for name, value in one["weights"].items():
                torch.testing.assert_close(value, same["weights"][name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("stage", [0, more(1)])
def test_other_stages_and_accumulation(on_ranks, stage):
    run(on_ranks, 2, "listed", 2, stage, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        more({"zero_optimization": {"stage3_param_persistence_threshold": 100}}),
        more({"onefold": {"node_size": 2}}),
    ],
)
def test_features_train_with_listed_experts(on_ranks, keys):
    """With the threshold, biases are persistent and the rest is divided."""
    assert run(on_ranks, 2, "listed", 2, 3, **keys)[0]["divided"]


def train_in_fp8(size: int) -> tuple[list[float], set[tuple[int, bool]]]:
    keys = {"bf16": {"enabled": True}, "fp8": {"enabled": True, "emulate": True}}
    engine = start(make_model("listed"), settings_of(3, size, **keys))
    params = [param for unit in engine.state.schedule.units for param in unit.params]
    losses, _ = train(engine)
    found = {(param.spec.num_expert_parts, param.fp8 is not None) for param in params}
    engine.destroy()
    return losses, found


def test_divided_lists_are_gathered_in_the_dtype_of_the_model(on_ranks):
    """FP8 all-gathers would gather the experts of all ranks."""
    (whole, _), (divided, found) = (on_ranks(2, train_in_fp8, size)[0] for size in (1, 2))
    assert (2, False) in found
    assert (2, True) not in found
    assert (1, True) in found
    assert divided == pytest.approx(whole, rel=2e-2)


@pytest.mark.parametrize(("before", "world", "size"), [(2, 2, 1), more(4, 4, 4), more(4, 2, 2)])
def test_checkpoints_of_lists_are_loaded_by_any_division(on_ranks, tmp_path, before, world, size):
    saved = on_ranks(before, save_and_load, str(tmp_path), "listed", 2, 2, True, True)[0]
    loaded = on_ranks(world, save_and_load, str(tmp_path), "listed", size, 3, False, False)[0]
    for name, value in saved["before"].items():
        torch.testing.assert_close(loaded["before"][name], value, rtol=0, atol=0, msg=name)
    if world == before:
        assert loaded["losses"] == pytest.approx(saved["losses"], rel=1e-5)


def use(case: str) -> Any:
    """Use listed experts in a way, and return what is seen of it."""
    model = make_model("listed", jitter=0.1 if case == "jitter" else 0.0)
    if case == "state":
        model.blocks[0].forward = _changing(model.blocks[0])
    elif case == "not a number":
        model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * (1.0 if rank() else math.nan),))
    elif case == "dropout in experts":
        for expert in model.blocks[0].experts:
            expert.down = nn.Sequential(expert.down, nn.Dropout(0.5))
    elif case == "noisy router":
        model.blocks[0].gate.register_forward_hook(lambda module, args, output: output + torch.randn_like(output))
        model.blocks[0].forward = _routing_first(model.blocks[0])
    elif case == "two arguments":
        model.blocks[0].experts[3].forward = lambda rows, scale: rows * scale
        model.blocks[0].forward = lambda x: (model.blocks[0].experts[3](x, 2.0), x)
    elif case == "other size":
        for expert in model.blocks[0].experts:
            expert.forward = lambda rows: rows[:, :3]
    engine = start(model, settings_of(3, 2))
    experts, batch = model.blocks[0].experts, batch_of(0, rank())
    try:
        if case == "calls":
            engine.backward(engine(**batch))
            return model.blocks[0].num_shared_calls
        if case == "jitter":
            torch.manual_seed(5)
            loss = engine(**batch).item()
            torch.manual_seed(5)
            plain = make_model("listed", jitter=0.1)
            torch.manual_seed(5)
            return loss, plain(**batch).item()
        if case in ("dropout in experts", "noisy router"):
            with torch.no_grad():
                return [engine(**batch).item() for _ in range(2)]
        if case == "places":
            inside = []
            model.head.register_forward_pre_hook(
                lambda *_: inside.append([len(each.up.weight.untyped_storage()) for each in experts])
            )
            with torch.no_grad():
                engine(**batch)
            return [type(each).__name__ for each in experts], model.blocks[0].gate.in_features
        if case == "other's expert":
            loss = engine(**batch) + experts[3 - 3 * rank()].up.weight.sum()
            engine.backward(loss)
        engine.backward(engine(**batch))
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        engine.destroy()
    return "no error"


def _changing(block: nn.Module) -> Any:
    """Return a forward that routes in another way each time."""
    forward, calls = type(block).forward, []

    def changed(hidden: torch.Tensor) -> Any:
        calls.append(1)
        return forward(block, hidden * len(calls))

    return changed


def _routing_first(block: nn.Module) -> Any:
    """Return a forward that draws random numbers after its router has drawn some."""
    forward = type(block).forward

    def routing_first(hidden: torch.Tensor) -> Any:
        noise = block.gate(hidden.flatten(0, 1)).softmax(-1).mean()
        return forward(block, nn.functional.dropout(hidden, 0.5) + noise)

    return routing_first


@pytest.mark.parametrize("case", ["dropout in experts", "noisy router"])
def test_random_numbers_of_children_differ_between_calls(on_ranks, case):
    for first, second in on_ranks(2, use, case):
        assert first != second


def test_other_children_compute_once_and_noise_is_the_same(on_ranks):
    assert on_ranks(2, use, "calls") == [1, 1]
    for loss, plain in on_ranks(2, use, "jitter"):
        assert loss == pytest.approx(plain, rel=1e-5)


def test_the_children_are_the_own_ones_again(on_ranks):
    assert on_ranks(2, use, "places")[0] == (["Expert"] * 4, 16)


def test_tokens_that_are_not_numbers_are_computed(on_ranks):
    assert on_ranks(2, use, "not a number") == ["no error"] * 2


def test_calls_that_cannot_be_divided_are_named(on_ranks):
    for found in on_ranks(2, use, "state"):
        assert "the forward of blocks.0 calls its experts in another way if it runs again" in found
    for found in on_ranks(2, use, "two arguments"):
        assert "blocks.0 calls its experts with other arguments than one tensor of rows" in found
    for found in on_ranks(2, use, "other size"):
        assert "an expert of blocks.0 returned" in found
    for found in on_ranks(2, use, "other's expert"):
        assert "is gathered for its expert layer only" in found, found


class TwoLists(nn.Module):
    """A block with experts, norms in another list, and a parameter with an entry for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.correction = nn.Parameter(torch.zeros(4))


def test_the_list_of_experts_is_found_among_others():
    (layer,) = expert_layers(TwoLists())
    assert (layer.is_list, layer.list_name, layer.num_experts) == (True, "experts", 4)
    (layer,) = expert_layers(onefold.experts(TwoLists()))
    assert (layer.is_list, layer.list_name, layer.num_experts) == (True, "experts", 4)
    stacked: nn.Module = TwoLists()
    stacked.experts = nn.Parameter(torch.zeros(4, 16, 16))  # the norms are no experts
    (layer,) = expert_layers(onefold.experts(stacked))
    assert layer.stacked == ("correction", "experts")


class OneList(nn.Module):
    """Experts that are called with routed tokens, of which a rank may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for expert in index.unique().tolist():
            output = output.index_add(0, torch.where(index == expert)[0], self.parts[expert](tokens[index == expert]))
        return output


class Marked(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.first = nn.Linear(16, 16)
        self.experts_of_mine = onefold.experts(OneList(), parallel_size=2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        index = torch.arange(len(tokens)) % 3
        rows = self.first(tokens)
        if self.recomputes:
            output = checkpoint(self.experts_of_mine, rows, index, use_reentrant=False)
        else:
            output = self.experts_of_mine(rows, index)
        return output.square().mean()


def train_marked(recomputes: bool) -> tuple[list[float], list[float], int, bool]:
    torch.manual_seed(1)
    model = Marked(recomputes)
    plain = copy.deepcopy(model)
    engine = start(model, settings_of(3, 1))  # the mark asks for two parts
    batches = [torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    losses = []
    for step, batch in enumerate(batches):
        rows = batch[rank()][: 0 if rank() and step == 1 else 6]  # a rank without tokens
        loss = engine(rows) if len(rows) else engine(rows).nan_to_num()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights, size = weights_of(model), engine.expert_parallel.size
    engine.destroy()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    expected = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        for of_rank in range(2):
            rows = batch[of_rank][: 0 if of_rank and step == 1 else 6]
            loss = plain(rows) if len(rows) else plain(batch[0][:1]) * 0
            (loss / 2).backward()
            expected += [loss.item()] if of_rank == rank() else []
        for parameter in plain.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
    same = all(torch.allclose(weights[name], each, atol=1e-5) for name, each in plain.named_parameters())
    return losses, expected, size, same


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_marked_list_trains_without_tokens_on_a_rank(on_ranks, recomputes):
    for losses, expected, size, same in on_ranks(2, train_marked, recomputes):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert size == 2
        assert same


def test_parts_of_a_layout_have_whole_shards():
    """Two parts of three parameters each, over four ranks."""
    parts = [[(f"{part}.{each}", (40, 50), 0) for each in range(3)] for part in range(2)]
    whole = Layout.of_parts(parts, 4)
    part = whole.part(2, 1)
    assert whole.total == 2 * part.total == 4 * whole.shard_size
    assert part.num_shards == 2
    assert whole.shard_size % 2048 == 0
    assert [member.shape for member in part.members] == [(0,)] * 3 + [(40, 50)] * 3
    own, first = part.members[3:], whole.members[3].start
    assert first == part.total
    assert [member.start for member in own] == [member.start - first for member in whole.members[3:]]
    assert sum(stop - start for start, stop in part.gaps) == part.total - 3 * 2000


def test_different_parallel_sizes_are_refused(on_ranks):
    assert "ask for different parallel sizes: 2 (0), 4 (1)" in on_ranks(2, ask, [2, 4], 1)[0]
    assert (
        "expert_parallel_size is 4 in the config, but the expert layers of the model ask for 2"
        in on_ranks(2, ask, [2], 4)[0]
    )


def ask(sizes: list[int], given: int) -> str:
    model = nn.Sequential(*(onefold.experts(OneList(), parallel_size=size) for size in sizes))
    try:
        start(model, settings_of(3, given)).destroy()
    except ValueError as error:
        return str(error)
    return "no error"
