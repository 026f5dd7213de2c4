"""The two model families in plain PyTorch, as the oracle for Shardwise's own: no kernels chosen by hand, no sharding.

Parameters have the names and shapes of Hugging Face checkpoints, and configurations the keys of Hugging Face's config.json. A third model, much
smaller, is for tests of loss scaling.
"""

import math

import torch
import torch.nn.functional as F

IGNORED = -100


def band(positions: int, window: int | None) -> torch.Tensor:
    """Whether position i may look at position j."""
    distance = torch.arange(positions)[:, None] - torch.arange(positions)[None, :]
    return (distance >= 0) & (distance < (window or positions + 1))


def attention(query, key, value, window=None):
    """Written out: scores, mask, softmax, sum. Shapes are (sequences, heads, positions, head width)."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~band(query.shape[2], window), -math.inf)
    return scores.softmax(dim=-1) @ value


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, and float32 for all others."""
    return torch.promote_types(dtype, torch.float32)


def loss_sum(logits, targets):
    logits = logits.to(wide_dtype(logits.dtype)).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Llama:
    def __init__(self, config: dict, parameters: dict):
        self.config, self.parameters = config, parameters

    def norm(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def frequencies(self):
        head_dim = self.config["head_dim"]
        frequencies = [self.config["rope_theta"] ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
        scaling = self.config.get("rope_scaling")
        if scaling is None:
            return frequencies
        stretched = []
        for frequency in frequencies:
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            stretched.append(smooth * frequency + (1 - smooth) * frequency / scaling["factor"])
        return stretched

    def turn(self, x):
        """Rotary embedding as a multiplication of complex numbers."""
        half = x.shape[-1] // 2
        frequencies = torch.tensor(self.frequencies(), dtype=wide_dtype(x.dtype)).double()
        angles = torch.outer(torch.arange(x.shape[2]).double(), frequencies)
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)

    def loss(self, tokens, targets):
        c, p = self.config, self.parameters
        x = p["model.embed_tokens.weight"][tokens]
        for i in range(c["num_hidden_layers"]):
            layer = lambda name: p.get(f"model.layers.{i}.{name}")  # noqa: E731
            normed = self.norm(x, layer("input_layernorm.weight"))

            def heads(name, norm=None):
                y = F.linear(normed, layer(f"self_attn.{name}.weight"), layer(f"self_attn.{name}.bias"))
                y = y.unflatten(-1, (-1, c["head_dim"]))
                weight = layer(f"self_attn.{norm}.weight") if norm else None
                return (y if weight is None else self.norm(y, weight)).transpose(1, 2)

            query, key = self.turn(heads("q_proj", "q_norm")), self.turn(heads("k_proj", "k_norm"))
            seen = attention(query, key, heads("v_proj"), c.get("sliding_window"))
            x = x + F.linear(seen.transpose(1, 2).flatten(2), layer("self_attn.o_proj.weight"))
            normed = self.norm(x, layer("post_attention_layernorm.weight"))
            gate = F.linear(normed, layer("mlp.gate_proj.weight"))
            gated = gate * torch.sigmoid(gate) * F.linear(normed, layer("mlp.up_proj.weight"))
            x = x + F.linear(gated, layer("mlp.down_proj.weight"))
        x = self.norm(x, p["model.norm.weight"])
        return loss_sum(F.linear(x, p["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]), targets)


class Gpt2:
    def __init__(self, config: dict, parameters: dict):
        self.config, self.parameters = config, parameters

    def norm(self, x, name):
        p, variance = self.parameters, x.var(-1, keepdim=True, unbiased=False)
        normed = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + self.config["layer_norm_epsilon"])
        return normed * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(self, x, name):
        return x @ self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def loss(self, tokens, targets):
        c, p = self.config, self.parameters
        x = p["wte.weight"][tokens] + p["wpe.weight"][: tokens.shape[1]]
        for i in range(c["n_layer"]):
            all_heads = self.linear(self.norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
            heads = [part.unflatten(-1, (c["n_head"], -1)).transpose(1, 2) for part in all_heads.chunk(3, dim=-1)]
            x = x + self.linear(attention(*heads).transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
            wide = self.linear(self.norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
            gelu = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
            x = x + self.linear(gelu, f"h.{i}.mlp.c_proj")
        return loss_sum(self.norm(x, "ln_f") @ p["wte.weight"].T, targets)


class Regression:
    """Two linear layers with a tanh in between, and half the squared error. The further away a target is, the larger the gradients
    are, so a test can make them overflow."""

    def __init__(self, config: dict, parameters: dict):
        self.parameters = parameters

    def loss(self, inputs, targets):
        p = self.parameters
        hidden = F.linear(inputs.to(p["first.weight"].dtype), p["first.weight"], p["first.bias"]).tanh()
        return 0.5 * (F.linear(hidden, p["second.weight"]).float() - targets).square().sum()


FAMILIES = {"llama": Llama, "gpt2": Gpt2, "regression": Regression}
