"""Usage: lightning_strategy.py FILE [fit]: the strategy that the file makes, given to a Trainer; with fit a step of it."""

import json
import runpy
import sys
from types import SimpleNamespace

import torch
from lightning.pytorch import LightningModule, Trainer


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def deepspeed(strategy, arguments) -> dict:
    """What Lightning fills in for a Trainer with these arguments, as it does on GPUs; here it would refuse to go further."""
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(**{"gradient_clip_val": None, **arguments}))
    strategy._format_config()
    return {
        "accumulation": strategy.config["gradient_accumulation_steps"],
        "stage": strategy.config["zero_optimization"]["stage"],
    }


def main() -> None:
    made = runpy.run_path(sys.argv[1])
    strategy, arguments = made["strategy"], made["trainer"]
    told = {"strategy": type(strategy).__name__}
    if told["strategy"] == "DeepSpeedStrategy":
        told |= deepspeed(strategy, arguments)
    if "fit" in sys.argv:
        quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
        trainer = Trainer(strategy=strategy, **arguments, max_steps=1, **quiet)
        samples = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=made["micro_batch_size"])
        trainer.fit(Model(), samples)
        told |= {"steps": trainer.global_step, "ranks": trainer.world_size}
        if trainer.global_rank:
            return
    print(json.dumps(told))


if __name__ == "__main__":
    main()
