"""CUDA graphs of blocks: bits of eager steps in every stage, and what stays eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_cases import (
    CASES,
    EAGER,
    VOCABULARY,
    Decoder,
    batch,
    hooked,
    in_another_order,
    kept_gradients,
    odd_programs,
    other_outputs,
    problems,
    reasons_of,
    remembered,
    settings,
    with_other_masks,
)
from models import start, weights_of

from onefold.config import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_bits_are_those_of_eager_steps(on_nccl_ranks, tmp_path, world, case, stage):
    if case == "offload" and stage == 0:
        pytest.skip("stage 0 has nothing to offload")
    assert on_nccl_ranks(world, problems, str(tmp_path), stage, case) == [[]] * world


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_model_captured_as_a_whole_has_the_bits_of_eager_steps(on_nccl_ranks, tmp_path, case, stage):
    if case == "offload" and stage == 0:
        pytest.skip("stage 0 has nothing to offload")
    assert on_nccl_ranks(1, problems, str(tmp_path), stage, case, "model") == [[]]


@pytest.mark.parametrize("stage", [0, 2])
def test_several_ranks_capture_the_model_if_they_are_asked_to(on_nccl_ranks, tmp_path, stage):
    assert on_nccl_ranks(2, problems, str(tmp_path), stage, "clipping", "model") == [[], []]


def test_gradients_of_a_captured_model_may_be_kept_and_written(on_nccl_ranks):
    ((eager, graphs),) = on_nccl_ranks(1, kept_gradients)
    assert graphs == eager


def test_a_backward_from_another_output_is_refused(on_nccl_ranks):
    (((eager, graphs), error),) = on_nccl_ranks(1, other_outputs)
    assert graphs == eager
    assert "an output that had no gradient" in error


@pytest.mark.parametrize("kind", EAGER)
def test_a_model_that_a_graph_cannot_repeat_runs_eagerly(on_nccl_ranks, kind):
    ((reasons, _),) = on_nccl_ranks(1, reasons_of, kind, "model")
    assert any(EAGER[kind] in reason for reason in reasons) or (kind.__name__ == "WritingBlock" and not reasons)


@pytest.mark.parametrize("kind", EAGER)
def test_blocks_that_graphs_cannot_repeat_run_eagerly(on_nccl_ranks, kind):
    ((reasons, num_replays),) = on_nccl_ranks(1, reasons_of, kind)
    assert num_replays == 0
    assert len(reasons) == 1
    assert EAGER[kind] in reasons.pop()


def test_hooks_run(on_nccl_ranks):
    assert on_nccl_ranks(1, hooked) == [[4, 4, 3]]


@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_programs_that_hold_several_graphs(on_nccl_ranks, scope):
    ((eager, graphs, error),) = on_nccl_ranks(1, odd_programs, scope)
    assert graphs == eager
    assert "second time" in error


def compiled_model() -> list[str]:
    """Blocks that are compiled before or after `initialize`."""
    found = []
    model = Decoder()
    model.blocks[0].compile()
    try:
        start(model, settings(2, True))
    except ConfigError as error:
        found.append(str(error))
    engine = start(Decoder(), settings(2, True))
    try:
        engine.compile()
    except RuntimeError as error:
        found.append(str(error))
    engine.destroy()
    return found


def test_compiled_blocks_are_refused(on_nccl_ranks):
    ((before, after),) = on_nccl_ranks(1, compiled_model)
    assert "onefold.cuda_graphs: blocks that are compiled" in before
    assert "engine.compile() with onefold.cuda_graphs" in after


def trained_llama(stage: int, graphs: bool | str) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **shape))
    engine = start(llama, settings(stage, graphs, zero_optimization={"stage3_param_persistence_threshold": 0}))
    losses = []
    for number in range(8):
        tokens = batch(number)
        padding = torch.ones_like(tokens)
        padding[1, 12:] = 0
        found = engine(input_ids=tokens, attention_mask=padding, labels=tokens, output_hidden_states=number == 7)
        engine.backward(found.loss)
        engine.step()
        losses.append(found.loss.item())
    told = [engine._hooks.graphs.reasons, engine._hooks.graphs.num_replays] if graphs else None
    weights = {name: tensor.cpu() for name, tensor in weights_of(engine.module).items()}
    engine.destroy()
    return losses, weights, told


def compare_llamas(stage: int, scope: str) -> list[Any]:
    eager, graphs = (trained_llama(stage, on) for on in (False, scope))
    wrong: list[Any] = [] if eager[0] == graphs[0] else [eager[0], graphs[0]]
    wrong += [name for name, tensor in eager[1].items() if not torch.equal(tensor, graphs[1][name])]
    reasons, num_replays = graphs[2]
    reasons.pop("the model", None)  # it may read the mask on the host, so that its blocks are captured
    return wrong if num_replays and not reasons else [*wrong, graphs[2]]


@pytest.mark.parametrize(("stage", "scope"), [(2, "blocks"), (3, "blocks"), (2, "model")])
def test_models_of_transformers(on_nccl_ranks, stage, scope):
    assert on_nccl_ranks(1, compare_llamas, stage, scope) == [[]]


def losses_of_compiled(stage: int, compiles: bool) -> list[float]:
    """Losses of blocks that torch captures in CUDA graphs of its own."""
    torch.manual_seed(0)
    model = Decoder()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # a compiled function draws other numbers
    zero = {"stage3_param_persistence_threshold": 0}
    engine = start(model, settings(stage, False, zero_optimization=zero, gradient_accumulation_steps=2))
    if compiles:
        engine.compile(compile_kwargs={"mode": "reduce-overhead"})
    losses = []
    for number in range(16):
        loss, _ = engine(batch(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    engine.destroy()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reduce_overhead_of_torch(on_nccl_ranks, stage):
    eager, compiled = (on_nccl_ranks(1, losses_of_compiled, stage, compiles)[0] for compiles in (False, True))
    assert compiled == pytest.approx(eager, rel=1e-2)


def test_outputs_that_a_program_keeps_are_not_overwritten(on_nccl_ranks):
    ((eager, graphs),) = on_nccl_ranks(1, remembered)
    assert graphs == eager


def test_blocks_that_shared_an_argument_may_get_different_ones(on_nccl_ranks):
    ((eager, graphs),) = on_nccl_ranks(1, with_other_masks)
    assert graphs == eager


def test_backwards_in_another_order_are_refused(on_nccl_ranks):
    (error,) = on_nccl_ranks(1, in_another_order)
    assert "runs in another order than in the step in which it was captured" in error
