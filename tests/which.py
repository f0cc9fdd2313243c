"""Which tests to run for a module: `python tests/which.py onefold/comm/exchange.py`, or `make test-of MODULE=...`.

The tests of a package are in the folder of its name: those of `onefold/comm` in `tests/comm`, those of
`onefold/tools/cli` in `tests/cli`. `ELSEWHERE` names the files in other folders that see a module broken, and all files
for modules that belong to no package. Before a merge all tests run anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Modules without their folder `onefold/`; tests by folder and name, without `test_` and `.py`. Tests that need a GPU
# are named for kernels: `make test-gpu` runs them.
ELSEWHERE = {
    "__init__.py": "project/architecture engine/engine",
    "allocator.py": "offload/resident_memory",
    "checkpoint/loading/load.py": "engine/loader offload/offload_cases",
    "checkpoint/state/random_states.py": "engine/loader",
    "checkpoint/state/slots.py": "offload/offload_cases",
    "checkpoint/state/weights.py": "runtime/zero compat/huggingface",
    "checkpoint/saving/rank_shard_writer.py": "offload/offload_cases",
    "checkpoint/saving/save_coordinator.py": "offload/offload_cases",
    "checkpointing.py": "runtime/checkpointing runtime/stage3",
    "comm/agreement.py": "runtime/stage3 runtime/cases report/timeline",
    "comm/collective.py": "runtime/exactness report/timeline",
    "comm/connections.py": "engine/exits offload/offload_faults",
    "comm/consensus.py": "engine/alike",
    "comm/exchange.py": "runtime/exactness",
    "comm/fake_group.py": "estimate/estimate",
    "comm/guard.py": "runtime/stage3 runtime/cases",
    "comm/hang_detector.py": "engine/exits runtime/stage3 checkpoint/checkpoints offload/offload_faults",
    "comm/kernels.py": "gpu/gpu_codec",
    "comm/mesh.py": "cli/nodes cli/launch",
    "comm/native.py": "gpu/gpu gpu/gpu_ranks",
    "comm/signed_store.py": "security/job_secret",
    "comm/store_server.py": "security/rendezvous",
    "comm/staged.py": "gpu/gpu gpu/gpu_wires",
    "comm/store_board.py": "checkpoint/checkpoints checkpoint/checkpoint_faults",
    "comm/tree.py": "runtime/exactness",
    "comm/tree_kernel.py": "gpu/gpu_ranks gpu/gpu_codec",
    "compat/parameters.py": "runtime/zero",
    "config/batch.py": "engine/engine comm/mics",
    "config/checks.py": "engine/engine comm/wires_cases comm/mics",
    "config/hyperparameters.py": "optim/optimizers optim/muon optim/schedules",
    "config/signature.py": "optim/optimizers optim/schedules",
    "config/zero_optimization.py": "plan/plan",
    "engine/closing.py": "runtime/cases",
    "engine/core.py": "runtime/exactness runtime/cases runtime/compile",
    "compat/engine_getters.py": "engine/engine",
    "engine/checkpoint_loader.py": "checkpoint/checkpoints offload/offload_cases",
    "engine/memory_errors.py": "report/out_of_memory",
    "engine/step_reports.py": "report/run_record report/monitors",
    "engine/checkpoint_saver.py": "checkpoint/checkpoints checkpoint/checkpoint_faults",
    "engine/stall_guard.py": "recovery/stalls recovery/rank_beats",
    "engine/step_guards.py": "recovery/rollback",
    "engine/step_replay.py": "recovery/reexecution",
    "engine/train_state.py": "checkpoint/checkpoints",
    "env_report.py": "cli/env_report",
    "disk_waits.py": "recovery/rank_beats recovery/stalls",
    "errors.py": "config/config",
    "fsdp/collectives.py": "comm/wires",
    "gpu_kernels.py": "gpu/gpu_codec gpu/gpu_held_parameters",
    "job_secret.py": "security/job_secret security/rendezvous",
    "loader.py": "engine/loader engine/engine",
    "log.py": "engine/engine train/train",
    "offload/activation_offload.py": "runtime/checkpointing",
    "offload/buffer.py": "optim/states checkpoint/checkpoints",
    "offload/grad_shard.py": "runtime/exactness runtime/regressions",
    "offload/shard_store.py": "runtime/held_parameters checkpoint/checkpoints",
    "offload/state_codec.py": "optim/states",
    "offload/state_kernels.py": "gpu/gpu_states",
    "offload/write_check.py": "runtime/held_parameters checkpoint/checkpoints",
    "offload/write_kernels.py": "gpu/gpu_held_parameters",
    "optim/adam_kernels.py": "gpu/gpu_states",
    "optim/choose.py": "engine/engine runtime/cases config/params",
    "optim/chosen.py": "engine/engine runtime/cases",
    "optim/decision.py": "runtime/exactness engine/engine runtime/cases",
    "optim/from_instance.py": "engine/engine runtime/cases config/params",
    "optim/gpu_stream.py": "offload/device_pass",
    "optim/instance.py": "engine/engine",
    "optim/matrix_kernels.py": "gpu/gpu_muon",
    "optim/norm.py": "runtime/exactness runtime/cases comm/mics comm/wires_cases",
    "optim/nvme_windows.py": "offload/offload_waits offload/offload offload/offload_cases",
    "optim/offloaded_step.py": "offload/offload_waits offload/device_pass offload/offload offload/offload_cases",
    "optim/pipeline.py": "offload/offload offload/offload_cases runtime/exactness runtime/held_parameters",
    "optim/rules.py": "offload/offload_cases",
    "optim/sharded.py": "engine/engine checkpoint/checkpoints",
    "optim/step.py": "runtime/exactness engine/engine runtime/cases",
    "optim/instance_step.py": "runtime/held_parameters offload/offload",
    "plan/buffers.py": "offload/offload_cases runtime/stage3",
    "plan/cut.py": "runtime/stage3",
    "plan/state_formats.py": "optim/states",
    "plan/guards.py": "recovery/loss_guard optim/nonfinite",
    "plan/layout.py": "runtime/exactness",
    "plan/matrices.py": "optim/muon",
    "plan/memory.py": "offload/offload_cases runtime/stage3",
    "plan/optimizer_spec.py": "config/params optim/muon optim/schedules",
    "plan/plan.py": "engine/engine",
    "plan/program.py": "runtime/stage3",
    "plan/tiers.py": "offload/offload_cases runtime/stage3",
    "plan/traffic.py": "offload/offload_cases offload/device_pass",
    "pool.py": "plan/memory runtime/exactness runtime/stage3",
    "recorder.py": "report/timeline",
    "redaction.py": "security/redaction",
    "report/describe.py": "engine/engine comm/wires_cases",
    "report/run_file.py": "cli/watch",
    "runtime/call_hooks.py": "compat/huggingface",
    "runtime/flat_param.py": "comm/wires offload/offload",
    "runtime/hooks.py": "compat/huggingface",
    "runtime/order.py": "comm/wires_cases",
    "runtime/unit_spans.py": "report/timeline",
    "storage/file_lock.py": "checkpoint/file_lock offload/nvme",
    "storage/": "checkpoint/object_stores checkpoint/checkpoint_ranges",
    "start.py": "engine/engine runtime/zero",
    "stop_signals.py": "cli/rank_agent engine/stop_signals",
    "tools/bench/link_bench.py": "estimate/estimate",
    "tools/cli/checkpoint_commands.py": "checkpoint/ckpt_command checkpoint/export checkpoint/deepspeed_import",
    "tools/cli/plan_command.py": "estimate/estimate docs/guide",
    "tools/cli/rendezvous.py": "security/rendezvous",
    "tools/cli/reports.py": "pages/report_page",
    "tools/cli/terminal.py": "checkpoint/ckpt_command checkpoint/export",
    "tools/cli/train.py": "train/train",
    "tools/env_report.py": "cli/env_report",
    "tools/train/loop.py": "report/run_record",
    "train.py": "train/train",
    "utils/": "runtime/zero offload/offload_cases checkpoint/checkpoints engine/engine",
    "utils/zero_to_fp32.py": "checkpoint/export",
    "version.py": "cli/env_report",
    "tiled_loss.py": "runtime/tiled_loss",
    "window.py": "engine/window engine/engine",
    "zero.py": "runtime/zero compat/huggingface engine/parking",
}


def package_of(name: str) -> str:
    """Return the package of a module below `onefold/`; those of `tools/` count as packages of their own."""
    parts = Path(name).parts
    return parts[1] if parts[0] == "tools" else parts[0]


def tests_of(module: str) -> list[str]:
    """Return the folder and the files of `tests/` for a module, by its path; none where nothing is known of it."""
    name = module.removeprefix("./").removeprefix("onefold/")
    if not (ROOT / "onefold" / name).exists():
        return []
    package = package_of(name)
    folders = [f"tests/{package}"] if (ROOT / "tests" / package).is_dir() else []
    table = ELSEWHERE.get(name) or ELSEWHERE.get(f"{package}/", "")
    others = [Path(test) for test in table.split()]
    return [*folders, *(f"tests/{test.parent}/test_{test.name}.py" for test in others)]


def main(modules: Sequence[str]) -> int:
    if not modules:
        print(__doc__, file=sys.stderr)
        return 2
    found: dict[str, None] = {}
    for module in modules:
        files = tests_of(module)
        if not files:
            print(f"No tests are known for {module}: name them in ELSEWHERE of tests/which.py.", file=sys.stderr)
            return 1
        found.update(dict.fromkeys(files))
    print(" ".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
