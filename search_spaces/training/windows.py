"""Attention that looks back a window of tokens: what a token sees, and which keys a block of queries visits."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.trial_config import TrialConfig

Trained = TypeVar("Trained", bound=Model)

USUAL_BLOCK, SHORTEST_BLOCK = 128, 8
"""Queries of a block: what kernels like, and what is worth a call of one where the window is narrow."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A block of neighbouring queries, and the keys that its kernel reads: some of them a mask hides from some queries."""

    first_query: int
    queries: int
    first_key: int
    """The keys from here to the block's last query are read."""
    global_keys: int
    """And so many from the first token on, apart from those; 0: none, or they are among those."""

    @property
    def end(self) -> int:
        """The token after the block's last query."""
        return self.first_query + self.queries

    @property
    def keys(self) -> int:
        """Keys in all."""
        return self.end - self.first_key + self.global_keys


@dataclass(frozen=True, slots=True)
class Window:
    """Causal attention to the last `tokens` tokens, one's own included [Beltagy et al. 2020, Longformer, 3.1], and to the first
    `global_tokens` of the sequence besides [Xiao et al. 2024, StreamingLLM, 3.2]."""

    tokens: int
    """0: all, however far back."""
    global_tokens: int = 0

    def hides(self, length: int) -> bool:
        """Whether there are tokens in a sequence of so many that causality alone would show."""
        return 0 < self.tokens < length - self.global_tokens

    @property
    def block(self) -> int:
        """Queries of a block: more of them visit more keys in vain, fewer copy keys and call kernels more often.

        A quarter of a wide window, so that at most a quarter of the keys is read in vain. With global tokens the keys of a
        block are copied together, so that a block is half of the window then.
        """
        share = self.tokens // (2 if self.global_tokens else 4)
        least = SHORTEST_BLOCK if self.tokens < USUAL_BLOCK else USUAL_BLOCK
        return max(_power_of_two(share if self.tokens >= USUAL_BLOCK else self.tokens), least)

    def visits(self, start: int, queries: int) -> Iterator[Visit]:
        """The blocks of so many queries from `start` on, in order."""
        for first in range(start, start + queries, self.block):
            count, first_key = min(self.block, start + queries - first), max(first - self.tokens + 1, 0)
            near = first_key <= self.global_tokens
            yield Visit(first, count, 0 if near else first_key, 0 if near else self.global_tokens)

    def visited_pairs(self, length: int) -> int:
        """Pairs of a query and a key that are computed for a sequence, those that a mask hides included."""
        return sum(visit.queries * visit.keys for visit in self.visits(0, length))

    def copied_keys(self, length: int) -> int:
        """Keys of a sequence that are copied to stand beside the global ones of a block, these included."""
        return sum(visit.keys for visit in self.visits(0, length) if visit.global_keys)

    def visible_pairs(self, length: int) -> int:
        """Pairs of a query and a key that it sees: w s - w (w - 1) / 2 by the window w of a sequence s, and besides g n -
        g (g - 1) / 2 by n = s - w queries that have not all of the g global tokens in their window, g at most n.
        """
        window = min(self.tokens, length) or length
        beyond = length - window
        first = min(self.global_tokens, beyond)
        return window * length - window * (window - 1) // 2 + first * beyond - first * (first - 1) // 2


def window_of(model: ModelSpec) -> Window:
    """What a token of the model sees."""
    return Window(model.sliding_window, model.global_tokens)


def windowed(model: Trained, config: TrialConfig) -> Trained:
    """The model with the window that the configuration asks for, where that is shorter than its own."""
    if not config.attention_window or not isinstance(model, ModelSpec):
        return model
    window = min(config.attention_window, model.sliding_window or config.attention_window)
    return dataclasses.replace(model, sliding_window=window, global_tokens=config.attention_global_tokens)


def window_problem(config: TrialConfig, model: Model, sequence_length: int) -> str | None:
    """Why the model cannot attend as the configuration asks, in a clause; None: it can, or is asked for nothing."""
    window, first = config.attention_window, config.attention_global_tokens
    if not window or isinstance(model, CommandModel):  # a script's attention is its own affair
        return None
    if isinstance(model, FactoryModel):
        return f"attention_window={window} needs attention of our own, not that of {model.name}"
    if first and window < sequence_length <= window + first:
        return f"a window of {window} and {first} global tokens hide nothing of {sequence_length} tokens"
    return None


def _power_of_two(number: int) -> int:
    """The largest that is no larger; 0 of 0."""
    return 1 << (number.bit_length() - 1) if number else 0
