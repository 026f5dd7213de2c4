//! The router of a mixture of experts: which experts process a token, with which weights, and the losses that keep experts balanced.
//!
//! The balance loss is DeepSeek-V3's, per sequence. A sequence counts as much as its targets do in the loss of the step, so that the loss
//! is the same however sequences are divided into micro-batches and among ranks.
//!
//! The other way to balance experts is a bias, also DeepSeek-V3's: it is added to the scores when a token chooses its experts, and not to the
//! weights of their outputs. No gradient trains it. Each update raises it for experts with fewer tokens than the mean, and lowers it for
//! those with more.

use shardwise_plan::{MoeConfig, RouterConfig, ScoringFunc};
use shardwise_torch::autograd::{self, Forward};
use shardwise_torch::tch::{Kind, Tensor, no_grad};

use crate::expert_bias::ExpertBias;
use crate::loss::IGNORED;
use crate::{Batch, Result};

/// Where tokens go.
pub(crate) struct Routing {
    /// The experts of each token (tokens, experts per token), the one with the highest score first.
    pub(crate) experts: Tensor,
    /// The weights of their outputs, of the same shape.
    pub(crate) weights: Tensor,
    /// The router's own losses, summed over all tokens.
    pub(crate) loss: Option<Tensor>,
}

/// Routes tokens (tokens, hidden size). The product with the router's matrix is computed in their dtype, and what follows at least in f32.
/// `batch` is needed for losses only.
pub(crate) fn route(
    moe: &MoeConfig,
    x: &Tensor,
    matrix: &Tensor,
    bias: Option<&ExpertBias>,
    batch: Option<&Batch>,
) -> Result<Routing> {
    let router = &moe.router;
    let wide = if x.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let logits = x.f_linear(matrix, None::<&Tensor>)?.f_to_kind(wide)?;
    let scores = match router.scoring_func {
        ScoringFunc::Softmax => logits.f_softmax(-1, wide)?,
        ScoringFunc::Sigmoid => logits.f_sigmoid()?,
    };
    let experts = no_grad(|| match bias {
        Some(bias) => choose_experts(moe, &scores.f_add(bias.on_device())?),
        None => choose_experts(moe, &scores.detach()),
    })?;
    let mut weights = scores.f_gather(1, &experts, false)?;
    if router.norm_topk_prob {
        weights = weights.f_div(&sum_of_row(&weights)?)?;
    }
    if router.routed_scaling_factor != 1. {
        weights = weights.f_mul_scalar(router.routed_scaling_factor)?;
    }
    let loss = match batch.filter(|_| router.has_loss()) {
        Some(batch) => Some(balance_loss(moe, &logits, &scores, &experts, batch)?),
        None => None,
    };
    Ok(Routing { experts, weights, loss })
}

/// By expert: the number of tokens that have chosen it.
pub(crate) fn count_tokens(experts: &Tensor, num_experts: usize) -> Result<Vec<i64>> {
    Ok(Vec::try_from(experts.f_reshape([-1])?.f_bincount(None::<&Tensor>, num_experts as i64)?)?)
}

/// The experts of tokens whose sequences have this many positions, where `num_experts` stands in place of an expert that has no capacity left;
/// `None` if capacity is not limited. All first choices of a sequence come before its second choices, as in GShard.
pub(crate) fn drop_beyond_capacity(moe: &MoeConfig, experts: &Tensor, positions: i64) -> Result<Option<Tensor>> {
    let Some(capacity) = moe.capacity(positions as usize) else { return Ok(None) };
    let (num_experts, (tokens, choices)) = (moe.num_experts as i64, experts.size2()?);
    let (sequences, ints) = (tokens / positions, (Kind::Int64, experts.device()));
    let by_choice = experts.f_view([sequences, positions, choices])?.f_transpose(1, 2)?.f_reshape([sequences, -1])?;
    let (sorted, order) = by_choice.f_sort_stable(true, 1, false)?;
    let mut counts = Tensor::f_zeros([sequences, num_experts], ints)?;
    let _ = counts.f_scatter_add_(1, &by_choice, &by_choice.f_ones_like()?)?;
    let starts = counts.f_cumsum(1, Kind::Int64)?.f_sub(&counts)?;
    let place = Tensor::f_arange(positions * choices, ints)?.f_sub(&starts.f_gather(1, &sorted, false)?)?;
    let mut is_dropped = Tensor::f_zeros([sequences, positions * choices], (Kind::Bool, experts.device()))?;
    let _ = is_dropped.f_scatter_(1, &order, &place.f_ge(capacity as i64)?)?;
    let is_dropped =
        is_dropped.f_view([sequences, choices, positions])?.f_transpose(1, 2)?.f_reshape([tokens, choices])?;
    Ok(Some(experts.f_masked_fill(&is_dropped, num_experts)?))
}

/// Adds the gradient of the router's own loss to the backward pass of `output`. `weight` is the derivative of the step's loss with respect
/// to it.
pub(crate) fn attach_loss(output: Tensor, loss: Option<Tensor>, weight: f64) -> Result<Tensor> {
    let Some(loss) = loss.filter(Tensor::requires_grad) else { return Ok(output) };
    let (kind, device) = (loss.kind(), loss.device());
    let mut outputs = autograd::function(
        "balance loss",
        &[&output, &loss],
        |inputs| Ok(Forward { outputs: vec![inputs[0].f_detach()?], saved: vec![] }),
        move |mut back| Ok(vec![back.grads.remove(0), Some(Tensor::f_full([0i64; 0], weight, (kind, device))?)]),
    )?;
    Ok(outputs.remove(0))
}

/// The experts with the highest scores; of equal ones, those with the lowest index.
fn choose_experts(moe: &MoeConfig, scores: &Tensor) -> Result<Tensor> {
    let RouterConfig { n_group, topk_group, .. } = moe.router;
    if topk_group == n_group {
        return first_experts(scores, moe.num_experts_per_tok);
    }
    // As in DeepSeek-V3, the score of a group is the sum of its two highest.
    let tokens = scores.size()[0];
    let groups = scores.f_view([tokens, n_group as i64, -1])?;
    let highest = groups.f_sort_stable(true, -1, true)?.0.f_narrow(-1, 0, groups.size()[2].min(2))?;
    let group_scores = highest.f_sum_dim_intlist([-1i64].as_slice(), false, scores.kind())?;
    let chosen = first_experts(&group_scores, topk_group)?;
    let mut is_closed = group_scores.f_ones_like()?.f_to_kind(Kind::Bool)?;
    let _ = is_closed.f_scatter_value_(1, &chosen, 0)?;
    let open = groups.f_masked_fill(&is_closed.f_unsqueeze(-1)?, f64::NEG_INFINITY)?;
    first_experts(&open.f_view_as(scores)?, moe.num_experts_per_tok)
}

/// The columns with the highest values of each row. `topk` would choose any of equal ones.
fn first_experts(scores: &Tensor, count: usize) -> Result<Tensor> {
    Ok(scores.f_sort_stable(true, -1, true)?.1.f_narrow(1, 0, count as i64)?.f_contiguous()?)
}

/// The sums of rows, to divide by: sigmoids can all be 0.
fn sum_of_row(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_sum_dim_intlist([-1i64].as_slice(), true, x.kind())?.f_add_scalar(1e-20)?)
}

/// The sum over sequences of their targets times their loss: how unevenly they use experts, and how large their logits are.
fn balance_loss(moe: &MoeConfig, logits: &Tensor, scores: &Tensor, experts: &Tensor, batch: &Batch) -> Result<Tensor> {
    let (router, kind) = (&moe.router, scores.kind());
    let (sequences, positions) = batch.targets.size2()?;
    let targets = batch.targets.f_ne(IGNORED)?.f_sum_dim_intlist([1i64].as_slice(), false, kind)?;
    let mut losses = targets.f_zeros_like()?;
    if router.router_aux_loss_coef > 0. {
        let shares = match router.scoring_func {
            ScoringFunc::Softmax => scores.shallow_clone(),
            ScoringFunc::Sigmoid => scores.f_div(&sum_of_row(scores)?)?,
        };
        let mean = shares.f_view([sequences, positions, -1])?.f_mean_dim([1i64].as_slice(), false, kind)?;
        let chosen = experts.f_view([sequences, -1])?;
        let mut counts = mean.detach().f_zeros_like()?;
        let _ = counts.f_scatter_add_(1, &chosen, &counts.f_new_ones(chosen.size(), (kind, chosen.device()))?)?;
        // 1 for an expert that gets as many tokens as the others.
        let even = moe.num_experts as f64 / (moe.num_experts_per_tok as f64 * positions as f64);
        let imbalance = counts.f_mul_scalar(even)?.f_mul(&mean)?.f_sum_dim_intlist([1i64].as_slice(), false, kind)?;
        losses = losses.f_add(&imbalance.f_mul_scalar(router.router_aux_loss_coef)?)?;
    }
    if router.router_z_loss_coef > 0. {
        let squares = logits.f_logsumexp([-1i64].as_slice(), false)?.f_square()?;
        let mean = squares.f_view([sequences, positions])?.f_mean_dim([1i64].as_slice(), false, kind)?;
        losses = losses.f_add(&mean.f_mul_scalar(router.router_z_loss_coef)?)?;
    }
    Ok(losses.f_dot(&targets)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_torch::autograd::Graph;
    use shardwise_torch::tch::{Device, manual_seed};

    use super::*;

    fn rows<T: shardwise_torch::tch::kind::Element + Copy>(tensor: &Tensor) -> Vec<Vec<T>>
    where
        Vec<T>: for<'a> TryFrom<&'a Tensor>,
        for<'a> <Vec<T> as TryFrom<&'a Tensor>>::Error: std::fmt::Debug,
    {
        (0..tensor.size()[0]).map(|row| Vec::try_from(&tensor.get(row).contiguous()).unwrap()).collect()
    }

    fn routed(moe: &MoeConfig, logits: &[[f64; 4]], bias: Option<&ExpertBias>) -> Routing {
        let x = Tensor::from_slice(logits.concat().as_slice()).view([-1, 4]);
        route(moe, &x, &Tensor::eye(4, (Kind::Double, x.device())), bias, None).unwrap()
    }

    #[test]
    fn the_highest_scores_are_chosen_and_ties_go_to_the_lowest_index() {
        let routing = routed(&MoeConfig::new(4, 2, 1), &[[0., 2., 1., 3.], [1., 1., 1., 1.], [0., 5., 0., 0.]], None);
        assert_eq!(rows::<i64>(&routing.experts), [[3, 1], [0, 1], [1, 0]]);
        for weights in rows::<f64>(&routing.weights) {
            assert!((weights.iter().sum::<f64>() - 1.).abs() < 1e-15, "{weights:?}");
        }
        assert!((routing.weights.double_value(&[0, 0]) - 1. / (1. + (-1f64).exp())).abs() < 1e-15);
    }

    #[test]
    fn a_token_chooses_groups_first() {
        let grouped = RouterConfig { n_group: 2, topk_group: 1, ..RouterConfig::default() };
        let moe = MoeConfig { router: grouped, ..MoeConfig::new(4, 2, 1) };
        // The highest score is in the group with the lower sum.
        let sigmoid = RouterConfig { scoring_func: ScoringFunc::Sigmoid, ..grouped };
        let routing = routed(&MoeConfig { router: sigmoid, ..moe }, &[[1., 1.1, 1.2, -9.]], None);
        assert_eq!(rows::<i64>(&routing.experts), [[1, 0]]);
    }

    #[test]
    fn a_bias_changes_which_experts_are_chosen_and_not_their_weights() {
        let router =
            RouterConfig { scoring_func: ScoringFunc::Sigmoid, norm_topk_prob: false, ..RouterConfig::default() };
        let moe = MoeConfig { router, ..MoeConfig::new(4, 2, 1) };
        let bias = ExpertBias::new(vec![0., 0., 0.5, -1.], Device::Cpu).unwrap();
        let routing = routed(&moe, &[[0., 2., 1., 3.]], Some(&bias));
        assert_eq!(rows::<i64>(&routing.experts), [[2, 1]]);
        let sigmoid = |logit: f64| 1. / (1. + (-logit).exp());
        for (weight, logit) in rows::<f64>(&routing.weights)[0].iter().zip([1., 2.]) {
            assert!((weight - sigmoid(logit)).abs() < 1e-15, "{weight}");
        }
    }

    #[test]
    fn a_bias_balances_experts_without_a_loss() {
        manual_seed(3);
        let router = RouterConfig { scoring_func: ScoringFunc::Sigmoid, ..RouterConfig::default() };
        let moe = MoeConfig { router, ..MoeConfig::new(8, 2, 1) };
        // What tokens have in common makes them prefer the first expert.
        let x = Tensor::randn([256, 16], (Kind::Double, Device::Cpu)) + 1.;
        let first = Tensor::from_slice(&[1f64, 0., 0., 0., 0., 0., 0., 0.]).view([8, 1]);
        let matrix = Tensor::randn([8, 16], (Kind::Double, Device::Cpu)) * 0.2 + first * 0.3;
        let mut bias = ExpertBias::new(vec![0.; 8], Device::Cpu).unwrap();
        let mut busiest = Vec::new();
        for _ in 0..300 {
            let routing = route(&moe, &x, &matrix, Some(&bias), None).unwrap();
            let counts = count_tokens(&routing.experts, 8).unwrap();
            busiest.push(*counts.iter().max().unwrap() as f64 / 64.);
            bias = bias.update(&counts.iter().map(|&count| count as u64).collect::<Vec<_>>(), 0.005).unwrap();
        }
        // At first, almost every token chooses the same expert.
        let later = busiest[200..].iter().copied().fold(0., f64::max);
        assert!(busiest[0] > 3. && later < 1.3, "{busiest:?}");
    }

    #[test]
    fn first_choices_come_before_second_ones_when_an_expert_is_full() {
        // Two sequences of three tokens. In the first, expert 0 is the first choice of two tokens and the second choice of the other.
        let experts = Tensor::from_slice(&[1i64, 0, 0, 2, 0, 2, 0, 1, 1, 0, 1, 2]).view([6, 2]);
        let dropped = |capacity: f64| {
            // A factor of 1 stands for two tokens.
            let moe = MoeConfig { capacity_factor: Some(capacity / 2.), ..MoeConfig::new(3, 2, 1) };
            rows::<i64>(&drop_beyond_capacity(&moe, &experts, 3).unwrap().unwrap())
        };
        assert_eq!(dropped(2.), [[1, 3], [0, 2], [0, 2], [0, 3], [1, 0], [1, 2]]);
        assert_eq!(dropped(1.), [[1, 3], [0, 2], [3, 3], [0, 3], [1, 3], [3, 2]]);
        assert_eq!(dropped(3.), rows::<i64>(&experts));
    }

    #[test]
    fn a_balanced_router_has_the_smallest_loss() {
        let router = RouterConfig { router_aux_loss_coef: 1., ..RouterConfig::default() };
        let moe = MoeConfig { router, ..MoeConfig::new(4, 1, 1) };
        let loss = |logits: [[f64; 4]; 4]| {
            let x = Tensor::from_slice(logits.concat().as_slice()).view([4, 4]);
            let batch =
                Batch::new(Tensor::from_slice(&[0i64; 4]).view([1, 4]), Tensor::from_slice(&[0i64; 4]).view([1, 4]));
            let matrix = Tensor::eye(4, (Kind::Double, x.device()));
            route(&moe, &x, &matrix, None, Some(&batch)).unwrap().loss.unwrap().double_value(&[])
        };
        let one_each = [[9., 0., 0., 0.], [0., 9., 0., 0.], [0., 0., 9., 0.], [0., 0., 0., 9.]];
        // Four targets, and a loss of 1 for each.
        assert!((loss(one_each) - 4.).abs() < 1e-12);
        assert!((loss([[90., 0., 0., 0.]; 4]) - 16.).abs() < 1e-12);
    }

    #[test]
    fn the_balance_loss_balances_experts() {
        manual_seed(3);
        let router = RouterConfig { router_aux_loss_coef: 1., ..RouterConfig::default() };
        let moe = MoeConfig { router, ..MoeConfig::new(8, 2, 1) };
        // What tokens have in common makes them prefer the first expert.
        let x = Tensor::randn([256, 16], (Kind::Double, Device::Cpu)) + 1.;
        let first = Tensor::from_slice(&[1f64, 0., 0., 0., 0., 0., 0., 0.]).view([8, 1]);
        let mut matrix = Tensor::randn([8, 16], (Kind::Double, Device::Cpu)) * 0.1 + first * 0.3;
        let tokens = Tensor::zeros([4, 64], (Kind::Int64, Device::Cpu));
        let batch = Batch::new(tokens.shallow_clone(), tokens);
        let mut busiest = Vec::new();
        for _ in 0..100 {
            let leaf = matrix.detach().set_requires_grad(true);
            let routing = route(&moe, &x, &leaf, None, Some(&batch)).unwrap();
            let most = routing.experts.view(-1).bincount(None::<&Tensor>, 8).max().int64_value(&[]);
            busiest.push(most as f64 / 64.);
            let grads = autograd::grad(&[&routing.loss.unwrap()], &[None], &[&leaf], Graph::Free).unwrap();
            matrix -= grads[0].as_ref().unwrap() * 1e-3;
        }
        // At first, every token chooses the same expert. Then the choices change back and forth.
        let later = busiest[50..].iter().sum::<f64>() / 50.;
        assert!(busiest[0] == 4. && later < 2., "{busiest:?}");
    }
}
