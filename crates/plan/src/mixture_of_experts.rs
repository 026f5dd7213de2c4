//! The configuration of a mixture of experts: how many experts, how tokens are routed, and what keeps them balanced.

use crate::ConfigError;

/// A mixture of experts in place of a block's MLP. Fields are named as in Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// The number of experts.
    pub num_experts: usize,
    /// The number of experts that process a token (top-k).
    pub num_experts_per_tok: usize,
    /// The size of an expert's hidden layer.
    pub moe_intermediate_size: usize,
    /// The number of experts that process every token, as in DeepSeek. They are one MLP with as many times the hidden size.
    pub n_shared_experts: usize,
    /// In training, how many tokens of a sequence an expert processes at most, relative to the mean of all experts. Without, as many as choose
    /// it (dropless).
    pub capacity_factor: Option<f64>,
    /// How tokens choose experts.
    pub router: RouterConfig,
    /// The names of the parameters in checkpoints.
    pub names: MoeNames,
}

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterConfig {
    /// How logits become scores.
    pub scoring_func: ScoringFunc,
    /// Whether the scores of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// What the weights of a token's experts are multiplied by.
    pub routed_scaling_factor: f64,
    /// The number of groups of experts, as in DeepSeek: a token chooses groups first.
    pub n_group: usize,
    /// The number of groups that a token chooses.
    pub topk_group: usize,
    /// The coefficient of the loss that keeps experts balanced in each sequence; 0 for none.
    pub router_aux_loss_coef: f64,
    /// The coefficient of the loss that keeps logits small; 0 for none.
    pub router_z_loss_coef: f64,
    /// How much an update changes the bias that is added to scores when tokens choose experts, as in DeepSeek-V3; 0 for not at all.
    pub router_bias_update_rate: f64,
}

/// How the router's logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoringFunc {
    /// The scores of all experts sum to one.
    Softmax,
    /// The score of each expert is independent of the others, as in DeepSeek-V3.
    Sigmoid,
}

/// The names that a family of models has for a mixture's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoeNames {
    /// `mlp.experts.0.gate_proj`, as in Qwen 3.
    Qwen,
    /// `block_sparse_moe.experts.0.w1`, as in Mixtral.
    Mixtral,
}

/// The endings of the names of a mixture's parameters. A star stands for the number of an expert: the matrices of all experts are one
/// parameter, whose first dimension is the expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertParameters {
    /// The router's matrix (experts, hidden size).
    pub router: &'static str,
    /// The experts' gates (experts, intermediate size, hidden size).
    pub gate_proj: &'static str,
    /// What the gates are multiplied with, of the same shape.
    pub up_proj: &'static str,
    /// The experts' outputs (experts, hidden size, intermediate size).
    pub down_proj: &'static str,
}

impl MoeNames {
    /// The endings of the parameters' names.
    pub const fn parameters(self) -> ExpertParameters {
        match self {
            MoeNames::Qwen => ExpertParameters {
                router: "mlp.gate.weight",
                gate_proj: "mlp.experts.*.gate_proj.weight",
                up_proj: "mlp.experts.*.up_proj.weight",
                down_proj: "mlp.experts.*.down_proj.weight",
            },
            MoeNames::Mixtral => ExpertParameters {
                router: "block_sparse_moe.gate.weight",
                gate_proj: "block_sparse_moe.experts.*.w1.weight",
                up_proj: "block_sparse_moe.experts.*.w3.weight",
                down_proj: "block_sparse_moe.experts.*.w2.weight",
            },
        }
    }
}

impl Default for RouterConfig {
    /// A softmax whose chosen scores are divided by their sum, without balance losses.
    fn default() -> Self {
        RouterConfig {
            scoring_func: ScoringFunc::Softmax,
            norm_topk_prob: true,
            routed_scaling_factor: 1.,
            n_group: 1,
            topk_group: 1,
            router_aux_loss_coef: 0.,
            router_z_loss_coef: 0.,
            router_bias_update_rate: 0.,
        }
    }
}

impl RouterConfig {
    /// Whether the router adds a loss of its own.
    pub fn has_loss(&self) -> bool {
        self.router_aux_loss_coef > 0. || self.router_z_loss_coef > 0.
    }
}

impl MoeConfig {
    /// Creates a mixture like Qwen 3's, without balance losses.
    pub fn new(num_experts: usize, num_experts_per_tok: usize, moe_intermediate_size: usize) -> Self {
        MoeConfig {
            num_experts,
            num_experts_per_tok,
            moe_intermediate_size,
            n_shared_experts: 0,
            capacity_factor: None,
            router: RouterConfig::default(),
            names: MoeNames::Qwen,
        }
    }

    /// The size of the shared experts' hidden layer; 0 without them.
    pub fn shared_intermediate_size(&self) -> usize {
        self.n_shared_experts * self.moe_intermediate_size
    }

    /// How many tokens of a sequence an expert processes at most in training, if that is limited.
    pub fn capacity(&self, positions: usize) -> Option<usize> {
        let mean = (self.num_experts_per_tok * positions) as f64 / self.num_experts as f64;
        Some(((self.capacity_factor? * mean).ceil() as usize).max(1))
    }

    /// The share of all experts that process a token.
    pub fn active_share(&self) -> f64 {
        self.num_experts_per_tok as f64 / self.num_experts as f64
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let fail = |key, problem: String| Err(ConfigError { key, problem });
        for (key, size) in
            [("moe.num_experts", self.num_experts), ("moe.moe_intermediate_size", self.moe_intermediate_size)]
        {
            if size == 0 {
                return fail(key, "is 0, but must be at least 1".to_string());
            }
        }
        let &MoeConfig { num_experts, num_experts_per_tok, capacity_factor, router, .. } = self;
        if let Some(factor) = capacity_factor.filter(|factor| !factor.is_finite() || *factor <= 0.) {
            return fail("moe.capacity_factor", format!("is {factor}, but must be a positive number"));
        }
        let RouterConfig { n_group, topk_group, .. } = router;
        if !(1..=num_experts).contains(&num_experts_per_tok) {
            let problem =
                format!("is {num_experts_per_tok}, but must be from 1 to num_experts, which is {num_experts}");
            return fail("moe.num_experts_per_tok", problem);
        }
        if n_group == 0 || !num_experts.is_multiple_of(n_group) {
            return fail("moe.n_group", format!("{n_group} groups do not divide {num_experts} experts"));
        }
        if !(1..=n_group).contains(&topk_group) || topk_group * (num_experts / n_group) < num_experts_per_tok {
            let problem = format!(
                "is {topk_group}, but must be from 1 to n_group, which is {n_group}, and leave at least \
                 {num_experts_per_tok} experts to choose from"
            );
            return fail("moe.topk_group", problem);
        }
        for (key, coefficient) in [
            ("moe.routed_scaling_factor", router.routed_scaling_factor),
            ("moe.router_aux_loss_coef", router.router_aux_loss_coef),
            ("moe.router_z_loss_coef", router.router_z_loss_coef),
            ("moe.router_bias_update_rate", router.router_bias_update_rate),
        ] {
            if !coefficient.is_finite() || coefficient < 0. {
                return fail(key, format!("is {coefficient}, but must be a number that is not negative"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixture_that_cannot_route_is_refused() {
        let plain = MoeConfig::new(8, 2, 16);
        let routed = |router| MoeConfig { router, ..plain.clone() };
        let grouped = |n_group, topk_group| routed(RouterConfig { n_group, topk_group, ..RouterConfig::default() });
        assert_eq!(plain.check(), Ok(()));
        assert_eq!(grouped(4, 1).check(), Ok(()));
        for (wrong, key) in [
            (MoeConfig { num_experts_per_tok: 9, ..plain.clone() }, "moe.num_experts_per_tok"),
            (MoeConfig { num_experts_per_tok: 0, ..plain.clone() }, "moe.num_experts_per_tok"),
            (MoeConfig { moe_intermediate_size: 0, ..plain.clone() }, "moe.moe_intermediate_size"),
            (MoeConfig { capacity_factor: Some(0.), ..plain.clone() }, "moe.capacity_factor"),
            (grouped(3, 1), "moe.n_group"),
            (grouped(8, 1), "moe.topk_group"),
            (grouped(4, 5), "moe.topk_group"),
            (routed(RouterConfig { router_aux_loss_coef: -1., ..RouterConfig::default() }), "moe.router_aux_loss_coef"),
        ] {
            assert_eq!(wrong.check().err().map(|error| error.key), Some(key), "{wrong:?}");
        }
    }
}
