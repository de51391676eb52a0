"""Write search_spaces/presets/class_sizes.toml: the sizes that Hugging Face's classes take where a config.json leaves them out.

python -m benchmarks.frameworks.class_sizes, with the extra transformers
"""

from pathlib import Path

import transformers

from search_spaces.models.huggingface import FAMILIES, TEXT_PARTS

KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "ffn_dim", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
TARGET = Path(__file__).parents[2] / "search_spaces" / "presets" / "class_sizes.toml"


def main() -> None:
    """Write one row for each family of which transformers has a class."""
    rows = [
        "# Sizes that Hugging Face's configuration class of each family takes where a config.json leaves them out",
        f"# [transformers {transformers.__version__}, models/FAMILY/configuration_FAMILY.py].",
        "# Written by python -m benchmarks.frameworks.class_sizes.",
    ]
    for family in (*FAMILIES, *(f"{part}_text" for part in TEXT_PARTS)):
        if family in transformers.CONFIG_MAPPING:
            config = transformers.AutoConfig.for_model(family)
            sizes = ", ".join(f"{key} = {getattr(config, key)}" for key in KEYS if getattr(config, key, None) is not None)
            rows.append(f"{family} = {{ {sizes} }}")
    TARGET.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
