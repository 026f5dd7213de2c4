//! The counts of experts' tokens, as numbers that ranks sum.

use shardwise_model::ExpertTokens;

/// By unit: the tokens that have chosen each expert, and then those that were dropped. `num_experts` is 0 for a unit without experts, which
/// has no numbers, and units of other stages have zeros here.
pub(crate) fn pack(counted: &[ExpertTokens], num_experts: &[usize]) -> Vec<f64> {
    let mut numbers = Vec::new();
    for (tokens, &experts) in counted.iter().zip(num_experts).filter(|(_, experts)| **experts > 0) {
        let mut counts = tokens.counts();
        counts.resize(experts, 0);
        numbers.extend(counts.into_iter().chain([tokens.dropped()]).map(|count| count as f64));
    }
    numbers
}

/// The tokens of each expert, and those that were dropped, by unit, from such numbers.
pub(crate) fn unpack(mut numbers: &[f64], num_experts: &[usize]) -> (Vec<Vec<u64>>, Vec<u64>) {
    let mut of_unit = |&experts: &usize| match experts {
        0 => (Vec::new(), 0),
        _ => {
            let (counts, rest) = numbers.split_at(experts);
            numbers = &rest[1..];
            (counts.iter().map(|&count| count as u64).collect(), rest[0] as u64)
        }
    };
    num_experts.iter().map(&mut of_unit).unzip()
}
