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


def gated_mlp(x, gate_proj, up_proj, down_proj):
    gate = F.linear(x, gate_proj)
    return F.linear(gate * torch.sigmoid(gate) * F.linear(x, up_proj), down_proj)


def with_gradient_only(loss):
    """A loss that is trained, but not reported."""
    return loss - loss.detach()


def kept_choices(c: dict, chosen: list, positions: int) -> set:
    """The choices of tokens that their experts have capacity for, all first choices of a sequence before its second ones."""
    capacity = math.inf
    if c.get("capacity_factor"):
        capacity = math.ceil(c["capacity_factor"] * c["num_experts_per_tok"] * positions / c["num_experts"])
    kept, used = set(), {}
    for choice in range(c["num_experts_per_tok"]):
        for token, mine in enumerate(chosen):
            place = (token // positions, mine[choice])
            used[place] = used.get(place, 0) + 1
            if used[place] <= capacity:
                kept.add((token, choice))
    return kept


def mixture(c: dict, layer, x, targets):
    """A mixture of experts, the losses of its router (the sum over sequences, weighted by their targets), and the
    number of tokens of each expert."""
    sequences, positions, hidden = x.shape
    experts, k = c["num_experts"], c["num_experts_per_tok"]
    logits = F.linear(x, layer("mlp.gate.weight")).to(wide_dtype(x.dtype)).flatten(0, 1)
    scores = logits.softmax(-1) if c["scoring_func"] == "softmax" else torch.sigmoid(logits)
    bias = layer("mlp.gate.e_score_correction_bias")
    preferences = scores if bias is None else scores + bias
    tokens, chosen = x.flatten(0, 1), []
    for score in preferences.tolist():
        # Python's sort is stable, so that the first of equal experts comes first.
        size = experts // c["n_group"]
        of_group = [sum(sorted(score[g * size : (g + 1) * size])[-2:]) for g in range(c["n_group"])]
        groups = sorted(range(c["n_group"]), key=lambda g: -of_group[g])[: c["topk_group"]]
        chosen.append(sorted((e for e in range(experts) if e // size in groups), key=lambda e: -score[e])[:k])
    weights = scores.gather(1, torch.tensor(chosen))
    if c["norm_topk_prob"]:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = (weights * c["routed_scaling_factor"]).to(x.dtype)
    output, kept = torch.zeros_like(tokens), kept_choices(c, chosen, positions)
    for e in range(experts):
        places = [(token, choice) for token, choice in sorted(kept) if chosen[token][choice] == e]
        if places:
            of_token, of_choice = torch.tensor(places).T
            matrices = (layer(f"mlp.experts.*.{name}_proj.weight")[e] for name in ("gate", "up", "down"))
            processed = weights[of_token, of_choice, None] * gated_mlp(tokens[of_token], *matrices)
            output = output.index_add(0, of_token, processed)
    output = output.view_as(x)
    if c["n_shared_experts"]:
        output = output + gated_mlp(x, *(layer(f"mlp.shared_experts.{name}_proj.weight") for name in ("gate", "up", "down")))
    loss = torch.zeros((), dtype=scores.dtype)
    shares = (scores / scores.sum(-1, keepdim=True)).view(sequences, positions, experts)
    for sequence in range(sequences):
        counts = torch.zeros(experts, dtype=scores.dtype)
        for mine in chosen[sequence * positions : (sequence + 1) * positions]:
            for e in mine:
                counts[e] += 1
        balance = experts / (k * positions) * (counts * shares[sequence].mean(0)).sum()
        z = logits.view(sequences, positions, experts)[sequence].logsumexp(-1).square().mean()
        loss = loss + (targets[sequence] != IGNORED).sum() * (c["router_aux_loss_coef"] * balance + c["router_z_loss_coef"] * z)
    return output, loss, torch.tensor(chosen).flatten().bincount(minlength=experts)


class Llama:
    def __init__(self, config: dict, parameters: dict):
        self.config, self.parameters = config, parameters
        # By layer: the number of tokens of each expert.
        self.expert_tokens = []

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
        x, router_loss = p["model.embed_tokens.weight"][tokens], torch.zeros(())
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
            if c.get("moe"):
                routed, loss, expert_tokens = mixture(c["moe"], layer, normed, targets)
                x, router_loss = x + routed, router_loss + loss
                self.expert_tokens.append(expert_tokens)
            else:
                x = x + gated_mlp(normed, *(layer(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")))
        x = self.norm(x, p["model.norm.weight"])
        logits = F.linear(x, p["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"])
        return loss_sum(logits, targets) + with_gradient_only(router_loss)


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
