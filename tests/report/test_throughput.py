"""Tokens per second and the FLOPs of a model: counted as torch counts them, and only where they are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Net, batches, config, rank, start
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onefold.report.device_peaks import peak_flops
from onefold.report.model_flops import ModelFlops
from onefold.report.run_file import RunFile
from onefold.tools.train.gpt import GPT, GPTConfig

COMMON = {
    "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100 80GB PCIe", 312e12), ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA H20", None), ("NVIDIA L40", None), ("NVIDIA A10", None),
        ("Tesla V100-SXM2-32GB", 125e12), ("Tesla V100-PCIE-16GB", 112e12), ("Tesla V100S-PCIE-32GB", None),
        ("NVIDIA A100-PCIE-40GB", 312e12), ("NVIDIA A100-40C", None), ("NVIDIA A100-4-20C", None),
        ("GRID A100-10C", None), ("GRID V100-8Q", None), ("GRID A100D-1-10CME", None), ("NVIDIA H100-80C", None),
        ("NVIDIA GeForce RTX 4090", 165e12), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("", None),
    ],
)  # fmt: skip
def test_only_known_devices_have_a_peak(name, peak):
    assert peak_flops(name) == peak


def counted(model: nn.Module, **inputs: Any) -> float:
    """Return the FLOPs that torch counts for forward and backward."""
    with FlopCounterMode(display=False) as counter:
        output = model(**inputs)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
    return float(counter.get_total_flops())


def transformers_model(kind: str, **more: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(kind, **{**COMMON, **more})
    return AutoModelForCausalLM.from_config(settings, attn_implementation="eager")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_flops_are_those_that_torch_counts(kind, more):
    model, length = transformers_model(kind, **more), 32
    ids = torch.randint(0, 128, (3, length))
    found = ModelFlops.of(model)
    assert found is not None
    # Norms and biases are parameters, too. The first layer has gradients for its weights only, but is no embedding.
    assert found.per_token(length) * ids.numel() == pytest.approx(
        counted(model, input_ids=ids, labels=ids, use_cache=False), rel=0.02
    )


def test_flops_of_the_built_in_gpt():
    model = GPT(GPTConfig(num_layers=2, num_heads=2, dim=32, sequence_length=16))
    found = ModelFlops.of(model)
    assert found is not None
    # Of each layer: 12 x 32 x 32 weights and two norms. The head, and the last norm. No embedding table.
    assert found.of_parameters == 6 * (2 * (12 * 32 * 32 + 4 * 32) + 256 * 32 + 2 * 32)
    assert found.per_token(16) - found.of_parameters == 12 * 32 * 16 * 2


def test_only_the_experts_of_a_token_count_and_frozen_weights_have_no_gradient():
    experts = transformers_model("mixtral", num_local_experts=4, num_experts_per_tok=1)
    every = transformers_model("mixtral", num_local_experts=4, num_experts_per_tok=4)
    few, all_of_them = ModelFlops.of(experts), ModelFlops.of(every)
    assert few is not None
    assert all_of_them is not None
    assert all_of_them.of_parameters - few.of_parameters == 6 * 2 * 3 * (3 * 96 * 200)
    model = transformers_model("llama")
    trained = ModelFlops.of(model)
    model.requires_grad_(requires_grad=False)
    frozen = ModelFlops.of(model)
    assert trained is not None
    assert frozen is not None
    assert frozen.of_parameters == trained.of_parameters * 4 / 6


def test_an_adapter_on_experts_counts_for_those_of_a_token():
    peft = pytest.importorskip("peft")

    def flops(num_used: int, rank: int) -> float:
        model = transformers_model("mixtral", num_local_experts=4, num_experts_per_tok=num_used)
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        settings = peft.LoraConfig(r=rank, target_modules=[], target_parameters=names, task_type="CAUSAL_LM")
        found = ModelFlops.of(peft.get_peft_model(model, settings))
        assert found is not None
        return found.of_parameters

    of_a_rank_and_an_expert = 6 * 2 * ((96 + 2 * 200) + (200 + 96))
    for num_used in (1, 4):
        assert flops(num_used, rank=5) - flops(num_used, rank=2) == 3 * num_used * of_a_rank_and_an_expert


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_packed_weights_count_all_their_elements(storage):
    bnb = pytest.importorskip("bitsandbytes")
    model = transformers_model("llama", tie_word_embeddings=False)
    model.requires_grad_(requires_grad=False)
    whole = ModelFlops.of(model)
    for module in list(model.modules()):
        for name, linear in module.named_children():
            if isinstance(linear, nn.Linear):
                packed = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_storage=storage)
                packed.weight = bnb.nn.Params4bit(
                    linear.weight.data, requires_grad=False, quant_storage=storage, module=packed
                )
                setattr(module, name, packed.to("cpu"))
    assert model.lm_head.weight.dtype == storage
    assert model.lm_head.weight.numel() < 128 * 96
    assert ModelFlops.of(model) == whole


@pytest.mark.parametrize("kind", ["recurrent_gemma", "gpt_neo"])
def test_layers_of_unknown_types_have_no_flops(kind):
    from transformers import AutoConfig

    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.config = AutoConfig.for_model(kind)

    assert ModelFlops.of(Model()) is None


def test_windows_limit_the_positions():
    more = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    found = ModelFlops.of(transformers_model("qwen2", **more))
    assert found is not None
    assert found.attention == ((12.0 * 96, 8), (12.0 * 96, None))
    assert found.per_token(32) - found.of_parameters == 12 * 96 * (8 + 32)


def test_models_without_a_known_shape_have_none():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    assert ModelFlops.of(Net()) is None
    assert ModelFlops.of(T5ForConditionalGeneration(T5Config(**sizes))) is None


# -- records -----------------------------------------------------------------------------------------------------


class NetOfTokens(Net):
    """A model whose forward takes tokens as models of transformers do."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        loss: torch.Tensor = super().forward(input_ids, input_ids.roll(-1, 1))
        return loss


def record_of_tokens(folder: str) -> None:
    """Run steps of two micro-steps on each rank: without a mask, with one, and with tokens that the caller counts."""
    torch.manual_seed(0)
    engine = start(NetOfTokens(), config(2, gradient_accumulation_steps=2, onefold={"report": folder}))
    for place, (x, _) in enumerate(batches(6)):
        mask = torch.ones_like(x)
        mask[:, 4:] = 0
        with torch.no_grad():
            engine(input_ids=x)  # an evaluation is not counted
        loss = engine(input_ids=x, **({"attention_mask": mask} if place in (2, 3) else {}))
        engine.backward(loss)
        if place >= 4:
            engine.count_tokens(1000 + rank(), row_length=7)
        engine.step()
    engine.close()


def test_the_record_has_the_tokens_of_all_ranks(on_ranks, tmp_path):
    on_ranks(2, record_of_tokens, str(tmp_path))
    run = RunFile.read(tmp_path)
    assert [found.tokens for found in run.steps] == [2 * 2 * 28, 2 * 2 * 16, 2 * 2 * 1000]
    assert [found.flops for found in run.steps] == [None] * 3, "the model has no config that tells its shape"
    assert run.peak_flops is None


def record_of_gpt(folder: str) -> None:
    torch.manual_seed(0)
    shape = GPTConfig(num_layers=1, num_heads=2, dim=16, sequence_length=8)
    engine = start(GPT(shape), config(3, onefold={"report": folder}))
    for x, _ in batches(2):
        engine.backward(engine(x, x))
        engine.count_tokens(28, row_length=7)
        engine.step()
    for x, _ in batches(1):
        engine.backward(engine(x, x))
        engine.step()
    engine.close()


def test_the_record_has_flops_of_a_sharded_model(on_ranks, tmp_path):
    on_ranks(2, record_of_gpt, str(tmp_path))
    flops = 6 * (12 * 16 * 16 + 4 * 16 + 256 * 16 + 2 * 16) + 12 * 16 * 7
    steps = RunFile.read(tmp_path).steps
    assert [found.flops for found in steps] == [56 * flops, 56 * flops, None]
    assert [found.tokens for found in steps] == [56, 56, None]
    assert steps[0].utilization(1e9) == pytest.approx(56 * flops / steps[0].seconds / 1e9)
