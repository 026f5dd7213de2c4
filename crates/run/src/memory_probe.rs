//! Measures the memory of a step's tensors, next to what the simulation says.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use shardwise_plan::program::{MemoryUse, Program};
use shardwise_torch::tch::{Device, Tensor};
use shardwise_train::{Probe, StepPhase};

use crate::memory_limit::take_tensor_peak;
use crate::run_probe::RunProbe;

/// A [`Probe`] that also measures the peak memory of each phase.
pub(crate) struct MemoryProbe {
    device: Device,
    inner: Arc<RunProbe>,
    /// The peaks of the current step: from its start, and then of each phase in the order in which the trainer enters them.
    peaks: Mutex<Vec<usize>>,
}

impl MemoryProbe {
    pub(crate) fn new(device: Device, inner: Arc<RunProbe>) -> Self {
        MemoryProbe { device, inner, peaks: Mutex::default() }
    }

    /// The peaks of the step that has just ended.
    pub(crate) fn take_peaks(&self) -> Vec<usize> {
        let mut peaks = std::mem::take(&mut *self.lock());
        peaks.extend([take_tensor_peak(self.device)]);
        peaks
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.peaks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Probe for MemoryProbe {
    fn start_step(&self, step: u64) {
        self.inner.start_step(step);
        self.lock().clear();
        take_tensor_peak(self.device);
    }

    fn enter(&self, phase: StepPhase, unit: usize) {
        self.lock().push(take_tensor_peak(self.device));
        self.inner.enter(phase, unit);
    }

    fn observe_gradient(&self, unit: usize, gradient: &Tensor) -> shardwise_torch::Result<()> {
        self.inner.observe_gradient(unit, gradient)
    }

    fn signal(&self) -> u64 {
        self.inner.signal()
    }
}

/// The memory of tensors in a phase of a unit, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseMemory {
    /// The instruction that starts the phase.
    pub instruction: String,
    /// The measured peak.
    pub measured_bytes: usize,
    /// The simulated peak.
    pub simulated_bytes: usize,
}

/// Compares the measured peaks of a step with the simulated ones.
pub(crate) fn compare_memory(program: &Program, simulated: &MemoryUse, measured: &[usize]) -> Vec<PhaseMemory> {
    let start = PhaseMemory { instruction: "start".to_string(), measured_bytes: 0, simulated_bytes: 0 };
    let mut phases = vec![start];
    for (instruction, memory) in program.instructions.iter().zip(&simulated.during) {
        if StepPhase::of(instruction).is_some() {
            let instruction = program.describe(instruction);
            phases.push(PhaseMemory { instruction, measured_bytes: 0, simulated_bytes: 0 });
        }
        if let Some(phase) = phases.last_mut() {
            phase.simulated_bytes = phase.simulated_bytes.max(memory.total_bytes());
        }
    }
    for (phase, &measured) in phases.iter_mut().zip(measured) {
        phase.measured_bytes = measured;
    }
    phases
}
