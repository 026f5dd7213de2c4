//! What a run observes of its trainer's steps.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shardwise_model::Unit;
use shardwise_torch::tch::Tensor;
use shardwise_train::{Probe, StepPhase, Trainer};

use crate::error::{Error, Result};
use crate::fingerprint::{Fingerprints, fingerprint, flip};
use crate::position::PositionTracker;

/// The [`Probe`] of a run: passes the trainer's position on to the [`PositionTracker`], behind which traces and injected faults are,
/// shares requests for traces, and fingerprints gradients in spot checks.
pub struct RunProbe {
    position: Arc<PositionTracker>,
    /// The number of steps that this rank was asked to trace.
    trace_requested: Arc<AtomicU64>,
    step: AtomicU64,
    gradients: Mutex<GradientProbe>,
}

#[derive(Default)]
struct GradientProbe {
    fingerprints: Option<Fingerprints>,
    bit_flip: Option<BitFlip>,
}

struct BitFlip {
    step: u64,
    unit: usize,
}

impl RunProbe {
    /// Creates a probe. `trace_requested` is the number of steps that this rank is asked to trace.
    pub fn new(position: Arc<PositionTracker>, trace_requested: Arc<AtomicU64>) -> Self {
        RunProbe { position, trace_requested, step: AtomicU64::new(0), gradients: Mutex::default() }
    }

    /// Observes this trainer from now on.
    pub fn attach(self: &Arc<Self>, trainer: &mut Trainer) {
        self.position.name_units(trainer.model().units().iter().map(Unit::name));
        trainer.set_probe(self.clone());
    }

    /// Injects a fault: flips one bit of a unit's gradients in this step, to test spot checks.
    pub fn flip_bit(&self, trainer: &Trainer, step: u64, unit: &str) -> Result<()> {
        let index = trainer.model().units().iter().position(|known| known.name() == unit);
        let unit = index.ok_or_else(|| Error::Options(format!("the model has no unit {unit} to flip a bit in")))?;
        self.gradients().bit_flip = Some(BitFlip { step, unit });
        Ok(())
    }

    /// Fingerprints all gradients from now on, those of each of `units` units.
    pub(crate) fn record_fingerprints(&self, units: usize) {
        self.gradients().fingerprints = Some(vec![0; units]);
    }

    /// Stops fingerprinting, and returns the fingerprints.
    pub(crate) fn take_fingerprints(&self) -> Fingerprints {
        self.gradients().fingerprints.take().unwrap_or_default()
    }

    fn gradients(&self) -> MutexGuard<'_, GradientProbe> {
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Probe for RunProbe {
    fn start_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
        self.position.start_step(step);
    }

    fn enter(&self, phase: StepPhase, unit: usize) {
        self.position.enter_unit(phase.into(), unit);
    }

    fn observe_gradient(&self, unit: usize, gradient: &Tensor) -> shardwise_torch::Result<()> {
        let (step, mut gradients) = (self.step.load(Ordering::Relaxed), self.gradients());
        let is_due = |bit_flip: &mut BitFlip| (bit_flip.step, bit_flip.unit) == (step, unit);
        if gradients.bit_flip.take_if(is_due).is_some() {
            flip(gradient)?;
        }
        if let Some(fingerprints) = &mut gradients.fingerprints {
            fingerprints[unit] = fingerprints[unit].wrapping_add(fingerprint(gradient)?);
        }
        Ok(())
    }

    fn signal(&self) -> u64 {
        self.trace_requested.swap(0, Ordering::Relaxed)
    }
}
