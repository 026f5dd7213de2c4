//! The memory that a rank holds, instruction by instruction.
//!
//! It mirrors what `shardwise-zero` holds for a unit in each of its states, and how its pool reuses buffers.

use std::collections::{BTreeMap, BTreeSet};

use super::super::costs::{Costs, UnitCost};
use super::super::groups::GroupKind;
use super::super::policy::{ActivationCheckpointing, Policy, UnitSpec};
use super::super::traffic::Layout;
use super::super::{Buffer as UnitBuffer, Codec, Instruction, Keep, Message, Offload, Payload, Program, Tier};
use super::pool::{Buffer, Pool};
use super::transfers::Transfers;
use crate::{Partition, int8_bytes};

/// What memory is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Parameters, in the dtype of the computation: this rank's shard, or all.
    Parameters,
    /// Gradients, from the backward pass to the update. Unsharded gradients that will be sharded are in the pool.
    Gradients,
    /// Masters and optimizer state.
    Optimizer,
    /// Buffers of the pool in use: unsharded parameters, and gradients until they are reduced.
    Unsharded,
    /// Buffers of the pool that are free. The pool keeps them for the next unit.
    FreeInPool,
    /// Activations kept for the backward pass.
    Activations,
    /// Temporary memory of a pass, with the gradients that it returns.
    Temporaries,
}

impl MemoryKind {
    /// All kinds, in the order of their indices.
    pub const ALL: [MemoryKind; 7] = [
        MemoryKind::Parameters,
        MemoryKind::Gradients,
        MemoryKind::Optimizer,
        MemoryKind::Unsharded,
        MemoryKind::FreeInPool,
        MemoryKind::Activations,
        MemoryKind::Temporaries,
    ];

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            MemoryKind::Parameters => "parameters",
            MemoryKind::Gradients => "gradients",
            MemoryKind::Optimizer => "optimizer",
            MemoryKind::Unsharded => "unsharded units",
            MemoryKind::FreeInPool => "free buffers",
            MemoryKind::Activations => "activations",
            MemoryKind::Temporaries => "temporaries",
        }
    }
}

/// Bytes by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    bytes: [usize; MemoryKind::ALL.len()],
}

impl Memory {
    /// The bytes of one kind.
    pub fn bytes(&self, kind: MemoryKind) -> usize {
        self.bytes[kind as usize]
    }

    /// The sum of all kinds.
    pub fn total_bytes(&self) -> usize {
        self.bytes.iter().sum()
    }
}

/// The memory of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// The most that is held during each instruction, by position.
    pub during: Vec<Memory>,
    /// The position of the first instruction during which the most is held in all.
    pub peak_position: usize,
}

impl MemoryUse {
    /// What is held at the peak; nothing if the program is empty.
    pub fn peak(&self) -> Memory {
        self.during.get(self.peak_position).copied().unwrap_or_default()
    }

    /// The most that is ever held of one kind, and the position of the first instruction during which it is.
    pub fn kind_peak(&self, kind: MemoryKind) -> (usize, usize) {
        first_max(self.during.iter().map(|memory| memory.bytes(kind)))
    }
}

/// The largest number, and the index of the first one of that size.
fn first_max(numbers: impl Iterator<Item = usize>) -> (usize, usize) {
    let larger =
        |best: (usize, usize), (index, number): (usize, usize)| if number > best.0 { (number, index) } else { best };
    numbers.enumerate().fold((0, 0), larger)
}

/// What a rank holds in a step after the first, when the pool has all buffers.
pub fn memory_use(program: &Program, units: &[UnitSpec], policy: &Policy, layout: &Layout, costs: &Costs) -> MemoryUse {
    let mut tracker = Tracker::new(program, units, policy, layout, costs);
    tracker.run();
    tracker.start_next_step();
    let during = tracker.run();
    let (_, peak_position) = first_max(during.iter().map(Memory::total_bytes));
    MemoryUse { during, peak_position }
}

struct Tracker<'a> {
    program: &'a Program,
    units: &'a [UnitSpec],
    policy: &'a Policy,
    layout: &'a Layout,
    costs: &'a Costs,
    /// The unit where the backward pass ends.
    first_trainable: usize,
    has_backward: bool,
    /// The units of its stage.
    named: BTreeSet<usize>,
    /// By unit: how its gradients are sent.
    gradient_codecs: Vec<Codec>,
    /// Whether there are other stages, so that the shares of a tied parameter's gradient are summed apart.
    is_pipeline: bool,
    /// The gradients that the last backward pass returned.
    returned: usize,
    parameters: usize,
    optimizer: usize,
    /// What is received from other stages, or is on another tier.
    transfers: Transfers,
    pool: Pool,
    held: Vec<Held>,
    /// The gradient of the input of the last backward pass.
    input_grad: usize,
    /// The activations of a unit, by micro-batch and unit.
    activations: BTreeMap<(usize, usize), usize>,
    /// The micro-batches and units whose forward pass has kept only its input.
    kept_inputs: BTreeSet<(usize, usize)>,
}

/// What is held for a unit besides its parameters and optimizer state.
#[derive(Clone, Default)]
struct Held {
    /// Unsharded parameters: buffers of the pool.
    gathered: Vec<Buffer>,
    /// Encoded parameters that are being gathered: buffers of the pool, two for each that they will be decoded to.
    encoded: Vec<Buffer>,
    /// Unsharded gradients that will be sharded: a buffer of the pool.
    local_grads: Option<Buffer>,
    /// A shard of gradients that will be added to those of earlier micro-batches: a buffer of the pool.
    summand: Option<Buffer>,
    /// Gradients that stay until the update.
    gradients: Option<usize>,
    /// The parameter that it is tied to, which another stage has sent.
    tied_parameters: usize,
    /// The gradient of a parameter that units share, which a pipeline sums apart: accumulated until it is sent or added to that of
    /// its owner, or received until it is added.
    tied_gradients: usize,
}

impl<'a> Tracker<'a> {
    fn new(
        program: &'a Program,
        units: &'a [UnitSpec],
        policy: &'a Policy,
        layout: &'a Layout,
        costs: &'a Costs,
    ) -> Self {
        // A rank holds the units of its stage: those that its program names.
        let named: BTreeSet<usize> = program.instructions.iter().filter_map(Instruction::unit).collect();
        let held = |buffer| named.iter().map(|&unit| buffer_bytes(&units[unit], buffer, policy, layout, costs)).sum();
        let bytes = |unit: usize, buffer| buffer_bytes(&units[unit], buffer, policy, layout, costs);
        Tracker {
            program,
            units,
            policy,
            layout,
            costs,
            first_trainable: units.iter().position(|unit| unit.trainable > 0).unwrap_or(units.len()),
            returned: 0,
            has_backward: program
                .instructions
                .iter()
                .any(|i| matches!(i, Instruction::Backward { .. } | Instruction::BackwardInput { .. })),
            parameters: held(UnitBuffer::Parameters),
            optimizer: held(UnitBuffer::Optimizer),
            transfers: Transfers::new(program, bytes),
            pool: Pool::default(),
            held: vec![Held::default(); units.len()],
            input_grad: 0,
            activations: BTreeMap::new(),
            kept_inputs: BTreeSet::new(),
            gradient_codecs: program.gradient_codecs(units.len()),
            is_pipeline: named.len() < units.len(),
            named,
        }
    }

    /// Forgets what no step leaves to the next.
    fn start_next_step(&mut self) {
        self.activations.clear();
        self.transfers.forget_gradients(|unit| !self.policy.defers_update(unit));
        for (unit, held) in self.held.iter_mut().enumerate() {
            held.tied_parameters = 0;
            held.gradients = held.gradients.filter(|_| self.policy.defers_update(unit));
        }
    }

    /// Executes the program. Returns what is held during each instruction.
    fn run(&mut self) -> Vec<Memory> {
        let program = self.program;
        program.instructions.iter().map(|instruction| self.execute(instruction)).collect()
    }

    /// Executes an instruction: first it allocates, then it frees. Returns what is held in between.
    fn execute(&mut self, instruction: &Instruction) -> Memory {
        let frozen = |unit: usize| frozen_bytes(&self.units[unit], self.policy, self.layout);
        self.transfers.allocate(instruction, self.costs, frozen);
        let temporaries = self.allocate(instruction);
        let memory = self.memory(temporaries);
        let bytes = |unit: usize, buffer| match buffer {
            // The output of the unit before it.
            UnitBuffer::Activations { micro_batch } if self.kept_inputs.contains(&(micro_batch, unit)) => {
                unit.checked_sub(1).map_or(0, |previous| self.costs.units[previous].output_bytes)
            }
            UnitBuffer::Activations { micro_batch } => {
                self.activations.get(&(micro_batch, unit)).copied().unwrap_or_default()
            }
            buffer => buffer_bytes(&self.units[unit], buffer, self.policy, self.layout, self.costs),
        };
        self.transfers.free(instruction, self.has_backward, bytes);
        self.free(instruction);
        memory
    }

    fn memory(&self, temporaries: usize) -> Memory {
        let mut memory = Memory::default();
        let stored = |is_kind: fn(&UnitBuffer) -> bool| self.transfers.stored_bytes(is_kind);
        let activations = self.activations.values().sum::<usize>() + self.input_grad + self.transfers.received_bytes();
        for (kind, bytes) in [
            (
                MemoryKind::Parameters,
                self.parameters.saturating_sub(stored(|buffer| *buffer == UnitBuffer::Parameters))
                    + self.held.iter().map(|held| held.tied_parameters).sum::<usize>(),
            ),
            (
                MemoryKind::Gradients,
                self.held
                    .iter()
                    .map(|held| held.gradients.unwrap_or(0) + held.tied_gradients)
                    .sum::<usize>()
                    .saturating_sub(stored(|buffer| *buffer == UnitBuffer::Gradients)),
            ),
            (MemoryKind::Optimizer, self.optimizer.saturating_sub(stored(|buffer| *buffer == UnitBuffer::Optimizer))),
            (MemoryKind::Unsharded, self.pool.used_bytes()),
            (MemoryKind::FreeInPool, self.pool.free_bytes()),
            (
                MemoryKind::Activations,
                activations.saturating_sub(stored(|buffer| matches!(buffer, UnitBuffer::Activations { .. }))),
            ),
            (MemoryKind::Temporaries, temporaries),
        ] {
            memory.bytes[kind as usize] = bytes;
        }
        memory
    }

    /// Allocates what an instruction needs. Returns the size of its temporaries.
    fn allocate(&mut self, instruction: &Instruction) -> usize {
        match *instruction {
            Instruction::StartGather { unit, codec } => {
                if self.policy.sharding.parameters && self.held[unit].gathered.is_empty() {
                    for (group, elements) in self.gathered_elements(unit) {
                        if codec == Codec::Int8 {
                            // This rank's part, and all parts, each as long as the longest.
                            let ranks = self.layout.group_size(group);
                            let part_bytes = int8_bytes(Partition::new(elements, ranks).part_len(0));
                            for bytes in [part_bytes, part_bytes * ranks] {
                                let buffer = self.pool.allocate(bytes);
                                self.held[unit].encoded.push(buffer);
                            }
                        } else {
                            self.allocate_gathered(unit, elements);
                        }
                    }
                }
                0
            }
            Instruction::WaitGather(unit) if !self.held[unit].encoded.is_empty() => {
                for (index, (_, elements)) in self.gathered_elements(unit).into_iter().enumerate() {
                    self.allocate_gathered(unit, elements);
                    let encoded = self.held[unit].encoded[2 * index..][..2].to_vec();
                    encoded.into_iter().for_each(|buffer| self.pool.free(buffer));
                }
                self.held[unit].encoded.clear();
                0
            }
            Instruction::Forward { unit, micro_batch, keep } => {
                let cost = &self.costs.units[unit];
                let (kept, temporaries) = match keep {
                    Keep::All => (cost.kept_bytes, cost.forward_temporary_bytes),
                    Keep::Selective => (cost.selective_bytes, cost.selective_forward_temporary_bytes),
                    Keep::Input | Keep::Nothing => (cost.output_bytes, cost.no_grad_temporary_bytes),
                };
                self.activations.insert((micro_batch, unit), kept);
                match keep {
                    Keep::Input => self.kept_inputs.insert((micro_batch, unit)),
                    _ => self.kept_inputs.remove(&(micro_batch, unit)),
                };
                temporaries
            }
            Instruction::Recompute { unit, micro_batch } => {
                let cost = &self.costs.units[unit];
                *self.activations.entry((micro_batch, unit)).or_default() += cost.kept_bytes;
                cost.forward_temporary_bytes
            }
            Instruction::BackwardInput { unit, .. } => self.backward_temporaries(unit),
            Instruction::Backward { unit, .. } | Instruction::BackwardWeight { unit, .. } => {
                let UnitCost { tied_gradient_bytes, sparse_gradient_bytes, .. } = self.costs.units[unit];
                let own = self.units[unit].trainable * self.layout.parameter_bytes;
                self.returned = own.saturating_sub(sparse_gradient_bytes) + tied_gradient_bytes;
                self.backward_temporaries(unit)
            }
            // The gradients that the backward pass returned are freed once they are added.
            Instruction::Accumulate { unit, .. } => {
                self.start_accumulating(unit);
                match self.units[unit].tied.filter(|&owner| self.units[owner].trainable > 0) {
                    Some(owner) if self.is_pipeline => {
                        let summed = if self.named.contains(&owner) { owner } else { unit };
                        self.held[summed].tied_gradients = self.units[unit].tied_elements * self.layout.gradient_bytes;
                    }
                    Some(owner) => self.start_accumulating(owner),
                    None => (),
                }
                std::mem::take(&mut self.returned)
            }
            Instruction::StartReceive(message) if message.payload.is_tied() => {
                let bytes = self.layout.message_bytes(&Message { codec: Codec::None, ..message }, false, self.units);
                let held = &mut self.held[message.unit];
                match message.payload {
                    Payload::TiedParameters => held.tied_parameters = bytes,
                    _ => held.tied_gradients = bytes,
                }
                0
            }
            Instruction::StartReduce { unit, .. } => {
                // A unit without gradients contributes zeros.
                self.start_accumulating(unit);
                if self.policy.sharding.gradients && self.units[unit].trainable > 0 {
                    let bytes = self.layout.kept_trainable(&self.units[unit], true) * self.layout.gradient_bytes;
                    match self.held[unit].gradients {
                        None => self.held[unit].gradients = Some(bytes),
                        Some(_) => self.held[unit].summand = Some(self.pool.allocate(bytes)),
                    }
                }
                0
            }
            _ => 0,
        }
    }

    /// The lengths of a unit's flat buffers that have elements, and the groups that shard them.
    fn gathered_elements(&self, unit: usize) -> Vec<(GroupKind, usize)> {
        let (trainable, frozen) = (self.units[unit].trainable_by_group(), self.units[unit].frozen_by_group());
        let buffers = trainable.into_iter().zip(frozen).flat_map(|(trainable, frozen)| [trainable, frozen]);
        buffers.filter(|&(_, elements)| elements > 0).collect()
    }

    fn allocate_gathered(&mut self, unit: usize, elements: usize) {
        let buffer = self.pool.allocate(elements * self.layout.parameter_bytes);
        self.held[unit].gathered.push(buffer);
    }

    /// The most that a unit's backward pass holds in addition to what was held before it.
    fn backward_temporaries(&self, unit: usize) -> usize {
        let cost = &self.costs.units[unit];
        match self.policy.activation_checkpointing {
            ActivationCheckpointing::Selective => cost.selective_temporary_bytes,
            ActivationCheckpointing::None | ActivationCheckpointing::Full => cost.temporary_bytes,
        }
    }

    /// Allocates memory for a unit's accumulated gradients, if it has none yet: from the pool if they will be sharded; otherwise it
    /// will hold the reduced gradients, too.
    fn start_accumulating(&mut self, unit: usize) {
        let Layout { gradient_bytes, parameter_bytes, .. } = *self.layout;
        let bytes =
            self.units[unit].trainable * self.gradient_codecs[unit].element_bytes(gradient_bytes, parameter_bytes);
        let held = &mut self.held[unit];
        if bytes == 0 {
            return;
        }
        if !self.policy.sharding.gradients {
            held.gradients = Some(bytes);
        } else if held.local_grads.is_none() {
            held.local_grads = Some(self.pool.allocate(bytes));
        }
    }

    /// Frees what an instruction is the last to need.
    fn free(&mut self, instruction: &Instruction) {
        match *instruction {
            Instruction::Release(unit) => {
                let gathered = std::mem::take(&mut self.held[unit].gathered);
                gathered.into_iter().for_each(|buffer| self.pool.free(buffer));
            }
            Instruction::Send(Message { payload: Payload::TiedGradients, unit, .. })
            | Instruction::WaitReceive(Message { payload: Payload::TiedGradients, unit, .. })
            | Instruction::StartReduce { unit, .. } => self.held[unit].tied_gradients = 0,
            // Nothing that leads to it is needed in a backward pass.
            Instruction::Send(Message { payload: Payload::Activations, unit, micro_batch, .. })
                if unit < self.first_trainable =>
            {
                self.activations.retain(|&(of, earlier), _| of != micro_batch || earlier > unit);
            }
            // Without a backward pass, an output is the next unit's input, and nothing else.
            Instruction::Forward { unit, micro_batch, .. } if !self.has_backward && unit > 0 => {
                self.activations.remove(&(micro_batch, unit - 1));
            }
            // The new output replaces the old one.
            Instruction::Recompute { unit, micro_batch } => {
                self.activations.insert((micro_batch, unit), self.costs.units[unit].kept_bytes);
            }
            // What the second half needs: the inputs of linear layers, recomputed or not, and the gradients of their outputs.
            Instruction::BackwardInput { unit, micro_batch } => {
                let kept = self.activations.entry((micro_batch, unit)).or_default();
                *kept = (*kept).max(self.costs.units[unit].kept_bytes);
            }
            Instruction::Backward { unit, micro_batch } | Instruction::BackwardWeight { unit, micro_batch } => {
                self.activations.remove(&(micro_batch, unit));
                // The gradient of its input has the size of the input: the output of the unit before it.
                let input_bytes = unit.checked_sub(1).map_or(0, |previous| self.costs.units[previous].output_bytes);
                self.input_grad = if unit == self.first_trainable { 0 } else { input_bytes };
                if unit == self.first_trainable {
                    // The outputs of the frozen units before it.
                    self.activations.retain(|&(of, _), _| of != micro_batch);
                }
            }
            Instruction::WaitReduceScatter(unit) => self.free_local_grads(unit),
            Instruction::WaitReduce(unit) => {
                self.free_local_grads(unit);
                if let Some(buffer) = self.held[unit].summand.take() {
                    self.pool.free(buffer);
                }
            }
            Instruction::Update(unit) => self.held[unit].gradients = None,
            _ => (),
        }
    }

    fn free_local_grads(&mut self, unit: usize) {
        if let Some(buffer) = self.held[unit].local_grads.take() {
            self.pool.free(buffer);
        }
    }
}

/// The bytes of a unit's parameters, optimizer state or gradients that a rank keeps.
pub(super) fn buffer_bytes(
    unit: &UnitSpec,
    buffer: UnitBuffer,
    policy: &Policy,
    layout: &Layout,
    costs: &Costs,
) -> usize {
    let sharding = policy.sharding;
    match buffer {
        UnitBuffer::Parameters => {
            layout.kept_trainable(unit, sharding.parameters) * layout.parameter_bytes
                + frozen_bytes(unit, policy, layout)
        }
        UnitBuffer::Optimizer => layout.kept_trainable(unit, sharding.optimizer) * costs.optimizer_element_bytes,
        UnitBuffer::Gradients => layout.kept_trainable(unit, sharding.gradients) * layout.gradient_bytes,
        UnitBuffer::Activations { .. } => 0,
    }
}

/// The bytes that a rank keeps on a tier, if everything is there that is ever stored there.
pub fn tier_bytes(
    program: &Program,
    units: &[UnitSpec],
    policy: &Policy,
    layout: &Layout,
    costs: &Costs,
    tier: Tier,
) -> usize {
    let stored = program.instructions.iter().filter_map(|instruction| match *instruction {
        Instruction::StartStore(Offload { unit, buffer, tier: to }) if to == tier => Some((unit, buffer)),
        _ => None,
    });
    let bytes = |(unit, buffer): (usize, UnitBuffer)| match buffer {
        // The output of the unit before it.
        UnitBuffer::Activations { .. } => unit.checked_sub(1).map_or(0, |previous| costs.units[previous].output_bytes),
        buffer => buffer_bytes(&units[unit], buffer, policy, layout, costs),
    };
    stored.collect::<BTreeSet<_>>().into_iter().map(bytes).sum()
}

/// The bytes of a unit's frozen parameters that a rank keeps.
pub(super) fn frozen_bytes(unit: &UnitSpec, policy: &Policy, layout: &Layout) -> usize {
    layout.kept_frozen(unit, policy.sharding.parameters) * layout.parameter_bytes
}
