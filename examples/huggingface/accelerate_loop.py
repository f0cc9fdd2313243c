"""Train with accelerate in a hand-written loop. The script does not import onefold.

accelerate launch --config_file zero3.yaml accelerate_loop.py out [EPOCHS]
"""

from __future__ import annotations

import json
import sys

import tiny
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from transformers import get_linear_schedule_with_warmup


def main() -> None:
    # Without a GPU, accelerate needs the name of the backend.
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    set_seed(1)
    words = tiny.tokenizer()
    model = tiny.model(words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 40 * epochs)
    loader = torch.utils.data.DataLoader(tiny.examples(words), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for batch in (batch for _ in range(epochs) for batch in loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.save_state(f"{sys.argv[1]}/state")
    accelerator.load_state(f"{sys.argv[1]}/state")
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        f"{sys.argv[1]}/final", state_dict=weights, is_main_process=accelerator.is_main_process
    )
    if accelerator.is_main_process:
        print(json.dumps({"processes": accelerator.num_processes, "losses": losses}), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
