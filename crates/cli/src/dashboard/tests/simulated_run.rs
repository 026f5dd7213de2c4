//! The journal of a simulated run, which learns, skips a step, loses a rank and resumes.

use shardwise_journal::{
    Entry, EntryKind, Evaluation, JOURNAL_VERSION, Launch, RankMemory, Resumed, Saved, Start, Step, StepTraffic,
    VerbTraffic,
};

/// The world size.
const RANKS: usize = 4;
const MIB: u64 = 1 << 20;
/// The duration of a step.
const STEP_S: f64 = 0.8;

/// The entries of the first `steps` steps of a run of `steps_max`, ending now. If `dies_at` is given, a rank dies at that step.
pub(super) fn simulate(steps: u64, steps_max: u64, dies_at: Option<u64>) -> Vec<Entry> {
    let mut simulation = Simulation { now_s: 0., entries: Vec::new() };
    simulation.launch(1);
    simulation.start(1, steps_max);
    for step in 1..=steps {
        simulation.step(step);
        if dies_at == Some(step) {
            simulation.die_and_resume(step, steps_max);
        }
    }
    let shift_s = Entry::now(EntryKind::Note { step: 0, text: String::new() }).time_s - simulation.now_s;
    simulation.entries.iter_mut().for_each(|entry| entry.time_s += shift_s);
    simulation.entries
}

struct Simulation {
    now_s: f64,
    entries: Vec<Entry>,
}

impl Simulation {
    fn add(&mut self, kind: EntryKind) {
        self.entries.push(Entry { time_s: self.now_s, kind });
    }

    fn launch(&mut self, attempt: u64) {
        self.add(EntryKind::Launched(Launch { attempt, ranks: RANKS, ..Launch::default() }));
        self.now_s += 1.9;
    }

    fn start(&mut self, first_step: u64, steps: u64) {
        let resumed_from = (first_step > 1).then(|| format!("runs/kjv, step {}", first_step - 1));
        self.add(EntryKind::Start(Box::new(Start {
            journal_version: JOURNAL_VERSION,
            name: "kjv".to_string(),
            recipe: "[run]\nsteps = 2000\n".to_string(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            ranks: RANKS,
            ranks_per_host: RANKS,
            zero_stage: 3,
            replicate: 1,
            pipeline: 1,
            expert: 1,
            context: 1,
            tensor: 1,
            param_dtype: "bf16".to_string(),
            parameters: 42_100_000,
            package: None,
            tokens_per_step: 8192,
            first_step,
            steps,
            resumed_from,
            memory_limit_bytes: Some(3 << 30),
            memory_estimate_bytes: 1100 * MIB,
            flops_per_token: 2.6e8,
            peak_flops_per_s: 9.1e12,
        })));
    }

    fn step(&mut self, step: u64) {
        self.now_s += STEP_S;
        let noise = |seed: u64| ((step.wrapping_mul(seed) % 1009) as f64 / 1009. - 0.5) * 2.;
        let is_skipped = step % 997 == 396;
        let loss = 2.05 + 7.2 * (-(step as f64) / 90.).exp() + 1.4 * (-(step as f64) / 700.).exp() + 0.11 * noise(7919);
        let tokens_per_s = 8192. / STEP_S * (1. + 0.05 * noise(104_729));
        self.add(EntryKind::Step(Step {
            step,
            loss: if is_skipped { f64::NAN } else { loss },
            grad_norm: 1.2 + 0.4 * noise(31),
            lr: 3e-4,
            tokens: 8192,
            tokens_per_s,
            step_s: STEP_S,
            mfu: tokens_per_s * 2.6e8 / 9.1e12,
            memory_bytes: 1229 * MIB,
            memory_peak_bytes: 1290 * MIB,
            sent_bytes: 252 * MIB,
            loss_scale: 1.,
            skipped_so_far: u64::from(step > 396),
            skipped: is_skipped.then(|| "the gradient of block.3 is not finite: nothing is updated".to_string()),
            spike: None,
            experts: Vec::new(),
        }));
        if step.is_multiple_of(10) {
            self.add(EntryKind::Memory { step, ranks: (0..RANKS).map(|rank| memory(rank, step)).collect() });
            let verb =
                |verb: &str, bytes| VerbTraffic { verb: verb.to_string(), calls: 180, bytes, expected_bytes: bytes };
            let verbs = vec![verb("all-gather", 1680 * MIB), verb("reduce-scatter", 840 * MIB)];
            self.add(EntryKind::Traffic(StepTraffic { step, steps: 10, verbs }));
        }
        if step.is_multiple_of(50) {
            let evaluation =
                Evaluation { step, loss: loss + 0.12, tokens: 65_536, bits_per_byte: Some((loss + 0.12) / 2.9) };
            self.add(EntryKind::Evaluation(evaluation));
        }
        if step.is_multiple_of(100) {
            let address = format!("runs/kjv/step-{step}");
            self.add(EntryKind::Saved(Saved { step, address, bytes: 505 * MIB, took_s: 1.3, stalled_s: 0.2 }));
        }
    }

    fn die_and_resume(&mut self, step: u64, steps_max: u64) {
        self.now_s += 0.4;
        let text = format!(
            "rank 2 (host vm, process 1389) died (signal 9 (Killed)), last heard at step {step} in forward of block.1, while ranks 0, 1 and 3 waited for it \
             in all-gather #88 of 'block.2' (38.7 kB, shard 0-3)."
        );
        self.add(EntryKind::Failed { attempt: 1, step, text });
        self.launch(2);
        let first = step / 100 * 100 + 1;
        self.start(first, steps_max);
        let resumed =
            Resumed { attempt: 2, step: first, lost_s: 2.5, noticed_s: 0.4, repeated_steps: step + 1 - first };
        self.add(EntryKind::Resumed(resumed));
        (first..=step).for_each(|step| self.step(step));
    }
}

/// The memory of a rank; the last one also has the head.
fn memory(rank: usize, step: u64) -> RankMemory {
    RankMemory {
        rank,
        parameters: 21 * MIB,
        gradients: 42 * MIB,
        optimizer: 127 * MIB,
        unsharded: 96 * MIB,
        activations: (610 + 60 * (rank as u64 + 1 == RANKS as u64) as u64 + step % 7) * MIB,
        process: 270 * MIB,
    }
}
