"""Which tests to run for a module: `python tests/which.py onefold/comm/exchange.py`, or `make test-of MODULE=...`.

The table names, for each module of the package, the files that see it broken, the nearest and quickest first. What is
used everywhere is named with the few that test it most closely: before a merge all of them run anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Modules without their folder `onefold/`, tests without `test_` and `.py`. A folder stands for all modules in it that
# have no line of their own. Tests that need a GPU are named too: `make test-gpu` runs them.
TESTS = {
    "__init__.py": "floors engine",
    "checkpoint/deepspeed/torch_files.py": "deepspeed_import",
    "checkpoint/deepspeed/zero_checkpoint.py": "deepspeed_import",
    "checkpoint/format/files.py": "manifests safetensors checkpoint_ranges checkpoint_faults",
    "checkpoint/format/folder.py": "checkpoint_ranges ckpt_command checkpoints checkpoint_faults",
    "checkpoint/format/manifest.py": "manifests ckpt_command checkpoint_ranges checkpoints export",
    "checkpoint/format/plain_data.py": "plain_data checkpoints",
    "checkpoint/format/safetensors_files.py": "safetensors export zero plain_data checkpoints",
    "checkpoint/format/shard_files.py": "checkpoint_ranges manifests ckpt_command checkpoints export checkpoint_faults",
    "checkpoint/loading/load.py": "manifests plain_data loader checkpoints offload_cases",
    "checkpoint/loading/random_states.py": "loader plain_data checkpoints",
    "checkpoint/loading/slots.py": "checkpoints offload_cases",
    "checkpoint/loading/weights.py": "safetensors zero huggingface",
    "checkpoint/saving/rank_writer.py": "checkpoints offload_cases checkpoint_faults",
    "checkpoint/saving/saver.py": "checkpoint_ranges checkpoints checkpoint_faults offload_cases",
    "checkpoint/tools/export.py": "export",
    "checkpoint/tools/audit.py": "ckpt_command",
    "checkpointing.py": "checkpointing stage3",
    "cli/bench.py": "bench_tiers",
    "cli/checkpoint_commands.py": "ckpt_command export deepspeed_import",
    "cli/commands.py": "commands launch bench_tiers ckpt_command",
    "cli/launch.py": "launch nodes",
    "cli/main.py": "commands launch export ckpt_command",
    "cli/ranks.py": "launch nodes",
    "cli/reports.py": "report_page",
    "cli/terminal.py": "ckpt_command bench_tiers export",
    "cli/train.py": "train",
    "cli/watch_run.py": "watch",
    "comm/__init__.py": "traffic wires mics",
    "allocator.py": "resident_memory",
    "comm/agreement.py": "traffic stage3 cases",
    "comm/board.py": "checkpoints checkpoint_faults",
    "comm/clocks.py": "timeline",
    "comm/codec.py": "codec wires gpu_codec",
    "comm/collective.py": "exactness wires traffic mics",
    "comm/consensus.py": "alike hangs",
    "comm/exchange.py": "exactness traffic wires",
    "comm/kernels.py": "gpu_codec",
    "comm/ledger.py": "wires traffic stage3",
    "comm/mesh.py": "listeners mics wires nodes launch two_level",
    "comm/native.py": "traffic wires_cases gpu gpu_ranks gpu_ranks_models gpu_ranks_tiers",
    "comm/nodes.py": "two_level",
    "comm/notes.py": "hangs gpu_hangs",
    "comm/parts.py": "two_level gpu_ranks",
    "comm/quantized.py": "wires wires_cases wires_training gpu_wires gpu_ranks_tiers",
    "comm/replicated.py": "mics gpu_wires gpu_ranks_tiers",
    "comm/stacks.py": "hangs",
    "comm/staged.py": "gpu gpu_wires gpu_ranks_tiers",
    "comm/tree.py": "exactness mics two_level",
    "comm/tree_kernel.py": "gpu_ranks gpu_codec",
    "comm/two_level.py": "two_level wires network gpu_ranks_tiers",
    "comm/watch.py": "hangs gpu_hangs exits stage3 checkpoints offload_faults",
    "compat/": "as_deepspeed compat_config compat_zero compat_accelerate compat_huggingface dropin beside_deepspeed",
    "compat/deepspeed/monitor/": "monitors as_deepspeed",
    "compat/parameters.py": "compat_zero zero huggingface",
    "config/": "config support params",
    "config/checks.py": "config engine wires_cases mics",
    "config/document.py": "config",
    "config/params.py": "params support",
    "config/zero_optimization.py": "config plan",
    "engine/__init__.py": "engine",
    "engine/alike.py": "alike",
    "engine/closing.py": "engine cases exits",
    "engine/core.py": "engine exactness cases compile regressions",
    "engine/deepspeed_names.py": "engine zero safetensors huggingface",
    "engine/loading.py": "checkpoints loader offload_cases",
    "engine/memory_errors.py": "out_of_memory gpu_timeline",
    "engine/offload_states.py": "parking wires_cases",
    "engine/reporting.py": "run_record monitors gpu_record",
    "engine/saving.py": "checkpoints checkpoint_faults",
    "engine/train_state.py": "engine checkpoints",
    "env_report.py": "env_report",
    "fsdp.py": "wires",
    "gpu_kernels.py": "gpu_codec gpu_held_parameters",
    "loader.py": "loader engine",
    "log.py": "engine train",
    "offload/activation_offload.py": "checkpointing",
    "offload/encoded.py": "states checkpoints",
    "offload/bus.py": "offload_waits device_pass offload gpu_offload checkpointing",
    "offload/fingerprint.py": "held_parameters gpu_held_parameters",
    "offload/fingerprint_kernels.py": "gpu_held_parameters",
    "offload/grad_shard.py": "exactness offload regressions gpu_steps",
    "offload/host_memory.py": "nvme offload_faults offload",
    "offload/nvme.py": "nvme offload_waits offload offload_faults",
    "offload/offload_memory.py": "offload offload_cases offload_faults offload_waits gpu_offload",
    "offload/param_shard.py": "device_pass offload offload_cases offload_faults",
    "offload/shard_store.py": "offload offload_cases held_parameters checkpoints",
    "offload/state_codec.py": "states gpu_states",
    "offload/state_kernels.py": "gpu_states",
    "offload/swap_folder.py": "nvme offload_faults",
    "offload/write_check.py": "held_parameters checkpoints",
    "offload/write_kernels.py": "gpu_held_parameters",
    "optim/adam_kernels.py": "gpu_states",
    "optim/device_pass.py": "device_pass gpu_states gpu_offload",
    "optim/choose.py": "reference optimizers engine cases",
    "optim/host_step.py": "offload_waits device_pass offload offload_cases gpu_offload",
    "optim/instance.py": "optimizers engine reference cases",
    "optim/matrix_kernels.py": "gpu_muon",
    "optim/loss_scale.py": "loss_scale engine cases",
    "optim/low_bit_classes.py": "states",
    "optim/norm.py": "exactness cases mics wires_cases optimizers gpu_steps gpu_hangs",
    "optim/rules.py": "reference offload_cases gpu_steps",
    "optim/schedules.py": "schedules engine",
    "optim/sharded.py": "reference engine checkpoints",
    "optim/signature.py": "params schedules",
    "optim/step.py": "exactness engine cases reference nonfinite gpu_steps",
    "optim/steppers.py": "reference held_parameters offload checkpoints gpu gpu_held_parameters",
    "plan/__init__.py": "plan",
    "plan/cut.py": "plan stage3",
    "plan/forms.py": "states memory",
    "plan/layout.py": "plan exactness",
    "plan/memory.py": "memory offload_cases bench_tiers wires_cases stage3",
    "plan/program.py": "program stage3",
    "plan/table.py": "plan engine",
    "pool.py": "memory exactness stage3",
    "report/charts.py": "report_page",
    "report/describe.py": "engine memory wires_cases offload_cases",
    "report/memory_usage.py": "engine train",
    "recorder.py": "timeline gpu_timeline",
    "report/monitors.py": "monitors",
    "report/link_bench.py": "estimate",
    "report/offload_bench.py": "bench_tiers",
    "report/out_of_memory.py": "out_of_memory",
    "report/page.py": "report_page train",
    "report/plan_report.py": "run_record report_page",
    "report/plots.py": "report_page",
    "report/run_file.py": "run_record report_page watch",
    "report/run_record.py": "run_record",
    "report/timeline.py": "timeline engine regressions run_record gpu_timeline",
    "report/trace_file.py": "timeline",
    "report/trace_window.py": "timeline gpu_timeline",
    "runtime/__init__.py": "stage3",
    "runtime/build.py": "exactness cases zero",
    "runtime/flat_grad.py": "exactness stage3 offload regressions",
    "runtime/flat_param.py": "stage3 wires zero offload",
    "runtime/held.py": "held_parameters zero",
    "runtime/hooks.py": "stage3 cases huggingface",
    "runtime/in_flight.py": "exactness stage3 cases regressions",
    "runtime/model_watch.py": "held_parameters",
    "runtime/order.py": "stage3 wires_cases gpu_ranks_models",
    "runtime/quantized_layers.py": "packed",
    "runtime/param_handle.py": "zero held_parameters stage3 regressions",
    "runtime/schedule.py": "exactness stage3 cases regressions",
    "runtime/torch_internals.py": "stage3 cases compile",
    "runtime/unit.py": "exactness stage3",
    "runtime/unit_spans.py": "timeline gpu_timeline",
    "start.py": "engine zero",
    "train/__main__.py": "train",
    "train/data.py": "train",
    "train/gpt.py": "train wires_training",
    "train/huggingface.py": "train",
    "train/loop.py": "train run_record",
    "train/options.py": "train",
    "train/progress.py": "train",
    "train/task.py": "train",
    "train/tokens.py": "train",
    "utils/__init__.py": "zero offload_cases checkpoints engine",
    "utils/zero_to_fp32.py": "export",
    "version.py": "env_report",
    "window.py": "window engine",
    "zero.py": "zero huggingface parking",
    "comm/imagined.py": "estimate",
    "optim/matrix_groups.py": "muon",
    "optim/matrix_rules.py": "muon",
    "optim/matrix_steps.py": "muon gpu_muon",
    "plan/matrices.py": "muon",
    "estimate/__init__.py": "estimate",
    "estimate/advice.py": "estimate",
    "estimate/caching_allocator.py": "estimate",
    "estimate/forecast.py": "estimate",
    "estimate/formulas.py": "what_fits",
    "estimate/machines.py": "estimate",
    "estimate/models.py": "estimate",
    "estimate/on_cuda.py": "estimate",
    "estimate/op_times.py": "estimate",
    "estimate/rehearsal.py": "estimate",
    "estimate/step_bench.py": "estimate",
    "estimate/work.py": "estimate",
    "estimate/textbook.py": "estimate",
    "estimate/to_javascript.py": "what_fits",
    "estimate/trace.py": "estimate",
    "cli/plan.py": "estimate guide commands",
    "cli/compare.py": "compare",
    "cli/trials.py": "compare",
    "cli/tune.py": "compare",
    "estimate/what_fits.py": "what_fits",
}

# Of no module: of the house, of the papers, of `benchmarks/`, and of the tests themselves.
OTHERS = "floors readme guide network benchmarks models mutants which"


def tests_of(module: str) -> list[str]:
    """The files of `tests/` for a module, by its path; none where the table does not know it."""
    name = module.removeprefix("./").removeprefix("onefold/")
    folders = [f"{folder}/" for folder in Path(name).parents]
    found = next((TESTS[place] for place in (name, *folders) if place in TESTS), "")
    places = {path.name: path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    return [str(places[f"test_{test}.py"]) for test in found.split()]


def main(modules: Sequence[str]) -> int:
    if not modules:
        print(__doc__, file=sys.stderr)
        return 2
    found: dict[str, None] = {}
    for module in modules:
        files = tests_of(module)
        if not files:
            print(f"{module} is not in the table of tests/which.py: give it a line there", file=sys.stderr)
            return 1
        found.update(dict.fromkeys(files))
    print(" ".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
