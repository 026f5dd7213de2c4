//! Shares what only the last stage of a pipeline has computed with all ranks: logits, and the tokens that it samples from them.
//!
//! These are collectives after a forward pass. Messages within a pass are `stage_messages.rs`.

use shardwise_plan::Dtype;
use shardwise_torch::tch::{Tensor, no_grad};
use shardwise_torch::{Block, dtype_of, kind_of, storage};

use crate::error::{Error, Result};
use crate::step::Trainer;

/// The most dimensions that logits may have.
const DIMENSIONS_MAX: usize = 7;

/// Stands for a token that could not be sampled.
const NO_TOKEN: i64 = -1;

impl Trainer {
    /// The tensor of the stage that has the last unit, on all stages. The others have none. All ranks call it together.
    pub(crate) fn share_from_last_stage(&self, label: &str, tensor: Option<Tensor>) -> Result<Tensor> {
        let (world, pipeline) = (&self.ranks.world, &self.ranks.pipeline);
        if pipeline.size() == 1 {
            return Ok(tensor.expect("the only stage has all units"));
        }
        let fail = |error: shardwise_torch::Error| Error::of_model(label, shardwise_model::Error::Torch(error));
        let last = self.last_stage();
        let mut own = vec![0i64; 2 + DIMENSIONS_MAX];
        if let Some(tensor) = &tensor {
            let shape = tensor.size();
            assert!(shape.len() <= DIMENSIONS_MAX, "{label} has {} dimensions", shape.len());
            let dtype = dtype_of(tensor.kind()).map_err(fail)?;
            let index = Dtype::ALL.iter().position(|known| *known == dtype);
            own[0] = index.expect("`ALL` has every dtype") as i64;
            own[1] = shape.len() as i64;
            own[2..2 + shape.len()].copy_from_slice(&shape);
        }
        let (own, all) = world.all_gather(label, own, vec![0i64; (2 + DIMENSIONS_MAX) * world.size()]).wait()?;
        let theirs = all.chunks_exact(own.len()).nth(pipeline.ranks().rank_at(last)).expect("every rank has a part");
        let (dtype, shape) = (Dtype::ALL[theirs[0] as usize], &theirs[2..2 + theirs[1] as usize]);
        let (kind, elements) = (kind_of(dtype), shape.iter().product::<i64>() as usize);
        let memory = match tensor {
            Some(tensor) => {
                let mut copy = Tensor::empty(shape, (kind, tensor.device()));
                no_grad(|| copy.copy_(&tensor));
                storage::take(&copy, "it is being sent to all stages").map_err(fail)?
            }
            None => Block::new(dtype, elements, self.options.device).map_err(fail)?,
        };
        let shared = pipeline.broadcast(label, last, memory).wait()?.into_tensor().map_err(fail)?;
        Ok(shared.view(shape))
    }

    /// The token that the first rank of the stage with the last unit has sampled. All ranks call it together.
    pub(crate) fn share_token(&self, sampled: Option<Result<i64>>, position: usize) -> Result<i64> {
        if self.ranks.pipeline.size() == 1 && self.ranks.experts.size() == 1 {
            return sampled.expect("the only stage has all units");
        }
        // All pipelines compute the same. But experts multiply the rows of several ranks at once, and a matrix product may round its rows
        // differently.
        let own = match &sampled {
            Some(Ok(token)) => *token,
            _ => NO_TOKEN,
        };
        let first_of_last = self.last_stage() * self.ranks.stage.size();
        let token = self.ranks.world.broadcast("token", first_of_last, vec![own]).wait()?[0];
        // Whether the other ranks could sample a token does not matter, so that all continue together.
        match (sampled, token) {
            (Some(Err(error)), NO_TOKEN) => Err(error),
            (_, NO_TOKEN) => {
                let problem = format!("position {position}: rank {first_of_last} could not sample a token");
                Err(Error::Options(problem))
            }
            (_, token) => Ok(token),
        }
    }

    /// The stage that has the last unit, which is not always the last one.
    fn last_stage(&self) -> usize {
        self.stage_of_unit[self.stage_of_unit.len() - 1]
    }
}
