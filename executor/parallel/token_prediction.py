"""A module for multi-token prediction."""

import torch
from torch import Tensor, nn

from executor.parallel.attention import Documents
from executor.parallel.operators import Operators, Rotary
from search_spaces.models.model import ModelSpec


class PredictionModule(nn.Module):
    """Predicts one token further than the module before it, or than the model [DeepSeek-AI 2024, DeepSeek-V3, 2.2].

    It joins a token's last hidden state with the embedding of the token that was predicted from it, each normed, projects both
    to the hidden width, and applies a layer and a norm. As in Megatron-LM and SGLang, the hidden state is that after the final
    norm, and the embedding comes first, as in the published weights. Embedding and output projection are the model's.

    Tensor ranks hold all but the layer whole, and apply it to all tokens, or with sequence parallelism to their share.
    """

    def __init__(self, spec: ModelSpec, operators: Operators, block: nn.Module) -> None:
        super().__init__()
        self.hidden_norm = operators.make_norm(spec)
        self.embedding_norm = operators.make_norm(spec)
        self.project = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        self.block = block
        self.norm = operators.make_norm(spec)

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: Rotary, documents: Documents | None) -> Tensor:
        """Hidden states and embeddings [batch, tokens, hidden] to normed hidden states of the same shape."""
        joined = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        result: Tensor = self.norm(self.block(self.project(joined), rotary, documents))
        return result
