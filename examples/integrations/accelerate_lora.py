"""Train peft's adapters on a frozen model with accelerate, within a memory budget.

python examples/integrations/accelerate_lora.py
"""

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from checkpoint_solver import fit, plans_of


def main():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, use_cache=False)
    adapters = LoraConfig(target_modules=["c_attn"], r=4, fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), adapters).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    fitted = fit(accelerator.unwrap_model(model), budget="2.2MB", optimizer=optimizer)
    tokens = torch.arange(4 * 64).reshape(4, 64).to(accelerator.device) % 100
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        print("loss", loss.item())
    print(*plans_of(fitted), sep="\n")


if __name__ == "__main__":
    main()
