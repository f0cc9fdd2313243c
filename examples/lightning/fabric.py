"""Train with Lightning's Fabric and its DeepSpeed strategy. The script does not import onefold.

python fabric.py out --stage 3 --precision bf16-mixed
"""

from __future__ import annotations

import argparse
import json

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from net import Net, loaders


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small model, save it and train on. Then load the checkpoint and train on again. Both runs "
        "must end with the same losses. The last line is JSON: losses, losses after the load, validation loss."
    )
    parser.add_argument("out", help="folder for the checkpoint")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3), help="shard 1: optimizer states, 2: and "
                        "gradients, 3: and parameters")  # fmt: skip
    parser.add_argument("--offload", action="store_true", help="offload optimizer states, in stage 3 also parameters")
    parser.add_argument("--config", metavar="FILE", help="a ds_config.json instead of --stage and --offload")
    parser.add_argument("--precision", default="bf16-mixed", help="32-true, bf16-mixed or 16-mixed")
    parser.add_argument("--devices", type=int, default=1, help="GPUs of this node, one rank on each")
    parser.add_argument("--num_nodes", type=int, default=1, help="nodes; start the script on each with NODE_RANK set")
    parser.add_argument("--steps", type=int, default=6, help="steps before the save, and after it")
    parser.add_argument("--batch", type=int, default=8, help="rows per rank and batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    return parser.parse_args()


def strategy(options: argparse.Namespace) -> DeepSpeedStrategy:
    if options.config:
        return DeepSpeedStrategy(config=options.config)
    return DeepSpeedStrategy(
        stage=options.stage,
        offload_optimizer=options.offload,
        offload_parameters=options.offload and options.stage == 3,
        logging_batch_size_per_gpu=options.batch,
    )


def main() -> None:
    options = arguments()
    fabric = Fabric(
        accelerator="cuda",
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=strategy(options),
        precision=options.precision,
    )
    fabric.launch()
    fabric.seed_everything(1)
    with fabric.init_module():  # in stage 3 every layer is sharded as it is built
        model = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=options.lr))
    train, valid = fabric.setup_dataloaders(*loaders(options.batch, 2 * options.steps, fabric.world_size))
    batches = [rows for (rows,) in train]

    def step(rows: torch.Tensor) -> float:
        loss = model(rows)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return fabric.all_gather(loss.detach()).float().mean().item()

    state = {"model": model, "optimizer": optimizer, "steps": options.steps}
    losses = [step(rows) for rows in batches[: options.steps]]
    fabric.save(f"{options.out}/half", state)
    losses += [step(rows) for rows in batches[options.steps :]]
    state["steps"] = 0
    fabric.load(f"{options.out}/half", state)
    resumed = [step(rows) for rows in batches[state["steps"] :]]
    model.eval()
    with torch.no_grad():
        evaluated = fabric.all_gather(torch.stack([model(rows) for (rows,) in valid])).float().mean().item()
    if fabric.is_global_zero:
        found = {"losses": losses, "resumed": resumed, "eval": [evaluated]}
        print(json.dumps({"ranks": fabric.world_size, **found}), flush=True)


if __name__ == "__main__":
    main()
