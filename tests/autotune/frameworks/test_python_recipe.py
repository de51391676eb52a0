"""Recipes that are Python functions, read without running them."""

from autotune.frameworks.read import python_recipes

TEXT = '''
raise RuntimeError("never run")

def base() -> Config:
    """Docs."""
    return Trainer.Config(
        training=TrainingConfig(local_batch_size=2 * 4, seq_len=4096, steps=STEPS),
        activation_checkpoint=SelectiveAC.Config(),
        compile=CompileConfig(enable=True, components=["model"]),
    )

def larger():
    config = base()
    config.training.local_batch_size = 16
    other.training.seq_len = 1
    config.parallelism.tensor_parallel_degree = 1 + 1
    return config

def bridge_config():
    cfg = llama_pretrain_config()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.env_vars = {**COMMON, "NVLINK_DOMAIN_SIZE": 8}
    return cfg

def more():
    cfg = _with_global_batch_size(bridge_config(), 768)
    return cfg

def helper(x):
    return x + 1

def endless():
    config = endless()
    return config
'''


def test_functions_that_return_configurations() -> None:
    found = {recipe.name: recipe for recipe in python_recipes(TEXT)}
    shared = {
        "training.seq_len": 4096, "activation_checkpoint.mode": "selective", "compile.enable": True,
        "compile.components": ["model"],
    }  # fmt: skip
    assert found["base"].settings == {"recipe": "base", "training.local_batch_size": 8, **shared}
    assert found["larger"].settings == {
        "recipe": "larger", "training.local_batch_size": 16, "parallelism.tensor_parallel_degree": 2, **shared,
    }  # fmt: skip
    bridge = {
        "model.tensor_model_parallel_size": 4, "model.virtual_pipeline_model_parallel_size": None,
        "env_vars.NVLINK_DOMAIN_SIZE": 8,
    }  # fmt: skip
    assert found["bridge_config"].settings == {"recipe": "bridge_config", **bridge}
    assert found["more"].settings == {"recipe": "more", "train.global_batch_size": 768, **bridge}
    assert set(found) == {"base", "larger", "bridge_config", "more"}
    assert found["larger"].line == TEXT.splitlines().index("def larger():") + 1


def test_functions_that_begin_with_others_twice_are_read_once() -> None:
    chain = "".join(f"def f{number}():\n    x = f{number + 1}()\n    x = f{number + 1}()\n" for number in range(60))
    found = python_recipes(f"{chain}def f60():\n    return Config(a={'9999999999 * ' * 9}9, b=1)\n")
    assert len(found) == 61 and all(recipe.settings == {"b": 1, "recipe": recipe.name} for recipe in found)
