//! Spikes, spot checks, and running out of memory.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use shardwise_checkpoint::{Checkpoint, Store};
use shardwise_comm::{Group, mpi};
use shardwise_data::Mixture;
use shardwise_harness::{Launch, ranks, try_ranks};
use shardwise_model::{Batch, Gpt2Config, IGNORED, LlamaConfig, Model};
use shardwise_recipe::Recipe;
use shardwise_run::{Error, OnSpike, Requests, RunProbe, SpikeDetector, compute_checked_gradients, run};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{ActivationCheckpointing, Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Precision, Sharding};

const VOCAB_SIZE: i64 = 64;
const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..Default::default() }).unwrap())
}

fn llama() -> LlamaConfig {
    LlamaConfig { num_key_value_heads: 3, loss_chunk_tokens: 10, ..LlamaConfig::new(VOCAB_SIZE as usize, 36, 3, 6, 53) }
}

fn options(stage: u8) -> Options {
    let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    Options {
        max_grad_norm: Some(0.5),
        ..Options::new(Sharding::stage(stage).unwrap(), Optimizer::AdamW(adamw), Schedule::constant(3e-3))
    }
}

fn trainer(model: Model, ranks: &Ranks, options: Options) -> Trainer {
    Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap()
}

/// A rank's micro-batches in a step. Some targets are ignored.
fn batches(step: i64, rank: usize, count: i64) -> Vec<Batch> {
    let batch = |index: i64| {
        let numbers = Tensor::arange(2 * 12, (Kind::Int64, Device::Cpu)).view([2, 12]);
        let tokens = (numbers * 7 + step * 31 + rank as i64 * 57 + index * 13).remainder(VOCAB_SIZE);
        let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
        let ignored = (&tokens + index).remainder(4).eq(0);
        Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
    };
    (0..count).map(batch).collect()
}

/// Lets a run's probe observe the trainer.
fn probe(trainer: &mut Trainer) -> Arc<RunProbe> {
    let probe = Arc::new(RunProbe::new(Arc::default(), Arc::default()));
    probe.attach(trainer);
    probe
}

/// One step with a spot check.
fn step_checked(trainer: &mut Trainer, probe: &RunProbe, step: i64, count: i64) -> Result<(), Error> {
    let of_rank = |rank: usize| Ok(batches(step, rank, count));
    let own = batches(step, trainer.ranks().world.rank(), count);
    let gradients = compute_checked_gradients(trainer, probe, &own, &of_rank)?;
    Ok(trainer.apply_update(gradients).map(drop)?)
}

fn parameters(trainer: &mut Trainer) -> Vec<u32> {
    let mut parameters = Vec::new();
    for shard in trainer.shards_mut() {
        shard.gather().unwrap();
        for tensor in shard.parameters() {
            let elements = tensor.detach().to_kind(Kind::Float).contiguous().view(-1);
            parameters.extend(Vec::<f32>::try_from(elements).unwrap().iter().map(|x| x.to_bits()));
        }
        shard.release().unwrap();
    }
    parameters
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_string()
}

// ---- spot checks ------------------------------------------------------------------------------------------------------

#[test]
fn a_spot_check_names_the_rank_and_the_unit() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(200)), || {
        let ranks = Ranks::sharded(world());
        let rank = ranks.world.rank();
        for stage in [0, 3] {
            // The gradient of a tied matrix belongs to the unit that computes it, here the head.
            for (wrong, unit, others) in
                [(2, "block.1", "3 and 0"), (0, "head", "1 and 2"), (3, "embedding", "0 and 1")]
            {
                let tied = LlamaConfig { tie_word_embeddings: true, ..llama() };
                let mut trainer = trainer(Model::from_config(tied).unwrap(), &ranks, options(stage));
                let probe = probe(&mut trainer);
                if rank == wrong {
                    probe.flip_bit(&trainer, 2, unit).unwrap();
                }
                step_checked(&mut trainer, &probe, 1, 2).unwrap();
                let before = parameters(&mut trainer);
                let error = step_checked(&mut trainer, &probe, 2, 2).unwrap_err();
                assert!(error.is_same_on_all_ranks());
                assert_eq!(
                    error.to_string(),
                    format!(
                        "spot check at step 2: rank {wrong}'s gradients of unit {unit} differ from what ranks {others} compute \
                         from the same samples: its hardware may be faulty (host {}); nothing was updated",
                        host()
                    ),
                    "stage {stage}"
                );
                assert_eq!(parameters(&mut trainer), before, "stage {stage}: nothing was updated");
                step_checked(&mut trainer, &probe, 3, 2).unwrap();
            }
        }
    });
}

#[test]
fn one_or_two_ranks_find_the_rank_that_contradicts_itself() {
    ranks!(2, || {
        let ranks = Ranks::sharded(world());
        let mut trainer = trainer(Model::from_config(llama()).unwrap(), &ranks, options(3));
        let observed = probe(&mut trainer);
        if ranks.world.rank() == 1 {
            observed.flip_bit(&trainer, 1, "block.2").unwrap();
        }
        let said = step_checked(&mut trainer, &observed, 1, 1).unwrap_err().to_string();
        assert!(said.contains("rank 1's gradients of unit block.2 differ from what rank 0 computes from"), "{said}");
        let alone = Ranks::sharded(Arc::new(shardwise_comm::single::group()));
        let mut trainer = self::trainer(Model::from_config(llama()).unwrap(), &alone, options(0));
        let observed = probe(&mut trainer);
        observed.flip_bit(&trainer, 1, "block.0").unwrap();
        let said = step_checked(&mut trainer, &observed, 1, 1).unwrap_err().to_string();
        assert!(said.contains("rank 0's gradients of unit block.0 differ from what it computes from"), "{said}");
        let none = observed.flip_bit(&trainer, 1, "block.7").unwrap_err().to_string();
        assert!(none.contains("no unit block.7"), "{none}");
    });
}

#[test]
fn a_clean_run_passes_its_spot_checks_and_is_not_changed_by_them() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), || {
        let sharded = Ranks::sharded(world());
        let hybrid = Ranks::hybrid(sharded.world.clone(), 2).unwrap();
        let plain = || Model::from_config(llama()).unwrap();
        let tied = || Model::from_config(LlamaConfig { tie_word_embeddings: true, ..llama() }).unwrap();
        let gpt2 = || Model::from_config(Gpt2Config::new(VOCAB_SIZE as usize, 16, 36, 2, 6)).unwrap();
        let frozen = || {
            let mut model = plain();
            model.freeze(&["model.embed_tokens", "model.layers.0.", "model.layers.1.self_attn"]).unwrap();
            model
        };
        let same = |what: &str, model: &dyn Fn() -> Model, ranks: &Ranks, options: Options, count: i64| {
            let [mut plain, mut spotted] = [(); 2].map(|()| trainer(model(), ranks, options.clone()));
            let probe = probe(&mut spotted);
            for step in 1..4 {
                plain.step(&batches(step, ranks.world.rank(), count)).unwrap();
                step_checked(&mut spotted, &probe, step, count).unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            assert!(parameters(&mut plain) == parameters(&mut spotted), "{what}: other parameters");
        };
        for stage in 0..4 {
            for activation_checkpointing in
                [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full]
            {
                let options = Options { activation_checkpointing, ..options(stage) };
                let what = format!("stage {stage}, {activation_checkpointing:?}");
                same(&what, &plain, &sharded, options.clone(), 2);
                same(&format!("tied, {what}"), &tied, &sharded, options.clone(), 1);
                same(&format!("frozen, {what}"), &frozen, &sharded, options, 2);
            }
            same(&format!("GPT-2, stage {stage}"), &gpt2, &sharded, options(stage), 2);
            same(&format!("replicas, stage {stage}"), &tied, &hybrid, options(stage), 2);
            let bf16 = Options { precision: Precision::BF16, ..options(stage) };
            same(&format!("bf16, stage {stage}"), &tied, &hybrid, bf16, 2);
        }
        let piecemeal = Options { reduce_each_micro_batch: true, prefetch: 0, ..options(3) };
        same("reduce each micro-batch", &plain, &sharded, piecemeal, 3);
    });
}

// ---- spikes -----------------------------------------------------------------------------------------------------------

#[test]
fn a_spike_is_reported_or_stops_before_the_update() {
    ranks!(2, || {
        let ranks = Ranks::sharded(world());
        let rank = ranks.world.rank();
        // The same batch every time, until a different one comes.
        let usual = || batches(1, rank, 1);
        let odd = || {
            batches(1, rank, 1)
                .into_iter()
                .map(|batch| Batch::new(batch.targets.remainder(VOCAB_SIZE), batch.inputs))
                .collect()
        };
        for stage in 0..4 {
            for on_spike in [OnSpike::Report, OnSpike::Stop] {
                let mut trainer = trainer(
                    Model::from_config(llama()).unwrap(),
                    &ranks,
                    Options { schedule: Schedule::constant(1e-2), ..options(stage) },
                );
                let mut detector = SpikeDetector::default();
                let mut step = |trainer: &mut Trainer, batches: &[Batch]| {
                    let gradients = trainer.compute_gradients(batches)?;
                    let spike = detector.check(trainer, &gradients, on_spike)?;
                    Ok::<_, Error>((trainer.apply_update(gradients)?, spike))
                };
                for number in 1..=100 {
                    let (report, spike) = step(&mut trainer, &usual()).unwrap();
                    assert_eq!(spike, None, "step {number}");
                    let squares: f64 = report.unit_norms.iter().map(|norm| norm * norm).sum();
                    assert!((squares.sqrt() / report.grad_norm - 1.).abs() < 1e-9);
                }
                let before = parameters(&mut trainer);
                let odd: Vec<Batch> = odd();
                let (said, changed) = match (step(&mut trainer, &odd), on_spike) {
                    (Ok((_, spike)), OnSpike::Report) => (spike.unwrap().to_string(), true),
                    (Err(error), OnSpike::Stop) => {
                        assert!(error.is_same_on_all_ranks());
                        let said = error.to_string();
                        assert!(said.starts_with("step 101: ") && said.ends_with("; nothing was updated"), "{said}");
                        (said["step 101: ".len()..].to_string(), false)
                    }
                    (other, _) => panic!("{other:?}"),
                };
                assert!(said.starts_with("the loss is ") && said.contains(" over the last 64 steps it was "), "{said}");
                assert_eq!(parameters(&mut trainer) != before, changed, "stage {stage}, {on_spike:?}");
                step(&mut trainer, &usual()).unwrap();
            }
        }
    });
}

/// Positions of a window, and windows of the corpus.
const SEQ_LEN: usize = 16;
const WINDOWS: usize = 400;
const STEPS: u64 = 60;

/// Writes a recipe for two ranks, and a corpus that is easy to learn except for one window in each of these steps.
fn corpus(folder: &Path, odd_steps: &[u64], on_spike: &str) -> PathBuf {
    let order = Mixture::new(vec![(WINDOWS as u64, 1.)], 7).unwrap();
    let odd: Vec<usize> = odd_steps.iter().map(|step| order.at(2 * (step - 1)).index as usize).collect();
    let token = |place: usize| -> u16 {
        // The first token of a window is also the last target of the previous one.
        let is_odd = odd.contains(&(place / SEQ_LEN)) && !place.is_multiple_of(SEQ_LEN);
        if is_odd { (32 + place * place * 7 % 31) as u16 } else { (place % 8) as u16 }
    };
    let tokens: Vec<u8> = (0..=WINDOWS * SEQ_LEN).flat_map(|place| token(place).to_le_bytes()).collect();
    std::fs::write(folder.join("tokens.bin"), tokens).unwrap();
    let text = format!(
        "[model.llama]\nvocab_size = {VOCAB_SIZE}\nhidden_size = 32\nnum_hidden_layers = 2\n\
         num_attention_heads = 4\nintermediate_size = 80\n[data]\ncorpus = \
         \"tokens.bin\"\ntoken_bytes = 2\nseed = 7\n[batch]\nmicro_batch_size = 1\nseq_len = {SEQ_LEN}\n[optimizer]\nlr = 1e-2\n\
         [run]\nsteps = {STEPS}\n[checkpoints]\nfolder = \"checkpoints\"\nevery_steps = 10\nbackground = false\n[supervision]\non_spike = \
         \"{on_spike}\"\nspot_check_every = 7\n"
    );
    std::fs::write(folder.join("recipe.toml"), text).unwrap();
    folder.join("recipe.toml")
}

fn folder() -> PathBuf {
    PathBuf::from(std::env::var(FOLDER).unwrap())
}

/// Collects the output of a run, and requests a stop when a certain word is printed.
struct Printed {
    text: String,
    ends_at: Option<(&'static str, Requests)>,
}

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.text += std::str::from_utf8(bytes).unwrap();
        if let Some((word, requests)) = &self.ends_at
            && self.text.contains(word)
        {
            requests.stop.store(true, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs a recipe. Also returns its output, on rank 0.
fn run_recipe(path: &Path, world: &Arc<Group>, ends_at: Option<&'static str>) -> (Result<(), Error>, String) {
    let requests = Requests::default();
    let mut printed = Printed { text: String::new(), ends_at: ends_at.map(|word| (word, requests.clone())) };
    let recipe = Recipe::read(path).unwrap();
    let outcome = run(&recipe, world, &requests, &Arc::default(), &mut |_| (), &mut printed);
    (outcome.map(drop), printed.text)
}

/// A temporary folder of the test. That of a rank is inside it.
fn scratch() -> tempfile::TempDir {
    std::env::var(FOLDER).map_or_else(|_| tempfile::tempdir(), tempfile::tempdir_in).unwrap()
}

fn launch(ranks: usize, folder: &Path) -> Launch {
    Launch::ranks(ranks).variable(FOLDER, folder.to_str().unwrap()).timeout(Duration::from_secs(200))
}

fn step_of(text: &str, step: u64) -> Vec<&str> {
    let prefix = format!("step {step}/{STEPS}  ");
    text.lines().filter(|line| line.starts_with(&prefix)).collect()
}

#[test]
fn a_rollback_skips_the_batch_and_so_does_a_resumed_run() {
    let scratch = scratch();
    corpus(scratch.path(), &[45], "rollback");
    ranks!(launch(2, scratch.path()), || {
        let (world, path) = (world(), folder().join("recipe.toml"));
        // Stops after the rollback, before it reaches the step again.
        let (outcome, text) = run_recipe(&path, &world, Some("rolling back"));
        outcome.unwrap();
        let store = Arc::new(Store::open(folder().join("checkpoints").to_str().unwrap()).unwrap());
        let checkpoint = Checkpoint::open(&store, 41).unwrap();
        let passed_over = checkpoint.manifest().training["progress"]["passed_over"].clone();
        assert_eq!(passed_over[0]["step"], 45, "{passed_over}");
        let (outcome, again) = run_recipe(&path, &world, None);
        outcome.unwrap();
        if world.rank() != 0 {
            return;
        }
        let fault = text.lines().find(|line| line.starts_with("step 45: ")).unwrap();
        assert!(fault.contains("the loss is ") && fault.contains(" over the last 44 steps it was "), "{fault}");
        let samples = "; the step read sequences 88 to 89 of the order with seed 7 (window ";
        assert!(fault.contains(samples) && fault.contains("tokens.bin"), "{fault}");
        assert!(fault.ends_with("; nothing was updated, rolling back"), "{fault}");
        assert!(text.contains("resuming after step 40, from ") && text.contains("stopped after step 41"), "{text}");
        assert_eq!(step_of(&text, 41).len(), 2, "before and after: {text}");
        assert!(again.contains("resuming after step 41"), "{again}");
        let passed = step_of(&again, 45);
        assert_eq!(passed.len(), 1, "{again}");
        assert!(passed[0].starts_with("step 45/60  batch skipped after a spike: the loss is "), "{again}");
        assert!(step_of(&again, 60)[0].contains("loss 0."), "{again}");
    });
}

#[test]
fn a_run_with_too_many_rollbacks_stops() {
    let scratch = scratch();
    corpus(scratch.path(), &[43, 45, 47, 52], "rollback");
    ranks!(launch(2, scratch.path()), || {
        let world = world();
        let (outcome, text) = run_recipe(&folder().join("recipe.toml"), &world, None);
        let error = outcome.unwrap_err();
        assert!(error.is_same_on_all_ranks());
        let said = error.to_string();
        assert!(
            said.starts_with("step 52: the loss is ") && said.contains("it already skipped steps 43, 45, 47"),
            "{said}"
        );
        if world.rank() == 0 {
            assert_eq!([43, 45, 47].map(|step| step_of(&text, step).len()), [3, 2, 1], "{text}");
        }
    });
}

#[test]
fn a_run_stops_at_or_reports_a_spike_as_configured() {
    let scratch = scratch();
    corpus(scratch.path(), &[45], "stop");
    ranks!(launch(2, scratch.path()), || {
        let said = run_recipe(&folder().join("recipe.toml"), &world(), None).0.unwrap_err().to_string();
        assert!(said.starts_with("step 45: the loss is ") && said.ends_with("; nothing was updated"), "{said}");
        assert!(said.contains("the step read sequences 88 to 89 of the order with seed 7 (window "), "{said}");
    });
    std::fs::remove_dir_all(scratch.path().join("checkpoints")).unwrap_or_default();
    corpus(scratch.path(), &[45], "report");
    ranks!(launch(2, scratch.path()), || {
        let world = world();
        let (outcome, text) = run_recipe(&folder().join("recipe.toml"), &world, None);
        outcome.unwrap();
        if world.rank() == 0 {
            assert_eq!(text.matches("\n  spike: the loss is ").count(), 1, "{text}");
            assert!(step_of(&text, 60)[0].contains("loss 0."), "{text}");
        }
    });
}

// ---- memory -----------------------------------------------------------------------------------------------------------

#[test]
fn running_out_of_memory_is_explained_with_the_unit_the_kinds_and_a_remedy() {
    let scratch = scratch();
    let text = "[model.llama]\nvocab_size = 64\nhidden_size = 64\nnum_hidden_layers = 6\n\
                num_attention_heads = 4\nintermediate_size = 160\n[data]\n[batch]\nmicro_batch_size = 16\n\
                seq_len = 1024\n[optimizer]\nlr = 1e-3\n[run]\nsteps = 2\n";
    std::fs::write(scratch.path().join("recipe.toml"), text).unwrap();
    let outcome = try_ranks!(launch(2, scratch.path()), || {
        shardwise_torch::enable_caching_allocator();
        let world = world();
        // Threads get their stacks before the limit is set.
        drop(
            Tensor::ones([512, 512], (Kind::Float, Device::Cpu))
                .matmul(&Tensor::ones([512, 512], (Kind::Float, Device::Cpu))),
        );
        if world.rank() == 1 {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let data = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
            let data: usize = data.trim().trim_end_matches(" kB").parse().unwrap();
            let limit = (data << 10) + (250 << 20);
            let pid = std::process::id().to_string();
            let limited =
                Command::new("prlimit").args(["--pid", &pid]).arg(format!("--data={limit}")).status().unwrap();
            assert!(limited.success());
        }
        let (outcome, _) = run_recipe(&folder().join("recipe.toml"), &world, None);
        let error = outcome.unwrap_err();
        println!("{}\n{error}", if error.is_out_of_memory() { "no memory:" } else { "something else:" });
        // The other rank would wait for this one forever.
        std::process::exit(1);
    });
    let Err(failure) = outcome else { panic!("the run fits after all") };
    let said = &failure.report.ranks[1].output;
    assert!(said.contains("no memory:\nout of memory allocating "), "{failure}");
    assert!(said.contains(" in the forward pass of unit block."), "{said}");
    assert!(said.contains("; the rank's memory in use was\n"), "{said}");
    for kind in ["parameters", "gradients", "optimizer", "unsharded units", "activations, rest", "process", "total"] {
        assert!(said.contains(&format!("\n  {kind} ")), "{kind}: {said}");
    }
    assert!(said.contains("the limit of a process's data (ulimit -d) is "), "{said}");
    assert!(said.contains("\nactivation_checkpointing = \"") && said.contains(" should fit, with about "), "{said}");
}
