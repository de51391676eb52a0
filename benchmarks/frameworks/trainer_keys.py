"""Add the settings of programs that train with Hugging Face's Trainer to autotune/frameworks/trainer_keys.toml.

    python -m benchmarks.frameworks.trainer_keys PROGRAM=VERSION=FOLDER …

PROGRAM is a key of `CLASSES`; FOLDER has its source, as in the repository or unpacked from a wheel; nothing of it is
imported. The table is a union over versions, because users have older ones: run it once for each version. Exit code 1: nothing
was found.
"""

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

TARGET = Path(__file__).parents[2] / "autotune" / "frameworks" / "trainer_keys.toml"
COMMANDS = ("sft", "dpo", "kto", "grpo", "reward", "rloo")
CLASSES = {
    "transformers": [("", "**/transformers/training_args.py", "TrainingArguments")],
    "trl": [
        ("", "**/trl/trainer/model_config.py", "ModelConfig"),
        ("", "**/trl/scripts/utils.py", "ScriptArguments|DatasetMixtureConfig"),
        *(("commands", f"**/trl/trainer/{command}_config.py", r"\w+Config") for command in COMMANDS),
    ],
    "llama-factory": [("", "**/llamafactory/hparams/*_args.py", r"(?!Evaluation)\w+")],
    "axolotl": [
        ("", "**/axolotl/utils/schemas/**/*.py", r"(?!\w+(Capabilities|Dataset|Type)$)\w+"),
        ("", "**/axolotl/integrations/**/args.py", r"\w+"),
    ],
}
"""Program -> table, files and classes whose fields are its settings; of commands the file's name says which."""
INTERVALS = ("eval_strategy", "evaluation_strategy", "logging_strategy")
WORDS = {
    "optim": "OptimizerNames", "lr_scheduler_type": "SchedulerType", "save_strategy": "SaveStrategy",
    "hub_strategy": "HubStrategy", **dict.fromkeys(INTERVALS, "IntervalStrategy"),
}  # fmt: skip
"""Setting -> the enumeration of transformers that has its words."""


def classes(folder: Path, files: str, name: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    """The classes of that name, a regular expression, in the files."""
    for file in sorted(folder.glob(files)):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and re.fullmatch(name, node.name):
                yield file, node


def fields(node: ast.ClassDef) -> set[str]:
    """Names of a dataclass's or a model's fields."""
    names = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)}
    return {name for name in names if not name.startswith("_") and name != "model_config"}


def words(node: ast.ClassDef) -> set[str]:
    """Values of an enumeration of texts."""
    values = (part.value for part in node.body if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant))
    return {value.value for value in values if isinstance(value.value, str)}


def written(name: str, entries: set[str]) -> str:
    """One row of the table."""
    lines = textwrap.wrap(" ".join(sorted(entries)), 118, break_on_hyphens=False)
    return f'{name} = "{lines[0]}"' if len(lines) == 1 else "\n".join([f'{name} = """', *lines, '"""'])


def main(arguments: list[str]) -> int:
    """Read each program's source, and write the table with what it adds."""
    text = TARGET.read_text(encoding="utf-8")
    header = text.partition("\n\n")[0]
    content = tomllib.loads(text)
    tables = {name: {key: set(row.split()) for key, row in content[name].items()} for name in ("commands", "words")}
    tables[""] = {key: set(row.split()) for key, row in content.items() if isinstance(row, str)}
    found = 0
    for argument in arguments:
        program, version, folder = argument.split("=", 2)
        for table, files, name in CLASSES[program]:
            for file, node in classes(Path(folder), files, name):
                row = file.name.partition("_config")[0] if table else program
                tables[table][row] |= fields(node) - (tables[""]["transformers"] | tables[""]["trl"] if table else set())
                found += 1
        for setting, name in WORDS.items() if program == "transformers" else ():
            for _, node in classes(Path(folder), "**/transformers/**/*.py", name):
                tables["words"][setting] |= words(node)
        if version not in header:
            header += f"\n# Added: {program} {version}."
    rows = [header, *(written(*row) for row in tables[""].items())]
    rows += [f"[{name}]\n" + "\n".join(written(*row) for row in tables[name].items()) for name in ("commands", "words")]
    TARGET.write_text("\n\n".join(rows) + "\n", encoding="utf-8")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
