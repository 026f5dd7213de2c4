//! Builds the device against the libtorch that `torch-sys` has found, and the libraries that stand in for CUDA's driver and for NCCL.

use std::env;
use std::path::{Path, PathBuf};

fn main() {
    let lib = PathBuf::from(env::var_os("DEP_TCH_LIBTORCH_LIB").expect("torch-sys exports the path of libtorch"));
    let include = lib.parent().expect("lib/ has a parent").join("include");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    link(&["driver.cpp"], &out.join("libcuda.so.1"), &[]);
    link(&["nccl.cpp"], &out.join("libnccl.so"), &[format!("-L{}", out.display()), "-l:libcuda.so.1".to_string()]);
    let torch = [
        format!("-I{}", include.display()),
        format!("-I{}", include.join("torch/csrc/api/include").display()),
        format!("-L{}", lib.display()),
        format!("-Wl,-rpath,{}", lib.display()),
        format!("-L{}", out.display()),
    ];
    let libraries = ["-l:libcuda.so.1", "-ltorch_cpu", "-lc10"].map(str::to_string);
    // Kernels are registered in this order: those of device.cpp are for operators that have none yet.
    let sources = ["attention.cpp", "device.cpp"];
    link(&sources, &out.join("libshardwise_pretend_device.so"), &[&torch[..], &libraries[..]].concat());
    for file in ["attention.cpp", "device.cpp", "device.h", "driver.cpp", "driver.h", "nccl.cpp"] {
        println!("cargo::rerun-if-changed={file}");
    }
}

/// Compiles files to a shared library. Others find it by its name, and it finds those in the same folder.
fn link(sources: &[&str], library: &Path, arguments: &[String]) {
    let name = library.file_name().and_then(|name| name.to_str()).expect("a library has a name");
    let mut build = cc::Build::new();
    let mut command =
        build.cpp(true).std("c++20").define("NDEBUG", None).warnings(false).pic(true).get_compiler().to_command();
    command.args(["-shared", "-pthread"]).args(sources).arg("-o").arg(library).args(arguments);
    let status =
        command.args([&format!("-Wl,-soname,{name}"), "-Wl,-rpath,$ORIGIN"]).status().expect("the compiler runs");
    assert!(status.success(), "{sources:?} could not be compiled");
}
