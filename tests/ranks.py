"""Pools of real ranks: gloo's, forked once per world size from a parent that has imported torch; and NCCL's.

[Note: NCCL ranks on one GPU]
NCCL refuses two ranks on one device only if both say they are on the same host, and `NCCL_HOSTID` is what a rank says.
So each rank gets another one, all take device 0, and NCCL connects them by sockets of the loopback. With CUDA's MPS
daemon their kernels run side by side; without it the device switches between processes, and everything is slow.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 240.0


class RankError(AssertionError):
    """A rank raised; the text holds its traceback."""


class RankPool:
    """`world_size` processes in one group. A case that breaks a rank gets a fresh pool for the next one."""

    def __init__(self, world_size: int, backend: str = "gloo", node_size: int | None = None) -> None:
        """`node_size`: what ranks take for the number of ranks on their host."""
        self.world_size = world_size
        self._backend = backend
        self._node_size = node_size or world_size
        self._ranks: list[tuple[Any, Any]] = []

    def run(self, case: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `case(*args, **kwargs)` on every rank; the results in rank order."""
        if not self._ranks:
            self.start()
        for _, pipe in self._ranks:
            pipe.send((case, args, kwargs))
        results: list[Any] = [None] * self.world_size
        errors: dict[int, str] = {}
        waiting = dict(enumerate(pipe for _, pipe in self._ranks))
        deadline = time.monotonic() + TIMEOUT
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=1.0)
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    try:
                        ok, value = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        ok, value = False, f"rank {rank} died"
                    if ok:
                        results[rank] = value
                    else:
                        errors[rank] = value
                        # The others may wait for this rank for ever; give them a moment to say more.
                        deadline = min(deadline, time.monotonic() + 5)
                    del waiting[rank]
        if waiting and not errors:
            errors = {rank: f"rank {rank} gave no answer within {TIMEOUT:.0f} s" for rank in waiting}
        if errors:
            self.stop()
            raise RankError("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items())))
        return results

    def start(self) -> None:
        port = free_port()
        # Forking is fast, but CUDA cannot start in a fork of a process that has asked for it.
        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        for rank in range(self.world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, self._node_size, port, self._backend, there), daemon=True
            )
            process.start()
            self._ranks.append((process, here))

    def stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []


def start_mps() -> bool:
    """Have CUDA's daemon for kernels of several processes, where there is one. It ends with the last of them."""
    folder = os.environ.setdefault("CUDA_MPS_PIPE_DIRECTORY", tempfile.mkdtemp(prefix="onefold-mps-"))
    os.environ.setdefault("CUDA_MPS_LOG_DIRECTORY", folder)
    daemon = shutil.which("nvidia-cuda-mps-control")
    return daemon is not None and subprocess.run([daemon, "-d"], capture_output=True, check=False).returncode == 0


def stop_mps() -> None:
    subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, capture_output=True, check=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world: int, port: int, backend: str, node_size: int | None = None) -> dict[str, str]:
    """What a launcher sets, and on NCCL with fewer GPUs than ranks what lets ranks share one."""
    found = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if backend == "nccl" and world > torch.cuda.device_count():
        found |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(node_size or world), "NCCL_HOSTID": f"host{rank}"}
        found |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return found


def _other_threads() -> str:
    """Where the other threads of this process are, the hang detector's among them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)[-4:])}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "\n".join(["", f"{len(stacks)} other threads", *stacks])


def _serve(rank: int, world_size: int, node_size: int, port: int, backend: str, pipe: Any) -> None:
    os.environ.update(rank_environment(rank, world_size, port, backend, node_size))
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if backend == "nccl" and world_size > 1:  # their runs are compared to the bit
            torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    gc.freeze()  # a collection after each case then looks only at what cases have made
    while True:
        try:
            case, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(1234)
            pipe.send((True, case(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc() + _other_threads()))
        gc.collect()
