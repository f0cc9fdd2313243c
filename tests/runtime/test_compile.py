"""Compiled models: `engine.compile()`, and models, blocks and losses that the user compiles."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from models import batches, config, more, net, precision, start, train
from torch import nn


def compiled(stage: int, dtype: str, compiles: bool) -> tuple[Any, dict[str, int], bool]:
    torch._dynamo.reset()
    engine = start(net(), config(stage, gradient_clipping=0.5, **precision(dtype)))
    if compiles:
        engine.compile(backend="aot_eager", compile_kwargs={"fullgraph": True})
    trace = train(engine, 3)
    with torch.no_grad():
        engine.eval()
        x, y = batches(1, seed=9)[0]
        trace.losses.append(engine(x, y).item())
    traffic = {row.operation: row.bytes for row in engine.ledger.rows() if row.operation != "synchronize"}
    return trace, traffic, engine.is_compiled


@covering(stage=(3, more(0), more(1), more(2)), dtype=("bf16", more("fp32")), strength=1)
def test_compiled_blocks_train_as_the_eager_ones_do(on_ranks, stage, dtype):
    eager = on_ranks(2, compiled, stage, dtype, False)
    for (mine, sent, yes), (theirs, expected, no) in zip(on_ranks(2, compiled, stage, dtype, True), eager, strict=True):
        assert (yes, no) == (True, False)
        assert sent == expected
        torch.testing.assert_close(mine.losses, theirs.losses, rtol=1e-4, atol=1e-4)
        for name in theirs.weights:
            torch.testing.assert_close(mine.weights[name], theirs.weights[name], rtol=1e-2, atol=2e-3)


def refuses(given: dict[str, Any]) -> tuple[str, bool, list[str]]:
    engine = start(net(), config(1))
    with pytest.raises(ValueError, match=r"engine\.compile: ") as caught:
        engine.compile(**given)
    replaced = [name for name, module in engine.module.named_modules() if "forward" in module.__dict__]
    return str(caught.value), engine.is_compiled, replaced


@pytest.mark.parametrize("given", [{"schedule": []}, {"compiled_autograd_enabled": True}])
def test_what_belongs_to_deepcompile_is_refused(on_ranks, given):
    (key,) = given
    for told, is_compiled, replaced in on_ranks(1, refuses, given):
        assert key in told
        assert "DeepCompile" in told
        assert not is_compiled
        assert replaced == []


def after_the_engine(destroys: bool) -> bool:
    model = net()
    engine = start(model, config(2))
    engine.compile(backend="aot_eager")
    train(engine, 1)
    if destroys:
        engine.destroy()
    del engine
    gc.collect()
    return all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("destroys", [True, False])
def test_destroying_an_engine_removes_the_compiled_forward(on_ranks, destroys):
    assert on_ranks(1, after_the_engine, destroys) == [True]


def compiled_by_the_user(stage: int, way: str) -> Any:
    """Every way in which people compile a model, beside an engine that compiles nothing."""
    torch._dynamo.reset()
    model: Any = net()
    if way == "model before":
        model = torch.compile(model, backend="aot_eager")
    elif way == "blocks before":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    zero = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
    engine = start(model, config(stage, gradient_clipping=0.5, zero_optimization=zero))
    called: Any = engine
    if way == "engine":
        called = torch.compile(engine, backend="aot_eager")
    elif way == "blocks after":
        for block in engine.module.blocks:
            block.compile(backend="aot_eager")
    losses = []
    for x, y in batches(3):
        loss = called(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(called(*batches(1, seed=9)[0]).item())
    num_graphs = sum(torch._dynamo.utils.counters["stats"].values())
    return losses, num_graphs


_eager: dict[int, Any] = {}


@covering(
    stage=(3, 1, more(0), more(2)),
    way=(more("model before"), "blocks before", "engine", more("blocks after")),
    strength=1,
)
def test_models_compile_in_every_way(on_ranks, stage, way):
    if stage not in _eager:
        _eager[stage] = on_ranks(2, compiled_by_the_user, stage, "not at all")
    found = on_ranks(2, compiled_by_the_user, stage, way)
    for (losses, num_graphs), (expected, none) in zip(found, _eager[stage], strict=True):
        assert num_graphs > none, "nothing was compiled"
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


def losses_of_a_transformers_model(stage: int, compiled: bool) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=40, **shape))
    engine = start(torch.compile(model, backend="eager") if compiled else model, config(stage))
    losses = []
    for step in range(3):
        tokens = torch.arange(step, step + 32).view(4, 8)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [3, more(2)])
def test_a_transformers_model_may_be_compiled_before_initialize(on_ranks, stage):
    """Its forward makes a slice of a ModuleList, which hooks on registrations see."""
    eager = on_ranks(1, losses_of_a_transformers_model, stage, False)
    assert on_ranks(1, losses_of_a_transformers_model, stage, True) == eager


def own_forward_after_destroy() -> bool:
    model = net()
    model.blocks[0].forward = own = model.blocks[0].forward
    engine = start(model, config(2))
    engine.compile(backend="aot_eager")
    engine.destroy()
    return model.blocks[0].__dict__.get("forward") == own and "forward" not in model.blocks[1].__dict__


def test_a_forward_of_the_users_own_comes_back_when_the_engine_goes(on_ranks):
    assert on_ranks(1, own_forward_after_destroy) == [True]


class ReadsHead(nn.Module):
    """A loss outside of the model, which reads a weight of it."""

    def forward(self, hidden: torch.Tensor, y: torch.Tensor, model: nn.Module) -> torch.Tensor:
        logits = F.linear(hidden, model.head.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


class Counter:
    """A backend that runs graphs as they are, and counts them and their operations."""

    num_graphs = num_ops = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.num_graphs += 1
        self.num_ops += sum(node.op.startswith("call") for node in graph.graph.nodes)
        return graph.forward


def graphs(stage: int | None, when: str) -> tuple[list[float], int, int]:
    """Losses, number of graphs and of operations in them. None is plain torch, compiled as a whole."""
    torch._dynamo.reset()
    counter = Counter()
    model: Any = net()
    if stage is None:
        model = torch.compile(model, backend=counter)
        model(*batches(1)[0]).backward()
        return [], counter.num_graphs, counter.num_ops
    if when == "model":
        model = torch.compile(model, backend=counter)
    zero = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0, "reduce_bucket_size": 1000}
    engine = start(model, config(stage, gradient_clipping=0.5, zero_optimization=zero))
    called: Any = engine
    losses = []
    for number, (x, y) in enumerate(batches(5)):
        if number == 2 and when == "late":  # updates of the last step may be in flight
            called = torch.compile(engine, backend=counter)
        loss = called(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, counter.num_graphs, counter.num_ops


@covering(stage=(1, more(0), more(2)), when=("late", more("model")), world=(2, more(1)), strength=2)
def test_hooks_break_no_graph_where_parameters_stay_unsharded(on_ranks, stage, when, world):
    ((_, *plain),) = on_ranks(1, graphs, None, "model")
    for (losses, *compiled), (expected, *_) in zip(
        on_ranks(world, graphs, stage, when), on_ranks(world, graphs, stage, "never"), strict=True
    ):
        assert compiled == plain
        assert losses == expected


@pytest.mark.parametrize("when", ["model", more("late")])
def test_a_unit_that_unshards_is_one_graph(on_ranks, when):
    for (losses, num_graphs, num_ops), (expected, *_) in zip(
        on_ranks(2, graphs, 3, when), on_ranks(2, graphs, 3, "never"), strict=True
    ):
        # The embedding, the blocks, which share one, the head, and the loss.
        assert num_graphs == 4
        assert num_ops == 11
        assert losses == expected


def loss_outside(stage: int, compiles: bool) -> list[float]:
    """A compiled loss that reads a weight outside of the forward of its unit, and the engine compiled or not."""
    torch._dynamo.reset()
    model = net()
    model.forward = lambda x: model.blocks[0](model.embed(x))  # type: ignore[method-assign]
    engine = start(model, config(stage))
    compute = torch.compile(ReadsHead(), backend="eager") if compiles else ReadsHead()
    called: Any = torch.compile(engine, backend="eager") if compiles else engine
    losses = []
    for x, y in batches(3):
        engine.backward(loss := compute(called(x), y, model))
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [3, more(1)])
def test_a_compiled_loss_reads_a_weight_outside_of_its_unit(on_ranks, stage):
    assert on_ranks(2, loss_outside, stage, True) == on_ranks(2, loss_outside, stage, False)
