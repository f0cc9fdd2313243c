"""Programs that end in every way, many times: `python exits.py STAGE COUNT PATH...` prints the exit codes as JSON.

Each rank is a fork of this process, which has imported everything, and falls through to the end of this file: its
interpreter finalizes as that of any program. With FRESH=1 in the environment ranks are new processes instead.

A thread that is in the store or in the backend while the interpreter finalizes aborts the process, now and then.
So the last thing a rank does before is to count its threads: it ends with code 77 where one is left.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold

torch.set_num_threads(1)

WORLD = 2
# What each rank should end with, by path; a signal as a negative number.
PATHS = {
    "normal": [0, 0],
    "no engine left": [0, 0],
    "destroyed": [0, 0],
    "process group destroyed": [0, 0],
    "offload": [0, 0],
    "wires": [0, 0],
    "save in the background": [0, 0],
    "early break": [1, 0],
    "early break, offload": [1, 0],
    "early break, wires": [1, 0],
    "exception": [1, 1],
    "exception on both": [1, 1],
    "exception after a save": [1, 1],
    "sys.exit": [1, 3],
    "sys.exit on both": [3, 3],
    "Ctrl-C": [1, -signal.SIGINT],
    "Ctrl-C on both": [-signal.SIGINT, -signal.SIGINT],
    "Ctrl-C while waiting": [1, -signal.SIGINT],
    "ranks differ": [1, 1],
    "before initialize": [1, 3],
}
TIMEOUT = 60.0
THREAD_LEFT = 77


def count_threads() -> None:
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if left:
        print(f"threads are left: {left}", file=sys.stderr, flush=True)
        os._exit(THREAD_LEFT)


def config_of(path: str, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if "offload" in path:
        zero["offload_optimizer"] = {"device": "cpu"}
    if "wires" in path:
        zero |= {"zero_quantized_gradients": True}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        "log_level": "critical",
    }


kept: list[onefold.Engine] = []


def program(path: str, stage: int, rank: int, folder: str) -> None:
    if path == "before initialize":
        onefold.init_distributed()
        if rank == 1:
            sys.exit(3)
    width = 32 if path == "ranks differ" and rank else 16
    blocks = (nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16)) for _ in range(3))
    engine = onefold.initialize(model=nn.Sequential(*blocks), config=config_of(path, stage))[0]
    if path != "no engine left":
        kept.append(engine)  # as in most programs, until the interpreter itself goes

    def step() -> None:
        engine.backward(engine(torch.randn(4, 16)).pow(2).mean())
        engine.step()

    step()
    step()
    odd, both = rank == 1, "both" in path
    if "save" in path:
        engine.save_checkpoint(folder, background=True)
    if path.startswith("early break") and odd:
        return
    if path.startswith("exception") and (odd or both):
        raise ValueError("the program's own")
    if path.startswith("sys.exit") and (odd or both):
        sys.exit(3)
    if path.startswith("Ctrl-C") and (odd or both):
        threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        if "waiting" in path:
            dist.barrier()
        while True:
            step()
    if path == "destroyed":
        engine.destroy()
        return
    if path == "process group destroyed":
        engine.destroy()
        dist.destroy_process_group()
        return
    if path == "no engine left":
        del engine
        return
    if "waiting" in path:
        time.sleep(0.5)
    for _ in range(100_000 if path.startswith("Ctrl-C") else 4):  # until the other is gone, on a fast machine too
        step()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(pids: list[int]) -> list[int | str]:
    codes: dict[int, int | str] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGABRT)  # with faulthandler it says where it hangs
                    os.waitpid(pid, 0)
                    codes[pid] = "hangs"
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


role: tuple[str, int] | None = None
if __name__ != "__main__":
    pass
elif sys.argv[1] == "--rank":
    role, stage, folder = (sys.argv[2], int(os.environ["RANK"])), int(sys.argv[3]), sys.argv[4]
else:
    stage, count, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    results: dict[str, dict[str, int]] = {}
    for path in sys.argv[4:] or PATHS:
        for _ in range(count):
            port, pids = free_port(), []
            for rank in range(WORLD):
                pid = os.fork()
                if not pid:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                    if os.environ.get("FRESH"):
                        os.execv(sys.executable, [sys.executable, __file__, "--rank", path, str(stage), folder])
                    role = path, rank
                    break
                pids.append(pid)
            if role is not None:
                break
            key = json.dumps(wait_for(pids))
            found = results.setdefault(path, {})
            found[key] = found.get(key, 0) + 1
        if role is not None:
            break
    if role is None:
        print(json.dumps(results))

if role is not None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(count_threads)  # the first to be registered is the last to run
    program(role[0], stage, role[1], os.path.join(folder, f"{role[0]} {os.environ['MASTER_PORT']}"))
