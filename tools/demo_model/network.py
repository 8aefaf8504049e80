"""The demo model's architecture, qwen2, in PyTorch: as small as it can be written, for training only."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """The shape of the model. Widths are multiples of 32, the block of Q8_0, and of no popular ratio."""

    vocab: int = 4096
    layers: int = 6
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    ffn_width: int = 832
    context_length: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-6


class Attention(nn.Module):
    """Grouped-query attention with biases on Q, K and V, and rotary positions (NEOX halves)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.attn_q = nn.Linear(config.width, config.width)
        self.attn_k = nn.Linear(config.width, config.kv_heads * self.head_dim)
        self.attn_v = nn.Linear(config.width, config.kv_heads * self.head_dim)
        self.attn_output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x: [batch, tokens, width]; mask: [batch, 1, tokens, tokens], True where a query may look."""
        batch, tokens, width = x.shape
        q, k, v = (
            project(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output: Tensor = self.attn_output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return output


class Block(nn.Module):
    """Attention and a SwiGLU feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.ffn_gate = nn.Linear(config.width, config.ffn_width, bias=False)
        self.ffn_up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.ffn_down = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attn_norm(x), cos, sin, mask)
        inner = self.ffn_norm(x)
        output: Tensor = x + self.ffn_down(functional.silu(self.ffn_gate(inner)) * self.ffn_up(inner))
        return output


class Model(nn.Module):
    """Qwen2 with tied embeddings: token ids [batch, tokens] to logits [batch, tokens, vocab]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocab, config.width)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.output_norm = nn.RMSNorm(config.width, config.norm_eps)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * config.layers) if residual else 1))

    def forward(self, ids: Tensor, samples: Tensor) -> Tensor:
        """`samples` numbers the sample of each token: attention stays inside one sample."""
        tokens = ids.shape[1]
        half = self.config.width // self.config.heads // 2
        frequency = self.config.rope_base ** (-torch.arange(half, device=ids.device) / half)
        angle = torch.arange(tokens, device=ids.device)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=ids.device).tril()
        mask = (causal & (samples[:, :, None] == samples[:, None, :]))[:, None]
        x = self.token_embd(ids)
        for block in self.blk:
            x = block(x, cos, sin, mask)
        return functional.linear(self.output_norm(x), self.token_embd.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, tokens, head_dim]: pairs are (i, i + head_dim / 2)."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
