"""A raw Accelerate loop: accumulation, exact clipping, a schedule, and a checkpoint that resumes bit for bit.

    python examples/accelerate_loop.py --steps 40   # or: accelerate launch examples/accelerate_loop.py

Expect the loss every ten steps and "resumed: equal to the bit". The only line of ours is the optimizer.
"""

import argparse
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import forge_hf


def build(steps: int) -> tuple:
    """Model, optimizer, schedule and data; the same every time."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = forge_hf.ForgeAdamW(model, lr=3e-3, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    ids = torch.randint(0, 16, (32, 1)) + torch.arange(24)  # counting, from a random start
    return model, optimizer, schedule, DataLoader(TensorDataset(ids), batch_size=4)


def run(accelerator: Accelerator, prepared: tuple, first: int, last: int, save_at: int, folder: str) -> None:
    """Train from step `first` to `last`."""
    model, optimizer, schedule, loader = prepared
    step, losses = first, []
    while step < last:
        for (ids,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                losses.append(float(loss))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % 10 == 0:
                accelerator.print(f"step {step}: loss {sum(losses) / len(losses):.4f}")
                losses = []
            if step == save_at:
                accelerator.save_state(folder)
            if step == last:
                return


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main(argv: list[str] | None = None) -> bool:
    """Train, then train the second half again from the checkpoint; returns whether both ends are equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps; a multiple of 8")
    steps = parser.parse_args(argv).steps
    # Two batches a step and eight a pass: half of the steps end with a pass, so data need no skipping.
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with tempfile.TemporaryDirectory() as folder:
        prepared = accelerator.prepare(*build(steps))
        run(accelerator, prepared, 0, steps, steps // 2, folder)
        whole = weights(prepared[0])
        accelerator.free_memory()
        prepared = accelerator.prepare(*build(steps))
        accelerator.load_state(folder)
        run(accelerator, prepared, steps // 2, steps, 0, folder)
    equal = torch.equal(whole, weights(prepared[0]))
    accelerator.print("resumed: equal to the bit" if equal else "resumed: NOT equal")
    return equal


if __name__ == "__main__":
    raise SystemExit(not main())
