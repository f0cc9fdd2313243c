"""The config floor by property: what loads, what is refused, what is said, and what an error tells."""

import base64
import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "tools"))  # the generator is not installed

from config_page import document

from onefold.config import Batch, Config, ConfigError, check_built, load_config, solve_batch
from onefold.config.keys import entries, walk

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "configs").iterdir())


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


# The files that are shipped


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads_and_starts_with_a_comment(path: Path) -> None:
    config = load_config(path)
    assert path.read_text().startswith("# " if path.suffix == ".yaml" else "// ")
    assert config.raw
    stage_in_name = next((int(digit) for digit in "123" if f"zero{digit}" in path.name), None)
    if stage_in_name is not None:
        assert config.zero_optimization.stage == stage_in_name
    check_built(config)


def test_the_full_example_gives_what_it_describes() -> None:
    config = load_config(ROOT / "examples/configs/full-zero3-offload.json")
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (128, 2)
    assert config.zero_optimization.offload_param.device == "cpu"
    assert config.zero_optimization.stage3_param_persistence_threshold == 1_000_000
    assert config.optimizer is not None
    assert config.optimizer.params["betas"] == (0.9, 0.999)
    assert config.scheduler is not None
    assert config.scheduler.type == "WarmupDecayLR"
    assert config.compute_dtype == "fp16"
    assert solve_batch(config, 4) == Batch(128, 2, 16, 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accelerate-zero2.yaml", {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500_000_000}),
        ("zero2-buckets.json", {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}),
        ("zero2-allreduce-bucket.json", {"reduce_bucket_size": 500_000_000, "overlap_comm": True}),
        ("zero3-auto.json", {"reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000}),
        ("accelerate-zero3.yaml", {"stage3_gather_16bit_weights_on_model_save": True}),
    ],
)
def test_examples_give_their_values(name: str, expected: dict[str, Any]) -> None:
    zero_optimization = load_config(ROOT / "examples/configs" / name).zero_optimization
    assert {key: getattr(zero_optimization, key) for key in expected} == expected


def test_infinity_reads_the_documented_spelling_of_threads() -> None:
    config = load_config(ROOT / "examples/configs/infinity.json")
    assert config.aio.intra_op_parallelism == 2
    assert config.zero_optimization.offload_param.nvme_path == ("/local_nvme",)
    assert not any(line.startswith("aio") for line in config.notices)


def test_docs_are_fresh() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == document(), "run `make docs`"


def test_docs_name_every_key() -> None:
    text = document()
    for path, entry in walk(Config):
        assert f"`{path if entry.section is not None and not entry.optional else entry.name}`" in text


# Defaults and the object


def test_an_empty_config_has_defaults_and_nothing_to_say() -> None:
    config = load_config({})
    assert (config.notices, config.refusals, config.raw) == ((), (), {})
    assert config.zero_optimization.stage == 0
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization.overlap_comm is None
    assert config.zero_optimization.offload_optimizer.device == "none"
    assert config.onefold.collective == "auto"
    assert config.optimizer is None
    assert config.compute_dtype == "fp32"
    check_built(config)


def test_every_default_written_out_loads_and_refuses_nothing() -> None:
    def written(kind: type) -> dict[str, Any]:
        found = {}
        for entry in entries(kind).values():
            if entry.section is not None and not entry.optional:
                found[entry.name] = written(entry.section)
            elif not entry.optional and entry.name not in ("type",):
                found[entry.name] = list(entry.default) if isinstance(entry.default, tuple) else entry.default
        return found

    config = load_config(written(Config))
    assert config.refusals == ()
    # What only some stages or NVMe read is said even at its default; nothing else is.
    assert all("below stage" in line or line.startswith("aio") for line in config.notices), config.notices


def test_config_is_frozen_and_passes_through() -> None:
    config = load_config(zero(stage=1))
    assert load_config(config) is config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train_batch_size = 3  # type: ignore[misc]


def test_raw_is_a_copy_of_what_was_given() -> None:
    given = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "steps_per_print": math.inf}
    config = load_config(given)
    assert config.raw == given
    given["zero_optimization"]["stage"] = 1  # type: ignore[index]
    assert config.raw["zero_optimization"]["stage"] == 2


# Absent values, dotted paths, aliases


@pytest.mark.parametrize("absent", ["auto", None, "none", "None", "AUTO"])
def test_absent_values_leave_the_default(absent: Any) -> None:
    config = load_config(
        {
            "train_batch_size": absent,
            "gradient_clipping": absent,
            "communication_data_type": absent,
            "fp16": {"enabled": absent, "loss_scale": absent},
            "bf16": absent,
            "optimizer": {"type": "AdamW", "params": {"lr": absent, "betas": absent, "eps": 1e-8}},
            "scheduler": absent,
            "onefold": {"collective": absent},
            **zero(
                stage=2, offload_optimizer=absent, offload_param={"device": absent, "nvme_path": absent}, zenflow=absent
            ),
        }
    )
    assert config.train_batch_size is None
    assert config.gradient_clipping == 1.0
    assert config.optimizer is not None
    assert config.optimizer.params == {"eps": 1e-8}
    assert config.scheduler is None
    assert config.zero_optimization.offload_param.device == "none"
    assert (config.notices, config.refusals) == ((), ())


def test_a_section_of_autos_is_absent() -> None:
    params = {"type": "auto", "params": {"lr": "auto", "betas": ["auto", "auto"]}}
    assert load_config({"optimizer": params}).optimizer is None


@pytest.mark.parametrize("absent", ["auto", None, "none"])
@pytest.mark.parametrize(("kind", "given", "read"), [
    ("AdamW", [..., 0.95], (0.9, 0.95)),
    ("adam8bit", [0.8, ...], (0.8, 0.999)),
    ("Lion", [..., 0.5], (0.9, 0.5)),
    ("Muon", [..., 0.5], (0.9, 0.5)),
])  # fmt: skip
def test_an_absent_element_of_a_list_is_that_of_the_default(absent: Any, kind: str, given: Any, read: Any) -> None:
    betas = [absent if beta is ... else beta for beta in given]
    for path in ({"optimizer": {"type": kind, "params": {"betas": betas}}},
                 {"optimizer.type": kind, "optimizer.params.betas": betas}):  # fmt: skip
        optimizer = load_config(path).optimizer
        assert optimizer is not None
        assert optimizer.params["betas"] == read


@pytest.mark.parametrize(("key", "value", "path"), [
    ("betas", [None, 0.9, 0.9], "optimizer.params.betas[0]"),
    ("adamw_names", ["*.up", "auto"], "optimizer.params.adamw_names[1]"),
    ("ns_coefficients", [1, None, 2], "optimizer.params.ns_coefficients[1]"),
])  # fmt: skip
def test_an_absent_element_without_a_default_is_named(key: str, value: Any, path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f'{path} is "auto" or null')):
        load_config({"optimizer": {"type": "Muon", "params": {key: value}}})


def test_a_dotted_path_is_its_key() -> None:
    config = load_config(
        {
            "zero_optimization.reduce_bucket_size": 5,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
            "zero_optimization.offload_optimizer.device": "cpu",
            "zero_optimization.offload_optimizer.pin_memory": False,
            "optimizer.type": "AdamW",
            "optimizer.params.lr": 1e-3,
            "bfloat16.enabled": True,
        }
    )
    assert config.zero_optimization.reduce_bucket_size == 5
    assert config.zero_optimization.stage == 2
    assert config.zero_optimization.offload_optimizer.pin_memory is False
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-3}
    assert config.bf16.enabled


@pytest.mark.parametrize(
    "given",
    [
        zero(reduce_bucket_size=5e8, allreduce_bucket_size=2e8),
        {"optimizer.params.lr": 1e-3, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
        # DeepSpeed rejects two spellings of a stage-3 key even when they agree, and so does this.
        zero(stage=3, stage3_max_live_parameters=5, max_live_parameters=5),
    ],
)
def test_two_spellings_that_disagree_are_an_error(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"one key.*Keep one"):
        load_config(given)


def test_a_section_counts_more_than_a_dotted_key_beside_it() -> None:
    """TRL adds such keys to the config of a reference model; DeepSpeed never reads them."""
    key = "zero_optimization.stage3_param_persistence_threshold"
    config = load_config({key: 320, **zero(stage=3, stage3_param_persistence_threshold=0)})
    assert config.zero_optimization.stage3_param_persistence_threshold == 0
    assert f'"{key}" = 320: the section has 0, which is used' in config.notices
    assert load_config({key: 320}).zero_optimization.stage3_param_persistence_threshold == 320
    assert not any("which is used" in line for line in load_config({key: 0, **zero(stage=3)}).notices)


@pytest.mark.parametrize("name", ["stage3_prefetch_bucket_size", "reduce_bucket_size", "stage3_max_live_parameters"])
def test_a_fraction_of_an_element_is_cut_off(name: str) -> None:
    """TRL and accelerate compute some sizes as 0.9 of a square."""
    config = load_config(zero(stage=3, **{name: 921.6}))
    assert getattr(config.zero_optimization, name) == 921
    assert f"zero_optimization.{name} = 921.6: read as 921 elements" in config.notices
    assert not any("read as" in line for line in load_config(zero(stage=3, **{name: 921.0})).notices)


@pytest.mark.parametrize(
    "given",
    [
        {"zero_optimization.reduce_bucket_size": 5, **zero(reduce_bucket_size=5.0)},
        zero(reduce_bucket_size=5, allreduce_bucket_size="5"),
        zero(allreduce_bucket_size=5),
    ],
)
def test_spellings_that_agree_are_fine(given: dict[str, Any]) -> None:
    assert load_config(given).zero_optimization.reduce_bucket_size == 5


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("prefetch_bucket_size", "stage3_prefetch_bucket_size"),
        ("param_persistence_threshold", "stage3_param_persistence_threshold"),
        ("model_persistence_threshold", "stage3_model_persistence_threshold"),
        ("max_live_parameters", "stage3_max_live_parameters"),
        ("max_reuse_distance", "stage3_max_reuse_distance"),
        ("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
        ("stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
    ],
)
def test_bare_and_old_names_of_stage_3(spelled: str, name: str) -> None:
    assert getattr(load_config(zero(stage=3, **{spelled: True if "gather" in spelled else 7})).zero_optimization, name)


def test_other_aliases() -> None:
    assert load_config({"elasticity": {"prefer_large_batch": False}}).elasticity.prefer_larger_batch is False
    assert load_config({"aio": {"thread_count": 4}}).aio.intra_op_parallelism == 4


# Unknown keys and wrong types


@pytest.mark.parametrize(
    ("given", "path", "meant"),
    [
        ({"stage": 2}, "stage", "zero_optimization.stage"),
        (zero(stag=2), "zero_optimization.stag", "zero_optimization.stage"),
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        ({"zero_optimization.stge": 2}, "zero_optimization.stge", "zero_optimization.stage"),
        ({"overlap_comm": True}, "overlap_comm", "zero_optimization.overlap_comm"),
        (
            zero(offload_optimizer={"devise": "cpu"}),
            "offload_optimizer.devise",
            "zero_optimization.offload_optimizer.device",
        ),
        ({"train_batchsize": 2}, "train_batchsize", "train_batch_size"),
        ({"fp16": {"enable": True}}, "fp16.enable", "fp16.enabled"),
        ({"optimizer": {"type": "Adam", "param": {}}}, "optimizer.param", "optimizer.params"),
        ({"aio": {"threads_count": 2}}, "aio.threads_count", "aio.thread_count"),
        ({"onefold": {"unit": []}}, "onefold.unit", "onefold.units"),
        ({"onefold": {"expert_parallel": 2}}, "onefold.expert_parallel", "onefold.expert_parallel_size"),
        ({"onefold": {"expert_parallel": {"enabled": True}}}, "onefold.expert_parallel", "expert_parallel?"),
        ({"optimizer": {"type": "Adam", "lr": 1e-3}}, "optimizer.lr", "optimizer.params.lr"),
        (zero(gradient_clipping=1.0), "zero_optimization.gradient_clipping", "gradient_clipping"),
        ({"checkpoint": {"writer": {"typ": "FAST"}}}, "checkpoint.writer.typ", "checkpoint.writer.type"),
    ],
)
def test_an_unknown_key_names_its_path_and_the_nearest(given: dict[str, Any], path: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    assert f"{path}:" in str(caught.value)
    assert f"did you mean {meant}" in str(caught.value)


def test_an_unknown_key_like_no_other_lists_what_is_known() -> None:
    with pytest.raises(
        ConfigError, match=r"data_types\.qqqq: .*known there: grad_accum_dtype, param_dtype, buffer_dtype"
    ):
        load_config({"data_types": {"qqqq": 1}})
    with pytest.raises(ConfigError, match="the nearest is"):
        load_config({"qqqq": 1})


def test_keys_that_begin_with_an_underscore_or_slashes_are_comments(tmp_path: Path) -> None:
    text = """{
        "_comment": "one", "//": "two", "//": "three", "_comment": {"stage": 9},
        "zero_optimization": {"stage": 3, "_why": 1, "offload_param": {"//device": "nvme", "device": "cpu"}},
        "optimizer": {"type": "AdamW", "_note": [], "params": {"lr": 0.5, "_lr": 0.25}},
        "tensor_parallel": {"_autotp_size": 4}
    }"""
    from_file = load_config(write(tmp_path, "config.json", text))
    assert from_file.zero_optimization.offload_param.device == "cpu"
    assert from_file.optimizer is not None
    assert from_file.optimizer.params == {"lr": 0.5}
    assert from_file.refusals == ()
    assert from_file.raw["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    yaml = "_a: 1\n_a: 2\nzero_optimization: {stage: 2, _b: {}}\n"
    assert load_config(write(tmp_path, "config.yaml", yaml)).zero_optimization.stage == 2
    given = {"_1": 1, "zero_optimization": {"//": 2, "stage": 1}}
    assert load_config(given).zero_optimization.stage == 1
    assert given["_1"] == 1  # the caller's dict is as it was
    inner = accelerate(zero_stage=2, _comment="ours")
    assert load_config({**inner, "_comment": "theirs"}).zero_optimization.stage == 2


FOREIGN = ("log", "cuda_visible_devices", "inference_batch_size", "comms_config", "seed", "project.name")
NEAR = (
    "zero_optimisation", "fp_16", "train_batchsize", "batch_size", "micro_batch_size", "grad_clip", "optimzer",
    "overlap_comm", "offload_optimizer", "overlap_com", "stage", "lr", "learning_rate", "bf16_enabled",
    "per_device_train_batch_size", "gradient-accumulation-steps",
)  # fmt: skip


def test_a_reader_may_list_unknown_keys_that_resemble_no_known_one() -> None:
    given = {name: 1 for name in FOREIGN}
    config = load_config({**given, "train_batch_size": 4}, lists_unknown=True)
    assert config.unknown == FOREIGN
    assert config.train_batch_size == 4
    for name in FOREIGN:
        with pytest.raises(ConfigError, match=f"{name}: there is no key"):
            load_config({name: 1})
    for name in NEAR:
        with pytest.raises(ConfigError, match=f"{name}: there is no key"):
            load_config({name: 1}, lists_unknown=True)
    for nested in ({"zero_optimization": {"log": 1}}, {"fp16": {"qqqq": 1}}, {"zero": {"stage": 3}}, {"aio.qqqq": 1}):
        with pytest.raises(ConfigError, match="there is no key"):
            load_config(nested, lists_unknown=True)


@pytest.mark.parametrize(
    "given",
    [
        zero(stage=3, sub_group_size=0),
        zero(stage=2, allgather_bucket_size=0),
        zero(stage=3, zero_hpz_partition_size=0),
        zero(stage=2, compute_grad_norm=False, parameter_alignment=True),
        zero(stage=3, leaf_module={"classes": "Block"}),
        {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["bias", "*.inv_freq"]}},
        {"data_types": {"keep_in_fp32_modules": "auto"}},
        {"disable_python_gc": True},
        {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}},
        {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}},
    ],
)
def test_what_deepspeed_accepts_is_accepted(given: dict[str, Any]) -> None:
    assert load_config(given).refusals == ()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"train_batch_size": 1.5}, "train_batch_size = 1.5: expected a whole number"),
        ({"train_batch_size": True}, "train_batch_size = True: expected a whole number"),
        ({"train_batch_size": 0}, "train_batch_size = 0: expected at least 1"),
        ({"train_batch_size": "many"}, "train_batch_size = 'many': expected a whole number"),
        ({"train_batch_size": math.inf}, "expected a finite number"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1: expected at least 0"),
        ({"gradient_predivide_factor": 0}, "a number above 0"),
        (zero(stage=4), "zero_optimization.stage = 4: expected a whole number from 0 to 3"),
        (zero(stage=-1), "from 0 to 3"),
        (zero(overlap_comm="yes"), "zero_optimization.overlap_comm = 'yes': expected true or false"),
        (zero(overlap_comm=1), "expected true or false"),
        ({"zero_optimization": 2}, "zero_optimization = 2: expected an object"),
        ({"zero_optimization": []}, "expected an object"),
        ({"fp16": True}, "fp16 = True: expected an object"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale = True: expected a number"),
        ({"fp16": {"loss_scale": -1}}, "at least 0"),
        ({"fp16": {"loss_scale": math.inf}}, "finite"),
        ({"fp16": {"loss_scale": math.nan}}, "expected a number"),
        ({"fp16": {"loss_scale_window": 0}}, "at least 1"),
        ({"communication_data_type": "fp8"}, "communication_data_type = 'fp8': expected fp32, bf16 or fp16"),
        ({"gradient_allreduce_op": "max"}, "one of mean, sum"),
        (zero(offload_optimizer={"device": "gpu"}), "one of none, cpu, nvme"),
        ({"onefold": {"units": "Block"}}, "a list of strings"),
        ({"elasticity": {"micro_batch_sizes": [1, "two"]}}, "micro_batch_sizes[1] = 'two': expected a whole number"),
        ({"elasticity": {"micro_batch_sizes": 1}}, "micro_batch_sizes = 1: expected a list of whole numbers"),
        ({"train_batch_size": "010"}, "train_batch_size = '010': expected a whole number"),
        ({"train_batch_size": 10**400}, "train_batch_size = (a number of many digits): expected a finite number"),
        ({"train_batch_size": "9" * 5000}, "train_batch_size = '9999"),
        ({"gradient_predivide_factor": 10**5000}, "gradient_predivide_factor = (a number of many digits)"),
        (zero(mics_shard_size=-2), "mics_shard_size = -2: expected at least -1"),
        ({"amp": {"enabled": "yes"}}, "amp.enabled = 'yes': expected true or false"),
        ({"eigenvalue": {"inner": {"enabled": 1}}}, "eigenvalue.inner.enabled = 1: expected true or false"),
        ({"tensor_parallel": {"autotp_size": "two"}}, "tensor_parallel.autotp_size = 'two': expected a whole number"),
        ({"tensor_parallel": {"tp": {"tp_size": -1}}}, "tensor_parallel.tp.tp_size = -1: expected at least 0"),
        ({"autotuning": {"arg_mappings": {"lr": 3}}}, "autotuning.arg_mappings.lr = 3: expected a string"),
        ({"pipeline": 3}, "pipeline = 3: expected an object"),
        ({"optimizer": {"type": 3}}, "a string"),
        (
            zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 1.5}),
            "ratio = 1.5: expected auto, or a number from",
        ),
        (zero(stage=2, offload_optimizer={"device": "cpu", "ratio": -0.1}), "expected auto, or a number from 0 to 1"),
        (
            zero(stage=2, offload_optimizer={"device": "cpu", "ratio": "half"}),
            "ratio = 'half': expected auto, or a number",
        ),
        (
            zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": 3}),
            "nvme_path = 3: expected a string",
        ),
        (zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": ["/a", 3]}), "nvme_path[1] = 3: expected"),
        (zero(stage=2, offload_optimizer={"device": "cpu", "pipeline_read": "early"}), "expected true or false"),
        (zero(stage=2, offload_optimizer={"device": "cpu", "buffer_size": 0}), "buffer_size = 0: expected at least 1"),
        ({"onefold": {"device_memory": 0}}, "onefold.device_memory = 0: expected a number above 0"),
        ({"onefold": {"host_memory": -1}}, "onefold.host_memory = -1: expected a number above 0"),
        ({"log_level": "loud"}, "one of debug"),
    ],
)
def test_a_wrong_value_names_path_value_and_expectation(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    assert told in str(caught.value)


@pytest.mark.parametrize("spelled", [500_000_000, 5e8, "5e8", "500000000", "500_000_000", "5.0e+8"])
def test_whole_numbers_in_all_spellings(spelled: Any) -> None:
    size = load_config(zero(reduce_bucket_size=spelled)).zero_optimization.reduce_bucket_size
    assert (size, type(size)) == (500_000_000, int)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("fp16", "fp16"),
        ("half", "fp16"),
        ("torch.float16", "fp16"),
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("float", "fp32"),
        ("FP32", "fp32"),
        ("torch.float32", "fp32"),
    ],
)
def test_dtypes_in_all_spellings(spelled: str, name: str) -> None:
    assert load_config({"communication_data_type": spelled}).communication_data_type == name


@pytest.mark.parametrize(("spelled", "steps"), [(math.inf, None), ("inf", None), (0, None), (10, 10), (10.0, 10)])
def test_steps_per_print(spelled: Any, steps: int | None) -> None:
    assert load_config({"steps_per_print": spelled}).steps_per_print == steps


def test_optimizer_params_are_numbers_even_from_yaml_strings() -> None:
    config = load_config({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "betas": ["0.9", 0.999]}}})
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-4, "betas": (0.9, 0.999)}


# Contradictions


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled"),
        (
            {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "fp16"}},
            "torch_autocast.dtype = fp16, but the parameters are bf16",
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, "torch_autocast.dtype"),
        ({"data_types": {"param_dtype": "bf16"}}, "Set bf16.enabled to true"),
        ({"data_types": {"param_dtype": "fp32"}, "fp16": {"enabled": True}}, "Leave out data_types.param_dtype"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}, **zero(stage=2)}, "bf16_master_weights_and_grads"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "stage 1, 2 or 3"),
        (zero(stage=3, offload_param={"device": "nvme"}), "Set zero_optimization.offload_param.nvme_path"),
        (
            zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": []}),
            "Set zero_optimization.offload_optimizer.nvme_path",
        ),
        (zero(offload_optimizer={"device": "cpu"}), "offload_optimizer needs stage 1, 2 or 3 (stage is 0). Set"),
        (zero(stage=0, cpu_offload=True), "offload_optimizer needs stage 1, 2 or 3"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing"),
        ({"scheduler": {"params": {"warmup_num_steps": 1}}}, "scheduler.type is missing"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
        (
            zero(stage=2, cpu_offload=True, offload_optimizer={"device": "cpu"}),
            "Keep zero_optimization.offload_optimizer",
        ),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            "no number of ranks fits",
        ),
        ({"train_batch_size": 10, "gradient_accumulation_steps": 4}, "no number of ranks fits"),
    ],
)
def test_contradictions_name_the_keys_and_the_fix(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    assert told in str(caught.value)


# Support status


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (zero(zenflow={"topk_ratio": 0.2}), "zero_optimization.zenflow"),
        (zero(legacy_stage1=True), "zero_optimization.legacy_stage1"),
        ({"fp16": {"fp16_master_weights_and_grads": True}, **zero(stage=2)}, "fp16.fp16_master_weights_and_grads"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"sparse_gradients": True}, "sparse_gradients"),
        ({"max_grad_norm": 1.0}, "max_grad_norm = 1.0: it does not clip gradients; write gradient_clipping"),
        ({"autotuning": {"enabled": True}}, "autotuning.enabled = true: training does not search; `onefold tune`"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
        ({"pipeline": {"stages": 2}}, "pipeline"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp"),
        ({"compression_training": {"weight_quantization": {"shared": {"enabled": True}}}}, "compression_training"),
        *(
            ({name: {"enabled": True}}, f"{name}.enabled")
            for name in (
                "autotuning",
                "flops_profiler",
                "nebula",
            )
        ),
        *(
            ({name: {"enabled": True}}, name)
            for name in (
                "progressive_layer_drop",
                "eigenvalue",
                "curriculum_learning",
                "data_efficiency",
                "hybrid_engine",
                "weight_quantization",
                "datastates_ckpt",
                "sparse_attention",
            )
        ),
        ({"checkpoint": {"use_node_local_storage": True}}, "checkpoint.use_node_local_storage"),
    ],
)
def test_what_is_not_offered_loads_but_is_refused(given: dict[str, Any], path: str) -> None:
    config = load_config(given)
    assert any(line.startswith(path) for line in config.refusals), config.refusals
    with pytest.raises(ConfigError) as caught:
        check_built(config)
    assert all(line in str(caught.value) for line in config.refusals)


@pytest.mark.parametrize(
    "given",
    [
        zero(stage=2, zero_quantized_weights=False, zero_hpz_partition_size=1, mics_shard_size=-1, legacy_stage1=False),
        zero(
            offload_optimizer={"device": "none", "nvme_path": None}, offload_param={"device": "none"}, cpu_offload=False
        ),
        {"amp": {"enabled": "false"}, "eigenvalue": {"enabled": False}, "pipeline": {}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"tensorboard": {"enabled": False, "output_path": ""}, "flops_profiler": {"enabled": False, "top_modules": 1}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"activation_checkpointing": {"number_checkpoints": False}},
        zero(stage=2, offload_optimizer={"nvme_path": [], "ratio": None, "pipeline_read": None, "max_in_cpu": 0}),
        {"onefold": {"device_memory": None, "host_memory": "auto", "delayed_host_step": False}},
        {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "comms_logger": {"enabled": False}},
        {"fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16}},
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"initial_scale_power": 8}},
        {"optimizer": {"type": "Adam", "params": {"torch_adam": False, "fp32_optimizer_states": True, "fused": None}}},
        {"checkpoint": {"keep_last": 2, "keep_every": 10}},
    ],
)
def test_asking_for_nothing_says_nothing(given: dict[str, Any]) -> None:
    config = load_config(given)
    assert (config.notices, config.refusals) == ((), ())


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (zero(contiguous_gradients=False), "zero_optimization.contiguous_gradients = false"),
        (zero(reduce_scatter=False), "zero_optimization.reduce_scatter"),
        (zero(round_robin_gradients=True), "zero_optimization.round_robin_gradients"),
        (zero(use_multi_rank_bucket_allreduce=False), "zero_optimization.use_multi_rank_bucket_allreduce"),
        (zero(allgather_partitions=False), "zero_optimization.allgather_partitions"),
        (zero(ignore_unused_parameters=False), "zero_optimization.ignore_unused_parameters"),
        (zero(elastic_checkpoint=True), "zero_optimization.elastic_checkpoint"),
        (zero(grad_hooks=False), "zero_optimization.grad_hooks"),
        (zero(stage=3, sub_group_size=5), "zero_optimization.sub_group_size"),
        (zero(stage=True), "zero_optimization.stage = true"),
        (zero(stage=2, cpu_offload=True), "zero_optimization.cpu_offload"),
        (
            {"communication_data_type": "fp32", **zero(stage=3, zero_quantized_gradients=True)},
            "communication_data_type: it has no effect with zero_optimization.zero_quantized_gradients",
        ),
        (
            zero(zero_quantized_weights=True, stage=2),
            "zero_optimization.zero_quantized_weights = true: it has no effect below stage 3",
        ),
        (zero(zeropp_loco_param={"err_beta": 0.5}), "zero_optimization.zeropp_loco_param: it has no effect without"),
        (zero(stage=2, stage3_max_live_parameters=1e9), "zero_optimization.stage3_max_live_parameters"),
        (zero(stage=2, stage3_gather_16bit_weights_on_model_save=True), "zero_optimization.stage3_gather"),
        (zero(stage=2, leaf_module={"classes": ["Expert"]}), "zero_optimization.leaf_module.classes"),
        (
            zero(stage=2, offload_param={"device": "cpu"}),
            'zero_optimization.offload_param.device = "cpu": it has no effect below stage 3',
        ),
        (
            zero(stage=3, offload_param={"device": "cpu"}),
            "zero_optimization.offload_param: shards are cast from master weights",
        ),
        (
            {"onefold": {"device_memory": 4}},
            'onefold.device_memory: it has no effect unless zero_optimization.offload_optimizer.ratio is "auto"',
        ),
        (
            zero(stage=2, offload_optimizer={"ratio": 0.5}),
            "zero_optimization.offload_optimizer.ratio = 0.5: it has no effect",
        ),
        (
            zero(offload_optimizer={"ratio": "auto"}),
            'zero_optimization.offload_optimizer.ratio = "auto": it has no effect',
        ),
        (zero(stage=2, offload_optimizer={"buffer_size": 5}), "zero_optimization.offload_optimizer.buffer_size"),
        (zero(stage=2, offload_optimizer={"pipeline_read": True}), "zero_optimization.offload_optimizer.pipeline_read"),
        (zero(stage=2, offload_optimizer={"fast_init": True}), "zero_optimization.offload_optimizer.fast_init"),
        (zero(stage=2, offload_optimizer={"super_offload": True}), "zero_optimization.offload_optimizer.super_off"),
        (zero(stage=2, offload_optimizer={"max_in_cpu": 1e9}), "zero_optimization.offload_optimizer.max_in_cpu"),
        (zero(offload_optimizer={"nvme_path": "/nvme"}), "zero_optimization.offload_optimizer.nvme_path"),
        (
            zero(offload_param={"nvme_path": ["/nvme"]}),
            "zero_optimization.offload_param.nvme_path: it has no effect unless",
        ),
        ({"onefold": {"delayed_host_step": True}}, "onefold.delayed_host_step: it has no effect without zero_optim"),
        ({"bf16": {"enabled": True, "loss_scale": 0}}, "bf16.loss_scale"),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "bf16.immediate_grad_update"),
        ({"fp16": {"loss_scale": 128}}, "fp16.loss_scale = 128.0: it has no effect without fp16.enabled"),
        ({"fp16": {"enabled": False, "loss_scale": 128}}, "fp16.loss_scale = 128.0: it has no effect without fp16.en"),
        ({"fp16": {"enabled": "auto", "hysteresis": 3}}, "fp16.hysteresis = 3: it has no effect without fp16.enabled"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "fp16": {"hysteresis": 3}},
            "fp16.hysteresis = 3: it has no effect without fp16.enabled",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"auto_cast": True}},
            "fp16.auto_cast = true: it has no effect without fp16.enabled",
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 3}},
            "fp16.hysteresis: it has no effect with a fixed fp16.loss_scale",
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 8, "min_loss_scale": 2}},
            "fp16.min_loss_scale: it has no effect with a fixed",
        ),
        ({"amp": {"enabled": False, "opt_level": "O1"}}, "amp: the feature is off"),
        ({"compression_training": {"a": {"enabled": False, "bits": 8}}}, "compression_training: the feature is off"),
        ({"tensor_parallel": {"autotp_size": 1, "tp_grain_size": 8}}, "tensor_parallel: the feature is off"),
        (
            {"tensorboard": {"enabled": False, "output_path": "logs"}},
            'tensorboard.output_path = "logs": it has no effect',
        ),
        ({"checkpoint": {"keep_every": 10}}, "checkpoint.keep_every = 10: it has no effect without checkpoint.keep_l"),
        (
            zero(stage=2, offload_optimizer={"device": "none", "ratio": 0.5}),
            "zero_optimization.offload_optimizer.ratio = 0.5: it has no effect without zero_optimization.offload_"
            'optimizer.device (it is "none")',
        ),
        (
            zero(stage=2, offload_optimizer={"device": "none", "pin_memory": False}),
            "zero_optimization.offload_optimizer.pin_memory = false: it has no effect",
        ),
        (
            zero(stage=2, offload_optimizer={"device": "cpu", "buffer_count": 7}),
            "zero_optimization.offload_optimizer.buffer_count = 7: it has no effect without zero_optimization.offload_"
            "optimizer.device = nvme",
        ),
        (
            zero(stage=2, offload_param={"pin_memory": False}),
            "zero_optimization.offload_param.pin_memory = false: it has no effect",
        ),
        (
            zero(stage=3, offload_param={"device": "cpu", "max_in_cpu": 5}),
            "zero_optimization.offload_param.max_in_cpu = 5: it has no effect without",
        ),
        (
            zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/a", "ratio": "auto", "max_in_cpu": 5}),
            "zero_optimization.offload_optimizer.max_in_cpu: it has no effect with ratio",
        ),
        (
            zero(stage=2, offload_param={"device": "nvme", "nvme_path": "/a", "buffer_count": 7}),
            "zero_optimization.offload_param.buffer_count = 7: it has no effect below stage 3",
        ),
        (zero(stage=3, mics_shard_size=0), "zero_optimization.mics_shard_size = 0: states are sharded over all ranks"),
        (zero(stage=2, mics_shard_size=0), "zero_optimization.mics_shard_size = 0: states are sharded over all ranks"),
        (
            zero(stage=3, overlap_comm=False, stage3_prefetch_bucket_size=5),
            "zero_optimization.stage3_prefetch_bucket_size: it has no effect if overlap_comm",
        ),
        (
            zero(stage=0, allgather_bucket_size=5),
            "zero_optimization.allgather_bucket_size = 5: it has no effect below stage 1",
        ),
        (
            {"zero_allow_untested_optimizer": True},
            "zero_allow_untested_optimizer = true: it has no effect below stage 1",
        ),
        (
            {"prescale_gradients": True, "gradient_predivide_factor": 2},
            "gradient_predivide_factor: it has no effect with prescale_gradients",
        ),
        (
            {"gradient_allreduce_op": "sum", "prescale_gradients": True},
            "prescale_gradients: it has no effect with gradient_allreduce_op sum",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"fused": True}}},
            "optimizer.params.fused = true: onefold uses one fused kernel",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"foreach": "false"}}},
            "optimizer.params.foreach = false: onefold uses one fused",
        ),
        ({"optimizer": {"type": "adam", "params": {"torch_adam": True}}}, "optimizer.params.torch_adam = true: one"),
        (
            {"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}},
            "optimizer.params.fp32_optimizer_states = false: onefold.state_dtype",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": "false"}}},
            "optimizer.params.adam_w_mode = false: AdamW always uses decoupled",
        ),
        ({"aio": {"queue_depth": 16}}, "aio"),
        ({"comms_logger": {"enabled": True}}, "comms_logger.enabled"),
        ({"activation_checkpointing": {"partition_activations": True}}, "activation_checkpointing.partition_act"),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, "activation_checkpointing.number_checkpoints = 4"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal"),
        ({"checkpoint": {"writer": {"decoupled": True}}}, "checkpoint.writer.decoupled"),
        ({"timers": {"throughput": {"enabled": False}}}, "timers.throughput.enabled"),
        ({"disable_allgather": True}, "disable_allgather"),
        ({"vocabulary_size": 50257}, "vocabulary_size"),
        ({"dump_state": True}, "dump_state"),
        ({"zero_force_ds_cpu_optimizer": False}, "zero_force_ds_cpu_optimizer"),
        ({"optimizer": {"type": "Adam", "legacy_fusion": True}}, "optimizer.legacy_fusion"),
    ],
)
def test_what_has_nothing_to_do_is_noticed_in_one_line(given: dict[str, Any], path: str) -> None:
    notices = load_config(given).notices
    assert any(line.startswith(path) for line in notices), notices
    assert all("\n" not in line for line in notices)


def test_stage_3_keys_are_quiet_in_stage_3() -> None:
    config = load_config(zero(stage=3, stage3_max_live_parameters=5, stage3_gather_16bit_weights_on_model_save=True))
    assert config.notices == ()
    assert not config.refusals


@pytest.mark.parametrize(
    ("spelled", "ratio"),
    [("auto", None), (" AUTO", None), (0.3, 0.3), ("0.3", 0.3), (0, 0.0), (None, 1.0), ("none", 1.0)],
)
def test_auto_is_a_ratio_and_null_is_none_given(spelled: Any, ratio: float | None) -> None:
    config = load_config(zero(stage=2, offload_optimizer={"device": "cpu", "ratio": spelled}))
    assert config.zero_optimization.offload_optimizer.ratio == ratio
    assert (config.notices, config.refusals) == ((), ())


@pytest.mark.parametrize(
    ("spelled", "paths"),
    [
        ("/a", ("/a",)),
        (["/a"], ("/a",)),
        (["/a", "~/b"], ("/a", "/home/me/b")),
        ("$DRIVE/x", ("/drive/x",)),
        (" ${DRIVE} ", ("/drive",)),
    ],
)
def test_one_drive_or_several(spelled: Any, paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DRIVE", "/drive")
    nvme = {"device": "nvme", "nvme_path": spelled}
    config = load_config(zero(stage=3, offload_optimizer=nvme, offload_param=nvme))
    assert config.zero_optimization.offload_optimizer.nvme_path == paths
    assert config.zero_optimization.offload_param.nvme_path == paths
    assert (config.notices, config.refusals) == ((), ())


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize("spelled", ["", "  ", ["/a", ""], "$NO_SUCH_DRIVE/x", "${NO_SUCH_DRIVE}", "~no_such_user/x"])
def test_a_folder_that_is_none_is_refused(section: str, spelled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_DRIVE", raising=False)
    with pytest.raises(ConfigError, match=rf"zero_optimization\.{section}\.nvme_path = "):
        load_config(zero(stage=3, **{section: {"device": "nvme", "nvme_path": spelled}}))
    config = load_config(zero(stage=3, **{section: {"device": "none", "nvme_path": spelled}}))
    assert any("nvme_path" in line for line in config.notices), "nothing is made of it, but it is told"


def test_a_section_that_offloads_nothing_has_no_say_in_the_other() -> None:
    cpu = {"device": "cpu", "pin_memory": True}
    for stage, other in ((3, {"pin_memory": False}), (2, {"device": "cpu", "pin_memory": False})):
        config = load_config(zero(stage=stage, offload_optimizer=cpu, offload_param=other))
        assert config.zero_optimization.offload_param.pin_memory
    assert not load_config(
        zero(stage=3, offload_param={"device": "cpu", "pin_memory": False})
    ).zero_optimization.offload_param.pin_memory


@pytest.mark.parametrize("name", ["pipeline_read", "pipeline_write"])
def test_the_pipeline_is_on_unless_it_says_false(name: str) -> None:
    for spelled, read in ((True, True), (False, False), (None, None), ("auto", None)):
        nvme = {"device": "nvme", "nvme_path": "/a"}
        config = load_config(zero(stage=1, offload_optimizer={**nvme, name: spelled}))
        assert getattr(config.zero_optimization.offload_optimizer, name) is read
        assert (config.notices, config.refusals) == ((), ())


def test_offload_is_honoured_in_full_and_quietly() -> None:
    config = load_config(
        {
            **zero(
                stage=3,
                offload_optimizer={"device": "nvme", "nvme_path": "/a", "buffer_count": 3, "buffer_size": 1e7}
                | {"max_in_cpu": 0, "ratio": "auto", "pipeline_read": True, "pipeline_write": False},
                offload_param={"device": "nvme", "nvme_path": "/a", "buffer_size": 1e7, "max_in_cpu": 0},
            ),
            "aio": {"single_submit": True, "overlap_events": False, "block_size": 4096, "queue_depth": 16},
            "onefold": {"device_memory": 100, "host_memory": "5e2", "delayed_host_step": True},
        }
    )
    check_built(config)
    assert config.notices == ()
    assert (config.onefold.device_memory, config.onefold.host_memory) == (100.0, 500.0)
    assert config.aio.single_submit
    assert not config.aio.overlap_events


def test_old_offload_keys_become_the_new_ones() -> None:
    config = load_config(zero(stage=2, cpu_offload=True, cpu_offload_use_pin_memory=False))
    check_built(config)
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert config.zero_optimization.offload_optimizer.pin_memory is False
    assert load_config(zero(stage=True)).zero_optimization.stage == 1


def test_old_offload_keys_leave_the_rest_of_the_section() -> None:
    config = load_config(zero(stage=3, cpu_offload=True, cpu_offload_param=True, offload_optimizer={"ratio": "auto"}))
    assert config.zero_optimization.offload_optimizer.ratio is None
    assert config.zero_optimization.offload_param.device == "cpu"
    assert all("old spelling" in line for line in config.notices)


def test_hugging_face_zero2_file_is_quiet() -> None:
    config = load_config(
        {
            "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16}
            | {"hysteresis": 2, "min_loss_scale": 1},
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
            },
            **zero(
                stage=2,
                allgather_partitions=True,
                allgather_bucket_size=2e8,
                overlap_comm=True,
                reduce_scatter=True,
                reduce_bucket_size=2e8,
                contiguous_gradients=True,
            ),
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "wall_clock_breakdown": False,
        }
    )
    assert (config.notices, config.refusals) == ((), ())


# Text


def test_comments_commas_and_numbers(tmp_path: Path) -> None:
    text = """// one
    {
      # two
      "train_batch_size": 1_000, /* three
      lines */
      "steps_per_print": Infinity,
      "tensorboard": {"job_name": "a // b # c /* d */ 1_0 ,}", "output_path": "say \\" // x"},
      "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8,},
      "onefold": {"units": ["Block", "head",],},
    } // end
    """
    config = load_config(write(tmp_path, "config.json", text))
    assert config.train_batch_size == 1000
    assert config.steps_per_print is None
    assert config.tensorboard.job_name == "a // b # c /* d */ 1_0 ,}"
    assert config.tensorboard.output_path == 'say " // x'
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.onefold.units == ("Block", "head")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.json", '{"zero_optimization": {"stage": 1, "stage": 2}}', "zero_optimization.stage is given twice"),
        ("a.json", '// hello\n{\n  "stage" 1\n}', "line 3, column 11: Expecting ':' delimiter\n      \"stage\" 1"),
        ("a.json", "[1]", "expected an object"),
        ("a.json", "", "line 1, column 1"),
        ("a.json", '{"a": 1_000 2}', "column 13"),
        ("a.yaml", "zero_optimization:\n  stage: 1\n  stage: 2\n", "line 3, column 3: the key 'stage' is given twice"),
        ("a.yaml", "a: [1, 2\n", "line 2"),
        ("a.yaml", "just words", "expected an object"),
        ("a.json", '{"a":' * 100_000 + "1" + "}" * 100_000, "more than 50 levels"),
        ("a.json", '{"a":' * 60 + "1" + "}" * 60, "more than 50 levels"),
        ("a.json", "[" * 100_000 + "]" * 100_000, "more than 50 levels"),
        ("a.yaml", "a: " + "[" * 5000 + "]" * 5000, "more than 50 levels"),
        ("a.yaml", "amp: &x\n  y: *x\n", "more than 50 levels"),
        ("a.json", '{\n"train_batch_size": ' + "9" * 5000 + "}", "line 2, column 21: a number of 5000 digits"),
        ("a.yaml", "train_batch_size: " + "9" * 5000, "line 1, column 19: a number of 5000 characters"),
    ],
)
def test_bad_text_says_where(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize("spelled", ["010", "1:30", "0x10", "0b11", "0o17", "1:30.5", "!!int 010", "2024-01-01", "1_"])
def test_yaml_numbers_are_decimal(tmp_path: Path, spelled: str) -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size = '.*': expected a whole number"):
        load_config(write(tmp_path, "a.yaml", f"train_batch_size: {spelled}\n"))
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr = '.*': expected a number"):
        load_config(write(tmp_path, "b.yaml", f"optimizer: {{type: Adam, params: {{lr: {spelled!r}}}}}\n"))


@pytest.mark.parametrize("spelled", ["500", "5e2", "500.0", "5_00", "+500", "!!int 500", "!!float 500", "'500'"])
def test_yaml_numbers_in_all_spellings(tmp_path: Path, spelled: str) -> None:
    assert load_config(write(tmp_path, "a.yaml", f"train_batch_size: {spelled}\n")).train_batch_size == 500


def test_yaml_dates_are_words(tmp_path: Path) -> None:
    text = "tensorboard: {job_name: 2024-01-01, output_path: 2024-99-99}\n"
    section = load_config(write(tmp_path, "a.yaml", text)).tensorboard
    assert (section.job_name, section.output_path) == ("2024-01-01", "2024-99-99")


@pytest.mark.parametrize(("name", "text"), [("a.json", '{"train_batch_size": 4}'), ("a.yaml", "train_batch_size: 4")])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
    assert load_config(tmp_path / name).train_batch_size == 4


def test_a_dict_that_is_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(ConfigError, match="this config: not a config, because it has more than 50 levels"):
        load_config({"amp": deep})
    circle: dict[str, Any] = {}
    circle["amp"] = circle
    with pytest.raises(ConfigError, match="more than 50 levels"):
        load_config(circle)


def test_sources_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json: the config cannot be read \(No such file"):
        load_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="config cannot be read"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"json\.loads"):
        load_config('{"train_batch_size": 1}')
    with pytest.raises(ConfigError, match="not int"):
        load_config(3)  # type: ignore[arg-type]


def test_a_base64_string_is_a_config() -> None:
    encoded = base64.urlsafe_b64encode(json.dumps(zero(stage=2)).encode()).decode()
    assert load_config(encoded).zero_optimization.stage == 2


# Accelerate


def accelerate(**keys: Any) -> dict[str, Any]:
    return {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "deepspeed_config": keys}


def test_accelerate_keys_become_deepspeed_keys() -> None:
    config = load_config(
        {
            **accelerate(
                zero_stage=3,
                offload_optimizer_device="nvme",
                offload_optimizer_nvme_path="/nvme",
                offload_param_device="none",
                gradient_accumulation_steps=4,
                gradient_clipping="0.5",
                zero3_save_16bit_model=True,
                zero3_init_flag=True,
                deepspeed_moe_layer_cls_names="Experts, Router",
                deepspeed_multinode_launcher="pdsh",
                stage3_max_live_parameters="1e9",
            ),
            "mixed_precision": "fp16",
            "num_processes": 8,
            "num_machines": 2,
            "machine_rank": 0,
            "main_process_port": None,
            "downcast_bf16": "no",
            "rdzv_backend": "static",
            "same_network": True,
            "tpu_env": [],
            "use_cpu": False,
        }
    )
    zero_optimization = config.zero_optimization
    assert zero_optimization.stage == 3
    assert zero_optimization.offload_optimizer.device == "nvme"
    assert zero_optimization.leaf_module.classes == ("Experts", "Router")
    assert zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (4, 0.5)
    assert config.fp16.enabled
    assert config.fp16.auto_cast
    assert config.raw["zero_optimization"]["stage"] == 3
    assert config.notices == (
        "deepspeed_config.zero3_init_flag = true: only the script that builds the model reads it",
        "deepspeed_config.deepspeed_multinode_launcher, num_processes, num_machines: "
        "these keys are for the launcher, and have no effect in a config",
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (accelerate(zero_stge=2), "deepspeed_config.zero_stge: .* did you mean deepspeed_config.zero_stage"),
        ({**accelerate(), "num_process": 2}, "did you mean num_processes"),
        ({**accelerate(), "mixed_precision": "int4"}, "expected no, fp16, bf16 or fp8"),
        ({**accelerate(gradient_accumulation_steps=4), "gradient_accumulation_steps": 8}, "Keep one of them"),
        ({**accelerate(), "deepspeed_config": 3}, "expected an object"),
        (accelerate(deepspeed_moe_layer_cls_names=3), "deepspeed_moe_layer_cls_names = 3: expected a list of strings"),
        (accelerate(zero3_init_flag="maybe"), "deepspeed_config.zero3_init_flag = 'maybe': expected true or false"),
        (accelerate(deepspeed_config_file=3), "deepspeed_config.deepspeed_config_file = 3: expected a string"),
    ],
)
def test_accelerate_errors(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(given)


@pytest.mark.parametrize("value", [False, "no", None])
def test_accelerate_without_mixed_precision_is_fp32(value: Any) -> None:
    assert load_config({**accelerate(zero_stage=1), "mixed_precision": value}).compute_dtype == "fp32"


def test_accelerate_for_another_trainer_is_refused() -> None:
    given = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    assert len(load_config(given).refusals) == 2


def test_accelerate_names_a_deepspeed_file(tmp_path: Path) -> None:
    write(tmp_path, "ds.json", '{"zero_optimization": {"stage": 2}, "bf16": "auto"}')
    text = "deepspeed_config:\n  deepspeed_config_file: ds.json\n{}distributed_type: DEEPSPEED\nmixed_precision: bf16\n"
    config = load_config(write(tmp_path, "a.yaml", text.format("")))
    assert config.zero_optimization.stage == 2
    assert config.bf16.enabled
    with pytest.raises(ConfigError, match="already 2"):
        load_config(write(tmp_path, "b.yaml", text.format("  zero_stage: 3\n")))


def test_the_inside_of_deepspeed_config_alone_is_enough(tmp_path: Path) -> None:
    text = "zero_stage: 3\nstage3_prefetch_bucket_size: 5e8\noffload_optimizer_device: cpu\n"
    zero_optimization = load_config(write(tmp_path, "a.yaml", text)).zero_optimization
    assert (zero_optimization.stage, zero_optimization.stage3_prefetch_bucket_size) == (3, 500_000_000)
    assert zero_optimization.offload_optimizer.device == "cpu"


def test_yaml_in_deepspeeds_own_schema(tmp_path: Path) -> None:
    text = "train_batch_size: 8\nzero_optimization:\n  stage: 2\n  reduce_bucket_size: 5e8\n  offload_param: none\n"
    config = load_config(write(tmp_path, "a.yml", text))
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.train_batch_size == 8


# The batch triangle


def batch(train: int | None, micro: int | None, accumulation: int | None) -> Config:
    return load_config(
        {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
        }
    )


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("accumulation", [1, 5])
def test_any_two_give_the_third(world: int, micro: int, accumulation: int) -> None:
    solved = Batch(micro * accumulation * world, micro, accumulation, world)
    for given in (
        (solved.train, micro, accumulation),
        (None, micro, accumulation),
        (solved.train, None, accumulation),
        (solved.train, micro, None),
    ):
        assert solve_batch(batch(*given), world) == solved


def test_one_alone_goes_with_an_accumulation_of_one() -> None:
    assert solve_batch(batch(12, None, None), 3) == Batch(12, 4, 1, 3)
    assert solve_batch(batch(None, 4, None), 3) == Batch(12, 4, 1, 3)


@pytest.mark.parametrize(
    ("given", "world", "told"),
    [
        ((None, None, None), 2, "Add train_micro_batch_size_per_gpu or train_batch_size"),
        ((None, None, 4), 2, "in addition to gradient_accumulation_steps 4"),
        (
            (128, 2, 16),
            3,
            "train_batch_size 128 is not micro 2 x accumulation 16 x world 3 = 96. Write train_batch_size 96",
        ),
        ((128, 2, 16), 1, "it fits 4 ranks: check that all of them are started"),
        ((10, None, None), 4, "train_batch_size 10 / (accumulation 1 x world 4 = 4) is 2.5, not a whole number"),
        ((10, 2, None), 4, "gradient_accumulation_steps = train_batch_size 10 / (micro 2 x world 4 = 8) is 1.25"),
        ((2, None, 1), 4, "Write train_batch_size 4"),
        ((8, 1, 1), 0, "world size is 0"),
    ],
)
def test_a_triangle_that_does_not_close_shows_the_arithmetic(
    given: tuple[int | None, int | None, int | None], world: int, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(batch(*given), world)
    assert told in str(caught.value)
