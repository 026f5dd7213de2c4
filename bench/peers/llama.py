"""The model that every PyTorch side trains: a Llama of plain modules, as in common open-source repositories.

Parameters have the names of Hugging Face checkpoints. The head is tied to the embedding, unless `tie_word_embeddings` is false.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, hidden_size, heads):
        super().__init__()
        self.head_dim = hidden_size // heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x, cosines, sines):
        heads = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # noqa: E731

        def rotate(y):
            first, second = y.chunk(2, dim=-1)
            return y * cosines + torch.cat([-second, first], dim=-1) * sines

        query, key, value = rotate(heads(self.q_proj(x))), rotate(heads(self.k_proj(x))), heads(self.v_proj(x))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Expert(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.w1 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.w2 = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, intermediate_size, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """Mixtral's: each expert multiplies the rows of the tokens that chose it."""

    def __init__(self, hidden_size, moe):
        super().__init__()
        self.per_token = moe["num_experts_per_tok"]
        self.gate = nn.Linear(hidden_size, moe["num_experts"], bias=False)
        self.experts = nn.ModuleList(Expert(hidden_size, moe["moe_intermediate_size"]) for _ in range(moe["num_experts"]))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).float().softmax(-1).topk(self.per_token, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        output = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, choices = torch.where(chosen == index)
            output.index_add_(0, rows, expert(tokens[rows]) * weights[rows, choices, None])
        return output.view_as(x)


class Block(nn.Module):
    def __init__(self, hidden_size, heads, intermediate_size, moe=None):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.self_attn = Attention(hidden_size, heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=1e-5)
        # With Mixtral's names.
        if moe:
            self.block_sparse_moe = Mixture(hidden_size, moe)
        else:
            self.mlp = Mlp(hidden_size, intermediate_size)

    def forward(self, x, cosines, sines):
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        mlp = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return x + mlp(self.post_attention_layernorm(x))


def rotary_angles(seq_len, head_dim, dtype):
    """The cosines and sines for all positions."""
    pairs = torch.arange(0, head_dim, 2).float()
    angles = torch.outer(torch.arange(seq_len).float(), 10000.0 ** (-pairs / head_dim))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Inner(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.head_dim = shape["hidden_size"] // shape["num_attention_heads"]
        self.embed_tokens = nn.Embedding(shape["vocab_size"], shape["hidden_size"])
        sizes = shape["hidden_size"], shape["num_attention_heads"], shape["intermediate_size"], shape.get("moe")
        self.layers = nn.ModuleList(Block(*sizes) for _ in range(shape["num_hidden_layers"]))
        self.norm = nn.RMSNorm(shape["hidden_size"], eps=1e-5)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        # Not the length of x: with sequence parallelism, x has only this rank's tokens.
        cosines, sines = rotary_angles(tokens.shape[1], self.head_dim, x.dtype)
        for block in self.layers:
            x = block(x, cosines, sines)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.model = Inner(shape)
        self.lm_head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False)
        if shape["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, targets):
        logits = self.lm_head(self.model(tokens))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Stage(nn.Module):
    """Some consecutive units of the model: "embedding", "block.0" and so on, "head". Returns logits if the head is one of them."""

    def __init__(self, shape, units):
        super().__init__()
        whole = Llama(shape)
        self.head_dim = whole.model.head_dim
        self.model = nn.Module()
        self.model.embed_tokens = whole.model.embed_tokens if "embedding" in units else None
        blocks = {str(index): block for index, block in enumerate(whole.model.layers) if f"block.{index}" in units}
        self.model.layers = nn.ModuleDict(blocks)
        self.model.norm, self.lm_head = (whole.model.norm, whole.lm_head) if "head" in units else (None, None)

    def forward(self, x):
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        cosines, sines = rotary_angles(x.shape[1], self.head_dim, x.dtype)
        for block in self.model.layers.values():
            x = block(x, cosines, sines)
        return x if self.lm_head is None else self.lm_head(self.model.norm(x))
