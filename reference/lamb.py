"""LAMB from its paper: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020),
Algorithm 2. Nothing is fused and nothing is sharded, so that the formulas can be compared with the paper line by line.

Implementations differ where the paper leaves a choice. This is the variant that `crates/zero/src/optimizer.rs` promises:

- Bias correction: both moments are corrected, as in Algorithm 2. Some implementations leave it out.
- Trust ratio: phi is the identity, so neither the parameter's norm nor the ratio itself is clipped. (The paper allows
  phi(z) = min(max(z, lower), upper); DeepSpeed clips the ratio to [0.01, 10] by default.)
- The ratio is 1 where either norm is zero, and for vectors: norms and biases are updated as Adam would, without weight decay.
- Epsilon is added to the root of the second moment, not under it.
"""

import torch


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for x in group["params"]:
                state, g = self.state[x], x.grad
                if not state:
                    state.update(t=0, m=torch.zeros_like(x), v=torch.zeros_like(x))
                state["t"] += 1
                state["m"] = beta1 * state["m"] + (1 - beta1) * g
                state["v"] = beta2 * state["v"] + (1 - beta2) * g * g
                m = state["m"] / (1 - beta1 ** state["t"])
                v = state["v"] / (1 - beta2 ** state["t"])
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * x
                x -= group["lr"] * trust_ratio(x, update) * update


def trust_ratio(x: torch.Tensor, update: torch.Tensor) -> float:
    """The norm of the whole parameter over the norm of its whole update, weight decay included."""
    x_norm, update_norm = x.double().norm().item(), update.double().norm().item()
    return x_norm / update_norm if x.dim() >= 2 and x_norm > 0 and update_norm > 0 else 1.0
