//! Pipelines, written by hand.

use shardwise_plan::Mesh;
use shardwise_plan::program::{
    ActivationCheckpointing, Costs, Instruction, Keep, LinkCost, Message, Policy, Program, Programs, SharedLink,
    Topology, UnitCost, UnitSpec,
};

/// The order of micro-batches on a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// All forward passes, then all backward passes.
    Gpipe,
    /// One forward, one backward, after as many forward passes as there are later stages.
    OneForwardOneBackward,
    /// The same, with gradients of parameters after those of all inputs of the stage.
    SplitBackward,
}

impl Schedule {
    pub(crate) const ALL: [Schedule; 3] = [Schedule::Gpipe, Schedule::OneForwardOneBackward, Schedule::SplitBackward];

    /// What a stage does.
    fn actions(self, stage: usize, stages: usize, micro_batches: usize) -> Vec<Action> {
        let ahead = match self {
            Schedule::Gpipe => micro_batches,
            Schedule::OneForwardOneBackward | Schedule::SplitBackward => (stages - stage).min(micro_batches),
        };
        let first = (0..ahead).map(Action::Forward);
        let steady = (ahead..micro_batches).flat_map(|next| [Action::Backward(next - ahead), Action::Forward(next)]);
        let last = (micro_batches - ahead..micro_batches).map(Action::Backward);
        first.chain(steady).chain(last).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Forward(usize),
    Backward(usize),
}

/// Equal blocks of 64 elements and 32 bytes of output.
pub(crate) fn blocks(count: usize) -> Vec<UnitSpec> {
    let block = |index| UnitSpec { output_bytes: 32, ..UnitSpec::new(&format!("block.{index}"), 64, true) };
    (0..count).map(block).collect()
}

/// Units that take 1 s forward and 2 s backward, and nothing for the rest. Links are free.
pub(crate) fn costs(units: &[UnitSpec]) -> Costs {
    let cost = |unit: &UnitSpec| UnitCost {
        name: unit.name.clone(),
        forward_s: 1.,
        backward_s: 2.,
        kept_bytes: 600,
        selective_bytes: 300,
        output_bytes: 32,
        ..UnitCost::default()
    };
    Costs {
        units: units.iter().map(cost).collect(),
        links: Costs::free_links_except(&[]),
        tiers: [LinkCost::FREE; 2],
        optimizer_element_bytes: 8,
    }
}

/// One rank per host, with free links and unlimited cores.
pub(crate) fn topology(mesh: Mesh) -> Topology {
    Topology {
        mesh,
        ranks_per_host: 1,
        cores_per_host: 1,
        threads_per_rank: 1,
        within_host: SharedLink::unshared(LinkCost::FREE),
        between_hosts: SharedLink::unshared(LinkCost::FREE),
        parameter_bytes: 4,
        gradient_bytes: 4,
    }
}

#[track_caller]
pub(crate) fn assert_close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9 * expected.abs().max(1.), "{found} is not {expected}");
}

/// A step of a pipeline whose stages have equally many consecutive units.
pub(crate) fn pipeline(units: &[UnitSpec], policy: &Policy, stages: usize, schedule: Schedule) -> Programs {
    Programs::pipeline((0..stages).map(|stage| Stage::new(units, policy, stage, stages).program(schedule)).collect())
}

struct Stage<'a> {
    units: &'a [UnitSpec],
    policy: &'a Policy,
    stage: usize,
    stages: usize,
    /// The units of this stage.
    own: std::ops::Range<usize>,
    first_trainable: usize,
    instructions: Vec<Instruction>,
}

impl<'a> Stage<'a> {
    fn new(units: &'a [UnitSpec], policy: &'a Policy, stage: usize, stages: usize) -> Self {
        let own = stage * units.len() / stages..(stage + 1) * units.len() / stages;
        let first_trainable = units.iter().position(|unit| unit.trainable > 0).unwrap();
        Stage { units, policy, stage, stages, own, first_trainable, instructions: Vec::new() }
    }

    fn push(&mut self, instruction: Instruction) {
        self.instructions.push(instruction);
    }

    fn program(mut self, schedule: Schedule) -> Program {
        let sharding = self.policy.sharding;
        let trainable: Vec<usize> = self.own.clone().filter(|&unit| self.units[unit].trainable > 0).collect();
        self.push(Instruction::CountTokens);
        if sharding.optimizer && !sharding.parameters {
            trainable.iter().for_each(|&unit| self.push(Instruction::WaitGather(unit)));
        }
        let actions: Vec<Action> = schedule.actions(self.stage, self.stages, self.policy.micro_batches);
        let has_backward = self.own.end > self.first_trainable;
        let is_needed = |action: &Action| has_backward || matches!(action, Action::Forward(_));
        let actions: Vec<Action> = actions.into_iter().filter(is_needed).collect();
        // A receive starts one action before it is needed.
        actions.first().into_iter().for_each(|&first| self.start_receive(first));
        for (index, &action) in actions.iter().enumerate() {
            actions.get(index + 1).into_iter().for_each(|&next| self.start_receive(next));
            match action {
                Action::Forward(micro_batch) => self.forward(micro_batch),
                Action::Backward(micro_batch) => self.backward(micro_batch, schedule),
            }
        }
        for &unit in &trainable {
            self.push(Instruction::WaitReduce(unit));
            self.push(Instruction::Norm(unit));
        }
        self.push(Instruction::ReduceTotals);
        trainable.iter().for_each(|&unit| self.push(Instruction::Update(unit)));
        let units = self.units.iter().map(|unit| unit.name.clone()).collect();
        Program { units, instructions: self.instructions }
    }

    /// The message that an action needs from another stage.
    fn needed(&self, action: Action) -> Option<Message> {
        match action {
            Action::Forward(micro_batch) => (self.stage > 0).then(|| Message::activations(self.own.start, micro_batch)),
            Action::Backward(micro_batch) => {
                (self.stage + 1 < self.stages).then(|| Message::gradients(self.own.end - 1, micro_batch))
            }
        }
    }

    fn start_receive(&mut self, action: Action) {
        self.needed(action).into_iter().for_each(|message| self.push(Instruction::StartReceive(message)));
    }

    fn wait_receive(&mut self, action: Action) {
        self.needed(action).into_iter().for_each(|message| self.push(Instruction::WaitReceive(message)));
    }

    fn forward(&mut self, micro_batch: usize) {
        self.wait_receive(Action::Forward(micro_batch));
        for unit in self.own.clone() {
            let keep = match self.policy.activation_checkpointing {
                _ if unit < self.first_trainable => Keep::Nothing,
                ActivationCheckpointing::None => Keep::All,
                ActivationCheckpointing::Selective => Keep::Selective,
                ActivationCheckpointing::Full => Keep::Input,
            };
            self.with_parameters(unit, &[Instruction::Forward { unit, micro_batch, keep }]);
        }
        if self.stage + 1 < self.stages {
            self.push(Instruction::Send(Message::activations(self.own.end - 1, micro_batch)));
        }
    }

    fn backward(&mut self, micro_batch: usize, schedule: Schedule) {
        self.wait_receive(Action::Backward(micro_batch));
        let units: Vec<usize> = self.own.clone().filter(|&unit| unit >= self.first_trainable).rev().collect();
        let is_split = schedule == Schedule::SplitBackward;
        for &unit in &units {
            let recompute = match self.policy.activation_checkpointing {
                ActivationCheckpointing::Full => Some(Instruction::Recompute { unit, micro_batch }),
                _ => None,
            };
            let backward = match is_split {
                true => Instruction::BackwardInput { unit, micro_batch },
                false => Instruction::Backward { unit, micro_batch },
            };
            let passes: Vec<Instruction> = recompute.into_iter().chain([backward]).collect();
            self.with_parameters(unit, &passes);
            if !is_split {
                self.accumulate(unit, micro_batch);
            }
        }
        if self.stage > 0 && self.own.start > self.first_trainable {
            self.push(Instruction::Send(Message::gradients(self.own.start, micro_batch)));
        }
        for unit in units.into_iter().filter(|_| is_split) {
            self.push(Instruction::BackwardWeight { unit, micro_batch });
            self.accumulate(unit, micro_batch);
        }
    }

    fn accumulate(&mut self, unit: usize, micro_batch: usize) {
        self.push(Instruction::Accumulate { unit, micro_batch });
        if micro_batch + 1 == self.policy.micro_batches && self.units[unit].trainable > 0 {
            self.push(Instruction::start_reduce(unit));
        }
    }

    /// Computes with a unit's parameters, which are gathered for that if they are sharded.
    fn with_parameters(&mut self, unit: usize, passes: &[Instruction]) {
        let is_sharded = self.policy.sharding.parameters;
        if is_sharded {
            self.push(Instruction::start_gather(unit));
            self.push(Instruction::WaitGather(unit));
        }
        passes.iter().for_each(|&pass| self.push(pass));
        if is_sharded {
            self.push(Instruction::Release(unit));
        }
    }
}
