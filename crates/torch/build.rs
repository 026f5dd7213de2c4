//! Compiles the C++ shim against the libtorch that `torch-sys` has found.

use std::env;
use std::path::PathBuf;

fn main() {
    let lib = env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys exports the path of libtorch");
    let libtorch = PathBuf::from(&lib).parent().expect("lib/ has a parent").to_path_buf();
    let cuda = env::var_os("CARGO_FEATURE_CUDA").is_some();

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .warnings(false)
        .includes([libtorch.join("include"), libtorch.join("include/torch/csrc/api/include")])
        .files(["shim/shim.cpp", "shim/memory.cpp"]);
    if cuda {
        build.file("shim/cuda.cpp");
    }
    build.compile("shardwise_torch_shim");

    println!("cargo::rerun-if-changed=shim");
    println!("cargo::rustc-link-search=native={lib}");
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
    if cuda {
        println!("cargo::rustc-link-lib=torch_cuda");
    }
}
