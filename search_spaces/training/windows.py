"""Attention to a window, or within chunks: the tokens that a token attends to, and the keys that a block of queries reads."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.trial_config import TrialConfig

Trained = TypeVar("Trained", bound=Model)


@dataclass(frozen=True, slots=True)
class Visit:
    """A block of consecutive queries, and the keys that its kernel reads, some of which are masked for some queries."""

    first_query: int
    queries: int
    first_key: int
    """The kernel reads the keys from this one to the block's last query."""
    global_keys: int
    """Additional keys from the first token on; 0: none, or they are in the range above."""

    @property
    def end(self) -> int:
        """The token after the block's last query."""
        return self.first_query + self.queries

    @property
    def keys(self) -> int:
        """Total keys."""
        return self.end - self.first_key + self.global_keys


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Causal attention to the last `tokens` tokens, including itself [Beltagy et al. 2020, Longformer, 3.1], and to the first
    `global_tokens` of the sequence [Xiao et al. 2024, StreamingLLM, 3.2]; or, `chunked`, to the tokens of its own chunk."""

    tokens: int
    """0: no limit."""
    global_tokens: int = 0
    chunked: bool = False
    """Whether the sequence is cut into chunks of `tokens` tokens, and attention stays within each of them."""

    def hides(self, length: int) -> bool:
        """Whether the window masks tokens of a sequence of this length that causal attention would not."""
        return 0 < self.tokens < length - self.global_tokens

    def has_whole_chunks(self, start: int, queries: int) -> bool:
        """Whether `queries` queries from `start` on are whole chunks: their attention is causal and needs no further mask."""
        return self.chunked and start % self.tokens == queries % self.tokens == 0

    @property
    def block(self) -> int:
        """Queries of a block: larger blocks read more masked keys, smaller ones copy keys and call kernels more often.

        A quarter of a wide window, so that at most a quarter of the keys read is masked. With global tokens the keys of a block
        are copied together, so a block is half of the window.
        """
        share = self.tokens // (2 if self.global_tokens else 4)
        # Queries of a block: the usual size, suited to kernels, and the minimum size for narrow windows.
        usual_block, shortest_block = 128, 8
        least = shortest_block if self.tokens < usual_block else usual_block
        queries = share if self.tokens >= usual_block else self.tokens
        return max(1 << (queries.bit_length() - 1) if queries else 0, least)  # the largest power of two that is at most it

    def visits(self, start: int, queries: int) -> Iterator[Visit]:
        """The blocks of `queries` queries from `start` on, in order. A block of chunked attention is a chunk."""
        if self.chunked:
            for chunk in range(start - start % self.tokens, start + queries, self.tokens):
                first = max(chunk, start)
                yield Visit(first, min(chunk + self.tokens, start + queries) - first, chunk, 0)
            return
        for first in range(start, start + queries, self.block):
            count, first_key = min(self.block, start + queries - first), max(first - self.tokens + 1, 0)
            reaches_global = first_key <= self.global_tokens
            yield Visit(first, count, 0 if reaches_global else first_key, 0 if reaches_global else self.global_tokens)

    def visited_pairs(self, length: int) -> int:
        """Query-key pairs that are computed for a sequence, including masked ones."""
        return sum(visit.queries * visit.keys for visit in self.visits(0, length))

    def visible_pairs(self, length: int) -> int:
        """Unmasked query-key pairs: w s - w (w - 1) / 2 from the window w in a sequence s, plus g n - g (g - 1) / 2 from the
        n = s - w queries that do not have all of the g global tokens in their window, g at most n. Of a chunk of c tokens:
        c (c + 1) / 2.
        """
        if self.chunked:
            return sum(visit.queries * (visit.queries + 1) // 2 for visit in self.visits(0, length))
        window = min(self.tokens, length) or length
        beyond = length - window
        first = min(self.global_tokens, beyond)
        return window * length - window * (window - 1) // 2 + first * beyond - first * (first - 1) // 2


def window_of(model: ModelSpec, layer: int | None = None) -> AttentionWindow:
    """The attention window of the model, or of one of its layers."""
    if layer is not None and not model.has_window(layer):
        return AttentionWindow(0)
    return AttentionWindow(model.sliding_window, model.global_tokens, model.chunked_attention)


def windowed(model: Trained, config: TrialConfig) -> Trained:
    """The model with the configuration's window, if that is shorter than its own."""
    if not config.attention_window or not isinstance(model, ModelSpec):
        return model
    window = min(config.attention_window, model.sliding_window or config.attention_window)
    return dataclasses.replace(model, sliding_window=window, global_tokens=config.attention_global_tokens)


def window_problem(config: TrialConfig, model: Model, sequence_length: int) -> str | None:
    """Why the model cannot have the configuration's window, in a clause; None: it can, or there is none."""
    window, first = config.attention_window, config.attention_global_tokens
    if not window or isinstance(model, CommandModel):  # a script implements its own attention
        return None
    if isinstance(model, FactoryModel):
        return f"attention_window={window} needs our own attention, not that of {model.name}"
    if any(model.whole_layers):
        return f"{model.name} has layers with and without a window of its own"
    if model.chunked_attention:
        return f"attention of {model.name} is limited to chunks, which a window would cross"
    if first and window < sequence_length <= window + first:
        return f"a window of {window} and {first} global tokens hide nothing of {sequence_length} tokens"
    return None
