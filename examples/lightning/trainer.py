"""Train with Lightning's Trainer and its DeepSpeed strategy. The script does not import onefold.

python trainer.py out --strategy deepspeed_stage_3 --precision bf16-mixed
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from net import Net, loaders


class Counting(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net: Net | None = None
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:  # in stage 3 every layer is sharded as it is built
            self.net = Net()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(rows)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self(batch[0])
        self.loss = loss.detach()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(self.all_gather(self.loss).float().mean().item())  # the mean over all ranks

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("eval_loss", self(batch[0]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.evaluated.append(self.trainer.callback_metrics["eval_loss"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small model for two epochs, then again from the checkpoint after the first. Both must "
        "end with the same losses. The last line is JSON: losses, resumed losses, validation losses."
    )
    parser.add_argument("out", help="folder for checkpoints, and for fp32 weights in one file (weights.pt)")
    parser.add_argument("--strategy", default="deepspeed_stage_2", help="deepspeed_stage_1, _2, _3, _2_offload, ...")
    parser.add_argument("--config", metavar="FILE", help="a ds_config.json instead of the strategy's own settings")
    parser.add_argument("--precision", default="bf16-mixed", help="32-true, bf16-mixed or 16-mixed")
    parser.add_argument("--devices", type=int, default=1, help="GPUs of this node, one rank on each")
    parser.add_argument("--num_nodes", type=int, default=1, help="nodes; start the script on each with NODE_RANK set")
    parser.add_argument("--steps", type=int, default=6, help="batches per rank and epoch")
    parser.add_argument("--batch", type=int, default=8, help="rows per rank and batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step; should divide --steps")
    parser.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate after warmup")
    return parser.parse_args()


def train(options: argparse.Namespace, resume: Path | None = None) -> tuple[L.Trainer, Counting]:
    L.seed_everything(1)
    model = Counting(options.lr)
    keep_all = ModelCheckpoint(
        options.out, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True, enable_version_counter=False
    )
    trainer = L.Trainer(
        accelerator="gpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=DeepSpeedStrategy(config=options.config) if options.config else options.strategy,
        precision=options.precision,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip,
        max_epochs=2,
        num_sanity_val_steps=0,
        callbacks=[keep_all],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, *loaders(options.batch, options.steps, trainer.world_size), ckpt_path=resume)
    return trainer, model


def main() -> None:
    options = arguments()
    _, model = train(options)
    trainer, resumed = train(options, resume=Path(options.out, "epoch=0.ckpt"))
    if trainer.is_global_zero:
        convert_zero_checkpoint_to_fp32_state_dict(f"{options.out}/epoch=1.ckpt", f"{options.out}/weights.pt")
        found = {"losses": model.losses, "resumed": resumed.losses, "eval": model.evaluated}
        print(json.dumps({"ranks": trainer.world_size, **found}), flush=True)


if __name__ == "__main__":
    main()
