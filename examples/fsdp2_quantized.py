"""Use onefold's quantized collectives with PyTorch's FSDP2, by a few lines after `fully_shard`.

    torchrun --nproc-per-node 2 examples/fsdp2_quantized.py

Parameters are sent as int8, gradients as int8 inside a node and int4 between nodes. The example uses nothing else of
onefold.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from onefold.fsdp import QuantizedAllGather, QuantizedReduceScatter


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)], nn.Linear(256, 1))
    model.to(device)
    mesh = dist.init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    gather, reduce = QuantizedAllGather(), QuantizedReduceScatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(50):
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step + 1000 * dist.get_rank())).to(device)
        loss = (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, sent {gather.sent_bytes + reduce.sent_bytes:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
