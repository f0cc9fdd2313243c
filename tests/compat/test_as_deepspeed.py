"""onefold under the name of DeepSpeed: imports, metadata, names, config objects, the launcher."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from models import more

import onefold
from onefold.compat import deepspeed_names, finder

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """A folder on the path with the distribution in it, as pip would have laid it."""
    folder = tmp_path_factory.mktemp("site-packages")
    shutil.copytree(ROOT / "packaging/deepspeed/deepspeed", folder / "deepspeed")
    metadata = folder / "deepspeed-0.19.8+onefold.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8+onefold\n")
    (metadata / "top_level.txt").write_text("deepspeed\n")
    return folder


def run(code: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *paths])), **variables}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, env=environment
    )


def check(code: str, *paths: Path) -> str:
    done = run(code, *paths)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- two ways in -------------------------------------------------------------------------------------------------------

QUESTIONS = """
    import importlib.metadata, importlib.util, sys
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.metadata.version("deepspeed") == "0.19.8+onefold"
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
    import deepspeed
    assert deepspeed.__version__ == "0.19.8+onefold"
    assert not {"torch", "torch.distributed", "onefold.engine"} & set(sys.modules), "importing it loads nothing"
    import deepspeed.runtime.engine as one
    import onefold.compat.deepspeed.runtime.engine as other
    assert one is other and deepspeed.DeepSpeedEngine is other.DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    assert deepspeed.zero.ZeroParamStatus is ZeroParamStatus
    assert deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES[2] == "WarmupLR"
    try:
        import deepspeed.no_such_module
    except ModuleNotFoundError as error:
        assert "deepspeed.no_such_module" in str(error)
    else:
        raise AssertionError
    assert not hasattr(deepspeed, "no_such_name")
"""


def test_registering_answers_imports_and_metadata():
    register = "import onefold\nonefold.register_as_deepspeed()\n"
    check(2 * register + textwrap.dedent(QUESTIONS))


@pytest.mark.slow
def test_the_distribution_answers_imports_and_metadata(installed):
    check(QUESTIONS, installed)


def test_the_version_of_the_distribution_is_ours():
    from onefold.compat.as_deepspeed import VERSION

    assert f'version = "{VERSION}"' in (ROOT / "packaging/deepspeed/pyproject.toml").read_text()


def test_registering_refuses_after_a_real_deepspeed():
    done = run(
        """
        import sys, types
        sys.modules["deepspeed"] = types.ModuleType("deepspeed")
        import onefold
        onefold.register_as_deepspeed()
        """
    )
    assert "DeepSpeed itself is already imported" in done.stderr


def test_registering_refuses_after_a_library_that_has_asked():
    done = run(
        """
        import sys, types
        sys.modules["accelerate.accelerator"] = types.ModuleType("accelerate.accelerator")
        import onefold
        onefold.register_as_deepspeed()
        """
    )
    assert "accelerate.accelerator was imported before" in done.stderr


def test_every_module_and_name_can_be_had(installed):
    """Each name that a module lists is really there, and so is each that stands for something not offered."""
    wanted = {f"deepspeed.{path}".removesuffix("."): [] for path in sorted(finder.PATHS)}
    for path, (_, names) in finder.NOT_OFFERED.items():
        wanted[f"deepspeed.{path}"] += names
    for path, sources in deepspeed_names.NAMES.items():
        listed = [name.partition("=")[0] for names in sources.values() for name in names.split()]
        wanted[f"deepspeed.{path}".removesuffix(".")] += listed
    check(
        f"""
        import importlib
        for module, names in {wanted!r}.items():
            found = importlib.import_module(module)
            for name in [*names, *dir(found)]:
                assert getattr(found, name, None) is not None or name.startswith("_") or name == "mpu", (module, name)
        """,
        installed,
    )


def test_one_path_at_most_adds_names_to_a_module():
    """Two would replace each other's: the names are served by the module's `__getattr__`."""
    extended = [finder.MODULES[path] for path in deepspeed_names.NAMES if path in finder.MODULES]
    assert len(extended) == len(set(extended))


def test_modules_of_the_table_behave_as_files_would(installed):
    check(
        """
        import importlib, inspect, pickle
        import deepspeed, deepspeed.runtime.engine
        from deepspeed.comm import *
        from deepspeed.runtime.constants import *
        assert all_reduce and init_distributed and TRAIN_BATCH_SIZE == "train_batch_size"
        assert deepspeed.runtime.engine.__spec__.name == deepspeed.runtime.engine.__name__
        for name in ("utils", "runtime.zero", "runtime.engine", "moe.layer"):
            assert inspect.getfile(importlib.import_module(f"deepspeed.{name}")).endswith(".py")
        for found in (deepspeed.zero.Init, deepspeed.ops.adam.FusedAdam, deepspeed.utils.safe_get_full_grad):
            assert pickle.loads(pickle.dumps(found)) is found and inspect.getsource(found)
        config = deepspeed.runtime.zero.config.DeepSpeedZeroConfig(stage=3)
        assert pickle.loads(pickle.dumps(config)) == config
        assert importlib.reload(deepspeed.utils).logger is deepspeed.utils.logging.logger
        """,
        installed,
    )


def test_what_is_not_offered_says_so_when_it_is_used(installed):
    check(
        """
        from deepspeed.profiling.flops_profiler import FlopsProfiler
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttention
        class Mine(PipelineModule):
            pass
        for kind, text in ((FlopsProfiler, "flops profiler"), (Mine, "pipeline"), (UlyssesSPAttention, "sequence")):
            try:
                kind(1, a=2)
            except NotImplementedError as error:
                assert text in str(error) and kind.__name__ in str(error), error
            else:
                raise AssertionError(kind)
        """,
        installed,
    )


def test_an_attribute_of_what_is_not_offered_says_so_too():
    from onefold.compat.deepspeed.pipe import PipelineModule
    from onefold.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    with pytest.raises(
        NotImplementedError, match=r"TiledFusedLogitsLoss\.apply: onefold does not support this part of sequence"
    ):
        TiledFusedLogitsLoss.apply(1, 2)
    with pytest.raises(NotImplementedError, match=r"PipelineModule\.to: onefold does not support pipeline"):
        type("Mine", (PipelineModule,), {}).mro()[1].to("cpu")


def test_looking_at_what_is_not_offered_is_harmless():
    import copy
    import doctest
    import inspect
    import pickle
    import unittest.mock

    from onefold.compat.deepspeed.elasticity import DSElasticAgent
    from onefold.compat.deepspeed.profiling import flops_profiler

    assert not hasattr(flops_profiler.FlopsProfiler, "forward")
    assert getattr(flops_profiler.FlopsProfiler, "apply", None) is None
    assert inspect.isclass(flops_profiler.FlopsProfiler)
    inspect.signature(flops_profiler.FlopsProfiler)
    inspect.getmembers(flops_profiler.FlopsProfiler)
    inspect.unwrap(flops_profiler.FlopsProfiler)
    assert doctest.DocTestFinder().find(flops_profiler) is not None
    assert pickle.loads(pickle.dumps(flops_profiler.FlopsProfiler)) is flops_profiler.FlopsProfiler
    assert copy.deepcopy(flops_profiler.FlopsProfiler) is flops_profiler.FlopsProfiler
    with unittest.mock.patch.object(flops_profiler, "FlopsProfiler"):
        pass
    with pytest.raises(NotImplementedError, match="DSElasticAgent: onefold does not support an elastic agent"):
        DSElasticAgent(None, None)


TOOLS = {
    "mmengine": """
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        from deepspeed.ops.lamb import FusedLamb
        from deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
        for name in "FusedAdam FusedLamb OnebitAdam OnebitLamb ZeroOneAdam".split():
            assert isinstance(globals()[name], type)
        try:
            OnebitAdam([], lr=1)
        except NotImplementedError as error:
            assert "1-bit optimizers" in str(error)
    """,
    "open-instruct": """
        import torch
        from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
        from deepspeed.utils import groups
        assert groups._get_sequence_parallel_world_size() == 1
        original = torch_checkpoint_engine.TorchCheckpointEngine.load
        def load(self, path, map_location=None):
            return original(self, path, map_location)
        torch_checkpoint_engine.TorchCheckpointEngine.load = load
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path="model", core_attn_implementation="sdpa", sequence_parallel_size=1, micro_batch_size=1,
            seq_length_is_variable=True,
        )
        assert mpu is None
    """,
    "VLM-R1": """
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
        from deepspeed.utils import logger
        logger.warning_once("once")
        assert TorchCheckpointEngine().load
    """,
    "ArcticTraining": """
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine, CheckpointCommitInfo
        from deepspeed.runtime.engine import DeepSpeedEngine, MoE, autocast_if_enabled
        assert DeepSpeedEngine.load_moe_state_dict and DeepSpeedEngine._save_moe_checkpoint
        assert DeepSpeedEngine.print_forward_breakdown
    """,
    "OpenRLHF": """
        from deepspeed.module_inject.layers import GatherReplacedLayerParams
        with GatherReplacedLayerParams([], None, enabled=True):
            pass
    """,
    "DeepSpeed-Chat": """
        import torch
        from deepspeed.compression.helper import recursive_getattr, recursive_setattr
        model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        recursive_setattr(model, "0.0", torch.nn.Identity())
        assert isinstance(recursive_getattr(model, "0.0"), torch.nn.Identity)
    """,
    "the others": """
        import torch
        import deepspeed.comm.comm as dist
        import deepspeed.runtime.compiler as compiler
        import deepspeed.utils
        assert not dist.is_initialized() and dist.barrier and dist.get_rank and deepspeed.utils.is_initialized
        assert compiler.disable(lambda: 1)() == 1 and not compiler.is_compiling()
        from deepspeed.utils.zero_to_fp32 import parse_optim_states
        from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
        from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
        from deepspeed.checkpoint import ORIGINAL_VOCAB_SIZE, PARAMETER_WITH_ROW_PARALLELISM_PATTERNS
        from deepspeed.ops.sparse_attention.sparsity_config import LocalSlidingWindowSparsityConfig
        assert DeepSpeedZeroLeafModuleConfig(classes=["A"]).classes == ["A"]
    """,
}


def test_the_first_lines_of_tools_run(installed):
    """Each in a namespace of its own, in one interpreter, as the tools import and patch."""
    programs = {tool: textwrap.dedent(code) for tool, code in TOOLS.items()}
    check(
        f"""
        for tool, code in {programs!r}.items():
            exec(compile(code, tool, "exec"), {{"__name__": tool}})
        """,
        installed,
    )


def test_a_checkpoint_engine_loads_tensors_and_executes_nothing(tmp_path):
    import pickle

    from onefold.compat.deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    engine = TorchCheckpointEngine()
    engine.save({"weight": torch.ones(3), "step": 4}, str(tmp_path / "good.pt"))
    found = engine.load(str(tmp_path / "good.pt"), map_location="cpu")
    assert (found["weight"].tolist(), found["step"]) == ([1.0, 1.0, 1.0], 4)
    torch.save({"called": textwrap.TextWrapper()}, tmp_path / "bad.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"bad\.pt contains pickled objects"):
        engine.load(str(tmp_path / "bad.pt"))


def test_tracked_random_states_are_replayed_in_a_recomputation():
    from onefold.compat.deepspeed.runtime.activation_checkpointing import checkpointing

    tracker = checkpointing.get_cuda_rng_tracker()
    assert tracker is checkpointing._CUDA_RNG_STATE_TRACKER
    masks = []

    def dropped(x):
        with tracker.fork():
            masks.append(torch.rand(8))
        return x * masks[-1]

    try:
        checkpointing.model_parallel_cuda_manual_seed(5)
        for _ in range(2):
            x = torch.ones(8, requires_grad=True)
            checkpointing.checkpoint(dropped, x).sum().backward()
            assert torch.equal(masks[-1], masks[-2])
            assert torch.equal(x.grad, masks[-1])
        assert not torch.equal(masks[0], masks[2])
        with pytest.raises(ValueError, match="already tracked"):
            tracker.add("other", 5 + 2718)
    finally:
        tracker.reset()
    (detached, number) = checkpointing.detach_variable((x * 2, 3))
    assert detached.is_leaf
    assert detached.requires_grad
    assert number == 3


# -- config objects ----------------------------------------------------------------------------------------------------


def zero_config(**given: Any) -> Any:
    from onefold.compat.deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return DeepSpeedZeroConfig(**given)


def test_zero_config_has_deepspeeds_defaults_and_aliases():
    config = zero_config()
    assert (config.stage, config.overlap_comm, config.reduce_bucket_size) == (0, False, 500_000_000)
    assert (config.prefetch_bucket_size, config.offload_optimizer) == (50_000_000, None)
    assert zero_config(stage=3).overlap_comm is True
    assert zero_config(stage3_prefetch_bucket_size=12).prefetch_bucket_size == 12
    assert zero_config(prefetch_bucket_size=12).prefetch_bucket_size == 12
    assert zero_config(stage="auto", reduce_bucket_size="auto") == config


def test_zero_config_hands_old_keys_on():
    config = zero_config(cpu_offload=True)
    assert config.offload_optimizer.device == "cpu"
    assert not hasattr(config, "cpu_offload")
    assert zero_config(cpu_offload_param=True).offload_param.device == "cpu"
    assert zero_config(cpu_offload=False).offload_optimizer is None
    with pytest.raises(AssertionError, match="offload_optimizer"):
        zero_config(cpu_offload=True, offload_optimizer={"device": "cpu"})


@pytest.mark.parametrize("given", [{"stage": 4}, {"no_such_key": 1}, {"reduce_bucket_size": 0}, {"ratio": 2}])
def test_zero_config_refuses_what_deepspeed_refuses(given):
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        zero_config(**given)


def test_a_config_model_of_somebody_elses():
    from onefold.compat.deepspeed.runtime.config_utils import DeepSpeedConfigModel, get_config_default
    from pydantic import Field

    class Mine(DeepSpeedConfigModel):
        new: int = 3
        old: str = Field("0", json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": int})

    assert (Mine().new, Mine(new="auto").new, Mine(old="7").new) == (3, 3, 7)
    assert get_config_default(Mine, "new") == 3
    with pytest.raises(AssertionError, match="both given"):
        Mine(new=1, old="2")


def test_deepspeed_config_is_read_and_solved(tmp_path):
    from onefold.compat.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    config = DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
        }
    )
    assert (config.train_micro_batch_size_per_gpu, config.zero_optimization_stage, config.zero_enabled) == (4, 2, True)
    assert config.bfloat16_config.enabled
    assert not config.float16_config.enabled
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size"):
        DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 3})


# -- the engine --------------------------------------------------------------------------------------------------------


def answers() -> dict[str, Any]:
    from onefold.compat.deepspeed.runtime.engine import _KEYS
    from onefold.compat.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from onefold.compat.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from onefold.compat import deepspeed

    config = {
        "train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 7}, "log_level": "error",
    }  # fmt: skip
    model = torch.nn.Linear(4, 4)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    found = {name: getattr(engine, name)() for name in _KEYS}
    found |= {
        "is engine": isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(engine, onefold.Engine),
        "is optimizer": isinstance(optimizer, deepspeed.DeepSpeedOptimizer),
        "is stage 3": isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3),
        "is stage 2": isinstance(optimizer, DeepSpeedZeroOptimizer),
        "name": (engine.optimizer_name(), engine.optimizer_params()["lr"], engine.scheduler_name()),
        "overlap": (
            engine.zero_overlap_comm(),
            engine.zero_optimization(),
            engine.zero_optimization_partition_gradients(),
        ),
        "masters": [(tuple(flat.shape), flat.dtype) for flat in optimizer.fp32_partitioned_groups_flat],
        "exposed": all(store.is_exposed for store in engine.state.step.stores),
        "scale": (engine.dynamic_loss_scale(), optimizer.dynamic_loss_scale, optimizer.loss_scale),
        "offload": (engine.zero_cpu_offload(), engine.zero_offload_param(), optimizer.parameter_offload.forward_hooks),
        "config": engine._config.zero_config.max_live_parameters,
    }
    engine.empty_partition_cache()
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    engine.close()
    return found


def test_the_engine_answers_to_deepspeeds_getters(on_ranks):
    (found,) = on_ranks(1, answers)
    expected = {
        "is engine": True, "is optimizer": True, "is stage 3": True, "is stage 2": False,
        "bfloat16_enabled": True, "fp16_enabled": False, "zero_max_live_parameters": 7,
        "name": ("adamw", 0.5, None), "overlap": (True, True, True), "scale": (False, False, 1.0),
        "offload": (False, None, []), "config": 7,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert all(dtype is torch.float32 for _, dtype in found["masters"])
    assert found["exposed"], "user code may write to masters at any time"


def test_files_that_point_to_a_manifest_are_not_taken_for_deepspeeds(tmp_path):
    from onefold.checkpoint.format import folder

    tag = tmp_path / "tag"
    tag.mkdir()
    folder.put_pointer_files(tag, ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
    assert not folder.is_deepspeeds(tag)
    (tag / "mp_rank_01_model_states.pt").write_bytes(b"PK")
    assert folder.is_deepspeeds(tag)
    folder.remove(tag)
    assert [path.name for path in tag.iterdir()] == ["mp_rank_01_model_states.pt"]  # somebody else's stays


def test_inference_is_plain_evaluation_or_refused():
    from onefold.compat.deepspeed.inference.engine import init_inference

    engine = init_inference(torch.nn.Linear(4, 4), config={"dtype": "bf16"}, replace_with_kernel_inject=False)
    assert engine(torch.ones(1, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert not engine.training
    assert engine.in_features == 4
    for keys in ({"mp_size": 2}, {"tensor_parallel": {"tp_size": 2}}, {"replace_with_kernel_inject": True}):
        with pytest.raises(NotImplementedError, match=next(iter(keys))):
            init_inference(torch.nn.Linear(4, 4), **keys)
    with pytest.raises(TypeError, match="Did you mean 'replace_with_kernel_inject'"):
        init_inference(torch.nn.Linear(4, 4), replace_with_kernel_injct=True)
    with pytest.raises(TypeError, match="must be a dict, not str"):
        init_inference(torch.nn.Linear(4, 4), config="config.json")


AXOLOTL = {
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0, "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32,
             "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "gradient_accumulation_steps": 1, "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2, "wall_clock_breakdown": True,
    "_comment": "bf16", "log": {"level": "info"}, "inference_batch_size": 4, "disable_python_gc": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "log_level": "error",
}  # fmt: skip


def openrlhf(stage: int, folder: str) -> dict[str, Any]:
    """Make the calls of OpenRLHF's strategy: train, and save the model as `save_model` does; and those of others."""
    import gc
    import logging

    from onefold.compat.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from onefold.compat.deepspeed.module_inject.layers import GatherReplacedLayerParams
    from onefold.compat.deepspeed.runtime.engine import autocast_if_enabled
    from onefold.compat.deepspeed.utils import logging as their_logging

    from onefold.compat import deepspeed

    their_logging.warning_once.cache_clear()  # a rank of the pool may have trained before
    their_logging.logger.setLevel("WARNING")
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    their_logging.logger.addHandler(handler)
    torch.manual_seed(3)
    config = {**AXOLOTL, "zero_optimization": {**AXOLOTL["zero_optimization"], "stage": stage}}
    deepspeed.checkpointing.configure(deepspeed_config=config)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    engine, optimizer, _, _ = deepspeed.initialize(
        args={"local_rank": 0}, model=model, model_parameters=[{"params": list(model.parameters())}], config=config,
        dist_init_required=True,
    )  # fmt: skip
    their_logging.logger.removeHandler(handler)
    found: dict[str, Any] = {"warned": [line for line in heard if "unknown top-level key" in line]}
    found["collects"] = gc.isenabled()
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean())
        overflow = optimizer.check_overflow(external=True)
        engine.step()
    engine.tput_timer.update_epoch_count()
    found["timers"] = sorted(engine.get_wall_clock_timers())
    found |= {"overflow": overflow, "epochs": engine.tput_timer.epoch_count, "config": engine.config["log"]}
    with GatherReplacedLayerParams(list(model.parameters()), model, enabled=True), autocast_if_enabled(engine):
        pass
    if stage == 3:
        weights = engine._consolidated_16bit_state_dict()
    else:
        with pytest.raises(ValueError, match="module_state_dict"):
            engine._consolidated_16bit_state_dict()
        weights = engine.module_state_dict()
    if weights is not None:
        torch.save(clone_tensors_for_torch_save(weights), os.path.join(folder, "weights.bin"))
    found["weights"] = None if weights is None else sorted(weights)
    engine._copy_recovery_script(folder)
    with pytest.raises(NotImplementedError, match="files of experts"):
        engine._save_moe_checkpoint(folder, "tag")
    engine.close()
    found["collects again"] = gc.isenabled()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_the_calls_of_openrlhf_with_a_config_of_axolotls(on_ranks, tmp_path, stage):
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    for rank, found in enumerate(on_ranks(2, openrlhf, stage, str(tmp_path))):
        warned = found.pop("warned")
        assert len(warned) == (2 if rank == 0 else 0), warned
        assert all(any(repr(name) in line for line in warned) for name in ("log", "inference_batch_size") if rank == 0)
        assert {"fwd", "bwd", "step"} <= set(found.pop("timers"))
        assert found == {
            "overflow": False, "epochs": 1, "config": {"level": "info"}, "collects": False, "collects again": True,
            "weights": names if rank == 0 or stage == 2 else None,
        }  # fmt: skip
    assert sorted(torch.load(tmp_path / "weights.bin", weights_only=True)) == names
    assert os.access(tmp_path / "zero_to_fp32.py", os.X_OK)


def test_near_misses_and_unknown_nested_keys_are_errors_by_deepspeeds_name_too():
    from onefold.compat.deepspeed.runtime.config import DeepSpeedConfig

    for given in ({"zero_optimisation": {}}, {"zero_optimization": {"log": 1}}, {"offload_optimizer": {}}):
        with pytest.raises(onefold.config.ConfigError, match="there is no key"):
            DeepSpeedConfig({"train_batch_size": 1, **given})


class TiledByHand(torch.autograd.Function):
    """Parts of the sequence one after another, in backward too, as axolotl and ArcticTraining write it."""

    @staticmethod
    def forward(ctx, fn, module, x, shards, params):
        ctx.fn, ctx.module, ctx.shards, ctx.params = fn, module, shards, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([fn(module, part) for part in x.chunk(shards, dim=1)], dim=1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        found = []
        for number, (part, grad_of_part) in enumerate(
            zip(x.chunk(ctx.shards, dim=1), grad.chunk(ctx.shards, dim=1), strict=True)
        ):
            for parameter in ctx.params:
                parameter.ds_grad_is_ready = number + 1 == ctx.shards
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.fn(ctx.module, part)
            torch.autograd.backward(out, grad_of_part)
            found.append(part.grad)
        return None, None, torch.cat(found, dim=1), None, None


class Tiled(torch.nn.Module):
    def __init__(self, apply: Any) -> None:
        super().__init__()
        self.up, self.down, self._apply_tiled = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8), apply

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._apply_tiled is None:
            return self.inner(x)
        return self._apply_tiled(Tiled.inner, self, x, 4, list(self.parameters()))


def trained_in_tiles(stage: int) -> list[list[float]]:
    from onefold.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    from onefold.compat import deepspeed

    found = []
    for apply in (None, TiledMLP.apply, TiledByHand.apply):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), Tiled(apply), Tiled(apply), torch.nn.Linear(8, 8))
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, "log_level": "error",
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, config=config)
        losses = []
        for step in range(3):
            seed = step + 10 * torch.distributed.get_rank()
            x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed))
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(losses)
        engine.close()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_in_tiles_trains_as_the_layer_itself(on_ranks, stage):
    for whole, by_name, by_hand in on_ranks(2, trained_in_tiles, stage):
        assert by_name == pytest.approx(whole, rel=1e-5)
        assert by_hand == pytest.approx(whole, rel=1e-5)


class Tables(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("bias", torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("other", torch.ones(4, dtype=torch.bfloat16))


def formats_of_buffers() -> dict[str, torch.dtype]:
    from onefold.compat import deepspeed

    data_types = {"keep_in_fp32_modules": ["running_*", "bias"]}
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "data_types": data_types, "log_level": "error"}
    engine, *_ = deepspeed.initialize(model=Tables(), config=config)
    found = {name: buffer.dtype for name, buffer in engine.module.named_buffers() if buffer.is_floating_point()}
    engine.close()
    return found


def test_buffers_that_a_config_names_are_fp32(on_ranks):
    (found,) = on_ranks(1, formats_of_buffers)
    assert {name for name, dtype in found.items() if dtype is torch.float32} == {
        "norm.running_mean", "norm.running_var", "bias",
    }  # fmt: skip
    assert found["other"] is torch.bfloat16


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "DeepSpeedCPUAdam": ("adam", {"lr": 0.01, "weight_decay": 0.1}),
    "FusedAdam": ("adam", {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}),
    "DeepSpeedCPUAdagrad": ("adagrad", {"lr": 0.01, "weight_decay": 0.1}),
    "DeepSpeedCPULion": ("lion", {"lr": 0.01, "weight_decay": 0.1}),
    "FusedLion": ("lion", {"lr": 0.01}),
}


def step_alone_and_in_an_engine(name: str) -> str:
    package, options = OPTIMIZERS[name]
    kind = getattr(importlib.import_module(f"onefold.compat.deepspeed.ops.{package}"), name)
    models = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
    models[1].load_state_dict(models[0].state_dict())
    alone, given = (kind(model.parameters(), **options) for model in models)
    config = {"train_batch_size": 4, "gradient_clipping": 0, "zero_optimization": {"stage": 2}, "log_level": "error"}
    engine, optimizer, _, _ = onefold.initialize(model=models[1], optimizer=given, config=config)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        models[0](x).square().mean().backward()
        alone.step()
        alone.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
    states = type(optimizer.sharded.states).__name__
    engine.close()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    return states


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_deepspeeds_optimizers_step_alone_and_in_an_engine(on_ranks, name):
    """Handed to an engine they are stepped by our rules, unit by unit, to the same weights."""
    assert on_ranks(1, step_alone_and_in_an_engine, name) == ["RuleStates"]


KINDS = ["Adam", "AdamW", "SGD", "Adagrad", "Lion", "Muon", "Shampoo", "AdamW8bit", "adamw_8bit", "Lion8bit", "RMSprop"]


class MeanOfRows(onefold.MatrixRule):
    """A rule of a user: the sign of the mean of each row."""

    name = "rows"

    def names_of_matrices(self, hyper):
        return []

    def prepare(self, gradient, states, update, hyper, step):
        update.copy_(gradient)

    def work(self, matrix, kept, hyper, step):
        return matrix.mean(1, keepdim=True).sign().expand_as(matrix)

    def finish(self, parameter, update, shape, hyper):
        parameter.add_(update, alpha=-hyper["lr"])

    def cost(self, rows, columns):
        return rows * columns


class Rows(torch.optim.Optimizer):
    onefold_rule = MeanOfRows()

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})


def handed_in(model: torch.nn.Module) -> dict[str, Any]:
    """Every kind of object that one may hand to `initialize` as the optimizer."""
    import bitsandbytes

    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return {
        "torch": torch.optim.NAdam(model.parameters()),
        "8 bits": bitsandbytes.optim.AdamW8bit(model.parameters()),
        "rule": Rows(matrices),
        "several": [torch.optim.Muon(matrices), torch.optim.AdamW(others)],
    }


def wrapped(stage: int) -> dict[str, Any]:
    """Train two steps with each kind of optimizer and describe what `deepspeed.initialize` has returned."""
    from onefold.compat.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from onefold.compat.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from onefold.compat import deepspeed

    found = {}
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "log_level": "error"}
    for kind in [*KINDS, *handed_in(torch.nn.Linear(8, 8))]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.Linear(128, 8))
        section = {"optimizer": {"type": kind, "params": {"lr": 0.01}}} if kind in KINDS else {}
        given = {} if kind in KINDS else {"optimizer": handed_in(model)[kind]}
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config={**config, **section}, **given)
        losses = []
        for _ in range(2):
            loss = engine(torch.ones(2, 8)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        assert losses[1] != losses[0], kind
        asked = DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
        assert isinstance(optimizer, asked), kind
        assert isinstance(optimizer, deepspeed.DeepSpeedOptimizer), kind
        assert isinstance(optimizer.optimizer, torch.optim.Optimizer), kind
        assert optimizer.optimizer.param_groups is optimizer.param_groups
        optimizer.state_dict()
        found[kind] = optimizer.stands_for.__name__
        engine.close()
    return found


@pytest.mark.parametrize("stage", [3, more(1)])
def test_every_kind_of_optimizer_goes_through_deepspeeds_initialize(on_ranks, stage):
    for found in on_ranks(2, wrapped, stage):
        assert found == {
            "Adam": "FusedAdam", "AdamW": "FusedAdam", "SGD": "SGD", "Adagrad": "Adagrad", "Lion": "FusedLion",
            "Muon": "Muon", "Shampoo": "Optimizer", "AdamW8bit": "FusedAdam", "adamw_8bit": "FusedAdam",
            "Lion8bit": "FusedLion", "RMSprop": "RMSprop", "torch": "NAdam", "8 bits": "AdamW8bit", "rule": "Rows",
            "several": "Muon",
        }  # fmt: skip


def test_tensors_go_to_files_and_back(tmp_path):
    from onefold.compat.deepspeed.ops.aio import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(block_size=4096, queue_depth=4, intra_op_parallelism=2)
    tensors = [torch.randn(1000), torch.arange(77, dtype=torch.bfloat16)]
    for number, tensor in enumerate(tensors):
        handle.async_pwrite(tensor, str(tmp_path / str(number)))
    assert handle.wait() == 2
    for number, tensor in enumerate(tensors):
        found = torch.zeros_like(tensor)
        assert handle.sync_pread(found, str(tmp_path / str(number))) == tensor.nbytes
        assert torch.equal(found, tensor)
    with pytest.raises(OSError, match="it has 154 of the 4000 bytes"):
        handle.sync_pread(torch.zeros(1000), str(tmp_path / "1"))


# -- the launcher ------------------------------------------------------------------------------------------------------


def deepspeed(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), **variables}
    command = [sys.executable, "-m", "onefold.compat.deepspeed.launcher.runner", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)


@pytest.mark.slow
def test_the_launcher_starts_ranks_with_their_number_and_the_environment_file(tmp_path):
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=yes\n# COMMENT=1\n")
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "print(f\"{sys.argv[1:]} {os.environ['RANK']} {os.environ['FROM_FILE']}\\n\", end='', flush=True)\n"
    )
    done = deepspeed(tmp_path, "--num_gpus", "2", "script.py", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.split("\n"))[1:]
    assert lines == [f"['--local_rank={rank}', '--epochs', '3'] {rank} yes" for rank in (0, 1)]
    done = deepspeed(tmp_path, "--num_gpus", "1", "--no_local_rank", "script.py", "a")
    assert done.stdout == "['a'] 0 yes\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--autotuning", "run", "x.py"], "use `onefold tune`"),
        (["--launcher", "openmpi", "x.py"], "only ssh"),
        (["--hostfile", "nothing", "x.py"], "no such file"),
        (["x.py"], "no such script"),
    ],
)
def test_the_launcher_names_what_it_cannot_do(tmp_path, arguments, text):
    done = deepspeed(tmp_path, *arguments)
    assert done.returncode == 2
    assert text in done.stderr


@pytest.mark.slow
def test_the_launcher_reaches_the_nodes_of_a_hostfile_by_ssh(tmp_path):
    """`ssh` is a script here that runs the command on this machine and writes down the node."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/bash\nwhile [[ $1 == -* ]]; do shift 2; done\necho "$1" >> nodes; shift; bash -c "$*"\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "line = ' '.join(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR'))\n"
        "sys.stdout.write(f'{line}\\n')\n"  # in one piece: print writes the end of a line by itself
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    port = str(20_000 + os.getpid() % 10_000)
    done = deepspeed(tmp_path, "--hostfile", "hosts", "--master_port", port, "script.py", PATH=path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 127.0.0.1", "1 2 127.0.0.1"]
    assert sorted((tmp_path / "nodes").read_text().split()) == ["127.0.0.1", "127.0.0.1", "localhost"]  # one to try
    done = deepspeed(tmp_path, "--hostfile", "hosts", "--master_port", port, "nothing.py", PATH=path)
    assert done.returncode == 2


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
def test_a_function_of_parts_of_the_sequence(reduction):
    """Check values and gradients of `sequence_tiled_compute`, whose parts have different lengths."""
    from onefold.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    torch.manual_seed(0)
    head, x = torch.nn.Linear(4, 6), torch.randn(2, 7, 4, requires_grad=True)
    targets = torch.randint(0, 6, (2, 7))

    def of_part(x: Any, targets: Any, scale: float) -> Any:
        losses = torch.nn.functional.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape) * scale if reduction is None else losses.mean() * scale

    parts = [of_part(x[:, start:stop], targets[:, start:stop], 2.0) for start, stop in ((0, 3), (3, 5), (5, 7))]
    joined = torch.cat(parts, 1) if reduction is None else getattr(torch.stack(parts), str(reduction))()
    found = sequence_tiled_compute(
        of_part, 7, 3, {"x": x, "targets": targets}, {"scale": 2.0}, "x", [*head.parameters()], 1, reduction
    )
    torch.testing.assert_close(found, joined)
    inputs = [x, *head.parameters()]
    torch.testing.assert_close(torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(joined.sum(), inputs))
    with pytest.raises(ValueError, match="tensors of 8 tokens"):
        sequence_tiled_compute(of_part, 8, 3, {"x": x}, {}, "x")
