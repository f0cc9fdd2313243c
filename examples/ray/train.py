"""Train on the workers of Ray Train: `python train.py [--workers N] [--gpu] [--checkpoints PLACE]`."""

import argparse

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import onefold


def train(options):
    """Run on each worker. Ray has set rank, size and address, and has started the process group."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, _, _, _ = onefold.initialize(model=model, config=config)
    engine.load_checkpoint(options["checkpoints"])  # after a failure, Ray starts all workers again
    while engine.global_steps < options["steps"]:
        generator = torch.Generator().manual_seed(engine.global_steps * engine.world_size + engine.global_rank)
        x = torch.randn(16, 64, generator=generator).to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(x), x[:, :8])
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(options["checkpoints"])
    print(f"rank {engine.global_rank} of {engine.world_size}: step {engine.global_steps}, loss {loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoints", default="/tmp/checkpoints", help="a folder of all nodes, or s3://bucket/run")
    given = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"checkpoints": given.checkpoints, "steps": given.steps},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
    )
    trainer.fit()
