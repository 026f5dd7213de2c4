//! The bytes that a program sends, by collective and group, are exactly those that its execution sends. Inside of layers, which ranks share
//! or whose sequences they divide, this holds layer by layer, and for the number of calls, too.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Count, Group, Verb, mpi};
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, Gpt2Config, LlamaConfig, Model};
use shardwise_plan::program::{Call, CallOp, Codec, CollectiveKind, GroupKind, ModelParallel, Sent, calls, traffic};
use shardwise_plan::{Axis, Dtype, Mesh};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{
    ActivationCheckpointing, Options, PipelineSchedule, Ranks, Schedule, StepShape, Trainer, init, unit_specs,
};
use shardwise_zero::{AdamW, Optimizer, Precision, Sharding};

/// A model with sizes that hardly divide evenly.
fn model(is_tied: bool, frozen: &[&str]) -> Model {
    let llama =
        LlamaConfig { num_key_value_heads: 1, tie_word_embeddings: is_tied, ..LlamaConfig::new(61, 12, 3, 3, 17) };
    let mut model = Model::from_config(llama).unwrap();
    model.freeze(frozen).unwrap();
    model
}

/// The number of tokens in a micro-batch.
const TOKENS: usize = 9;
/// Enough for a layer to multiply them in pieces, on up to 3 ranks, which hardly divide it.
const MANY_TOKENS: usize = 397;

fn batches(count: usize, tokens: usize) -> Vec<Batch> {
    let tokens = Tensor::arange(tokens as i64, (Kind::Int64, Device::Cpu)).remainder(61).view([1, -1]);
    (0..count).map(|_| Batch::new(tokens.shallow_clone(), tokens.shallow_clone())).collect()
}

/// Compares one step of a model: what its program says that this rank sends, and what it has sent.
fn compare(model: Model, ranks: &Ranks, options: Options, micro_batches: usize, setting: &str) {
    compare_with(TOKENS, model, ranks, options, micro_batches, setting);
}

fn compare_with(tokens: usize, model: Model, ranks: &Ranks, options: Options, micro_batches: usize, setting: &str) {
    let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(1)).unwrap();
    // The all-gathers of an update may still be running after the step.
    let settle = |trainer: &mut Trainer| trainer.shards_mut().for_each(|unit| unit.gather().unwrap());
    let policy = trainer.options().policy(micro_batches);
    let layout = ranks.layout(trainer.options().precision);
    let program = trainer.program(micro_batches).unwrap();
    let place = ModelParallel::of_rank(&ranks.mesh(), ranks.world.rank());
    let shape = StepShape { sequences: 1, positions: tokens, micro_batches };
    let units = unit_specs(trainer.model(), trainer.options(), &place, shape);
    let expected = traffic(&program, &units, &policy, &layout);
    let calls = calls(&program, &units, &policy);
    ranks.world.meter().reset();
    let parts = batches(micro_batches, tokens).into_iter().map(|batch| ranks.context.split(batch).unwrap());
    trainer.step(&parts.collect::<Vec<_>>()).unwrap();
    trainer.finish_update().unwrap();
    if !policy.sharding.parameters {
        settle(&mut trainer);
    }
    let metered = ranks.world.meter().read();
    let groups = [
        (GroupKind::Shard, &ranks.groups.shard),
        (GroupKind::Replicate, &ranks.groups.replicate),
        (GroupKind::Tensor, &ranks.tensor),
        (GroupKind::ShardTensor, &ranks.replicated.shard),
        (GroupKind::Ring, &ranks.context.ring),
        (GroupKind::Ulysses, &ranks.context.ulysses),
    ];
    let messages = metered.iter().filter(|(key, _)| key.verb == Verb::Send && &*key.group == ranks.pipeline.name());
    let sent: u64 = messages.map(|(_, count)| count.bytes).sum();
    assert_eq!(sent, expected.step.message_bytes(), "messages, {setting}");
    for (kind, group) in groups {
        let is_inside = matches!(kind, GroupKind::Tensor | GroupKind::Ring | GroupKind::Ulysses);
        // Without tensor parallelism, the group of all shards is that of the shards.
        if is_inside && group.size() == 1 || kind == GroupKind::ShardTensor && ranks.tensor.size() == 1 {
            continue;
        }
        for (collective, verb) in [
            (CollectiveKind::AllGather, Verb::AllGather),
            (CollectiveKind::ReduceScatter, Verb::ReduceScatter),
            (CollectiveKind::AllReduce, Verb::AllReduce),
            (CollectiveKind::AllToAll, Verb::AllToAll),
        ] {
            let of = |sent: &Sent| sent.bytes(kind, collective);
            let simulated = of(&expected.step) + of(&expected.update) + of(&expected.deferred);
            let name = group.name();
            let counts = metered.iter().filter(|(key, _)| key.verb == verb && &*key.group == name);
            let sent: Count = counts.clone().map(|(_, count)| *count).sum();
            assert_eq!(sent.bytes, simulated, "{} {}, {setting}", kind.name(), collective.name());
            if !is_inside {
                continue;
            }
            let is_such = |call: &Call| call.collective.group == kind && call.collective.kind == collective;
            let issued = calls.iter().filter(|(_, call)| call.op == CallOp::Issue && is_such(call)).count();
            assert_eq!(sent.calls, issued as u64, "calls of {}, {setting}", collective.name());
            for (index, unit) in units.iter().enumerate() {
                let of_unit = counts.clone().filter(|(key, _)| *key.label == *unit.name);
                let sent: Count = of_unit.map(|(_, count)| *count).sum();
                let is_issued =
                    |call: &&Call| call.op == CallOp::Issue && is_such(call) && call.collective.unit == Some(index);
                let issued: Vec<&Call> = calls.iter().map(|(_, call)| call).filter(is_issued).collect();
                let bytes: u64 = issued.iter().map(|call| layout.sent_bytes(&call.collective) as u64).sum();
                let expected = (issued.len() as u64, bytes);
                assert_eq!((sent.calls, sent.bytes), expected, "{} of {}, {setting}", collective.name(), unit.name);
            }
        }
    }
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap())
}

/// Stages 0 to 3 × hybrid × accumulation × frozen parts × tied or untied.
fn compare_all(size: usize) {
    let world = world();
    let some: &[&str] = &["model.embed_tokens", "model.layers.0.", "model.layers.1.self_attn"];
    let last: &[&str] = &["model.layers.1.", "model.norm"];
    for replicas in [1, 2, size].into_iter().filter(|replicas| size.is_multiple_of(*replicas)) {
        let ranks = Ranks::hybrid(world.clone(), replicas).unwrap();
        for stage in 0..4 {
            for (micro_batches, each) in [(1, false), (3, false), (2, true)] {
                for (is_tied, frozen) in [(false, &[][..]), (true, &[]), (false, some), (true, last)] {
                    for (param_dtype, reduce_dtype) in [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::F32)] {
                        let sharding = Sharding::stage(stage).unwrap();
                        let optimizer = Optimizer::AdamW(AdamW::default());
                        let is_quantized = stage == 3 && micro_batches == 3;
                        let options = Options {
                            gather_codec: if is_quantized { Codec::Int8 } else { Codec::None },
                            reduce_each_micro_batch: each && sharding.gradients,
                            precision: Precision { param_dtype, reduce_dtype },
                            prefetch: micro_batches - 1,
                            update_in_forward: micro_batches == 2,
                            ..Options::new(sharding, optimizer, Schedule::constant(1e-3))
                        };
                        let setting = format!(
                            "stage {stage}, {replicas} replicas, {micro_batches} micro-batches, tied {is_tied}, frozen \
                             {frozen:?}, {param_dtype}, quantized {is_quantized}",
                        );
                        compare(model(is_tied, frozen), &ranks, options, micro_batches, &setting);
                    }
                }
            }
            let gpt2 = Model::from_config(Gpt2Config::new(61, 9, 12, 2, 3)).unwrap();
            let options = Options::new(
                Sharding::stage(stage).unwrap(),
                Optimizer::AdamW(AdamW::default()),
                Schedule::constant(1e-3),
            );
            compare(gpt2, &ranks, options, 2, &format!("GPT-2, stage {stage}, {replicas} replicas"));
        }
    }
}

/// Stages 0 to 3 × sequence parallelism × checkpointing × accumulation × tied or untied, with layers that ranks share. Nine rows,
/// which no number of ranks but three divides.
fn compare_shared_layers(replicas: usize, tensor: usize) {
    let ranks = Ranks::parallel(world(), replicas, tensor).unwrap();
    let checkpointing =
        [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];
    for stage in 0..4 {
        for sequence_parallel in [false, true] {
            for activation_checkpointing in checkpointing {
                for (micro_batches, is_tied) in [(1, false), (2, true)] {
                    let is_quantized = stage == 3 && sequence_parallel;
                    let options = Options {
                        gather_codec: if is_quantized { Codec::Int8 } else { Codec::None },
                        activation_checkpointing,
                        sequence_parallel,
                        ..Options::new(
                            Sharding::stage(stage).unwrap(),
                            Optimizer::AdamW(AdamW::default()),
                            Schedule::constant(1e-3),
                        )
                    };
                    let setting = format!(
                        "stage {stage}, {replicas} replicas, tensor {tensor}, sequence {sequence_parallel}, \
                         {activation_checkpointing:?}, {micro_batches} micro-batches, tied {is_tied}, quantized {is_quantized}"
                    );
                    let llama = LlamaConfig {
                        num_key_value_heads: 3,
                        tie_word_embeddings: is_tied,
                        loss_chunk_tokens: 4,
                        ..LlamaConfig::new(61, 24, 2, 6, 17)
                    };
                    let gpt2 = Gpt2Config::new(61, 9, 24, 2, 6);
                    compare(
                        Model::from_config(llama.clone()).unwrap(),
                        &ranks,
                        options.clone(),
                        micro_batches,
                        &setting,
                    );
                    compare(Model::from_config(gpt2).unwrap(), &ranks, options.clone(), micro_batches, &setting);
                    // The backward pass ends within the first block, or before the head's norm.
                    for frozen in [
                        &["model.embed_tokens", "model.layers.0.input", "model.layers.0.self_attn"][..],
                        &["model.embed_tokens", "model.layers.", "model.norm"],
                    ] {
                        // A tied embedding would leave the head nothing to train.
                        let mut model =
                            Model::from_config(LlamaConfig { tie_word_embeddings: false, ..llama.clone() }).unwrap();
                        model.freeze(frozen).unwrap();
                        let setting = format!("{setting}, frozen {frozen:?}");
                        compare(model, &ranks, options.clone(), micro_batches, &setting);
                    }
                }
            }
        }
    }
}

/// Sequence parallelism × checkpointing, with layers that ranks share and multiply in pieces.
fn compare_pieces(tensor: usize) {
    let ranks = Ranks::parallel(world(), 1, tensor).unwrap();
    for sequence_parallel in [false, true] {
        for activation_checkpointing in
            [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full]
        {
            let optimizer = Optimizer::AdamW(AdamW::default());
            let options = Options {
                activation_checkpointing,
                sequence_parallel,
                ..Options::new(Sharding::stage(0).unwrap(), optimizer, Schedule::constant(1e-3))
            };
            let setting = format!("tensor {tensor}, sequence {sequence_parallel}, {activation_checkpointing:?}");
            let llama = Model::from_config(LlamaConfig::new(61, 24, 2, 6, 17)).unwrap();
            compare_with(MANY_TOKENS, llama, &ranks, options.clone(), 2, &setting);
            let gpt2 = Model::from_config(Gpt2Config::new(61, MANY_TOKENS, 24, 2, 6)).unwrap();
            compare_with(MANY_TOKENS, gpt2, &ranks, options, 1, &format!("GPT-2, {setting}"));
        }
    }
}

/// Sequences that `ring` × `ulysses` ranks divide, in layers that `tensor` ranks share: windows × key heads × checkpointing × precision.
fn compare_context(ring: usize, ulysses: usize, tensor: usize) {
    let world = world();
    let sizes = [(Axis::Ring, ring), (Axis::Ulysses, ulysses), (Axis::Tensor, tensor)];
    let ranks = Ranks::on_mesh(world.clone(), Mesh::divide(world.size(), &sizes).unwrap()).unwrap();
    let checkpointing =
        [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];
    for (index, (key_heads, window)) in
        [(6, None), (2, None), (1, None), (3, Some(5)), (2, Some(200))].into_iter().enumerate()
    {
        for precision in [Precision::F32, Precision::BF16] {
            let activation_checkpointing = checkpointing[index % 3];
            let optimizer = Optimizer::AdamW(AdamW::default());
            let options = Options {
                activation_checkpointing,
                precision,
                ..Options::new(Sharding::stage(index as u8 % 4).unwrap(), optimizer, Schedule::constant(1e-3))
            };
            let setting = format!(
                "ring {ring}, Ulysses {ulysses}, tensor {tensor}, {key_heads} key heads, window {window:?}, {precision:?}, \
                 {activation_checkpointing:?}"
            );
            let llama = LlamaConfig {
                num_key_value_heads: key_heads,
                sliding_window: window,
                ..LlamaConfig::new(61, 24, 2, 6, 17)
            };
            let projections = ["q_proj", "k_proj", "v_proj"].map(|name| format!("model.layers.0.self_attn.{name}"));
            let [q_proj, k_proj, v_proj] = projections.each_ref().map(String::as_str);
            for frozen in [
                &[][..],
                &["model.embed_tokens", "model.layers.0.input", "model.layers.0.self_attn"],
                // Only what comes after attention is trained, so attention has no backward pass.
                &["model.embed_tokens", "model.layers.0.input", q_proj, k_proj, v_proj],
            ] {
                let mut model = Model::from_config(llama.clone()).unwrap();
                model.freeze(frozen).unwrap();
                let setting = format!("{setting}, frozen {frozen:?}");
                compare_with(MANY_TOKENS, model, &ranks, options.clone(), 2, &setting);
            }
            let gpt2 = Model::from_config(Gpt2Config::new(61, MANY_TOKENS, 24, 2, 6)).unwrap();
            compare_with(MANY_TOKENS, gpt2, &ranks, options, 1, &format!("GPT-2, {setting}"));
        }
    }
}

#[test]
fn simulated_bytes_equal_metered_bytes_of_divided_sequences() {
    ranks!(2, || compare_context(2, 1, 1));
    ranks!(2, || compare_context(1, 2, 1));
    ranks!(3, || compare_context(3, 1, 1));
    ranks!(4, || compare_context(4, 1, 1));
    ranks!(4, || compare_context(1, 4, 1));
    ranks!(4, || compare_context(2, 2, 1));
    ranks!(4, || compare_context(2, 1, 2));
    ranks!(4, || compare_context(1, 2, 2));
}

/// Every schedule × stages 0 to 3 × accumulation × frozen parts × tied or untied, on the stages of a pipeline.
fn compare_pipelines(stages: usize, tensor: usize) {
    let world = world();
    let ranks = Ranks::on_mesh(
        world.clone(),
        Mesh::divide(world.size(), &[(Axis::Pipeline, stages), (Axis::Tensor, tensor)]).unwrap(),
    )
    .unwrap();
    let some: &[&str] = &["model.embed_tokens", "model.layers.0.", "model.layers.1.self_attn"];
    for (stage, schedule) in (0..4).flat_map(|stage| PipelineSchedule::BUILT_IN.map(|schedule| (stage, schedule))) {
        for (micro_batches, is_tied, frozen) in [(1, false, &[][..]), (3, true, &[]), (4, false, some)] {
            let sharding = Sharding::stage(stage).unwrap();
            let is_quantized = stage == 3 && micro_batches == 3;
            let options = Options {
                gather_codec: if is_quantized { Codec::Int8 } else { Codec::None },
                pipeline_schedule: schedule.clone(),
                ..Options::new(sharding, Optimizer::AdamW(AdamW::default()), Schedule::constant(1e-3))
            };
            let setting =
                format!("{schedule}, stage {stage}, {micro_batches} micro-batches, tied {is_tied}, frozen {frozen:?}");
            compare(model(is_tied, frozen), &ranks, options, micro_batches, &setting);
        }
    }
}

#[test]
fn simulated_bytes_equal_metered_bytes_of_pipelines() {
    ranks!(2, || compare_pipelines(2, 1));
    ranks!(4, || compare_pipelines(2, 1));
    ranks!(6, || compare_pipelines(2, 3));
}

#[test]
fn simulated_bytes_equal_metered_bytes_of_shared_layers() {
    ranks!(2, || compare_shared_layers(1, 2));
    ranks!(3, || compare_shared_layers(1, 3));
    ranks!(4, || compare_shared_layers(2, 2));
}

#[test]
fn simulated_bytes_equal_metered_bytes_of_layers_in_pieces() {
    ranks!(2, || compare_pieces(2));
    ranks!(3, || compare_pieces(3));
}

#[test]
fn simulated_bytes_equal_metered_bytes_on_2_ranks() {
    ranks!(2, || compare_all(2));
}

#[test]
fn simulated_bytes_equal_metered_bytes_on_3_ranks() {
    ranks!(3, || compare_all(3));
}

#[test]
fn simulated_bytes_equal_metered_bytes_on_4_ranks() {
    ranks!(4, || compare_all(4));
}

#[test]
fn simulated_bytes_equal_metered_bytes_on_8_ranks() {
    ranks!(Launch::ranks(8).timeout(Duration::from_secs(300)), || compare_all(8));
}
