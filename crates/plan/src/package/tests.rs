#![allow(clippy::unwrap_used, reason = "a test may fail")]

use serde_json::json;

use super::*;
use crate::ModelConfig;

/// A package of an embedding, a block and a head that is tied to the embedding.
fn manifest() -> Value {
    let file = |name: &str| json!({ "file": name, "sha256": sha256(b"code") });
    let function = |name: &str, parameters: Value, gradients: Value| {
        json!({
            "name": name, "parameters": parameters, "has_input": true, "reads_inputs": false, "reads_targets": false,
            "input_shape": [2, 4, 8], "output_shape": [2, 4, 8],
            "forward": file(&format!("{name}.forward.pt2")), "backward": file(&format!("{name}.backward.pt2")),
            "saved": [{ "parameter": 0 }, "input", { "value": { "shape": [2, 4, 8], "dtype": "bool" } }],
            "gradients": gradients, "chunk_rows": null, "forward_flops": 1e9, "backward_flops": 2e9,
            "forward_temporary_bytes": 0, "backward_temporary_bytes": 0
        })
    };
    let mut embedding = function("embedding", json!([[16, 8]]), json!([0]));
    embedding["has_input"] = json!(false);
    embedding["reads_inputs"] = json!(true);
    embedding["input_shape"] = Value::Null;
    embedding["saved"] = json!(["inputs"]);
    let mut head = function("head", json!([[16, 8]]), json!([0, 1]));
    head["output_shape"] = json!([]);
    head["reads_targets"] = json!(true);
    head["backward"] = Value::Null;
    head["saved"] = json!([]);
    head["chunk_rows"] = json!(4);
    head["input_shape"] = json!([4, 8]);
    let weight =
        |name: &str, shape: Value| json!({ "name": name, "shape": shape, "init": { "normal": 0.02 }, "decays": true });
    json!({
        "format": 1, "torch": "2.13.0", "device": "cpu", "cpu_features": ["avx2"], "dtype": "bf16",
        "activation_checkpointing": "none",
        "inputs": { "shape": [2, 4], "dtype": "i64" }, "targets": { "shape": [2, 4], "dtype": "i64" },
        "source": { "architecture": "LlamaForCausalLM", "transformers": "5.22.0" },
        "functions": [embedding, function("block", json!([[8, 8]]), json!([0, 1])), head],
        "units": [
            { "name": "embedding", "function": 0, "parameters": [weight("embed", json!([16, 8]))], "tied": null },
            { "name": "block.0", "function": 1, "parameters": [weight("up", json!([8, 8]))], "tied": null },
            { "name": "head", "function": 2, "parameters": [], "tied": { "unit": 0, "parameter": 0 } }
        ]
    })
}

fn open(manifest: &Value) -> Result<Package, ConfigError> {
    let folder = folder(&sha256(manifest.to_string().as_bytes())[..16]);
    std::fs::write(folder.join("package.json"), manifest.to_string()).unwrap();
    let package = Package::open(&folder);
    std::fs::remove_dir_all(&folder).unwrap();
    package
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("shardwise-manifest-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn a_manifest_is_a_model_config() {
    let package = open(&manifest()).unwrap();
    assert_eq!(package.hash(), sha256(manifest().to_string().as_bytes()));
    assert_eq!(package.vocab_size(), Some(16));
    assert_eq!(package.manifest().functions[1].saved_bytes(), 64);
    assert!(!package.manifest().functions[0].backward_reads_parameters());
    let config = ModelConfig::from(std::sync::Arc::new(package));
    let names: Vec<String> = config.parameters().into_iter().map(|parameter| parameter.name).collect();
    assert_eq!((names, config.num_parameters()), (vec!["embed".to_string(), "up".to_string()], 192));
    assert!(config.check_tensor_parallel(1).is_ok());
    let error = config.check_tensor_parallel(2).unwrap_err().to_string();
    assert!(error.contains("cannot be split among ranks"), "{error}");
}

#[test]
fn what_is_wrong_with_a_manifest_is_named() {
    for (pointer, value, message) in [
        ("/format", json!(2), "it has format 2, but this version reads format 1"),
        ("/surprise", json!(2), "unknown field `surprise`"),
        ("/device", json!("tpu"), "unknown variant `tpu`, expected `cpu` or `cuda`"),
        ("/dtype", json!("f64"), "its dtype is f64"),
        ("/dtype", json!("f8"), "the dtype \"f8\" is not supported"),
        ("/functions/1/forward/file", json!("../block.pt2"), "is not the name of a file in the package's folder"),
        ("/functions/1/forward/sha256", json!("0"), "is not a SHA-256"),
        ("/functions/1/gradients", json!([0]), "function \"block\": gradients has 1 entries"),
        ("/functions/1/gradients", json!([0, 0]), "each place from 0 to below 2 once"),
        ("/functions/1/gradients", json!([0, 7]), "each place from 0 to below 2 once"),
        ("/functions/1/saved", json!([{ "parameter": 1 }]), "saved has Parameter(1), which does not exist"),
        ("/functions/0/saved", json!(["input"]), "saved has Input, which does not exist"),
        ("/functions/1/backward", Value::Null, "has a backward pass, unless it has chunk_rows"),
        ("/functions/1/output_shape", json!([2, 4, 9]), "unit \"head\": it takes rows of Some(8)"),
        ("/functions/1/parameters", json!([[8, 1u64 << 50]]), "has no elements or too many"),
        ("/functions/2/input_shape", json!([5, 8]), "its input must have as many rows"),
        ("/functions/2/input_shape", json!([4, 9]), "the unit before it returns 8 rows of 8"),
        ("/targets/shape", json!([2, 5]), "and there are 10 i64 targets"),
        ("/functions/2/output_shape", json!([1]), "chunk_rows must be at least 1"),
        ("/units/1/function", json!(9), "unit \"block.0\": its function is 9, but there are 3"),
        ("/units/1/function", json!(2), "its parameters have the shapes"),
        ("/units/2/tied/parameter", json!(1), "it is tied to parameter 1 of unit 0, which no earlier unit has"),
        ("/units/2/tied/unit", json!(2), "which no earlier unit has"),
        ("/units", json!([]), "it has 0 units"),
    ] {
        let mut changed = manifest();
        match changed.pointer_mut(pointer) {
            Some(place) => *place = value,
            None => changed[pointer.trim_start_matches('/')] = value,
        }
        let error = open(&changed).unwrap_err().to_string();
        assert!(error.contains(message), "{pointer}: {error}");
    }
}

#[test]
fn a_changed_file_is_refused() {
    let folder = folder("changed");
    std::fs::write(folder.join("package.json"), manifest().to_string()).unwrap();
    let package = Package::open(&folder).unwrap();
    let file = &package.manifest().functions[1].forward;
    let path = folder.join(&file.file);
    std::fs::write(&path, b"code").unwrap();
    assert_eq!(package.read_file(file).unwrap(), b"code");
    std::fs::write(&path, b"c0de").unwrap();
    let error = package.read_file(file).unwrap_err().to_string();
    assert!(error.contains("block.forward.pt2: its SHA-256 is "), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
}
