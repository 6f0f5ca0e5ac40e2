"""The Trainer of transformers within a memory budget: add one callback.

python examples/integrations/hugging_face_trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from checkpoint_solver.integrations.hugging_face import FitCallback


def main():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, bos_token_id=0, eos_token_id=0)
    )
    rows = [torch.arange(64) * (index + 1) % 100 for index in range(24)]
    callback = FitCallback(budget="2.8MB")  # on a GPU: FitCallback()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
    print(*callback.plans, sep="\n")


if __name__ == "__main__":
    main()
