//! The models against the oracle in `reference/`: the same loss and the same gradients from the same weights and tokens.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use shardwise_model::{
    Activations, Batch, Gpt2Config, IGNORED, Llama3Rope, LlamaConfig, Model, MoeConfig, Pass, QkNorm, RopeScaling,
    RouterConfig, ScoringFunc, head_loss,
};
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::tch::{Device, Kind, Tensor, manual_seed};
use support::parameters;

fn batch(vocabulary: usize) -> Batch {
    let tokens = Tensor::randint(vocabulary as i64, [3, 19], (Kind::Int64, Device::Cpu));
    let targets = Tensor::randint(vocabulary as i64, [3, 19], (Kind::Int64, Device::Cpu));
    let _ = targets.narrow(1, 15, 4).narrow(0, 1, 1).fill_(IGNORED);
    Batch::new(tokens, targets)
}

/// The gradient of an embedding is sparse.
fn dense(grad: Tensor) -> Tensor {
    if grad.is_sparse() { grad.to_dense(None, false) } else { grad }
}

/// The loss, and the gradient of every parameter by name, a tied one's from both of its uses.
fn run(model: &Model, parameters: &[Vec<Tensor>], batch: &Batch) -> BTreeMap<String, Tensor> {
    let leaves: Vec<Vec<Tensor>> = parameters
        .iter()
        .map(|unit| unit.iter().map(|tensor| tensor.detach().copy().set_requires_grad(true)).collect())
        .collect();
    let mut x: Option<Tensor> = None;
    for (index, unit) in model.units().iter().enumerate() {
        let tied = unit.tied().map(|tied| &leaves[tied.unit][tied.parameter]);
        x = Some(unit.forward(&leaves[index], tied, x.as_ref(), batch, &Pass::new(Activations::All)).unwrap());
    }
    let loss = x.unwrap();
    let inputs: Vec<&Tensor> = leaves.iter().flatten().collect();
    let grads = autograd::grad(&[&loss], &[None], &inputs, Graph::Free).unwrap();
    let names = model.units().iter().flat_map(|unit| unit.parameters().iter().map(|p| p.name.clone()));
    let mut results: BTreeMap<String, Tensor> = names.zip(grads.into_iter().map(|grad| dense(grad.unwrap()))).collect();
    results.insert("loss".to_string(), loss.detach().view(1));
    results
}

fn oracle(config: &Value, model: &Model, parameters: &[Vec<Tensor>], batch: &Batch) -> BTreeMap<String, Tensor> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let python = shardwise_harness::python().unwrap();
    let name = format!("shardwise-oracle-{}-{}", std::process::id(), config["name"].as_str().unwrap());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let [config_file, in_file, out_file] =
        ["config.json", "in.safetensors", "out.safetensors"].map(|file| folder.join(file));
    std::fs::write(&config_file, config.to_string()).unwrap();
    let names = model.units().iter().flat_map(|unit| unit.parameters().iter().map(|p| p.name.as_str()));
    let mut tensors: Vec<(&str, &Tensor)> = names.zip(parameters.iter().flatten()).collect();
    tensors.extend([("tokens", &batch.inputs), ("targets", &batch.targets)]);
    Tensor::write_safetensors(&tensors, &in_file).unwrap();
    let script = root.join("reference/grads.py");
    let output = Command::new(python).arg(script).args([&config_file, &in_file, &out_file]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results = Tensor::read_safetensors(&out_file).unwrap().into_iter().collect();
    std::fs::remove_dir_all(folder).unwrap();
    results
}

fn assert_agrees(config: Value, model: &Model, vocabulary: usize) {
    manual_seed(17);
    let (parameters, batch) = (parameters(model), batch(vocabulary));
    let ours = run(model, &parameters, &batch);
    let theirs = oracle(&config, model, &parameters, &batch);
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    for (name, expected) in &theirs {
        let difference = (&ours[name] - expected).norm().double_value(&[]);
        let norm = expected.norm().double_value(&[]);
        assert!(norm > 0., "{name} has no gradient in the oracle");
        assert!(difference < 1e-5 * norm, "{name} differs by {difference:e} of {norm:e}");
    }
}

fn llama_config(name: &str, llama: &LlamaConfig) -> Value {
    json!({
        "name": name, "family": "llama", "num_hidden_layers": llama.num_hidden_layers, "head_dim": llama.head_dim,
        "rope_theta": llama.rope_theta, "rms_norm_eps": llama.rms_norm_eps,
        "tie_word_embeddings": llama.tie_word_embeddings, "sliding_window": llama.sliding_window,
        "moe": llama.moe.as_ref().map(|moe| json!({
            "num_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_tok,
            "n_shared_experts": moe.n_shared_experts,
            "scoring_func": match moe.router.scoring_func {
                ScoringFunc::Softmax => "softmax",
                ScoringFunc::Sigmoid => "sigmoid",
            },
            "capacity_factor": moe.capacity_factor, "norm_topk_prob": moe.router.norm_topk_prob, "routed_scaling_factor": moe.router.routed_scaling_factor,
            "n_group": moe.router.n_group, "topk_group": moe.router.topk_group,
            "router_aux_loss_coef": moe.router.router_aux_loss_coef, "router_z_loss_coef": moe.router.router_z_loss_coef,
        })),
        "rope_scaling": llama3_rope(llama).map(|scaling| json!({
            "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": scaling.original_max_position_embeddings,
        })),
    })
}

fn llama3_rope(llama: &LlamaConfig) -> Option<Llama3Rope> {
    match llama.rope_scaling? {
        RopeScaling::Llama3(rope) => Some(rope),
        other => panic!("the reference does not know {other:?}"),
    }
}

fn assert_llama_agrees(name: &str, llama: &LlamaConfig) {
    assert_agrees(llama_config(name, llama), &Model::from_config(llama.clone()).unwrap(), llama.vocab_size);
}

/// Small, and divisible by little.
fn small() -> LlamaConfig {
    LlamaConfig { loss_chunk_tokens: 10, ..LlamaConfig::new(101, 36, 2, 6, 52) }
}

#[test]
fn llama_2_agrees() {
    assert_llama_agrees("llama-2", &small());
}

#[test]
fn llama_3_agrees() {
    let rope =
        Llama3Rope { factor: 8., low_freq_factor: 1., high_freq_factor: 4., original_max_position_embeddings: 32 };
    let llama = LlamaConfig {
        num_key_value_heads: 2,
        rope_theta: 500_000.,
        rope_scaling: Some(RopeScaling::Llama3(rope)),
        ..small()
    };
    assert_llama_agrees("llama-3", &llama);
}

#[test]
fn mistral_agrees() {
    assert_llama_agrees("mistral", &LlamaConfig { num_key_value_heads: 3, sliding_window: Some(7), ..small() });
}

#[test]
fn qwen_2_agrees() {
    assert_llama_agrees(
        "qwen-2",
        &LlamaConfig { num_key_value_heads: 2, qkv_bias: true, tie_word_embeddings: true, rope_theta: 1e6, ..small() },
    );
}

#[test]
fn qwen_3_agrees() {
    assert_llama_agrees(
        "qwen-3",
        &LlamaConfig { num_key_value_heads: 2, head_dim: 8, qk_norm: Some(QkNorm::PerHead), ..small() },
    );
}

#[test]
fn a_mixture_of_experts_agrees_with_each_router() {
    let plain = RouterConfig::default();
    let balanced = RouterConfig { router_aux_loss_coef: 0.5, router_z_loss_coef: 0.2, ..plain };
    let sigmoid = RouterConfig { scoring_func: ScoringFunc::Sigmoid, routed_scaling_factor: 2.5, ..plain };
    for (name, router, n_shared_experts) in [
        ("softmax", plain, 0),
        ("unnormalized", RouterConfig { norm_topk_prob: false, ..plain }, 0),
        ("balanced", balanced, 0),
        ("sigmoid", sigmoid, 0),
        ("deepseek", RouterConfig { n_group: 4, topk_group: 2, router_aux_loss_coef: 0.5, ..sigmoid }, 2),
    ] {
        let moe = MoeConfig { router, n_shared_experts, ..MoeConfig::new(8, 2, 20) };
        assert_llama_agrees(name, &LlamaConfig { moe: Some(moe), ..small() });
    }
}

#[test]
fn gpt_2_agrees() {
    let gpt2 = Gpt2Config { loss_chunk_tokens: 10, ..Gpt2Config::new(101, 23, 36, 2, 6) };
    let config = json!({
        "name": "gpt-2", "family": "gpt2", "n_layer": gpt2.n_layer, "n_head": gpt2.n_head,
        "layer_norm_epsilon": gpt2.layer_norm_epsilon,
    });
    assert_agrees(config, &Model::from_config(gpt2.clone()).unwrap(), gpt2.vocab_size);
}

#[test]
fn the_chunk_does_not_change_the_loss() {
    manual_seed(3);
    let hidden = Tensor::randn([57, 16], (Kind::Double, Device::Cpu));
    let weight = Tensor::randn([101, 16], (Kind::Double, Device::Cpu));
    let targets = Tensor::randint(101, [57], (Kind::Int64, Device::Cpu));
    for (kind, precision) in [(Kind::Double, 1e-14), (Kind::Float, 1e-6)] {
        let [hidden, weight] = [&hidden, &weight].map(|tensor| tensor.to_kind(kind).set_requires_grad(true));
        let run = |chunk| {
            let loss = head_loss(&hidden, &weight, &targets, chunk).unwrap();
            let grads = autograd::grad(&[&loss], &[None], &[&hidden, &weight], Graph::Free).unwrap();
            (loss.double_value(&[]), grads.into_iter().map(Option::unwrap).collect::<Vec<_>>())
        };
        let (whole, whole_grads) = run(57);
        for chunk in [1, 7, 56, 1000] {
            let (loss, grads) = run(chunk);
            assert!((loss - whole).abs() < precision * whole, "{kind:?}: {loss} is not {whole}");
            for (grad, expected) in grads.iter().zip(&whole_grads) {
                // Sums in another order: up to the rounding of the largest element.
                let (error, largest) =
                    ((grad - expected).abs().max().double_value(&[]), expected.abs().max().double_value(&[]));
                assert!(
                    error < precision * largest,
                    "{kind:?}, chunk {chunk}: a gradient differs by {error:e} of {largest:e}"
                );
            }
        }
    }
}

#[test]
fn the_graph_of_a_head_is_walked_once() {
    let hidden = Tensor::randn([4, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let weight = Tensor::randn([11, 8], (Kind::Float, Device::Cpu));
    let loss = head_loss(&hidden, &weight, &Tensor::zeros([4], (Kind::Int64, Device::Cpu)), 3).unwrap();
    autograd::grad(&[&loss], &[None], &[&hidden], Graph::Keep).unwrap();
    let error = autograd::grad(&[&loss], &[None], &[&hidden], Graph::Keep).unwrap_err();
    assert!(error.to_string().contains("its graph can be walked only once"), "{error}");
}

#[test]
fn wrong_shapes_are_explained() {
    let message = |llama: LlamaConfig| Model::from_config(llama).err().unwrap().to_string();
    let said = message(LlamaConfig { num_key_value_heads: 4, ..small() });
    assert_eq!(said, "num_key_value_heads: 4 does not divide the 6 query heads");
    assert!(message(LlamaConfig { head_dim: 7, ..small() }).contains("head_dim: 7 is not a positive even number"));
    let gpt2 = Model::from_config(Gpt2Config::new(101, 8, 36, 1, 6)).unwrap();
    let parameters = parameters(&gpt2);
    let error =
        gpt2.units()[0].forward(&parameters[0], None, None, &batch(101), &Pass::new(Activations::All)).unwrap_err();
    assert_eq!(error.to_string(), "n_positions: sequences have 19 positions, and the model has 8");
}
