//! Expert parallelism: ranks that hold different experts of a layer, and send each other the tokens that chose them.
//!
//! A rank routes its own tokens, and sorts their rows by expert, so the rows for each rank are consecutive:
//!
//! ```text
//! counts    all-to-all    how many rows each expert gets from each rank
//! tokens    all-to-all    rows to the ranks that hold their experts, where they are sorted by expert
//! outputs   all-to-all    what the experts have computed, back to where the rows came from
//! ```
//!
//! No token is dropped. The backward pass sends the gradients of outputs, and receives those of rows.

use std::sync::Arc;

use shardwise_torch::autograd::ClosureError;
use shardwise_torch::tch::Tensor;

use crate::exchange_group::ExchangeGroup;
use crate::tensor_parallel::done;
use crate::{Error, PendingTensor, Result};

/// The ranks that hold the experts of a layer: each has equally many, in order.
#[derive(Clone)]
pub struct ExpertParallel {
    group: Option<Arc<dyn ExchangeGroup>>,
    label: Arc<str>,
}

impl ExpertParallel {
    /// Every rank has all experts.
    pub fn none() -> Self {
        ExpertParallel { group: None, label: "".into() }
    }

    /// The ranks of a group, which may be one.
    pub fn new(group: Arc<dyn ExchangeGroup>) -> Self {
        ExpertParallel { group: Some(group).filter(|group| group.size() > 1), label: "".into() }
    }

    /// The same with another label for its collectives.
    #[must_use]
    pub fn with_label(&self, label: &str) -> Self {
        ExpertParallel { label: label.into(), ..self.clone() }
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(1, |group| group.size())
    }

    /// Routes the rows of this rank's tokens, of which each expert gets as many as `counts` says.
    pub(crate) fn route_rows(&self, counts: &Tensor) -> Result<RowRoutes> {
        let label = self.label.clone();
        let Some(group) = &self.group else {
            // On a device, this is the only time that the host waits.
            let counts = Vec::<i64>::try_from(counts)?;
            return Ok(RowRoutes { route: None, label, own: counts.clone(), here: counts });
        };
        let (ranks, experts) = (group.size(), counts.numel() / group.size());
        let each = vec![experts; ranks];
        let pending = group.start_all_to_all(&label, counts, &each, &each).map_err(Error::Communication)?;
        let received = pending().map_err(Error::Communication)?;
        let both = Vec::<i64>::try_from(&Tensor::f_cat(&[counts, &received], 0)?)?;
        let (own, received) = both.split_at(ranks * experts);
        let sum = |rows: &[i64]| rows.iter().sum::<i64>() as usize;
        let from = |rank: usize| &received[rank * experts..][..experts];
        // Rows arrive by rank, and those of a rank by expert.
        let mut starts = vec![0; ranks * experts];
        (1..starts.len()).for_each(|at| starts[at] = starts[at - 1] + received[at - 1]);
        let places = (0..experts).flat_map(|expert| (0..ranks).map(move |rank| rank * experts + expert));
        let by_expert: Vec<i64> = places.flat_map(|at| starts[at]..starts[at] + received[at]).collect();
        let mut by_rank = vec![0; by_expert.len()];
        by_expert.iter().enumerate().for_each(|(place, &row)| by_rank[row as usize] = place as i64);
        let index = |rows: &[i64]| Tensor::f_from_slice(rows)?.f_to_device(counts.device());
        let route = Route {
            group: group.clone(),
            sent: own.chunks(experts).map(sum).collect(),
            received: (0..ranks).map(|rank| sum(from(rank))).collect(),
            by_expert: index(&by_expert)?,
            by_rank: index(&by_rank)?,
        };
        let here = (0..experts).map(|expert| (0..ranks).map(|rank| from(rank)[expert]).sum()).collect();
        Ok(RowRoutes { route: Some(route), label, own: own.to_vec(), here })
    }
}

/// Where the sorted rows of this rank's tokens go, and which rows its experts get.
pub(crate) struct RowRoutes {
    /// How they travel, if there are several ranks.
    route: Option<Route>,
    label: Arc<str>,
    /// By expert of all ranks: the number of rows of this rank's tokens.
    own: Vec<i64>,
    /// By expert of this rank: the number of rows that it gets from all ranks.
    here: Vec<i64>,
}

struct Route {
    group: Arc<dyn ExchangeGroup>,
    /// By rank: the number of rows that it gets.
    sent: Vec<usize>,
    /// By rank: the number of rows that come from it.
    received: Vec<usize>,
    /// By row sorted by expert: its index among those that arrive.
    by_expert: Tensor,
    /// By row that arrives: its index after sorting.
    by_rank: Tensor,
}

impl RowRoutes {
    /// By expert of all ranks: the number of rows of this rank's tokens.
    pub(crate) fn own(&self) -> &[i64] {
        &self.own
    }

    /// By expert of this rank: the number of its rows.
    pub(crate) fn here(&self) -> &[i64] {
        &self.here
    }

    /// Whether rows travel to other ranks.
    pub(crate) fn is_shared(&self) -> bool {
        self.route.is_some()
    }

    pub(crate) fn shallow_clone(&self) -> RowRoutes {
        RowRoutes {
            route: self.route.as_ref().map(Route::shallow_clone),
            label: self.label.clone(),
            own: self.own.clone(),
            here: self.here.clone(),
        }
    }

    /// Starts to send sorted rows to their experts. The result has the rows of this rank's experts, one expert after the other.
    pub(crate) fn start_send(&self, rows: Tensor) -> std::result::Result<PendingTensor, ClosureError> {
        let Some(route) = &self.route else { return Ok(done(rows)) };
        let pending = route.start(&self.label, &rows, &route.sent, &route.received)?;
        let by_expert = route.by_expert.shallow_clone();
        Ok(Box::new(move || Ok(pending()?.f_index_select(0, &by_expert)?)))
    }

    /// Starts to return rows to where they came from, in the order in which they were sent.
    pub(crate) fn start_return(&self, rows: Tensor) -> std::result::Result<PendingTensor, ClosureError> {
        let Some(route) = &self.route else { return Ok(done(rows)) };
        let by_rank = rows.f_index_select(0, &route.by_rank)?;
        drop(rows);
        route.start(&self.label, &by_rank, &route.received, &route.sent)
    }
}

impl Route {
    fn shallow_clone(&self) -> Route {
        Route {
            group: self.group.clone(),
            sent: self.sent.clone(),
            received: self.received.clone(),
            by_expert: self.by_expert.shallow_clone(),
            by_rank: self.by_rank.shallow_clone(),
        }
    }

    fn start(
        &self,
        label: &str,
        rows: &Tensor,
        sent: &[usize],
        received: &[usize],
    ) -> std::result::Result<PendingTensor, ClosureError> {
        let row_len = rows.size()[1];
        let elements = |rows: &[usize]| rows.iter().map(|&rows| rows * row_len as usize).collect::<Vec<_>>();
        let pending = self.group.start_all_to_all(label, rows, &elements(sent), &elements(received))?;
        let count = received.iter().sum::<usize>() as i64;
        Ok(Box::new(move || Ok(pending()?.f_view([count, row_len])?)))
    }
}
