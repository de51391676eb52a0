"""Tables fit terminals of 60, 80 and 120 columns: nothing is cut off, and no word is broken."""

import pytest
from called import Command

COMMANDS = (
    ("models",),
    ("clusters",),
    ("space", "llama-3-8b", "--cluster", "dgx-h100", "--space", "3d"),
    ("predict", "llama-3-8b", "--cluster", "dgx-h100"),
)


@pytest.mark.prove
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_tables_fit(command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    printed: dict[int, set[str]] = {}
    for width in (60, 80, 120, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        answer = command(*words)
        assert answer.status == 0, answer.err
        assert not [line for line in answer.out.splitlines() if "…" in line and line.rstrip().endswith("…")]
        printed[width] = set(answer.out.split())
    for width, shown in printed.items():
        broken = shown - printed[400]
        assert not {word for word in broken if not set(word) <= set("█▏▎▍▌▋▊▉░")}, width
