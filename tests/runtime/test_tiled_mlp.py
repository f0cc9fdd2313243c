"""MLPs in tiles: the results of whole MLPs, the same bits in every stage, the memory and the gathers of one tile."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import batches, config, launched_gathers, more, rank, start, weights_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.config import load_config
from onefold.plan import make_plan
from onefold.runtime.tiled_modules import TiledForward, TiledModules, check_tiled_modules, find_tiled_modules

WIDTH, VOCABULARY = 12, 31


class Mlp(nn.Module):
    """The MLP of a Llama, with dropout, which counts its rows."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40, bias=False)
        self.down_proj, self.drop = nn.Linear(40, WIDTH), nn.Dropout(dropout)
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(x.shape[:-1].numel())
        return self.down_proj(self.drop(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """A block that mixes tokens, and an MLP that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.mix(h.mean(1, keepdim=True))
        return h + self.mlp(self.norm(h))


class Model(nn.Module):
    way = "plain"

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            plain = self.way == "plain"
            h = layer(h) if plain else checkpoint(layer, h, use_reentrant=self.way == "reentrant")
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class WideMlp(nn.Module):
    """An MLP whose sizes are multiples of 16, for FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(h)))


class Wide(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.layers = nn.ModuleList(WideMlp() for _ in range(3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = h + layer(h)
        return h.float().square().mean()


def in_tiles(module: Mlp, number: int) -> TiledForward:
    return TiledForward("mlp", module, number)


# -- one MLP -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 5), (7,), (1, 2, 3)])
@pytest.mark.parametrize("number", [1, 3, 20])
def test_outputs_and_gradients_are_those_of_the_whole_module(number, shape):
    torch.manual_seed(1)
    module, x = Mlp(), torch.randn(*shape, WIDTH, requires_grad=True)
    expected = module(x)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *module.parameters()])
    tiled = in_tiles(module, number)
    module.rows.clear()
    found = module(x)
    torch.testing.assert_close(found, expected)
    assert max(module.rows) <= 2 * -(-x.shape[:-1].numel() // number)  # two tiles are compared with one
    module.rows.clear()
    gradients = torch.autograd.grad(found.square().sum(), [x, *module.parameters()])
    torch.testing.assert_close(gradients, wanted)
    assert sum(module.rows) == x.shape[:-1].numel()
    tiled.remove()
    assert "forward" not in vars(module)


def test_dropout_has_one_mask_in_forward_and_backward_and_the_comparison_draws_nothing():
    module, x = Mlp(0.5), torch.randn(8, WIDTH, requires_grad=True)
    in_tiles(module, 2)
    torch.manual_seed(5)
    first = module(x)
    torch.manual_seed(5)
    second = module(x)
    assert torch.equal(first, second)
    torch.manual_seed(5)
    parts = [Mlp.forward(module, part) for part in x.split(4)]
    torch.testing.assert_close(first, torch.cat(parts))
    one, other = (torch.autograd.grad(each.sum(), x)[0] for each in (first, torch.cat(parts)))
    torch.testing.assert_close(one, other)


def test_evaluation_and_short_inputs_are_computed_whole():
    module, x = Mlp(), torch.randn(8, WIDTH)
    in_tiles(module, 4)
    module.eval()
    with torch.no_grad():
        module(x)
    assert module.rows == [8]
    other = Mlp()
    TiledForward("mlp", other, None)
    other(x)
    assert other.rows == [8]


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the elements of the tensors that a graph saves."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        super().__init__(self.pack, lambda tensor: tensor)

    def __enter__(self) -> Saved:
        super().__enter__()
        return self

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sizes[tensor.numel()] += 1
        return tensor


def test_only_the_input_is_saved():
    module, x = Mlp(), torch.randn(8, WIDTH, requires_grad=True)
    in_tiles(module, 4)
    with Saved() as saved:
        module(x)
    assert saved.sizes == Counter([8 * WIDTH])


def test_a_checkpoint_around_the_module_saves_its_own_inputs_and_recomputes_no_tile():
    """The checkpoint recomputes the input of the MLP, and the backward of the MLP its tiles."""
    layer, x = Layer(), torch.randn(2, 4, WIDTH, requires_grad=True)
    parameters = [x, *layer.parameters()]
    wanted = torch.autograd.grad(layer(x).square().sum(), parameters)
    in_tiles(layer.mlp, 4)
    with Saved() as saved:
        found = checkpoint(layer, x, use_reentrant=False)
    assert set(saved.sizes) <= {x.numel(), 0}
    layer.mlp.rows.clear()
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), parameters), wanted)
    assert layer.mlp.rows == [2] * 4


def test_a_checkpoint_around_the_module_frees_its_input():
    layer, x = Layer(), torch.randn(2, 4, WIDTH, requires_grad=True)
    in_tiles(layer.mlp, 4)
    inputs: list[StorageWeakRef] = []
    layer.mlp.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    loss = checkpoint(layer, x, use_reentrant=False).sum()
    assert [storage.expired() for storage in inputs] == [True]
    loss.backward()


# -- refusals ----------------------------------------------------------------------------------------------------------


class Mixing(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-2, keepdim=True))


class Storing(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(x)
        return self.kept * 2


class Pair(Mlp):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x.sum()


class Summing(Mlp):
    def forward(self, x: torch.Tensor, more: Any = None) -> Any:
        return super().forward(x).sum(-2)


CALLS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "mixing": (Mixing, {}, "mlp mixes tokens: the last 4 tokens differ from their part of the last 8 by"),
    "storing": (Storing, {}, "mlp stores a tensor with a gradient in 'kept'"),
    "pair": (Pair, {}, r"mlp returns an output \(tuple\) for an input of shape \[4, 12\]"),
    "summing": (Summing, {}, r"mlp returns an output of shape \[12\]"),
    "two tensors": (Summing, {"more": [torch.ones(8)]}, "mlp is called with more than one tensor"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_calls_that_cannot_be_tiled_are_refused(kind):
    make, given, message = CALLS[kind]
    torch.manual_seed(2)
    module = make()
    in_tiles(module, 2)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=f"onefold.tiled_mlp: {message}"):
        module(torch.randn(8, WIDTH, requires_grad=True), **given).sum().backward()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_expert = nn.Linear(WIDTH, 2), nn.ModuleList([Mlp(), Mlp()]), Mlp()


class NormMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.bnorm = nn.BatchNorm1d(WIDTH)


class Attending(nn.Module):
    """A decoder layer of OPT, which has the layers of its MLP itself."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


def test_mlps_are_found_by_their_layers_and_experts_are_left_out(caplog):
    model = nn.ModuleDict({"a": Layer(), "moe": Experts(), "b": Attending(), "c": Mlp()})
    assert find_tiled_modules(model, []) == ["a.mlp", "c"]
    with caplog.at_level("INFO", logger="onefold"):
        check_tiled_modules(model, [], [])
    assert "experts are computed whole, in moe" in caplog.text
    assert find_tiled_modules(model, ["Mlp"])[:1] == ["a.mlp"]
    assert find_tiled_modules(model, ["*.fc?"]) == ["b.fc1", "b.fc2"]
    with pytest.raises(onefold.ConfigError, match=r"no MLP is found in a ModuleDict .* outside of experts"):
        find_tiled_modules(nn.ModuleDict({"moe": Experts(), "b": Attending()}), [])
    with pytest.raises(onefold.ConfigError, match=r"moe is a Experts, whose output for a token depends"):
        find_tiled_modules(model, ["moe"])
    with pytest.raises(onefold.ConfigError, match=r"c\.bnorm is a BatchNorm1d"):
        find_tiled_modules(nn.ModuleDict({"c": NormMlp()}), [])
    with pytest.raises(onefold.ConfigError, match="tiled_mlp_modules: 'nothing' matches no module"):
        find_tiled_modules(model, ["nothing"])


def test_copies_of_a_model_compute_whole_modules():
    model = Model()
    tiles = TiledModules(model, [], 2)
    assert isinstance(model.layers[0].mlp.forward, TiledForward)
    copied = copy.deepcopy(model)
    assert not isinstance(copied.layers[0].mlp.forward, TiledForward)
    assert copied.layers[0].mlp.forward.__self__ is copied.layers[0].mlp
    tiles.remove()
    assert "forward" not in vars(model.layers[0].mlp)


@pytest.mark.parametrize(("value", "tiles"), [(True, None), (False, 0), (4, 4)])
def test_the_key_takes_true_or_a_number(value, tiles):
    keys = {"tiled_mlp": value, "tiled_mlp_modules": ["Mlp"]} if value else {"tiled_mlp": value}
    plan = make_plan(load_config({"train_batch_size": 1, "onefold": keys}), 1)
    assert (plan.activations.mlp_tiles, plan.activations.tiled_modules) == (tiles, ("Mlp",) if value else ())


# -- engines -----------------------------------------------------------------------------------------------------------


def trained(stage: int, tiles: int, way: str, keys: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Model()
    model.way = way
    own = {"tiled_mlp": tiles, **keys.pop("onefold", {})}
    engine = start(model, config(stage, onefold=own, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **keys))
    text = "tiled MLPs        3 modules compute and recompute their tokens in 3 tiles"
    assert (text in engine.describe()) == bool(tiles)
    found = []
    generator = torch.Generator().manual_seed(rank())
    for _ in range(3):
        x = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
        loss = engine(x, x.roll(-1, 1))
        engine.backward(loss)
        engine.step()
        found += [loss.item(), engine.get_global_grad_norm() or 0.0]
    weights = {name: tensor.clone() for name, tensor in weights_of(engine.module).items()}
    engine.close()
    assert not any("forward" in vars(module) for module in model.modules())
    return found, weights


def fp8_losses(stage: int) -> list[float]:
    found = []
    for tiles in (0, 3):
        keys = {"bf16": {"enabled": True}, "fp8": {"enabled": True, "emulate": True}}
        own = {"tiled_mlp": tiles, "units": ["WideMlp"]}
        engine = start(Wide(), config(stage, onefold=own, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **keys))
        torch.manual_seed(1)
        x = torch.randn(2, 12, 32, dtype=torch.bfloat16)
        for _ in range(2):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        engine.close()
    return found


def test_mlps_in_fp8_are_scaled_by_tile_and_are_the_same_in_every_stage(on_ranks):
    """Check the comparison of the first call too, which must not take the scales for a mix of tokens."""
    found = [on_ranks(1, fp8_losses, stage)[0] for stage in (0, 3)]
    assert found[0] == found[1]
    assert found[0][2:] == pytest.approx(found[0][:2], rel=0.05)


CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "plain": ("plain", {}, (0, 1, 2)),
    "checkpoint": ("non-reentrant", {}, (0,)),
    "reentrant": ("reentrant", {}, (0,)),
    "chunks": ("plain", {"onefold": {"batch_chunks": 2}}, (2,)),
    "offload": ("plain", {"bf16": {"enabled": True}, "zero_optimization": {
        "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}, ()),
}  # fmt: skip


@pytest.mark.parametrize("case", [name if name in ("plain", "reentrant") else more(name) for name in CASES])
def test_tiles_give_the_results_of_whole_mlps_and_the_same_bits_in_every_stage(on_ranks, case):
    way, keys, stages = CASES[case]
    tolerance = 2e-2 if "bf16" in keys else 1e-5
    plain, tiled = (on_ranks(2, trained, 3, tiles, way, copy.deepcopy(keys)) for tiles in (0, 3))
    for (expected, weights), (found, others) in zip(plain, tiled, strict=True):
        assert found == pytest.approx(expected, rel=tolerance)
        for name, weight in weights.items():
            torch.testing.assert_close(others[name].float(), weight.float(), rtol=tolerance, atol=tolerance)
    for stage in stages:
        for (expected, weights), (found, others) in zip(
            on_ranks(2, trained, stage, 3, way, copy.deepcopy(keys)), tiled, strict=True
        ):
            assert found == expected
            assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def gathers(tiles: int) -> tuple[int, int, int]:
    """Gathers of a block and bytes that a rank sends in the second step, and the bytes of its collectives."""
    zero = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    engine = start(Model(), config(3, zero_optimization=zero, onefold={"tiled_mlp": tiles}))
    x = torch.zeros(4, 7, dtype=torch.long)
    for _ in range(2):
        before = engine.ledger.copy()
        with launched_gathers() as found:
            engine.backward(engine(x, x))
        engine.step()
    rows = engine.ledger.since(before).rows()
    engine.close()
    return found.count("layers.1"), sum(row.bytes for row in rows), sum(row.calls for row in rows)


def test_a_block_is_gathered_once_for_all_tiles(on_ranks):
    whole, tiled = on_ranks(2, gathers, 0), on_ranks(2, gathers, 4)
    assert tiled == whole
    assert tiled[0][0] == 2  # once for forward and once for backward


def refused_by_units() -> list[str]:
    found = []
    for units in (["gate_proj", "*down_proj"], ["embed", "head"]):
        with pytest.raises(onefold.ConfigError) as error:
            start(Model(), config(3, onefold={"tiled_mlp": 2, "units": [f"*{name}" for name in units]}))
        found.append(str(error.value))
    return found


def test_modules_that_would_be_gathered_for_each_tile_are_refused(on_ranks):
    inner, of_root = on_ranks(1, refused_by_units)[0]
    assert "layers.0.mlp contains layers.0.mlp.gate_proj, which would be gathered for each tile" in inner
    assert "layers.0.mlp contains a part of the root unit" in of_root


def compiled(stage: int) -> float:
    engine = start(Model(), config(stage, onefold={"tiled_mlp": 2}))
    x, y = batches(1)[0]
    expected = engine(x % VOCABULARY, y % VOCABULARY).item()
    engine.compile(backend="eager")
    loss = engine(x % VOCABULARY, y % VOCABULARY)
    engine.backward(loss)
    engine.step()
    engine.close()
    return abs(loss.item() - expected)


def test_compiled_units_compute_mlps_in_tiles(on_ranks):
    assert on_ranks(1, compiled, 3)[0] < 1e-6
