"""A small character GPT and its text: real training that runs anywhere, for the demo and tests."""

from __future__ import annotations

import math
from pydoc_data.topics import topics  # real English text that every Python carries

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class CharGPT(nn.Module):
    """`tied`: output weights are those of the embedding, as in GPT-2."""

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int,
        layers: int,
        heads: int,
        context: int,
        dropout: float = 0.1,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=1 / math.sqrt(width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Text:
    """Python's own documentation as tokens; batches are drawn from torch's global generator."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        letters = sorted(set(text))
        index = {letter: i for i, letter in enumerate(letters)}
        self.vocabulary = len(letters)
        self.tokens = torch.tensor([index[letter] for letter in text])

    def batch(self, size: int, context: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.tokens) - context - 1, (size,))
        rows = starts[:, None] + torch.arange(context + 1)
        picked = self.tokens[rows]
        return picked[:, :-1], picked[:, 1:]
