//! Pipeline parallelism: the same bits as without a pipeline, whatever the schedule.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use shardwise_comm::{Group, ReduceOp, mpi};
use shardwise_harness::{Hosts, Launch, ranks};
use shardwise_model::{
    Batch, Gpt2Config, IGNORED, Init, Layer, LlamaConfig, Model, ModelConfig, MoeConfig, Parameter, Parameters, Pass,
    RouterConfig, TensorParallel, Unit,
};
use shardwise_plan::{Axis, FloatsMut, Mesh};
use shardwise_torch::autograd;
use shardwise_torch::tch::{Device, Kind, Tensor, no_grad};
use shardwise_train::{
    ActivationCheckpointing, Options, PipelineSchedule, Ranks, Sampling, Schedule, Trainer, generate, init,
};
use shardwise_zero::{AdamW, Optimizer, Precision, Sharding};

const VOCAB_SIZE: i64 = 61;

/// Eight units, enough for two chunks on each of four stages.
fn llama() -> LlamaConfig {
    LlamaConfig { loss_chunk_tokens: 8, ..LlamaConfig::new(VOCAB_SIZE as usize, 24, 6, 4, 34) }
}

/// Experts, with a balance loss of their own.
fn mixture() -> ModelConfig {
    let router = RouterConfig { router_aux_loss_coef: 0.1, ..RouterConfig::default() };
    LlamaConfig { moe: Some(MoeConfig { router, ..MoeConfig::new(6, 2, 15) }), ..llama() }.into()
}

fn gpt2() -> ModelConfig {
    Gpt2Config { loss_chunk_tokens: 8, ..Gpt2Config::new(VOCAB_SIZE as usize, 8, 24, 6, 4) }.into()
}

fn batch(step: i64, micro: i64) -> Batch {
    let numbers = Tensor::arange(14, (Kind::Int64, Device::Cpu)).view([2, 7]);
    let tokens = (numbers * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
}

fn batches(ranks: &Ranks, step: i64, micro_batches: i64) -> Vec<Batch> {
    let (rank, size) = (ranks.data_rank() as i64, ranks.data_size() as i64);
    (0..micro_batches).map(|index| batch(step, index * size + rank)).collect()
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap())
}

fn options(stage: u8, precision: Precision) -> Options {
    let optimizer = Optimizer::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
    Options {
        precision,
        max_grad_norm: Some(1.),
        ..Options::new(Sharding::stage(stage).unwrap(), optimizer, Schedule::constant(1e-2))
    }
}

/// A setting of the comparison.
struct Setting {
    config: ModelConfig,
    frozen: &'static [&'static str],
    options: Options,
    micro_batches: i64,
    steps: i64,
}

/// Losses and norms of all steps, and the parameters of the rank's units after them, each with its name.
type Trained = (Vec<[f64; 2]>, Vec<(String, Tensor)>);

fn train(setting: &Setting, ranks: &Ranks, options: Options) -> Trained {
    let mut model = Model::from_config(setting.config.clone()).unwrap();
    model.freeze(setting.frozen).unwrap();
    let names: Vec<Vec<String>> =
        model.units().iter().map(|unit| unit.parameters().iter().map(|p| p.name.clone()).collect()).collect();
    let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap();
    let own: Vec<usize> = (0..names.len()).filter(|&unit| trainer.has_unit(unit)).collect();
    let mut numbers = Vec::new();
    for step in 0..setting.steps {
        let report = trainer.step(&batches(ranks, step, setting.micro_batches)).unwrap();
        assert!(report.loss.is_finite() && report.grad_norm > 0.);
        assert_eq!(report.without_gradient, Vec::<String>::new());
        numbers.push([report.loss, report.grad_norm]);
    }
    let evaluation = trainer.evaluate(&batches(ranks, 99, 2)).unwrap();
    numbers.push([evaluation.loss_sum, evaluation.tokens as f64]);
    let mut parameters = Vec::new();
    for (shard, unit) in trainer.shards_mut().zip(own) {
        shard.gather().unwrap();
        let copies = shard.parameters().iter().map(|tensor| no_grad(|| tensor.detach().copy()));
        parameters.extend(names[unit].iter().cloned().zip(copies));
        shard.release().unwrap();
    }
    (numbers, parameters)
}

/// Trains with and without a pipeline, and compares all bits.
fn assert_same_bits(setting: &Setting, ranks: &Ranks, schedules: &[PipelineSchedule], what: &str) {
    let alone = Options { sum_tied_shares_apart: true, ..setting.options.clone() };
    let (expected, whole) = train(setting, &ranks.of_stage(), alone);
    for schedule in schedules {
        let what = format!("{schedule}, {what}");
        let options = Options { pipeline_schedule: schedule.clone(), ..setting.options.clone() };
        let (found, own) = train(setting, ranks, options);
        assert_eq!(found, expected, "{what}");
        assert!(own.len() < whole.len(), "{what}: a rank has the units of its stage only");
        for (name, found) in own {
            let (_, expected) = whole.iter().find(|(known, _)| *known == name).unwrap();
            assert!(found.equal(expected), "{what}: {name} has other bits");
        }
    }
}

fn mesh(pipeline: usize, replicate: usize, shard: usize, tensor: usize) -> Mesh {
    let sizes =
        [(Axis::Pipeline, pipeline), (Axis::Replicate, replicate), (Axis::Shard, shard), (Axis::Tensor, tensor)];
    Mesh::new(&sizes).unwrap()
}

const CHECKPOINTING: [ActivationCheckpointing; 3] =
    [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];

/// Every schedule at every ZeRO stage, with precision, checkpointing, tied heads and experts in turn.
fn compare_stages(ranks: &Ranks, micro_batches: i64) {
    for stage in 0..4u8 {
        let index = stage as usize;
        let precision = [Precision::F32, Precision::BF16][index % 2];
        let tied = LlamaConfig { tie_word_embeddings: true, ..llama() };
        let config = [llama().into(), tied.into(), gpt2(), mixture()][index].clone();
        let options = Options { activation_checkpointing: CHECKPOINTING[index % 3], ..options(stage, precision) };
        let setting = Setting { config, frozen: &[], options, micro_batches, steps: 3 };
        assert_same_bits(&setting, ranks, &PipelineSchedule::BUILT_IN, &format!("stage {stage}, {}", ranks.mesh()));
    }
}

#[test]
fn two_stages_train_like_one() {
    ranks!(2, || compare_stages(&Ranks::on_mesh(world(), mesh(2, 1, 1, 1)).unwrap(), 4));
}

#[test]
fn three_stages_train_like_one() {
    ranks!(3, || compare_stages(&Ranks::on_mesh(world(), mesh(3, 1, 1, 1)).unwrap(), 3));
}

#[test]
fn four_stages_train_like_one() {
    ranks!(4, || compare_stages(&Ranks::on_mesh(world(), mesh(4, 1, 1, 1)).unwrap(), 4));
}

#[test]
fn stages_whose_parameters_are_sharded_train_like_one() {
    ranks!(4, || compare_stages(&Ranks::on_mesh(world(), mesh(2, 1, 2, 1)).unwrap(), 4));
}

#[test]
fn stages_whose_layers_are_shared_train_like_one() {
    ranks!(4, || compare_stages(&Ranks::on_mesh(world(), mesh(2, 1, 1, 2)).unwrap(), 4));
}

/// Reductions after each micro-batch, replicas, fewer micro-batches than stages, and a stage without trainable parameters.
#[test]
fn unusual_pipelines_train_like_one_stage() {
    ranks!(4, || {
        let world = world();
        let four = Ranks::on_mesh(world.clone(), mesh(4, 1, 1, 1)).unwrap();
        let replicated = Ranks::on_mesh(world, mesh(2, 2, 1, 1)).unwrap();
        let setting = |options: Options, frozen, micro_batches| Setting {
            config: llama().into(),
            frozen,
            options,
            micro_batches,
            steps: 2,
        };
        let (plain, every) = (options(2, Precision::F32), PipelineSchedule::BUILT_IN);
        let each = Options { reduce_each_micro_batch: true, ..plain.clone() };
        assert_same_bits(&setting(each, &[], 3), &replicated, &every, "each micro-batch is reduced");
        assert_same_bits(&setting(plain.clone(), &[], 1), &four, &every, "one micro-batch on four stages");
        // The first stage has the embedding and a block, or more.
        let frozen = &["model.embed_tokens", "model.layers.0.", "model.layers.1.", "model.layers.2."];
        for stage in [0, 3] {
            let setting = setting(options(stage, Precision::F32), frozen, 4);
            assert_same_bits(&setting, &four, &every, &format!("frozen units, stage {stage}"));
        }
        let cut = Options { pipeline_chunks: Some(vec![0..1, 1..6, 6..7, 7..8]), ..plain };
        let of_cut = [PipelineSchedule::GPipe, PipelineSchedule::OneFOneB, PipelineSchedule::ZeroBubbleH1];
        assert_same_bits(&setting(cut, &[], 5), &four, &of_cut, "stages of one and five units");
    });
}

/// Several chunks per stage, whose messages go around in a ring, on hosts with slow links.
#[test]
fn looped_schedules_run_between_hosts() {
    let hosts = Hosts { hosts: 2, ranks_per_host: 1, rate: "100mbit".to_string(), delay: "1ms".to_string() };
    ranks!(Launch::hosts(hosts), || {
        let ranks = Ranks::on_mesh(world(), mesh(2, 1, 1, 1)).unwrap();
        let options = options(3, Precision::F32);
        let setting = Setting { config: llama().into(), frozen: &[], options, micro_batches: 5, steps: 2 };
        assert_same_bits(&setting, &ranks, &PipelineSchedule::BUILT_IN, "two hosts");
    });
}

/// The share of the head is added last, so only the rounding differs.
#[test]
fn tied_heads_differ_from_one_stage_by_rounding_only() {
    ranks!(2, || {
        let ranks = Ranks::on_mesh(world(), mesh(2, 1, 1, 1)).unwrap();
        for config in [LlamaConfig { tie_word_embeddings: true, ..llama() }.into(), gpt2()] {
            let setting =
                Setting { config, frozen: &[], options: options(0, Precision::F64), micro_batches: 4, steps: 3 };
            let (expected, _) = train(&setting, &ranks.of_stage(), setting.options.clone());
            let (found, _) = train(&setting, &ranks, setting.options.clone());
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                assert!((found - expected).abs() <= 1e-12 * expected.abs(), "{found} is not {expected}");
            }
        }
    });
}

#[test]
fn stages_generate_and_evaluate_together() {
    ranks!(4, || {
        let ranks = Ranks::on_mesh(world(), mesh(2, 1, 1, 2)).unwrap();
        for (config, precision) in [(ModelConfig::from(llama()), Precision::F32), (gpt2(), Precision::BF16)] {
            let trainer = |ranks: &Ranks, pipeline_schedule: PipelineSchedule| {
                let model = Model::from_config(config.clone()).unwrap();
                let options = Options { pipeline_schedule, ..options(3, precision) };
                Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap()
            };
            let mut alone = trainer(&ranks.of_stage(), PipelineSchedule::OneFOneB);
            let inputs = batch(1, 2).inputs;
            let generate = |trainer: &mut Trainer| {
                let each = &mut |_| ControlFlow::Continue(());
                generate(trainer, &[1, 2, 3], 4, &[], &Sampling::GREEDY, each).unwrap()
            };
            let (logits, tokens) = (alone.logits(&inputs).unwrap(), generate(&mut alone));
            assert_eq!(tokens.len(), 4);
            // In ZB-V, the head is on the first stage.
            for schedule in PipelineSchedule::BUILT_IN {
                let mut staged = trainer(&ranks, schedule.clone());
                let found = staged.logits(&inputs).unwrap();
                assert!(found.kind() == logits.kind() && found.equal(&logits), "{schedule}");
                assert_eq!(generate(&mut staged), tokens, "{schedule}");
            }
        }
    });
}

/// An infinite parameter of a stage that does not compute the loss.
#[test]
fn a_value_that_is_not_finite_is_found_on_the_stage_that_computes_it() {
    ranks!(4, || {
        let ranks = Ranks::on_mesh(world(), mesh(4, 1, 1, 1)).unwrap();
        let mut seeded = init::from_seed(5);
        let name = "model.layers.1.mlp.up_proj.weight";
        let mut with_infinity = |parameter: &Parameter, range: Range<usize>, elements: FloatsMut<'_>| {
            let FloatsMut::F32(elements) = elements else { panic!("parameters are f32") };
            seeded(parameter, range, FloatsMut::F32(elements))?;
            if parameter.name == name {
                elements[0] = f32::INFINITY;
            }
            Ok(())
        };
        let model = Model::from_config(llama()).unwrap();
        let mut trainer = Trainer::new(model, ranks.clone(), options(0, Precision::F32), &mut with_infinity).unwrap();
        let error = trainer.step(&batches(&ranks, 0, 4)).unwrap_err().to_string();
        assert!(error.contains("the output of unit block.1 on rank 1 is not finite"), "{error}");
        assert!(error.contains(name), "{error}");
    });
}

/// Stages that got other samples would compute a gradient of nothing.
#[test]
fn stages_with_different_micro_batches_are_refused() {
    ranks!(2, || {
        let ranks = Ranks::on_mesh(world(), mesh(2, 1, 1, 1)).unwrap();
        let model = Model::from_config(llama()).unwrap();
        let mut trainer =
            Trainer::new(model, ranks.clone(), options(0, Precision::F32), &mut init::from_seed(5)).unwrap();
        let other = batch(0, 4 + ranks.pipeline.rank() as i64);
        let error = trainer.step(&[batch(0, 0), other]).unwrap_err().to_string();
        assert!(
            error.contains("ranks 0 and 1 hold stages of one pipeline, but have different micro-batches"),
            "{error}"
        );
    });
}

#[test]
fn pipelines_that_do_not_fit_the_model_are_refused() {
    ranks!(2, || {
        let ranks = Ranks::on_mesh(world(), mesh(2, 1, 1, 1)).unwrap();
        let refused = |options: Options, layers: usize| {
            let model = Model::from_config(LlamaConfig { num_hidden_layers: layers, ..llama() }).unwrap();
            let created = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5));
            created.err().map(|error| error.to_string()).unwrap_or_default()
        };
        let plain = options(0, Precision::F32);
        let many = PipelineSchedule::Interleaved1F1B { chunks_per_stage: 5 };
        let error = refused(Options { pipeline_schedule: many, ..plain.clone() }, 6);
        assert!(error.contains("cuts the model into 10 chunks, but it has only 8 units"), "{error}");
        let error = refused(Options { pipeline_chunks: Some(vec![0..3, 4..8]), ..plain.clone() }, 6);
        assert!(error.contains("chunk 1 must start at unit 3"), "{error}");
        assert_eq!(refused(plain, 6), "");
    });
}

// ---- claims: cargo xtask show pipeline --heavy ------------------------------------------------------------------------

/// Every schedule, ZeRO stage and precision, tied and untied.
fn compare_everything(stages: usize, tensor: usize) {
    let ranks = Ranks::on_mesh(world(), mesh(stages, 1, 1, tensor)).unwrap();
    for (stage, precision) in (0..4).flat_map(|stage| [(stage, Precision::F32), (stage, Precision::BF16)]) {
        for is_tied in [false, true] {
            let config = LlamaConfig { tie_word_embeddings: is_tied, ..llama() }.into();
            let options = options(stage, precision);
            let setting = Setting { config, frozen: &[], options, micro_batches: 4, steps: 10 };
            let what = format!("stage {stage}, {precision:?}, tied {is_tied}, {}", ranks.mesh());
            assert_same_bits(&setting, &ranks, &PipelineSchedule::BUILT_IN, &what);
        }
    }
}

#[test]
#[ignore = "run by cargo xtask show pipeline/equality"]
fn every_setting_trains_like_one_stage() {
    let launch = |ranks| Launch::ranks(ranks).timeout(Duration::from_secs(1800));
    ranks!(launch(2), || compare_everything(2, 1));
    ranks!(launch(3), || compare_everything(3, 1));
    ranks!(launch(4), || compare_everything(4, 1));
    ranks!(launch(4), || compare_everything(2, 2));
    ranks!(launch(6), || compare_everything(3, 2));
    ranks!(launch(8), || compare_everything(4, 2));
}

#[test]
#[ignore = "run by cargo xtask show pipeline/equality"]
fn six_settings_train_like_one_stage_for_100_steps() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(1800)), || {
        let world = world();
        let meshes = [mesh(4, 1, 1, 1), mesh(2, 1, 2, 1), mesh(2, 1, 1, 2)]
            .map(|mesh| Ranks::on_mesh(world.clone(), mesh).unwrap());
        for (index, schedule) in PipelineSchedule::BUILT_IN.into_iter().enumerate() {
            let precision = [Precision::F32, Precision::BF16][index % 2];
            let options = options(index as u8 % 4, precision);
            let config = llama().into();
            let setting = Setting { config, frozen: &[], options, micro_batches: 4, steps: 100 };
            assert_same_bits(&setting, &meshes[index % 3], &[schedule], "100 steps");
        }
    });
}

/// A layer that sleeps for the time of its passes, and notes when.
struct Sleep {
    is_first: bool,
    is_last: bool,
    pass: Duration,
    busy: Busy,
}

/// The starts and ends of passes.
type Busy = Arc<Mutex<Vec<(Instant, Instant)>>>;

fn sleep(pass: Duration, busy: &Busy) {
    let start = Instant::now();
    std::thread::sleep(pass);
    busy.lock().unwrap().push((start, Instant::now()));
}

impl Layer for Sleep {
    fn forward(
        &self,
        p: &Parameters<'_>,
        input: Option<&Tensor>,
        _: &Batch,
        pass: &Pass,
    ) -> shardwise_model::Result<Tensor> {
        sleep(self.pass, &self.busy);
        let weight = p.get("weight");
        let (duration, busy, deferred) = (self.pass, self.busy.clone(), pass.deferred.clone());
        let inputs: Vec<&Tensor> = input.into_iter().chain([weight]).collect();
        let has_input = !self.is_first;
        let mut outputs = autograd::function(
            "sleep",
            &inputs,
            |inputs| {
                let sum = inputs.iter().map(|tensor| tensor.view([2, 3])).reduce(|a, b| a + b).unwrap();
                Ok(autograd::Forward { outputs: vec![sum], saved: vec![] })
            },
            move |mut back| {
                let grad = back.grads.remove(0).unwrap();
                sleep(duration, &busy);
                let input_grad = has_input.then(|| Some(grad.shallow_clone()));
                let busy = busy.clone();
                let of_weight = move || {
                    sleep(duration, &busy);
                    Ok(grad.view(6))
                };
                let weight_grad = match &deferred {
                    Some(deferred) => {
                        deferred.defer(0, of_weight);
                        None
                    }
                    None => Some(of_weight()?),
                };
                Ok(input_grad.into_iter().chain([weight_grad]).collect())
            },
        )?;
        let output = outputs.remove(0);
        Ok(if self.is_last { output.sum(Kind::Float) } else { output })
    }

    fn output_shape(&self, _: &Batch, _: &TensorParallel) -> Option<Vec<i64>> {
        Some(vec![2, 3])
    }
}

/// The bubble of each schedule on four stages and eight micro-batches, as a share of the time that a stage computes.
#[test]
#[ignore = "run by cargo xtask show pipeline/bubbles"]
fn measured_bubbles_are_those_of_the_formulas() {
    const STAGES: usize = 4;
    const MICRO_BATCHES: usize = 8;
    ranks!(STAGES, || {
        let ranks = Ranks::on_mesh(world(), mesh(STAGES, 1, 1, 1)).unwrap();
        let (p, m) = (STAGES as f64, MICRO_BATCHES as f64);
        let formulas = [(p - 1.) / m, (p - 1.) / m, (p - 1.) / (2. * m), (p - 1.) / (3. * m), 0., (p - 1.) / (2. * m)];
        for (schedule, expected) in PipelineSchedule::BUILT_IN.into_iter().zip(formulas) {
            let chunks = schedule.chunks(STAGES);
            let busy = Busy::default();
            let unit = |index: usize| {
                let layer = Sleep {
                    is_first: index == 0,
                    is_last: index + 1 == chunks,
                    pass: Duration::from_millis((60 * STAGES / chunks) as u64),
                    busy: busy.clone(),
                };
                Unit::new(
                    format!("unit.{index}"),
                    vec![Parameter::vector(format!("{index}.weight"), 6, Init::Ones)],
                    layer,
                )
            };
            let model = Model::new((0..chunks).map(unit).collect()).unwrap();
            let options = Options { pipeline_schedule: schedule.clone(), ..options(0, Precision::F32) };
            let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap();
            let mut bubbles = Vec::new();
            for step in 0..4 {
                busy.lock().unwrap().clear();
                trainer.step(&batches(&ranks, step, MICRO_BATCHES as i64)).unwrap();
                let passes = std::mem::take(&mut *busy.lock().unwrap());
                let (start, end) = (passes[0].0, passes[passes.len() - 1].1);
                let busy_s: f64 = passes.iter().map(|(start, end)| (*end - *start).as_secs_f64()).sum();
                bubbles.push((end - start).as_secs_f64() / busy_s - 1.);
            }
            // The first step is slower.
            let own = bubbles[1..].iter().copied().fold(f64::INFINITY, f64::min);
            let all = ranks.world.all_reduce("bubbles", ReduceOp::Max, vec![own]).wait().unwrap();
            if ranks.world.rank() == 0 {
                println!("{schedule}: bubble {:.3}, formula {expected:.3}", all[0]);
            }
            assert!((all[0] - expected).abs() < 0.05, "{schedule}: bubble {:.3}, formula {expected:.3}", all[0]);
        }
    });
}
