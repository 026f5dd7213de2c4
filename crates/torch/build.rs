//! Compiles the C++ shim against the libtorch that `torch-sys` has found.

use std::env;
use std::path::PathBuf;

fn main() {
    let lib = env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys exports the path of libtorch");
    let libtorch = PathBuf::from(&lib).parent().expect("lib/ has a parent").to_path_buf();
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .warnings(false)
        // As libtorch was compiled: some of its types have members for debugging.
        .define("NDEBUG", None)
        .includes([libtorch.join("include"), libtorch.join("include/torch/csrc/api/include")])
        .files(["shim/shim.cpp", "shim/counts.cpp", "shim/device.cpp", "shim/memory.cpp", "shim/package.cpp"])
        .compile("shardwise_torch_shim");
    build_stub();

    println!("cargo::rerun-if-changed=shim");
    println!("cargo::rustc-link-search=native={lib}");
    println!("cargo::rustc-link-lib=torch_cpu");
    println!("cargo::rustc-link-lib=c10");
}

/// Builds an empty shared library with the name of libtorch's umbrella library; see the note in `src/package.rs`.
fn build_stub() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut command = cc::Build::new().get_compiler().to_command();
    command.args(["-shared", "-nostdlib", "-s", "-Wl,-soname,libtorch.so", "shim/stub.c", "-o"]);
    let status = command.arg(out.join("libtorch_stub.so")).status().expect("the C compiler runs");
    assert!(status.success(), "the C compiler could not link an empty shared library");
}
