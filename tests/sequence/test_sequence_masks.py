"""Masks of sequences, and whose attention is divided: as in plain torch with whole sequences, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import config, rank, start
from test_sequence_parallel import LENGTH, MICRO, VOCABULARY, plain_model, samples, shifted, transformers_model
from torch import nn
from torch.nn import functional as F

# By its name, before any engine is made.
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from onefold.config import ConfigError
from onefold.sequence import dispatch
from onefold.sequence.transformers_models import mask_function

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def open_engine(model: nn.Module, size: int = 2, stage: int = 1, **keys: Any) -> Any:
    micro = {"train_micro_batch_size_per_gpu": MICRO}
    return start(model, config(stage, sequence_parallel_size=size, optimizer=SGD, gradient_clipping=0, **micro, **keys))


def padded(lengths: tuple[int, int] = (17, 10)) -> dict[str, torch.Tensor]:
    """A batch with padding on the right, whose labels count."""
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    return samples(0, 0) | {"attention_mask": mask.long()}


def losses_of(engine: Any, *batches: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the losses of some batches, from this rank's parts of them."""
    parts = [engine.sequence_parallel.split(batch) for batch in batches]
    found = [engine(**part) for part in parts]
    losses = [loss if isinstance(loss, torch.Tensor) else loss.loss for loss in found]
    return sum(
        engine.sequence_parallel.mean_loss(loss, part["labels"]) for loss, part in zip(losses, parts, strict=True)
    )


def plain_losses(model: nn.Module, *batches: dict[str, torch.Tensor]) -> torch.Tensor:
    found = [model(**batch) for batch in batches]
    return sum(loss if isinstance(loss, torch.Tensor) else loss.loss for loss in found)


def check_step(engine: Any, loss: torch.Tensor, reference: nn.Module, expected: torch.Tensor) -> None:
    """Compare a loss, and the gradients by a step of SGD, with those of plain torch."""
    torch.testing.assert_close(loss.detach(), expected.detach())
    engine.backward(loss)
    engine.step()
    before = [p.detach().clone() for p in reference.parameters()]
    expected.backward()
    for value, old, p in zip(engine.module.parameters(), before, reference.parameters(), strict=True):
        grad = p.grad if p.grad is not None else torch.zeros_like(p)
        torch.testing.assert_close(value.detach(), old - grad, rtol=1e-4, atol=1e-5)


def of_masks(kind: str, batch: dict[str, torch.Tensor], settings: dict[str, Any], keys: dict[str, Any]) -> None:
    model = transformers_model(kind, 4, 2, **settings)
    reference = copy.deepcopy(model)
    engine = open_engine(model, **keys)
    check_step(engine, losses_of(engine, batch), reference, plain_losses(reference, batch))
    engine.destroy()


QWEN2_MOE = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 5, "num_experts": 4}

LENGTHS = {"max_position_embeddings": 8, "pad_token_id": 0}
DYNAMIC_ROPE = LENGTHS | {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10.0}}
FACTORS = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0], "original_max_position_embeddings": 16}
LONG_ROPE = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10.0} | FACTORS, "pad_token_id": 0}
LONG_ROPE |= {"max_position_embeddings": 64, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("kind", "batch", "settings", "keys"),
    [
        pytest.param("Llama", padded(), {}, {}, id="padding"),
        pytest.param("Llama", padded((10, 0)), {}, {}, id="only padding"),
        pytest.param("Mistral", padded(), {"sliding_window": 5}, {}, id="padding and window"),
        # This model passes its window to the mask only.
        pytest.param("Qwen2Moe", samples(0, 0), QWEN2_MOE, {}, id="window of the mask"),
        # Frequencies of these depend on the largest position, which only the last rank has.
        pytest.param("Phi3", samples(0, 0), LONG_ROPE, {}, id="long rotary table"),
        pytest.param("Llama", samples(0, 0), DYNAMIC_ROPE, {}, id="dynamic rotary table"),
        pytest.param("Llama", samples(0, 0, packed=True), {}, {"onefold": {"batch_chunks": 2}}, id="packed chunks"),
        pytest.param("Llama", padded(), {"recomputes": True}, {"onefold": {"batch_chunks": 2}}, id="padded chunks"),
    ],
)
def test_masks_are_those_of_transformers(on_ranks, kind, batch, settings, keys):
    on_ranks(2, of_masks, kind, batch, settings, keys)


def two_forwards() -> None:
    """Recompute the first of two batches after the second one, whose samples are others."""
    model = transformers_model("Llama", 4, 2, recomputes=True)
    reference, batches = copy.deepcopy(model), (samples(0, 0, packed=True), padded())
    engine = open_engine(model)
    check_step(engine, losses_of(engine, *batches), reference, plain_losses(reference, *batches))
    engine.destroy()


def test_a_recomputed_batch_keeps_its_samples(on_ranks):
    on_ranks(2, two_forwards)


class Recomputed(nn.Module):
    """Attention in a function of the model that is recomputed, in one form or another."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 4), form

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        function = {"method": self.attend, "function": F.scaled_dot_product_attention}[self.form]
        arguments = [self.linear(x)] * (1 if self.form == "method" else 3)
        return checkpoint(function, *arguments, use_reentrant=False).square().sum()


def of_owners() -> None:
    engine = open_engine(plain_model(4, 4))
    batch = shifted(samples(0, rank()))
    for kind in ("no engine", "another engine"):  # whose attention is not divided, also in recomputation
        recomputed, reference = plain_model(4, 4, recomputes=True), plain_model(4, 4)
        other = open_engine(recomputed, size=1) if kind == "another engine" else None
        plain_losses(reference, batch).backward()
        loss = recomputed(**batch) if other is None else other(**batch)
        loss.backward()
        grads = [p.grad for p in reference.parameters()]
        if other is None:
            torch.testing.assert_close([p.grad for p in recomputed.parameters()], grads)
        else:
            norm = torch.stack([each.norm() for each in average(grads)]).norm()
            other.step()
            assert other.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)
            other.destroy()
    engine.destroy()
    x = torch.randn(1, 4, LENGTH, 4, generator=torch.Generator().manual_seed(1))
    model = Recomputed("method")
    reference = copy.deepcopy(model)
    engine = open_engine(model)
    part = x.chunk(2, dim=2)[rank()]
    loss = engine(part)
    engine.backward(loss)
    (reference(x) / 2).backward()  # ranks add their parts, and average
    norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)
    engine.destroy()
    engine = open_engine(Recomputed("function"))
    with pytest.raises(RuntimeError, match=r"not in a module.*checkpoint"):
        engine.backward(engine(part))
    engine.destroy()


def average(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        torch.distributed.all_reduce(tensor)
    return [tensor / torch.distributed.get_world_size() for tensor in tensors]


def test_recomputed_attention_belongs_to_the_model_that_calls_it(on_ranks):
    on_ranks(2, of_owners)


def of_whole_sequences() -> None:
    """Recompute undivided batches after the context in which their forward ran."""
    for model in (plain_model(4, 4, recomputes=True), transformers_model("Llama", 4, 2, recomputes=True)):
        reference, batch = copy.deepcopy(model), samples(0, 0)
        batch = shifted(batch) if "Plain" in type(model).__name__ else batch
        engine = open_engine(model)
        with engine.sequence_parallel.whole_sequences():
            loss = plain_losses(engine, batch)
        check_step(engine, loss, reference, plain_losses(reference, batch))
        engine.destroy()


def test_whole_sequences_are_recomputed_whole(on_ranks):
    on_ranks(2, of_whole_sequences)


class ByName(nn.Module):
    """Two attentions, one of which is called by a name that was imported before the engine is made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return F.scaled_dot_product_attention(x, x, x) + scaled_dot_product_attention(x, x, x)


def of_names() -> None:
    x = torch.randn(1, 4, LENGTH, 4, generator=torch.Generator().manual_seed(1))
    model = ByName()
    expected = copy.deepcopy(model)(x)
    engine = open_engine(model)
    found = engine(x.chunk(2, dim=2)[rank()])
    torch.testing.assert_close(found, expected.chunk(2, dim=2)[rank()])
    engine.destroy()
    assert scaled_dot_product_attention is F.scaled_dot_product_attention
    assert scaled_dot_product_attention.__module__ != "onefold.sequence.dispatch"


def test_attention_that_was_imported_by_name(on_ranks):
    on_ranks(2, of_names)


class OfTorch(nn.Module):
    """Torch's own attention layers, next to a call of its attention function."""

    def __init__(self, needs_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
        self.needs_weights = needs_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x + self.attention(x, x, x, need_weights=self.needs_weights)[0])
        heads = x.unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)


def of_torch() -> None:
    x = torch.randn(2, LENGTH, 8, generator=torch.Generator().manual_seed(1))
    model = OfTorch(needs_weights=False)
    reference = copy.deepcopy(model)
    engine = open_engine(model)
    part = x.chunk(2, dim=1)[rank()]
    for training in (True, False):  # in evaluation, torch would use other kernels
        engine.train(training)
        with torch.set_grad_enabled(training):
            expected = reference.train(training)(x).chunk(2, dim=2)[rank()]
            torch.testing.assert_close(engine(part), expected)
    model.needs_weights = True
    with pytest.raises(ValueError, match="need_weights=False"):
        engine(part)
    engine.destroy()
    assert torch.backends.mha.get_fastpath_enabled()


def test_attention_layers_of_torch(on_ranks):
    on_ranks(2, of_torch)


def of_base_model() -> None:
    """Call the model inside of a causal language model, as scripts do that need hidden states, and recompute it."""
    model, batch = transformers_model("Llama", 4, 2, recomputes=True), samples(0, 0, packed=True)
    reference = copy.deepcopy(model)
    engine = open_engine(model)
    part = engine.sequence_parallel.split(batch)
    with pytest.raises(ValueError, match="without position_ids"):
        engine.module.model(input_ids=part["input_ids"])
    found, expected = (
        each.model(input_ids=given["input_ids"], position_ids=given["position_ids"]).last_hidden_state
        for each, given in ((engine.module, part), (reference, batch))
    )
    torch.testing.assert_close(found.detach(), expected.detach().chunk(2, dim=1)[rank()])
    engine.backward(found.square().sum())
    engine.step()
    (expected.square().sum() / 2).backward()  # ranks add their parts, and average
    norm = torch.stack([p.grad.norm() for p in reference.model.parameters()]).norm()
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)
    engine.destroy()


def test_a_base_model_is_divided_too(on_ranks):
    on_ranks(2, of_base_model)


def layer_of(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), module)


def model_of(kind: str, task: str, **settings: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return getattr(transformers, f"{kind}{task}")(getattr(transformers, f"{kind}Config")(**sizes, **heads, **settings))


def refused(model: Any) -> str:
    with pytest.raises(ConfigError) as error:
        open_engine(model)
    return str(error.value)


def of_refused_models() -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_attention_heads": 4, "vocab_size": 60}
    assert "1 is a Conv1d" in refused(layer_of(nn.Conv1d(4, 4, 3)))
    assert "1 is a LSTM" in refused(layer_of(nn.LSTM(4, 4)))
    assert "1 is a BatchNorm1d" in refused(layer_of(nn.BatchNorm1d(4)))
    assert "whole sequences" in refused(model_of("Llama", "ForSequenceClassification"))
    assert "whole sequences" in refused(model_of("Bert", "ForQuestionAnswering"))
    assert "positions from 0" in refused(model_of("Roberta", "ForMaskedLM"))
    assert "neighbours" in refused(model_of("MobileBert", "ForMaskedLM", embedding_size=16, intra_bottleneck_size=16))
    import transformers

    decoder = transformers.BlenderbotSmallForCausalLM(transformers.BlenderbotSmallConfig(**sizes))
    assert "takes no position_ids" in refused(decoder)


def test_models_that_combine_tokens_are_refused(on_ranks):
    on_ranks(2, of_refused_models)


def of_refused_masks() -> None:
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, or_masks

    packed = samples(0, 0, packed=True)
    engine = open_engine(transformers_model("Llama", 4, 2))
    engine.module.config.use_cache = True
    with pytest.raises(ValueError, match=r"does not separate samples.*use_cache=False"):
        losses_of(engine, packed)
    parallel = engine.sequence_parallel
    dispatch.begin_forward(parallel)
    either = or_masks(causal_mask_function, bidirectional_mask_function)
    with pytest.raises(ValueError, match="a mask by or_masks"):
        mask_function(pytest.fail)(batch_size=1, mask_function=either)
    engine.destroy()
    engine = open_engine(model_of("Bert", "ForMaskedLM"))
    with pytest.raises(ValueError, match="does not separate samples"):
        losses_of(engine, packed)
    engine.destroy()
    windows = {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    engine = open_engine(model_of("ModernBert", "ForMaskedLM", **windows, **tokens))
    with pytest.raises(ValueError, match="supported for causal attention only"):
        losses_of(engine, padded())
    engine.destroy()


def test_masks_that_are_not_supported_are_refused(on_ranks):
    on_ranks(2, of_refused_masks)


def skipped_batch() -> str:
    """Catch an error of a layer on one rank, and go on with the next batch there."""
    model = transformers_model("Llama", 4, 2)
    engine = open_engine(model)
    part = engine.sequence_parallel.split(samples(0, 0))
    if rank() == 1:
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: {}["missing"])
        with pytest.raises(KeyError):
            engine(**part)
        handle.remove()
    with pytest.raises(RuntimeError) as error:
        engine(**part)
    return str(error.value)


def test_a_rank_that_skips_a_batch_is_named(own_ranks):
    for text in own_ranks(2, skipped_batch):
        assert "rank 0 at the attention of a sequence" in text
        assert "rank 1 at the shapes of the parts of a sequence" in text
