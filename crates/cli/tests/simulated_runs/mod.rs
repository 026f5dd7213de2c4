//! Simulated runs, for tests of programs that read journals: runs without failures, with killed ranks and lost hosts, and with a million
//! steps. Times and losses follow from a seed.

use std::fs::{File, create_dir_all};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use shardwise_journal::{
    EVENTS, Entry, EntryKind, Evaluation, JOURNAL_VERSION, Launch, METRICS, RankMemory, Resumed, Saved, Start, Step,
    StepTraffic, VerbTraffic,
};

const MIB: f64 = (1 << 20) as f64;

/// The configuration of a simulated run.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) name: String,
    pub(crate) recipe: String,
    pub(crate) steps: u64,
    pub(crate) save_every: u64,
    pub(crate) step_s: f64,
    pub(crate) floor: f64,
    pub(crate) seed: u64,
    pub(crate) parameters: f64,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            name: "kjv".to_string(),
            recipe: recipe("kjv", 400, "6e-4"),
            steps: 400,
            save_every: 50,
            step_s: 5.2,
            floor: 2.9,
            seed: 1,
            parameters: 42.1e6,
        }
    }
}

/// The text of a recipe.
pub(crate) fn recipe(name: &str, steps: u64, lr: &str) -> String {
    format!(
        "# {name}: verses, in 2,048 tokens\n[model.llama]\nnum_hidden_layers = 8\nhidden_size = 512\nnum_attention_heads = 8\n\n[data]\ncorpus = \"data/kjv\"\n\n[run]\nsteps = {steps}\nseed = 7\n\n[optimizer]\nkind = \"adamw\"\nlr = {lr}\nmax_grad_norm = 1.0\n\n[zero]\nstage = 3\n\n[checkpoints]\nfolder = \"runs/{name}\"\nevery_steps = 50\n"
    )
}

/// A simulated run.
pub(crate) struct SimulatedRun {
    folder: PathBuf,
    plan: Plan,
    now_s: f64,
    metrics: BufWriter<File>,
    events: BufWriter<File>,
    random: u64,
    ranks: usize,
    attempt: u64,
    restarts: u64,
    lost_s: f64,
    last_step: u64,
    peak_bytes: u64,
    skipped: u64,
}

impl SimulatedRun {
    pub(crate) fn new(folder: &Path, plan: Plan) -> Self {
        create_dir_all(folder).unwrap();
        let [metrics, events] = [METRICS, EVENTS].map(|name| BufWriter::new(File::create(folder.join(name)).unwrap()));
        let random = plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        SimulatedRun {
            folder: folder.to_path_buf(),
            plan,
            now_s: 1_790_000_000.,
            metrics,
            events,
            random,
            ranks: 0,
            attempt: 0,
            restarts: 0,
            lost_s: 0.,
            last_step: 0,
            peak_bytes: 0,
            skipped: 0,
        }
    }

    /// Launches an attempt, which starts at a step.
    pub(crate) fn start(&mut self, ranks: usize, first_step: u64, hosts: &[&str], missing: &[&str]) {
        self.attempt += 1;
        self.ranks = ranks;
        let [hosts, missing] = [hosts, missing].map(|names| names.iter().map(ToString::to_string).collect());
        self.event(EntryKind::Launched(Launch { attempt: self.attempt, ranks, hosts, missing }));
        self.now_s += 2.1;
        let start = Start {
            journal_version: JOURNAL_VERSION,
            name: self.plan.name.clone(),
            recipe: self.plan.recipe.clone(),
            version: "0.1.0".to_string(),
            ranks,
            ranks_per_host: 2.min(ranks),
            zero_stage: 3,
            replicate: 1,
            pipeline: 1,
            expert: 1,
            context: 1,
            tensor: 1,
            param_dtype: "bf16".to_string(),
            parameters: self.plan.parameters as u64,
            package: None,
            tokens_per_step: 16_384,
            first_step,
            steps: self.plan.steps,
            resumed_from: (first_step > 1).then(|| format!("runs/{}/step-{}", self.plan.name, first_step - 1)),
            memory_limit_bytes: Some((1600. * MIB) as u64),
            memory_estimate_bytes: (self.memory_by_kind(0).iter().sum::<f64>() * 1.02) as u64,
            flops_per_token: 6. * self.plan.parameters,
            peak_flops_per_s: 2.6e11 * ranks as f64,
        };
        self.metric(EntryKind::Start(Box::new(start)));
    }

    /// Records that the ranks train again after a failure.
    pub(crate) fn resume(&mut self, step: u64, repeated_steps: u64, noticed_s: f64) {
        let lost_s = noticed_s + 2.3;
        self.restarts += 1;
        self.lost_s += lost_s;
        self.event(EntryKind::Resumed(Resumed { attempt: self.attempt, step, lost_s, noticed_s, repeated_steps }));
    }

    /// Runs steps, with all other entries between them.
    pub(crate) fn steps(&mut self, first: u64, last: u64) {
        for step in first..=last {
            self.step(step, None);
            if step % 10 == 0 || step == first {
                self.memory(step);
                self.traffic(step, 10);
            }
            if step % 50 == 0 {
                let loss = self.plan_loss(step) + 0.08;
                let bits_per_byte = Some(loss * 0.56);
                self.metric(EntryKind::Evaluation(Evaluation { step, loss, tokens: 40_960, bits_per_byte }));
            }
            if step % self.plan.save_every == 0 {
                let address = format!("runs/{}/step-{step}", self.plan.name);
                let bytes = (self.plan.parameters * 14.) as u64;
                self.metric(EntryKind::Saved(Saved { step, address, bytes, took_s: 1.9, stalled_s: 0.08 }));
            }
        }
    }

    /// Runs a step whose update is skipped.
    pub(crate) fn skip(&mut self, step: u64, why: &str) {
        self.skipped += 1;
        self.step(step, Some(why));
    }

    /// Runs steps without other entries, for very long runs.
    pub(crate) fn bare_steps(&mut self, first: u64, last: u64) {
        (first..=last).for_each(|step| self.step(step, None));
    }

    fn step(&mut self, step: u64, skipped: Option<&str>) {
        let step_s = self.plan.step_s * 4. / self.ranks as f64 * (1. + 0.04 * self.noise());
        self.now_s += step_s;
        let warm_up = (self.plan.steps / 20).max(1) as f64;
        let part = (step as f64 - warm_up).max(0.) / (self.plan.steps as f64 - warm_up).max(1.);
        let decayed = 6e-5 + 5.4e-4 * 0.5 * (1. + (std::f64::consts::PI * part).cos());
        let lr = if (step as f64) < warm_up { 6e-4 * step as f64 / warm_up } else { decayed };
        let tokens_per_s = 16_384. / step_s;
        let memory_bytes = (self.memory_by_kind(0).iter().sum::<f64>() * (1. + 0.004 * self.noise())) as u64;
        self.peak_bytes = self.peak_bytes.max(memory_bytes + (20. * MIB) as u64);
        let loss = if skipped.is_some() { f64::NAN } else { self.plan_loss(step) + 0.09 * self.noise() };
        let grad_norm = match skipped {
            Some(_) => f64::INFINITY,
            None => (0.6 + 3. / (1. + step as f64 / 30.)) * (1. + 0.25 * self.noise().abs()),
        };
        self.last_step = step;
        self.metric(EntryKind::Step(Step {
            step,
            loss,
            grad_norm,
            lr,
            tokens: 16_384,
            tokens_per_s,
            step_s,
            mfu: tokens_per_s * 6. * self.plan.parameters / (2.6e11 * self.ranks as f64) * 0.55,
            memory_bytes,
            memory_peak_bytes: self.peak_bytes,
            sent_bytes: (self.plan.parameters * 8. * (self.ranks - 1) as f64 / self.ranks as f64) as u64,
            loss_scale: 1.,
            skipped_so_far: self.skipped,
            skipped: skipped.map(ToString::to_string),
            spike: None,
            experts: Vec::new(),
        }));
    }

    fn plan_loss(&self, step: u64) -> f64 {
        let part = step as f64 / self.plan.steps as f64 * 400.;
        self.plan.floor + (9.2 - self.plan.floor) / (1. + part / 12.).powf(0.9)
    }

    /// The memory of a rank by kind, in the order of `RankMemory`.
    fn memory_by_kind(&self, rank: usize) -> [f64; 6] {
        let shard = self.plan.parameters / self.ranks.max(1) as f64;
        let wobble = 1. + 0.03 * ((rank * 7919) % 11) as f64 / 11.;
        [
            2. * shard,
            4. * shard,
            12. * shard,
            0.6 * self.plan.parameters,
            5.2 * self.plan.parameters * wobble,
            118. * MIB,
        ]
    }

    fn memory(&mut self, step: u64) {
        let ranks = (0..self.ranks.min(64)).map(|rank| {
            let [parameters, gradients, optimizer, unsharded, activations, process] =
                self.memory_by_kind(rank).map(|bytes| bytes as u64);
            RankMemory { rank, parameters, gradients, optimizer, unsharded, activations, process }
        });
        let ranks = ranks.collect();
        self.metric(EntryKind::Memory { step, ranks });
    }

    fn traffic(&mut self, step: u64, steps: u64) {
        let part = (self.ranks - 1) as f64 / self.ranks as f64;
        let whole = |times: f64| (times * self.plan.parameters * 2. * part * steps as f64) as u64;
        let verb = |verb: &str, calls: u64, bytes: u64, expected_bytes: u64| VerbTraffic {
            verb: verb.to_string(),
            calls: calls * steps,
            bytes,
            expected_bytes,
        };
        let verbs = vec![
            verb("all-gather", 19, whole(2.) + 800, whole(2.)),
            verb("reduce-scatter", 10, whole(2.004), whole(2.)),
            verb("all-reduce", 2, 4096 * steps, 0),
        ];
        self.metric(EntryKind::Traffic(StepTraffic { step, steps, verbs }));
    }

    /// Records a failure, which is noticed some time after the last step.
    pub(crate) fn fail(&mut self, noticed_s: f64, text: &str) {
        self.now_s += noticed_s;
        let (attempt, step) = (self.attempt, self.last_step + 1);
        self.event(EntryKind::Failed { attempt, step, text: text.to_string() });
        self.now_s += 0.2;
    }

    pub(crate) fn note(&mut self, text: &str) {
        self.metric(EntryKind::Note { step: self.last_step, text: text.to_string() });
    }

    /// Records the end of the run.
    pub(crate) fn end(&mut self, code: u8) {
        self.now_s += 1.;
        self.event(EntryKind::Ended { code, restarts: self.restarts, lost_s: self.lost_s });
    }

    /// Finishes the files, and returns the folder.
    pub(crate) fn folder(mut self) -> PathBuf {
        self.metrics.flush().unwrap();
        self.events.flush().unwrap();
        self.folder
    }

    fn metric(&mut self, kind: EntryKind) {
        let entry = Entry { time_s: self.now_s, kind };
        serde_json::to_writer(&mut self.metrics, &entry).unwrap();
        self.metrics.write_all(b"\n").unwrap();
    }

    fn event(&mut self, kind: EntryKind) {
        let entry = Entry { time_s: self.now_s, kind };
        serde_json::to_writer(&mut self.events, &entry).unwrap();
        self.events.write_all(b"\n").unwrap();
    }

    /// Noise with a standard deviation of about 1, from xorshift.
    fn noise(&mut self) -> f64 {
        let mut sum = 0.;
        for _ in 0..4 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            sum += (self.random >> 11) as f64 / (1_u64 << 53) as f64 - 0.5;
        }
        sum * 1.7
    }
}

/// A run without failures.
pub(crate) fn run_without_failures(folder: &Path, plan: Plan) -> PathBuf {
    let steps = plan.steps;
    let mut run = SimulatedRun::new(folder, plan);
    run.start(4, 1, &[], &[]);
    run.steps(1, steps);
    run.end(0);
    run.folder()
}

/// A run in which a rank is killed, a host is lost, so that 4 ranks become 2, and the host returns after a third failure.
pub(crate) fn run_with_failures(folder: &Path) -> PathBuf {
    let mut run = SimulatedRun::new(folder, Plan { seed: 3, ..Plan::default() });
    run.start(4, 1, &["a", "b"], &[]);
    run.steps(1, 59);
    run.skip(60, "the gradient of block.3 is not finite: model.layers.3.mlp.up_proj.weight");
    run.steps(61, 127);
    run.fail(0.2, "rank 2 (host b, process 1389) died of signal 9 (killed) at step 128 in backward of block.1.");
    run.start(4, 101, &["a", "b"], &[]);
    run.resume(101, 27, 0.2);
    run.steps(101, 180);
    run.fail(30.1, "host b is lost: all its ranks (ranks 2-3) have sent no heartbeat for 30 s.");
    run.start(2, 151, &["a"], &["b"]);
    run.resume(151, 30, 30.1);
    run.steps(151, 262);
    run.fail(
        30.1,
        "rank 1 (host a, process 2077) has sent no heartbeat for 30.1 s; it was last heard at step 263 in reduce of block.0.",
    );
    run.start(4, 251, &["a", "b"], &[]);
    run.resume(251, 12, 30.1);
    run.steps(251, 300);
    run.note("the loss scale was halved");
    run.steps(301, 400);
    run.end(0);
    run.folder()
}
