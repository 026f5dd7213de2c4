//! Compiles the C++ shim against the libtorch that `torch-sys` has found.

use std::env;
use std::path::PathBuf;

fn main() {
    let lib = env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys says where libtorch is");
    let libtorch = PathBuf::from(&lib).parent().expect("lib/ has a parent").to_path_buf();
    let cuda = env::var_os("CARGO_FEATURE_CUDA").is_some();

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .warnings(false)
        .includes([libtorch.join("include"), libtorch.join("include/torch/csrc/api/include")])
        .file("shim/shim.cpp");
    if cuda {
        build.include(cuda_headers(&libtorch)).file("shim/cuda.cpp");
    }
    build.compile("shardwise_torch_shim");

    println!("cargo::rerun-if-changed=shim");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    println!("cargo::rustc-link-search=native={lib}");
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
    if cuda {
        println!("cargo::rustc-link-lib=torch_cuda");
        println!("cargo::rustc-link-lib=c10_cuda");
    }
}

/// The CUDA headers: of `CUDA_HOME`, or those that pip installs beside torch.
fn cuda_headers(libtorch: &std::path::Path) -> PathBuf {
    let places = [
        env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("include")),
        libtorch.parent().map(|site| site.join("nvidia/cu13/include")),
        Some(PathBuf::from("/usr/local/cuda/include")),
    ];
    places.into_iter().flatten().find(|place| place.join("cuda_runtime_api.h").exists()).unwrap_or_else(|| {
        panic!("no cuda_runtime_api.h beside torch or in /usr/local/cuda; set CUDA_HOME to a CUDA 13 toolkit")
    })
}
