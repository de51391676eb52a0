"""A Hugging Face Trainer script, as people have them. Two lines are autotune's: they are marked.

    autotune sweep --ranks 2 --global-batch-size 16 --sequence-length 64 -- python examples/hf_trainer/train.py \
        --output_dir out --use_cpu true --per_device_train_batch_size {micro_batch_size} \
        --gradient_accumulation_steps {gradient_accumulation_steps} --gradient_checkpointing {gradient_checkpointing}

Leave out `--use_cpu true` where there are GPUs. Without it on a CPU, each rank trains alone.

A small GPT-2 from its config, with random weights, on tokens drawn at random: nothing is downloaded.
"""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

from autotune.integrations.transformers import AutotuneCallback  # (1)

SAMPLES, TOKENS, VOCABULARY = 100_000, 64, 512


class Tokens(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens())
    trainer.add_callback(AutotuneCallback())  # (2)
    trainer.train()


if __name__ == "__main__":
    main()
