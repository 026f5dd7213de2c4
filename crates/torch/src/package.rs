//! Functions that PyTorch has compiled ahead of time (AOTInductor), run without Python.
//!
//! A package (`.pt2`) is a zip file with a shared library, which libtorch's own loader unpacks, loads and calls. The library was compiled
//! for certain shapes, and does not check them. So a function is loaded together with its [`Signature`], and every call is checked
//! against it.
//!
//! # Note: what loading does
//! The loader unpacks to the folder for temporary files (`TMPDIR`), and the shim removes what was unpacked as soon as the library is
//! mapped. The library is compiled code that runs with this process's rights: load only what you trust. A package with sources instead
//! of code would make libtorch start a compiler, so it is refused. Calls may come from any thread; those of several threads wait for
//! each other. Loops run on the OpenMP threads of the calling thread, like libtorch's own.
//!
//! # Note: libtorch.so
//! The compiled code names `libtorch.so` among the libraries that it needs. That is an umbrella without code of its own, which loads
//! the CUDA libraries where there are any: half a gigabyte that a program on the CPU does not need. Our programs link what is
//! behind it. So an empty library with that name is loaded first, from memory, and the dynamic linker is content.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

use rustix::fs::{MemfdFlags, memfd_create};
use tch::{Kind, Tensor};

use crate::error::check;
use crate::{Error, Result, ffi};

/// An empty library named `libtorch.so`.
const LIBTORCH_STUB: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libtorch_stub.so"));

/// The shape and the kind of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// The shape.
    pub shape: Vec<i64>,
    /// The kind of its elements.
    pub kind: Kind,
}

/// What a compiled function expects and returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The arguments, which must be contiguous.
    pub arguments: Vec<TensorType>,
    /// The results.
    pub results: Vec<TensorType>,
}

/// A compiled function.
#[derive(Debug)]
pub struct CompiledFunction {
    raw: *mut ffi::CompiledFunction,
    name: String,
    signature: Signature,
}

// SAFETY: libtorch's container locks itself, and hands a model to one thread at a time; nothing in it belongs to a thread.
unsafe impl Send for CompiledFunction {}
// SAFETY: as above.
unsafe impl Sync for CompiledFunction {}

impl CompiledFunction {
    /// Loads the contents of a package of AOTInductor. `name` is its name in errors, and `signature` what it was compiled for.
    ///
    /// Takes bytes, not a path, so that what a caller has checked is what is loaded.
    pub fn load(name: &str, package: &[u8], signature: Signature) -> Result<Self> {
        let fail = |problem: &str| Error::Package { name: name.to_string(), problem: problem.to_string() };
        let entries = zip_entries(package).ok_or_else(|| fail("it is not a zip file; compile the model again"))?;
        if !entries.iter().any(|entry| entry.ends_with(".so")) {
            return Err(fail("it has no compiled code, only sources; compile it with package_cpp_only = False"));
        }
        let (_stub, stub) = unnamed_file(LIBTORCH_STUB).map_err(|error| fail(&error.to_string()))?;
        let (_package, path) = unnamed_file(package).map_err(|error| fail(&error.to_string()))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live string.
        let provided = check(unsafe { ffi::sw_compiled_provide_libtorch(stub.as_ptr()) });
        provided.map_err(|error| fail(&error.to_string()))?;
        // SAFETY: a live string; `raw` is written if the call succeeds.
        let loaded = check(unsafe { ffi::sw_compiled_load(path.as_ptr(), &mut raw) });
        loaded.map_err(|error| fail(&error.to_string()))?;
        Ok(CompiledFunction { raw, name: name.to_string(), signature })
    }

    /// What it expects and returns.
    pub fn signature(&self) -> &Signature {
        &self.signature
    }

    /// Calls the function, without autograd. An argument that nobody else holds is freed after its last use.
    pub fn run(&self, arguments: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let fail = |problem: String| Error::Package { name: self.name.clone(), problem };
        let Signature { arguments: expected, results: returned } = &self.signature;
        if arguments.len() != expected.len() {
            return Err(fail(format!("it takes {} arguments, but {} were given", expected.len(), arguments.len())));
        }
        for (index, (argument, expected)) in arguments.iter().zip(expected).enumerate() {
            compare(argument, expected).map_err(|problem| fail(format!("argument {index} {problem}")))?;
        }
        let mut pointers = ffi::pointers(&arguments);
        let mut raw = vec![std::ptr::null_mut(); returned.len()];
        // SAFETY: a live function, and lists of live tensors of these lengths. `raw` receives owned tensors if the call succeeds.
        // The code reads the arguments as the signature says, and they are checked above.
        check(unsafe {
            ffi::sw_compiled_run(self.raw, pointers.as_mut_ptr(), pointers.len(), raw.as_mut_ptr(), raw.len())
        })
        .map_err(|error| fail(error.to_string()))?;
        drop(arguments);
        // SAFETY: as above, each is ours.
        let results: Vec<Tensor> = raw.into_iter().map(|pointer| unsafe { Tensor::from_ptr(pointer) }).collect();
        for (index, (result, expected)) in results.iter().zip(returned).enumerate() {
            compare(result, expected).map_err(|problem| fail(format!("result {index} {problem}")))?;
        }
        Ok(results)
    }
}

impl Drop for CompiledFunction {
    fn drop(&mut self) {
        // SAFETY: the function that `load` created, freed once.
        unsafe { ffi::sw_compiled_free(self.raw) }
    }
}

/// A file that exists in memory only, and a path to it that works while it is open. libtorch and the dynamic linker read files.
fn unnamed_file(bytes: &[u8]) -> std::io::Result<(File, CString)> {
    let mut file = File::from(memfd_create("shardwise", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("digits have no zero byte");
    Ok((file, path))
}

/// Compares a tensor with what is expected in its place.
fn compare(tensor: &Tensor, expected: &TensorType) -> std::result::Result<(), String> {
    let (shape, kind) = (tensor.size(), tensor.kind());
    if shape != expected.shape || kind != expected.kind {
        return Err(format!(
            "is {kind:?} of shape {shape:?}, but the code was compiled for {:?} of shape {:?}",
            expected.kind, expected.shape
        ));
    }
    if tensor.device() != tch::Device::Cpu {
        return Err(format!("is on {:?}, but the code was compiled for the CPU", tensor.device()));
    }
    match tensor.is_contiguous() {
        true => Ok(()),
        false => Err(format!("of shape {shape:?} is not contiguous; its strides are {:?}", tensor.stride())),
    }
}

/// The names in the central directory of a zip file; `None` if it is not one. Zip64 is not needed for code.
fn zip_entries(bytes: &[u8]) -> Option<Vec<String>> {
    let short = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?) as usize);
    let long = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize);
    let end = bytes.len().checked_sub(22)?;
    // A comment of up to 64 KiB may follow the last record.
    let end = (end.saturating_sub(1 << 16)..=end).rev().find(|&at| bytes[at..].starts_with(b"PK\x05\x06"))?;
    let (count, mut at) = (short(end + 10)?, long(end + 16)?);
    let mut names = Vec::new();
    for _ in 0..count {
        if !bytes.get(at..)?.starts_with(b"PK\x01\x02") {
            return None;
        }
        let (name, extra, comment) = (short(at + 28)?, short(at + 30)?, short(at + 32)?);
        names.push(String::from_utf8_lossy(bytes.get(at + 46..at + 46 + name)?).into_owned());
        at += 46 + name + extra + comment;
    }
    Some(names)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_file_without_code_is_refused_before_libtorch_sees_it() {
        let load = |bytes: &[u8]| {
            let signature = Signature { arguments: vec![], results: vec![] };
            CompiledFunction::load("block.pt2", bytes, signature).err().unwrap().to_string()
        };
        assert!(load(b"").contains("block.pt2: it is not a zip file"));
        assert!(load(&[7; 4096]).contains("it is not a zip file"));
        let sources = zip(&["data/aotinductor/model/a.cpp"]);
        assert_eq!(zip_entries(&sources).unwrap(), ["data/aotinductor/model/a.cpp"]);
        assert!(load(&sources).contains("it has no compiled code"));
        // A directory that points outside of the file.
        let mut cut = sources;
        let end = cut.len() - 6;
        cut[end..end + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(load(&cut).contains("it is not a zip file"));
    }

    /// A zip file's directory, without files.
    fn zip(names: &[&str]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for name in names {
            let mut record = vec![0; 46];
            record[..4].copy_from_slice(b"PK\x01\x02");
            record[28..30].copy_from_slice(&(name.len() as u16).to_le_bytes());
            bytes.extend(record);
            bytes.extend(name.as_bytes());
        }
        let mut end = vec![0; 22];
        end[..4].copy_from_slice(b"PK\x05\x06");
        end[10..12].copy_from_slice(&(names.len() as u16).to_le_bytes());
        bytes.extend(end);
        bytes
    }
}
