"""The model that every PyTorch side trains: a Llama of plain modules, as one finds it in people's repositories.

Parameters have the names of Hugging Face checkpoints. The head is the embedding's matrix.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x, cosines, sines):
        heads = lambda y: y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # noqa: E731

        def turned(y):
            first, second = y.chunk(2, dim=-1)
            return y * cosines + torch.cat([-second, first], dim=-1) * sines

        query, key, value = turned(heads(self.q_proj(x))), turned(heads(self.k_proj(x))), heads(self.v_proj(x))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width, mlp_width):
        super().__init__()
        self.gate_proj = nn.Linear(width, mlp_width, bias=False)
        self.up_proj = nn.Linear(width, mlp_width, bias=False)
        self.down_proj = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width, heads, mlp_width):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = Attention(width, heads)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = Mlp(width, mlp_width)

    def forward(self, x, cosines, sines):
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.head_width = shape["width"] // shape["heads"]
        self.embed_tokens = nn.Embedding(shape["vocabulary"], shape["width"])
        block = lambda: Block(shape["width"], shape["heads"], shape["mlp_width"])  # noqa: E731
        self.layers = nn.ModuleList(block() for _ in range(shape["blocks"]))
        self.norm = nn.RMSNorm(shape["width"], eps=1e-5)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        pairs = torch.arange(0, self.head_width, 2).float()
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), 10000.0 ** (-pairs / self.head_width))
        angles = torch.cat([angles, angles], dim=-1)
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.layers:
            x = block(x, cosines, sines)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.model = Inner(shape)
        self.lm_head = nn.Linear(shape["width"], shape["vocabulary"], bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, targets):
        logits = self.lm_head(self.model(tokens))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
