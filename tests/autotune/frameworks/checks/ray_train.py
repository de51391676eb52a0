"""Usage: ray_train.py FILE: the script's trainer run on a local Ray."""

import json
import os
import runpy
import sys

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}

import ray


def main() -> None:
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR")
    made = runpy.run_path(sys.argv[1])
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        made["train"],
        train_loop_config=made["layout"],
        scaling_config=made["scaling"],
        torch_config=TorchConfig(backend="gloo"),
    )
    print(json.dumps({"returned": trainer.fit().return_value}))


if __name__ == "__main__":
    main()
