"""Settings that virtual tokens cannot be combined with. Does not import torch, since the search reads it."""

from search_spaces.capability import Combination
from search_spaces.knobs.conditions import VIRTUAL_TOKENS
from search_spaces.trial_config import TrialConfig


def _divides_prompt(config: TrialConfig, _: int) -> bool:
    return config.prompt_length > 0 and config.context_parallel_size > 1


def _orthogonalizes_tokens(config: TrialConfig, _: int) -> bool:
    return config.optimizer == "muon" and max(config.prefix_length, config.prompt_length) > 0


PROMPT_CONTEXT = Combination(
    rule="prompt-context",
    reads=("prompt_length", "context_parallel_size"),
    problem="context ranks that divide a prompt with its sample would have different numbers of tokens with a loss",
    remedy="set context_parallel_size=1, or train a prefix instead (prefix_length)",
    holds=_divides_prompt,
)
VIRTUAL_TOKENS_MUON = Combination(
    rule="virtual-tokens-muon",
    reads=("optimizer", *VIRTUAL_TOKENS),
    problem="muon orthogonalizes the updates of matrices, and virtual tokens are not matrices: all updates would be AdamW's",
    remedy="use optimizer=adamw, or leave virtual tokens at 0",
    holds=_orthogonalizes_tokens,
)
