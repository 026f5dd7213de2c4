//! Compiled packages compute what PyTorch computes, and refuse what they were not compiled for.
//!
//! The packages are those of `python/tests/packages`. Next to each are the weights, a micro-batch, and the loss
//! and the gradients that eager PyTorch computes with them.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shardwise_model::{Activations, Batch, Model, ModelConfig, Package, Pass, Tied};
use shardwise_torch::storage;
use shardwise_torch::tch::{Kind, Tensor, no_grad};

type Tensors = BTreeMap<String, Tensor>;

/// The packages to test with, by name.
fn packages() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(shardwise_harness::packages().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries.filter(|path| path.join("package.json").exists()).collect();
    found.sort();
    found
}

fn read(path: &Path) -> Tensors {
    Tensor::read_safetensors(path).unwrap().into_iter().collect()
}

fn batch(package: &Path) -> Batch {
    let mut tensors = read(&package.join("batch.safetensors"));
    Batch::new(tensors.remove("inputs").unwrap(), tensors.remove("targets").unwrap())
}

/// A model's parameters, by unit, as views of one tensor per unit, as in training.
struct Weights {
    flat: Vec<Option<Tensor>>,
    views: Vec<Vec<Tensor>>,
}

fn weights(model: &Model, values: &Tensors, kind: Kind) -> Weights {
    let (mut flat, mut all) = (Vec::new(), Vec::new());
    for unit in model.units() {
        let parts: Vec<Tensor> =
            unit.parameters().iter().map(|parameter| values[&parameter.name].to_kind(kind).reshape(-1)).collect();
        let whole = (!parts.is_empty()).then(|| Tensor::cat(&parts, 0));
        let mut start = 0;
        let views = unit.parameters().iter().map(|parameter| {
            let len = parameter.elements() as i64;
            let view = whole.as_ref().unwrap().narrow(0, start, len).view(&parameter.shape[..]);
            start += len;
            view.detach().set_requires_grad(parameter.trainable)
        });
        all.push(views.collect());
        flat.push(whole);
    }
    Weights { flat, views: all }
}

fn tied(weights: &Weights, tied: Option<Tied>) -> Option<&Tensor> {
    tied.map(|tied| &weights.views[tied.unit][tied.parameter])
}

/// The loss of a batch, in one graph.
fn loss(model: &Model, weights: &Weights, batch: &Batch) -> shardwise_model::Result<Tensor> {
    let mut x = None;
    for (index, unit) in model.units().iter().enumerate() {
        let (own, pass) = (&weights.views[index], Pass::new(Activations::All));
        x = Some(unit.forward(own, tied(weights, unit.tied()), x.as_ref(), batch, &pass)?);
    }
    Ok(x.unwrap())
}

/// The loss, and the gradient of every trainable parameter by name.
fn loss_and_gradients(model: &Model, weights: &Weights, batch: &Batch) -> (f64, Tensors) {
    let loss = loss(model, weights, batch).unwrap();
    loss.backward();
    let named = model.units().iter().flat_map(|unit| unit.parameters()).zip(weights.views.iter().flatten());
    let gradients = named.filter(|(parameter, _)| parameter.trainable);
    (loss.double_value(&[]), gradients.map(|(parameter, tensor)| (parameter.name.clone(), tensor.grad())).collect())
}

fn kind(package: &Package) -> (Kind, f64) {
    match package.manifest().dtype.to_string().as_str() {
        "f32" => (Kind::Float, 1e-5),
        "bf16" => (Kind::BFloat16, 3e-2),
        other => panic!("no test packages are {other}"),
    }
}

/// The largest difference, relative to the largest value.
fn difference(found: &Tensor, expected: &Tensor) -> f64 {
    // The eager gradient of an embedding is sparse.
    let dense =
        |tensor: &Tensor| if tensor.is_sparse() { tensor.to_dense(None, false) } else { tensor.shallow_clone() };
    let (found, expected) = (dense(found).to_kind(Kind::Double), dense(expected).to_kind(Kind::Double));
    ((found - &expected).abs().max() / expected.abs().max().clamp_min(1e-30)).double_value(&[])
}

fn assert_close(what: &str, found: &(f64, Tensors), expected: &(f64, Tensors), tolerance: f64) {
    assert!((found.0 / expected.0 - 1.).abs() < tolerance, "{what}: loss {} instead of {}", found.0, expected.0);
    assert_eq!(found.1.keys().collect::<Vec<_>>(), expected.1.keys().collect::<Vec<_>>(), "{what}");
    for (name, gradient) in &found.1 {
        let difference = difference(gradient, &expected.1[name]);
        assert!(difference < tolerance, "{what}: the gradient of {name} differs by {difference}");
    }
}

#[test]
fn losses_and_gradients_are_those_of_pytorch() {
    for path in packages() {
        let about = std::fs::read_to_string(path.join("expected.json")).unwrap();
        let about: serde_json::Value = serde_json::from_str(&about).unwrap();
        let (loss, gradients) = (about["loss"].as_f64().unwrap(), read(&path.join("gradients.safetensors")));
        let model = Model::from_package(&path).unwrap();
        let (kind, tolerance) = kind(model.package().unwrap());
        let weights = weights(&model, &read(&path.join("weights.safetensors")), kind);
        let found = loss_and_gradients(&model, &weights, &batch(&path));
        assert_close(&path.display().to_string(), &found, &(loss, gradients), tolerance);
    }
}

/// All tokens are the same, so that their gradients are added to one row of the embedding.
#[test]
fn several_threads_give_the_same_bits() {
    shardwise_torch::tch::set_num_threads(2);
    for path in packages() {
        let model = Model::from_package(&path).unwrap();
        let (kind, _) = kind(model.package().unwrap());
        let values = read(&path.join("weights.safetensors"));
        let Batch { inputs, targets, .. } = batch(&path);
        let batch = Batch::new(inputs.zeros_like(), targets);
        let run = || loss_and_gradients(&model, &weights(&model, &values, kind), &batch);
        let (loss, gradients) = run();
        for _ in 0..200 {
            let (again, repeated) = run();
            assert_eq!(again.to_bits(), loss.to_bits(), "{}", path.display());
            for (name, gradient) in &repeated {
                assert!(gradient.equal(&gradients[name]), "{}: {name} has other bits", path.display());
            }
        }
    }
}

#[test]
fn a_compiled_family_computes_what_the_built_in_one_does() {
    for path in packages() {
        let package = Arc::new(Package::open(&path).unwrap());
        let Some(Ok(config)) = package.config().map(ModelConfig::from_hugging_face) else { continue };
        let eager = Model::from_config(config).unwrap();
        let compiled = eager.with_compiled_layers(&package).unwrap();
        let (kind, tolerance) = kind(&package);
        let own_name = |name: String| name.strip_prefix("transformer.").map_or(name.clone(), str::to_string);
        let values = read(&path.join("weights.safetensors"));
        let values = values.into_iter().map(|(name, value)| (own_name(name), value)).collect();
        let [found, expected] =
            [compiled, eager].map(|model| loss_and_gradients(&model, &weights(&model, &values, kind), &batch(&path)));
        assert_close(&path.display().to_string(), &found, &expected, tolerance);
    }
}

#[test]
fn parameters_may_be_released_between_the_passes() {
    for path in packages() {
        let model = Model::from_package(&path).unwrap();
        let (kind, _) = kind(model.package().unwrap());
        let (values, batch) = (read(&path.join("weights.safetensors")), batch(&path));
        let (_, expected) = loss_and_gradients(&model, &weights(&model, &values, kind), &batch);
        for has_returned in [true, false] {
            let weights = weights(&model, &values, kind);
            let loss = loss(&model, &weights, &batch).unwrap();
            let flat: Vec<&Tensor> = weights.flat.iter().flatten().collect();
            let blocks = flat.iter().map(|flat| storage::take(flat, "block.7 is released").unwrap());
            let blocks: Vec<_> = blocks.collect();
            if has_returned {
                flat.iter().zip(blocks).for_each(|(flat, block)| storage::put(flat, block).unwrap());
                loss.backward();
                let named = model.units().iter().flat_map(|unit| unit.parameters()).zip(weights.views.iter().flatten());
                named.for_each(|(parameter, tensor)| assert!(tensor.grad().equal(&expected[&parameter.name])));
            } else if model.units().iter().any(|unit| unit.backward_reads_parameters()) {
                let error = loss.f_backward().unwrap_err().to_string();
                assert!(error.contains("block.7 is released"), "{error}");
            }
        }
    }
}

#[test]
fn frozen_parameters_get_no_gradient() {
    for path in packages() {
        let mut model = Model::from_package(&path).unwrap();
        let first = model.units()[1].parameters()[0].name.clone();
        let (kind, _) = kind(model.package().unwrap());
        let (values, batch) = (read(&path.join("weights.safetensors")), batch(&path));
        let (_, mut expected) = loss_and_gradients(&model, &weights(&model, &values, kind), &batch);
        model.freeze(&[&first]).unwrap();
        let weights = weights(&model, &values, kind);
        let (_, found) = loss_and_gradients(&model, &weights, &batch);
        assert!(!weights.views[1][0].grad().defined());
        expected.remove(&first);
        assert!(found.len() == expected.len() && found.iter().all(|(name, found)| found.equal(&expected[name])));
    }
}

#[test]
fn without_autograd_nothing_is_kept() {
    for path in packages() {
        let model = Model::from_package(&path).unwrap();
        let (kind, _) = kind(model.package().unwrap());
        let weights = weights(&model, &read(&path.join("weights.safetensors")), kind);
        let batch = batch(&path);
        let kept = no_grad(|| loss(&model, &weights, &batch).unwrap());
        let recorded = loss(&model, &weights, &batch).unwrap();
        assert!(!kept.requires_grad() && recorded.requires_grad() && kept.equal(&recorded));
    }
}

#[test]
fn other_batches_are_refused_with_both_shapes() {
    for path in packages() {
        let model = Model::from_package(&path).unwrap();
        let (kind, _) = kind(model.package().unwrap());
        let weights = weights(&model, &read(&path.join("weights.safetensors")), kind);
        let full = batch(&path);
        let shorter = Batch::new(full.inputs.narrow(0, 0, 1), full.targets.narrow(0, 0, 1));
        let error = loss(&model, &weights, &shorter).unwrap_err().to_string();
        for shape in [shorter.inputs.size(), full.inputs.size()] {
            assert!(error.contains(&format!("{shape:?}")), "{error}");
        }
        let numbers = full.inputs.ones_like().cumsum(1, None);
        let packed = Batch::packed(full.inputs, full.targets, &numbers).unwrap();
        let error = loss(&model, &weights, &packed).unwrap_err().to_string();
        assert!(error.contains("cannot train on packed documents"), "{error}");
    }
}

#[test]
fn a_changed_byte_is_refused_before_the_code_is_loaded() {
    for path in packages() {
        let copy = std::env::temp_dir().join(format!("shardwise-changed-{}", std::process::id()));
        std::fs::create_dir_all(&copy).unwrap();
        for entry in std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file())
        {
            std::fs::copy(&entry, copy.join(entry.file_name().unwrap())).unwrap();
        }
        let file = Package::open(&copy).unwrap().manifest().functions[1].backward.as_ref().unwrap().file.clone();
        let mut bytes = std::fs::read(copy.join(&file)).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(copy.join(&file), bytes).unwrap();
        let model = Model::from_package(&copy).unwrap();
        assert!(model.units()[0].load().is_ok());
        let error = model.units()[1].load().unwrap_err().to_string();
        assert!(error.contains(&format!("{file}: its SHA-256 is")), "{error}");
        std::fs::remove_dir_all(&copy).unwrap();
    }
}

#[test]
fn loading_leaves_no_files_behind() {
    let Some(path) = packages().into_iter().next() else { return };
    let model = Model::from_package(&path).unwrap();
    model.units().iter().for_each(|unit| unit.load().unwrap());
    // What is loaded is mapped from files that no longer exist.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped: Vec<&str> = maps.lines().filter(|line| line.contains("/data/aotinductor/")).collect();
    assert!(!mapped.is_empty() && mapped.iter().all(|line| line.ends_with("(deleted)")), "{mapped:?}");
    for line in mapped {
        let file = Path::new(line.split_whitespace().nth(5).unwrap());
        let folder = file.ancestors().find(|folder| folder.to_string_lossy().contains("/aotinductor_")).unwrap();
        let folder =
            folder.ancestors().take_while(|folder| folder.to_string_lossy().contains("/aotinductor_")).last().unwrap();
        assert!(!folder.exists(), "{}", folder.display());
    }
}
