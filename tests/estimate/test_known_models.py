"""Models that `onefold plan` knows by name, and advice that says what it changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onefold.moe import count_parameters
from onefold.tools.estimate.advice import advise
from onefold.tools.estimate.forecast import forecast
from onefold.tools.estimate.machines import GB, adjust, find_machine
from onefold.tools.estimate.model_configs import MODELS, known_model
from onefold.tools.estimate.models import find_model, from_number
from onefold.tools.estimate.question import DEFAULT_CONFIG, Question, Setting, settings_for
from onefold.tools.estimate.shapes import ModelKind, classify_model

# The numbers of parameters in the safetensors index of each published model. Without buffers: DeepSeek-V3's bias of
# routers, 14,848 elements, is one.
PUBLISHED = {
    "llama-3.2-3b": 3_212_749_824, "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "phi-2": 2_779_683_840, "phi-3-mini": 3_821_079_552, "phi-4": 14_659_507_200,
    "deepseek-v3": 671_026_419_200 - 58 * 256, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
}  # fmt: skip
# Billions of parameters for a token, as the model cards say. Those of gpt-oss leave out the embedding table.
ACTIVE = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "deepseek-v3": 37}


def test_every_model_has_a_published_number():
    assert MODELS.keys() == PUBLISHED.keys()
    assert all(classify_model(name) is ModelKind.KNOWN for name in MODELS)


QUICK = ("qwen2.5-7b", "mixtral-8x7b", "gpt2", "deepseek-v3")


@pytest.mark.parametrize("name", [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS
])  # fmt: skip
def test_a_known_model_has_the_published_parameters(name):
    counts = count_parameters(find_model(name).build())
    assert counts.total == PUBLISHED[name]
    if name in ACTIVE:
        assert counts.active is not None
        assert counts.active / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("Qwen3 8B", "qwen3-8b"), ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"), ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("meta-llama/Llama-3.1-405B", "llama-3.1-405b"), ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"), ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("openai-community/gpt2-xl", "gpt2-xl"), ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b"), ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"), ("mistralai/Mixtral-8x22B-Instruct-v0.1", None),
        ("mistralai/Mistral-7B-v0.3", None), ("mistralai/Mistral-7B-Instruct-v0.1", None),
        ("microsoft/Phi-3-mini-128k-instruct", None), ("Qwen/Qwen3-4B-Instruct-2507", None), ("Qwen3-8B-Base", None),
        ("gpt2-instruct", None), ("runs/qwen3-8b", None), ("llama-7b", None), ("qwen3-9b", None),
    ],
)  # fmt: skip
def test_names_of_publishers_and_variants_are_known(text, name):
    assert known_model(text) == name


# -- advice ------------------------------------------------------------------------------------------------------


def question_of(parameters: float, machine: str, config: dict[str, Any] = DEFAULT_CONFIG, **more: Any) -> Question:
    return Question(from_number(round(parameters)), adjust(find_machine(machine), **more), config)


def test_int8_states_and_ratio_are_advised_where_states_leave_the_gpu():
    question = question_of(7e9, "8xA100", memory=14 * GB)
    found = forecast(question, settings_for(question.machine))
    advice = advise(question, found)
    assert "cpu" in str(advice.setting)
    assert 'offload_optimizer.ratio "auto" keeps the states on the GPU' in advice.reason
    assert "Offloaded states change roundings, unless onefold.offloaded_step is device." in advice.reason
    assert "With onefold.state_dtype int8, stage 3 fits without offloading" in advice.reason
    assert "It changes numerics: optimizer states are rounded to 8 bits" in advice.reason


def test_advice_is_not_repeated_for_keys_that_are_set():
    own = {"state_dtype": "int8", "offloaded_step": "device"}
    question = question_of(30e9, "8xA100", {**DEFAULT_CONFIG, "onefold": own})
    cpu = {"device": "cpu", "ratio": "auto"}
    setting = Setting("stage 3 + optimizer cpu", {"stage": 3, "offload_optimizer": cpu})
    advice = advise(question, forecast(question, [setting]))
    assert advice.setting == setting.name
    for words in ("state_dtype", "ratio", "roundings"):
        assert words not in advice.reason


def test_nothing_is_said_of_numerics_where_nothing_changes():
    question = question_of(1e9, "8xH100")
    advice = advise(question, forecast(question, settings_for(question.machine)))
    for words in ("numerics", "roundings", "int8", "ratio"):
        assert words not in advice.reason


def test_recomputing_changes_no_result_and_int8_does_where_nothing_fits():
    machine = adjust(find_machine("H100"), memory=3 * GB, host_memory=3 * GB, nvme=0)
    question = Question(replace(find_model("120m")), machine, DEFAULT_CONFIG, 64, 256)
    found = forecast(question, settings_for(machine)[:1], finds_batch=False)
    reason = advise(question, found).reason
    assert "of activations, and changes no result." in reason
    assert "It changes numerics: optimizer states are rounded to 8 bits" in reason
