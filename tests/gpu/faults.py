"""One rank of a job in which rank 1 does something wrong: `python faults.py KIND STAGE`, with a launcher's environment.

Prints one line of JSON: how long after the fault this rank heard of it, and what. Runs on NCCL where there is a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

import onefold
from onefold.comm import Disagreement

FAULTS = ("skips a step", "calls once more", "exits", "is killed", "raises", "sleeps")


def main(kind: str, stage: int) -> None:
    rank = int(os.environ["RANK"])
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    torch.manual_seed(1)
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    engine, *_ = onefold.initialize(model=layers, model_parameters=layers.parameters(), config=settings)
    x = torch.randn(4, 256, device=engine.device, dtype=torch.bfloat16)
    began, told = 0.0, {"seconds": 0.0, "error": "", "text": ""}
    try:
        for number in range(8):
            odd = rank == 1 and number == 4
            if number == 4:
                began = time.monotonic()
            if odd and kind == "calls once more":
                engine.module(x).mean().item()
            if odd and kind == "exits":
                sys.exit(3)
            if odd and kind == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if odd and kind == "raises":
                raise ValueError("a bad sample")
            if odd and kind == "sleeps":
                time.sleep(12)
            loss = engine(x).float().pow(2).mean()
            engine.backward(loss)
            if not (odd and kind == "skips a step"):
                engine.step()
            if not torch.isfinite(loss).item():
                raise ArithmeticError("a loss that is not finite")
    except Disagreement as error:
        told = {"seconds": time.monotonic() - began, "error": type(error).__name__, "text": str(error)}
        raise
    finally:
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
