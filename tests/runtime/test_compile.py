"""`engine.compile()`: blocks compiled, gathers and reductions between them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from covering import covering
from models import batches, config, more, net, precision, start, train


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


@covering(stage=(0, 3, more(1), more(2)), dtype=("fp32", "bf16"), strength=1)
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
    stage=(3, 1, more(0), more(2)), way=("model before", "blocks before", "engine", more("blocks after")), strength=1
)
def test_models_compile_in_every_way(on_ranks, stage, way):
    if stage not in _eager:
        _eager[stage] = on_ranks(2, compiled_by_the_user, stage, "not at all")
    found = on_ranks(2, compiled_by_the_user, stage, way)
    for (losses, num_graphs), (expected, none) in zip(found, _eager[stage], strict=True):
        assert num_graphs > none, "nothing was compiled"
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


def own_forward_after_destroy() -> bool:
    model = net()
    model.blocks[0].forward = own = model.blocks[0].forward
    engine = start(model, config(2))
    engine.compile(backend="aot_eager")
    engine.destroy()
    return model.blocks[0].__dict__.get("forward") == own and "forward" not in model.blocks[1].__dict__


def test_a_forward_of_the_users_own_comes_back_when_the_engine_goes(on_ranks):
    assert on_ranks(1, own_forward_after_destroy) == [True]
