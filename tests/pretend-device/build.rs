//! Compiles the device against the libtorch that `torch-sys` has found.

use std::env;
use std::path::PathBuf;

fn main() {
    let lib = env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys exports the path of libtorch");
    let libtorch = PathBuf::from(&lib).parent().expect("lib/ has a parent").to_path_buf();
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .warnings(false)
        .includes([libtorch.join("include"), libtorch.join("include/torch/csrc/api/include")])
        .file("device.cpp")
        .compile("shardwise_pretend_device");
    println!("cargo::rerun-if-changed=device.cpp");
    println!("cargo::rustc-link-search=native={lib}");
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
}
