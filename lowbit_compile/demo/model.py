"""A Llama-shaped language model: RMSNorm, RoPE, grouped-query attention, SwiGLU, head tied to the embedding.

Shape letters: B batch, T positions, D model width, H query heads, K key/value heads, E head width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. The defaults are the CPU demo's, 3.3 million parameters."""

    vocab: int = 8192
    dim: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 512
    context: int = 256
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


CPU_CONFIG = ModelConfig()
GPU_CONFIG = ModelConfig(dim=768, layers=12, heads=12, kv_heads=4, ffn=2048, context=1024)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and frequency, each [context, head_dim / 2]."""
    half = config.head_dim // 2
    frequency_E = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
    angle_TE = torch.outer(torch.arange(config.context, dtype=torch.float32), frequency_E)
    return angle_TE.cos(), angle_TE.sin()


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """RoPE on the two halves of the head width, computed in float32."""
    left, right = x_BHTE.float().chunk(2, dim=-1)
    turned = torch.cat((left * cos_TE - right * sin_TE, right * cos_TE + left * sin_TE), dim=-1)
    return turned.to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.head_dim
        self.q_proj = nn.Linear(config.dim, config.heads * width, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.heads * width, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        width = self.config.head_dim
        q_BHTE = self.q_proj(x_BTD).view(batch, length, self.config.heads, width).transpose(1, 2)
        k_BKTE = self.k_proj(x_BTD).view(batch, length, self.config.kv_heads, width).transpose(1, 2)
        v_BKTE = self.v_proj(x_BTD).view(batch, length, self.config.kv_heads, width).transpose(1, 2)
        q_BHTE, k_BKTE = rotate(q_BHTE, cos_TE, sin_TE), rotate(k_BKTE, cos_TE, sin_TE)
        mixed_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed_BHTE.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), cos_TE, sin_TE)
        out: Tensor = x_BTD + self.ffn(self.ffn_norm(x_BTD))
        return out


class LanguageModel(nn.Module):
    """``model(tokens)`` gives logits; ``model(tokens, targets)`` the mean cross entropy, computed in float32."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig = CPU_CONFIG) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        self.lm_head.weight = self.embed.weight
        cos_TE, sin_TE = rope_tables(config)
        self.register_buffer("rope_cos", cos_TE, persistent=False)
        self.register_buffer("rope_sin", sin_TE, persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        """Normal of 0.02; projections that end in the residual stream are shrunk by the number of additions."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        length = tokens_BT.shape[1]
        cos_TE, sin_TE = self.rope_cos[:length], self.rope_sin[:length]
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TE, sin_TE)
        logits_BTV: Tensor = self.lm_head(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers; a shared weight counts once."""
    return sum(p.numel() for p in model.parameters())
