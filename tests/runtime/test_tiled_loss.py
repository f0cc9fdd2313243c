"""The loss in tiles: that of the whole logits, which never exist, also where the head is sharded or tied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import VOCABULARY, Net, config, launched_gathers, more, net, rank, start, weights_of
from torch import nn
from torch.nn import functional as F

import onefold
from onefold.config import load_config
from onefold.plan import make_plan
from onefold.tiled_loss import _default_num_tiles


class Tiled(Net):
    """With the loss in tiles, of the head or of its weight."""

    by_weight = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return onefold.tiled_cross_entropy(h, self.head.weight if self.by_weight else self.head, y, 3)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most rows of logits that any operation has returned."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == VOCABULARY:
            self.rows = max(self.rows, len(out))
        return out


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["module", "weight"])
def test_loss_and_gradients_are_those_of_the_whole_logits(kind, reduction):
    torch.manual_seed(0)
    head = nn.Linear(2, VOCABULARY, bias=kind == "module")
    hidden, targets = torch.randn(4, 5, 2, requires_grad=True), torch.randint(0, VOCABULARY, (4, 5))
    targets[1:3, 2:] = -100
    expected = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction=reduction)
    expected = expected.reshape(4, 5) if reduction == "none" else expected
    inputs = [hidden, *head.parameters()]
    with Largest() as largest:
        given = head if kind == "module" else head.weight
        found = onefold.tiled_cross_entropy(hidden, given, targets, 7, reduction=reduction)
        gradients = torch.autograd.grad(found.sum(), inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), inputs))
    assert largest.rows == 3
    assert "forward" not in head.__dict__


def test_gradients_of_the_head_add_in_fp32():
    weight = nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
    hidden = torch.full((1001, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[0] = 1
    targets = torch.zeros(1001, dtype=torch.long)
    onefold.tiled_cross_entropy(hidden, weight, targets, 1001, reduction="sum").backward()
    assert weight.grad is not None
    assert weight.grad[1].item() == pytest.approx((1 + 1000 / 256) / 2, rel=2**-7)


def losses(kind: type[Net], stage: int, tied: bool, by_weight: bool, offload: bool, dtype: str) -> Any:
    torch.manual_seed(5 + rank())
    model = kind(tied=tied)
    model.by_weight = by_weight
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {name: {"device": "cpu"} for name in ("offload_optimizer", "offload_param")} if offload else {}
    more = {"bf16": {"enabled": dtype == "bf16"}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = start(model, config(stage, zero_optimization=zero, onefold={"units": ["Block", "head", "embed"]}, **more))
    generator = torch.Generator().manual_seed(rank())
    found = []
    for _ in range(3):
        x = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
        loss = engine(x, x.roll(-1, 1))
        engine.backward(loss)
        engine.step()
        found += [loss.item(), engine.get_global_grad_norm()]
    weights = weights_of(engine.module)
    engine.destroy()
    return found, weights


@pytest.mark.parametrize(
    ("stage", "tied", "by_weight", "offload", "dtype"),
    [
        (3, False, False, False, "fp32"),
        (3, False, True, False, "fp32"),
        (3, True, False, False, "fp32"),
        (3, False, False, True, "bf16"),
        (1, True, True, False, "bf16"),
    ],
)
def test_the_head_may_be_sharded_tied_or_offloaded(on_ranks, stage, tied, by_weight, offload, dtype):
    case = (stage, tied, by_weight, offload, dtype)
    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[dtype]
    plain, tiled = (on_ranks(2, losses, kind, *case) for kind in (Net, Tiled))
    for (expected, weights), (found, others) in zip(plain, tiled, strict=True):
        assert found == pytest.approx(expected, rel=tolerance)
        for name, weight in weights.items():
            torch.testing.assert_close(others[name].float(), weight.float(), rtol=tolerance, atol=tolerance)


def gathers_of_head() -> int:
    model = net()
    model.__class__ = Tiled
    zero = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    engine = start(model, config(3, zero_optimization=zero, onefold={"units": ["Block", "head", "embed"]}))
    x = torch.zeros(4, 7, dtype=torch.long)
    for _ in range(2):
        with launched_gathers() as found:
            engine.backward(engine(x, x))
        engine.step()
    engine.destroy()
    return found.count("head")


def test_a_sharded_head_is_gathered_once_for_all_tiles(on_ranks):
    """Once for forward and once for backward."""
    assert on_ranks(2, gathers_of_head) == [2, 2]


def test_default_tiles_have_256_mib_of_logits_and_at_least_1024_tokens():
    assert _default_num_tiles(torch.empty(32768, 8, device="meta"), 32768) == 16
    assert _default_num_tiles(nn.Linear(8, 1 << 18, device="meta"), 4096) == 4
    assert _default_num_tiles(nn.Linear(8, 100, device="meta"), 4096) == 1


def test_wrong_arguments_are_refused():
    hidden, head = torch.zeros(4, 5, 8), nn.Linear(8, 3)
    with pytest.raises(ValueError, match=r"hidden has 20 tokens \(\[4, 5, 8\]\) and targets have 16"):
        onefold.tiled_cross_entropy(hidden, head, torch.zeros(4, 4, dtype=torch.long))
    targets = torch.zeros(4, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="num_tiles is 0"):
        onefold.tiled_cross_entropy(hidden, head, targets, 0)
    with pytest.raises(ValueError, match=r"the vocabulary of a Sequential is unknown\. Pass num_tiles"):
        onefold.tiled_cross_entropy(hidden, nn.Sequential(head), targets)


# -- models of transformers --------------------------------------------------------------------------------------------


def causal_model(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape, **heads)).train()


def losses_of_transformers(tiled: bool, stage: int, options: dict[str, Any]) -> list[Any]:
    model = causal_model("Llama")
    if tiled:
        onefold.use_tiled_loss(model, 3)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    more = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "onefold": {"batch_chunks": 2 if tiled else 0}}
    engine = start(model, config(stage, zero_optimization=zero, **more))
    generator, found = torch.Generator().manual_seed(rank()), []
    for _ in range(3):
        x = torch.randint(0, 97, (4, 10), generator=generator)
        labels = x.clone()
        labels[1, :5] = -100
        output = engine(input_ids=x, labels=labels, use_cache=False, **options)
        engine.backward(output.loss)
        engine.step()
        found += [output.loss.item(), engine.get_global_grad_norm()]
    engine.eval()
    with torch.no_grad():
        output = engine(input_ids=x, labels=labels, use_cache=False)
    found += [output.loss.item(), output.logits.sum().item()]
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "options"), [(3, {}), (3, {"num_items_in_batch": 50}), (1, {})])
def test_a_model_of_transformers_computes_its_loss_in_tiles(on_ranks, stage, options):
    pytest.importorskip("transformers")
    plain, tiled = (on_ranks(2, losses_of_transformers, tiled, stage, options) for tiled in (False, True))
    for expected, found in zip(plain, tiled, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


# Forwards of transformers start threads, and ranks cannot be forked from a process with threads. So they run on a rank.


def use_missing_logits() -> None:
    x = torch.randint(0, 97, (2, 5))
    model = causal_model("Llama")
    onefold.use_tiled_loss(model)
    output = model(input_ids=x, labels=x, use_cache=False)
    assert output.loss.requires_grad
    with pytest.raises(RuntimeError, match="The logits were not computed"):
        output.logits.argmax(-1)
    assert model(input_ids=x, use_cache=False).logits.shape == (2, 5, 97)
    with pytest.raises(ValueError, match="changes its logits by final_logit_softcapping"):
        onefold.use_tiled_loss(causal_model("Gemma2"))
    capped = causal_model("Gemma2")
    capped.config.final_logit_softcapping = None
    onefold.use_tiled_loss(capped)
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(RuntimeError, match=r"remove onefold\.use_tiled_loss"):
        capped(input_ids=x, labels=x, use_cache=False)


def test_logits_that_were_not_computed_cannot_be_used(on_ranks):
    pytest.importorskip("transformers")
    on_ranks(1, use_missing_logits)


def copy_model() -> None:
    model, x = causal_model("Llama"), torch.randint(0, 97, (2, 5))
    onefold.use_tiled_loss(model)
    copied = copy.deepcopy(model)
    expected = copied(input_ids=x, labels=x, use_cache=False).loss
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = copied(input_ids=x, labels=x, use_cache=False).loss
    assert torch.equal(found, expected)
    found.backward()
    assert copied.lm_head.weight.grad is not None
    assert model.lm_head.weight.grad is None


def test_a_copy_of_the_model_has_its_own_head(on_ranks):
    pytest.importorskip("transformers")
    on_ranks(1, copy_model)


def test_other_models_have_no_loss_to_tile():
    with pytest.raises(ValueError, match="a Net has no output embeddings"):
        onefold.use_tiled_loss(Net())


def test_losses_that_are_not_causal_are_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.ModernBertConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    with pytest.raises(ValueError, match="is ForMaskedLMLoss, but only the ForCausalLMLoss"):
        onefold.use_tiled_loss(transformers.ModernBertForMaskedLM(config))


def test_no_tokens_have_no_loss():
    head = nn.Linear(8, 16)
    loss = onefold.tiled_cross_entropy(torch.zeros(0, 8), head, torch.zeros(0, dtype=torch.long), reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()


# -- the key of the config ---------------------------------------------------------------------------------------------


def llama(kind: str) -> Any:
    """A small Llama: plain, with a tied head, with adapters, or with a trained copy of its head."""
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": kind == "tied"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    if kind == "qlora":
        from bitsandbytes.nn import Linear4bit, Params4bit

        for name in [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and "_proj" in name]:
            plain = model.get_submodule(name)
            packed = Linear4bit(plain.in_features, plain.out_features, bias=False, compute_dtype=torch.float32)
            packed.weight = Params4bit(plain.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, packed)
        model.to("cpu")  # packs the weights
    if kind in ("lora", "saved", "qlora"):
        from peft import LoraConfig, get_peft_model

        more = {"modules_to_save": ["lm_head"]} if kind == "saved" else {}
        targets = ["q_proj", "down_proj"] + ["lm_head"] * (kind == "lora")
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **more))
    return model.train()


def trained(kind: str, stage: int, tiles: Any, options: dict[str, Any], keys: dict[str, Any]) -> list[Any]:
    """Losses, norms, an evaluation and the weights of three steps; `shift_labels` as trainers pass them."""
    model = llama(kind)
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    engine = start(model, config(stage, optimizer=optimizer, onefold={"tiled_loss": tiles}, **keys))
    assert ("tiled loss" in engine.describe()) == bool(tiles)
    generator, found = torch.Generator().manual_seed(rank()), []
    for _ in range(3):
        x = torch.randint(0, 97, (4, 10), generator=generator)
        labels = x.clone()
        labels[1, :5] = -100
        more = dict(options)
        if more.pop("shifted", False):
            more["shift_labels"] = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        output = engine(input_ids=x, labels=labels, use_cache=False, **more)
        engine.backward(output.loss)
        assert bool(tiles) == (output.logits.shape[-1] != 97)
        engine.step()
        found += [output.loss.item(), engine.get_global_grad_norm() or 0.0]
    engine.eval()
    with torch.no_grad():
        output = engine(input_ids=x, labels=labels, use_cache=False)
    found += [output.loss.item(), output.logits.sum().item()]
    weights = {name: tensor.double().sum().item() for name, tensor in weights_of(engine.module).items()}
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    engine.close()
    changed = [name for each in (inner, inner.lm_head) for name in ("forward", "_loss_function") if name in vars(each)]
    assert not changed, changed
    return [*found, weights]


KEY_CASES = [
    more("plain", {}, {}),
    ("plain", {"num_items_in_batch": 50}, {"gradient_accumulation_steps": 2}),
    ("tied", {"shifted": True}, {}),
    ("lora", {"num_items_in_batch": torch.tensor(50)}, {}),
    more("qlora", {}, {"zero_optimization": {"stage3_param_persistence_threshold": 0}}),
    more("saved", {}, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
]


@pytest.mark.parametrize(("kind", "options", "keys"), KEY_CASES)
def test_the_key_gives_the_same_training_in_every_stage(on_ranks, kind, options, keys):
    pytest.importorskip("transformers")
    for package in {"plain": [], "tied": [], "qlora": ["peft", "bitsandbytes"]}.get(kind, ["peft"]):
        pytest.importorskip(package)
    plain = on_ranks(2, trained, kind, 3, False, options, keys)
    tiled = on_ranks(2, trained, kind, 3, 3, options, keys)
    for expected, found in zip(plain, tiled, strict=True):
        assert found[:-1] == pytest.approx(expected[:-1], rel=1e-4)
        assert found[-1] == pytest.approx(expected[-1], rel=1e-4, abs=1e-5)
    pairs = {"gradient_accumulation_steps": (2,)}.get(next(iter(keys), ""), (1,) if keys else (0, 1, 2))
    for stage in pairs:
        assert on_ranks(2, trained, kind, stage, 3, options, keys) == tiled


def messages_of_the_key() -> list[str]:
    import transformers

    found = []
    x = torch.zeros(1, 8, dtype=torch.long)

    def message(model: Any, call: Any = None, **given: Any) -> None:
        try:
            engine = start(model, config(0, onefold={"tiled_loss": True}))
        except onefold.ConfigError as error:
            found.append(str(error))
            return
        with pytest.raises(RuntimeError) as error:
            engine(**given)
        found.append(str(error.value))
        engine.close()

    message(Net())
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    message(transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**shape, **heads)))
    message(causal_model("Gemma2"))
    message(llama("plain"), input_ids=x, use_cache=False)
    used = llama("plain")
    onefold.use_tiled_loss(used)
    message(used)
    fused = llama("plain")
    fused.forward = lambda labels, **given: {"loss": fused.model(**given)[0].mean()}
    message(fused, input_ids=x, labels=x, use_cache=False)
    return found


def test_models_without_such_a_loss_are_refused_by_name(on_ranks):
    pytest.importorskip("transformers")
    (found,) = on_ranks(1, messages_of_the_key)
    wanted = [
        "onefold.tiled_loss: a Net contains no model of transformers",
        "a LlamaForSequenceClassification has no output embeddings with a loss function of transformers",
        "a Gemma2ForCausalLM changes its logits by final_logit_softcapping = 30.0",
        "LlamaForCausalLM is called in training mode without labels",
        "the loss of this LlamaForCausalLM is computed in tiles already",
        "the forward of LlamaForCausalLM computes its loss in another way",
    ]
    assert len(found) == len(wanted)
    for expected, text in zip(wanted, found, strict=True):
        assert expected in text


def loss_outside(stage: int) -> list[float]:
    engine = start(llama("plain"), config(stage, onefold={"tiled_loss": 3}))
    x = torch.randint(0, 97, (2, 10), generator=torch.Generator().manual_seed(1))
    targets = F.pad(x, (0, 1), value=-100)[:, 1:].contiguous()
    output = engine(input_ids=x, shift_labels=targets, use_cache=False)
    loss = engine.module.loss_function(logits=output.logits, labels=None, shift_labels=targets, vocab_size=97)
    engine.backward(loss)
    engine.step()
    expected = engine(input_ids=x, labels=x, use_cache=False).loss.item()
    engine.close()
    return [loss.item(), expected]


def test_a_loop_may_call_the_loss_function_with_shifted_labels(on_ranks):
    """Check the loss before a step, which the loop of accelerate's sequence parallelism computes itself."""
    pytest.importorskip("transformers")
    two, three = (on_ranks(2, loss_outside, stage) for stage in (2, 3))
    assert two == three
    assert two[0][1] < two[0][0]


@pytest.mark.parametrize(("value", "tiles"), [(True, None), ("auto", None), (False, 0), (0, 0), (4, 4)])
def test_the_key_takes_true_or_a_number(value, tiles):
    assert (
        make_plan(load_config({"train_batch_size": 1, "onefold": {"tiled_loss": value}}), 1).activations.loss_tiles
        == tiles
    )
