"""Store the optimizer states of an FSDP2 model in host memory, by one line after the optimizer is made.

    torchrun --nproc-per-node 2 examples/fsdp2_offload.py checkpoint
    torchrun --nproc-per-node 1 examples/fsdp2_offload.py checkpoint     # resumes on another number of ranks

Clipping, the scheduler and the checkpoint are those of any FSDP2 program. The example uses nothing else of onefold.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import onefold.fsdp

NUM_STEPS = 20


def main(folder: str) -> None:
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if has_gpu else "cpu"
    if has_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)], nn.Linear(256, 1))
    model.to(device)
    mesh = dist.init_device_mesh("cuda" if has_gpu else "cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = onefold.fsdp.offload(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * NUM_STEPS)

    first = 0
    if os.path.exists(os.path.join(folder, ".metadata")):
        weights, states = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": states, "scheduler": scheduler.state_dict(), "step": 0}
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        scheduler.load_state_dict(loaded["scheduler"])
        first = loaded["step"]
        if dist.get_rank() == 0:
            print(f"resumed at step {first}")

    for step in range(first, first + NUM_STEPS):
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step + 1000 * dist.get_rank())).to(device)
        loss = (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {optimizer.host_bytes:,} bytes of states in host memory")

    weights, states = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": states, "scheduler": scheduler.state_dict(), "step": first + NUM_STEPS}
    dcp.save(saved, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoint")
