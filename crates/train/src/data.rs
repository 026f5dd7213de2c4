//! Batches of tokens: random ones, or windows of a file of token ids.
//!
//! A sequence is a function of the seed and its number, so any number of ranks sees the same ones in the same step.

use std::fs::File;
use std::os::unix::fs::FileExt;

use shardwise_model::Batch;
use shardwise_model::init::mixed;
use shardwise_torch::tch::Tensor;

use crate::recipe::Recipe;
use crate::{Error, Result};

/// Where tokens come from.
pub struct Data {
    source: Source,
    seed: u64,
    sequences: usize,
    positions: usize,
    micro_batches: usize,
    vocabulary: u64,
}

enum Source {
    Random,
    File { file: File, name: String, tokens: u64, token_bytes: usize },
}

impl Data {
    /// What a recipe says.
    pub fn open(recipe: &Recipe) -> Result<Self> {
        let source = match &recipe.data.tokens {
            None => Source::Random,
            Some(path) => {
                let fail = |problem: String| Error::Data { path: path.clone(), problem };
                let file = File::open(path).map_err(|error| fail(error.to_string()))?;
                let bytes = file.metadata().map_err(|error| fail(error.to_string()))?.len();
                let token_bytes = recipe.data.token_bytes.unwrap_or(2);
                let tokens = bytes / token_bytes as u64;
                if bytes % token_bytes as u64 != 0 || tokens <= recipe.batch.positions as u64 {
                    let problem = format!(
                        "{bytes} bytes are not token ids of {token_bytes} bytes, at least {} of them",
                        recipe.batch.positions + 1
                    );
                    return Err(fail(problem));
                }
                Source::File { file, name: path.display().to_string(), tokens, token_bytes }
            }
        };
        Ok(Data {
            source,
            seed: recipe.data.seed,
            sequences: recipe.batch.sequences,
            positions: recipe.batch.positions,
            micro_batches: recipe.batch.micro_batches,
            vocabulary: recipe.vocabulary() as u64,
        })
    }

    /// A rank's micro-batches of a step, which are counted from one.
    pub fn step(&self, step: u64, rank: usize, ranks: usize) -> Result<Vec<Batch>> {
        let per_micro_batch = (ranks * self.sequences) as u64;
        let micro_batch = |index: u64| {
            // A number is only a number of a sequence: that it wraps around after 2⁶⁴ harms nobody.
            let micro_batch = (step - 1).wrapping_mul(self.micro_batches as u64).wrapping_add(index);
            let own = micro_batch.wrapping_mul(per_micro_batch).wrapping_add((rank * self.sequences) as u64);
            let mut ids = Vec::with_capacity(self.sequences * (self.positions + 1));
            (0..self.sequences as u64).try_for_each(|index| self.sequence(own.wrapping_add(index), &mut ids))?;
            let ids = Tensor::from_slice(&ids).view([self.sequences as i64, self.positions as i64 + 1]);
            let positions = self.positions as i64;
            Ok(Batch {
                tokens: ids.narrow(1, 0, positions).contiguous(),
                targets: ids.narrow(1, 1, positions).contiguous(),
            })
        };
        (0..self.micro_batches as u64).map(micro_batch).collect()
    }

    /// One more token than a sequence has positions: each position's target is the next.
    fn sequence(&self, number: u64, ids: &mut Vec<i64>) -> Result<()> {
        let key = mixed(self.seed ^ mixed(number));
        let count = self.positions + 1;
        match &self.source {
            Source::Random => {
                ids.extend((0..count as u64).map(|place| (mixed(key ^ place) % self.vocabulary) as i64));
            }
            Source::File { file, name, tokens, token_bytes } => {
                let begin = key % (tokens - count as u64 + 1);
                let fail = |problem: String| Error::Data { path: name.into(), problem };
                let mut bytes = vec![0; count * token_bytes];
                let offset = begin * *token_bytes as u64;
                file.read_exact_at(&mut bytes, offset).map_err(|error| fail(error.to_string()))?;
                for (place, token) in bytes.chunks_exact(*token_bytes).enumerate() {
                    let mut wide = [0; 8];
                    wide[..*token_bytes].copy_from_slice(token);
                    let id = u64::from_le_bytes(wide);
                    if id >= self.vocabulary {
                        let place = begin + place as u64;
                        let problem =
                            format!("token {place} is {id}, and the model's vocabulary has {}", self.vocabulary);
                        return Err(fail(problem));
                    }
                    ids.push(id as i64);
                }
            }
        }
        Ok(())
    }
}
