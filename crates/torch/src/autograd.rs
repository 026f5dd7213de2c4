//! Custom autograd functions written as Rust closures, and gradients for given output gradients.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;

use crate::error::check;
use crate::{Error, Result, ffi};

/// An error returned by a closure.
pub type ClosureError = Box<dyn std::error::Error + Send + Sync>;

/// The result of a forward closure.
pub struct Forward {
    /// The function's outputs.
    pub outputs: Vec<Tensor>,
    /// Inputs and outputs that the backward closure needs (PyTorch: `ctx.save_for_backward`). Autograd keeps them, with its
    /// version checks. A closure that captured an output instead would create a reference cycle with the graph.
    pub saved: Vec<Tensor>,
}

/// The arguments of a backward closure.
pub struct Backward {
    /// The gradient of each output; `None` if the loss does not depend on it.
    pub grads: Vec<Option<Tensor>>,
    /// The tensors that the forward closure saved.
    pub saved: Vec<Tensor>,
}

/// Applies a function with a custom backward pass to `inputs` (PyTorch: `torch.autograd.Function`).
///
/// `forward` runs immediately, under `no_grad`. `backward` belongs to the autograd graph: it runs in every backward pass
/// through the graph, and is dropped with the graph. It returns one gradient, or `None`, per input. An error or a panic in it
/// ends the backward pass with an error that contains `name`.
///
/// ```
/// use shardwise_torch::{autograd, tch::{Kind, Tensor}};
///
/// let x = Tensor::from_slice(&[1f32, 2., 3.]).set_requires_grad(true);
/// let y = autograd::function(
///     "square",
///     &[&x],
///     |inputs| Ok(autograd::Forward { outputs: vec![inputs[0].square()], saved: vec![inputs[0].shallow_clone()] }),
///     |back| Ok(vec![back.grads[0].as_ref().map(|grad| grad * 2. * &back.saved[0])]),
/// )?;
/// y[0].sum(Kind::Float).backward();
/// assert_eq!(Vec::<f32>::try_from(x.grad())?, [2., 4., 6.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn function(
    name: &'static str,
    inputs: &[&Tensor],
    forward: impl FnOnce(&[&Tensor]) -> Result<Forward>,
    backward: impl Fn(Backward) -> std::result::Result<Vec<Option<Tensor>>, ClosureError> + Send + 'static,
) -> Result<Vec<Tensor>> {
    let Forward { outputs, saved } = tch::no_grad(|| forward(inputs))?;
    let closure = Box::into_raw(Box::new(Closure { name, backward: Box::new(backward) }));
    let mut input_pointers = ffi::pointers(inputs.iter().copied());
    let mut output_pointers = ffi::pointers(&outputs);
    let mut saved_pointers = ffi::pointers(&saved);
    // SAFETY: the tensors outlive the call. `closure` is a live box that the shim owns from here on, and drops exactly
    // once, even if it fails. The outputs are replaced in place by tensors with a backward node.
    check(unsafe {
        ffi::sw_function(
            input_pointers.as_mut_ptr(),
            input_pointers.len(),
            output_pointers.as_mut_ptr(),
            output_pointers.len(),
            saved_pointers.as_mut_ptr(),
            saved_pointers.len(),
            closure.cast(),
            run_backward,
            drop_closure,
        )
    })?;
    Ok(outputs)
}

/// Whether [`grad`] frees the graph (PyTorch: `retain_graph`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Graph {
    /// Frees the graph and its saved tensors during the backward pass.
    Free,
    /// Keeps the graph for another backward pass.
    Keep,
}

/// Returns the gradients of `outputs`, weighted by `grad_outputs`, with respect to `inputs`; `None` for an input that the
/// outputs do not depend on. A `None` in `grad_outputs` is a weight of one, which is allowed only for an output of one element.
/// Nothing is accumulated into `Tensor::grad` (PyTorch: `torch.autograd.grad`).
pub fn grad(
    outputs: &[&Tensor],
    grad_outputs: &[Option<&Tensor>],
    inputs: &[&Tensor],
    graph: Graph,
) -> Result<Vec<Option<Tensor>>> {
    if outputs.len() != grad_outputs.len() {
        return Err(Error::Count { what: "output gradients", expected: outputs.len(), found: grad_outputs.len() });
    }
    let mut output_pointers = ffi::pointers(outputs.iter().copied());
    let mut grad_pointers: Vec<*mut ffi::Tensor> = grad_outputs
        .iter()
        .map(|grad| grad.map_or(std::ptr::null_mut(), |tensor| tensor.as_ptr().cast_mut()))
        .collect();
    let mut input_pointers = ffi::pointers(inputs.iter().copied());
    let mut results = vec![std::ptr::null_mut(); inputs.len()];
    // SAFETY: lists of live tensors with the given lengths; `results` receives owned tensors if the call succeeds.
    check(unsafe {
        ffi::sw_grad(
            output_pointers.as_mut_ptr(),
            grad_pointers.as_mut_ptr(),
            output_pointers.len(),
            input_pointers.as_mut_ptr(),
            input_pointers.len(),
            graph == Graph::Keep,
            results.as_mut_ptr(),
        )
    })?;
    // SAFETY: as above, each is null or ours.
    Ok(results.into_iter().map(|pointer| unsafe { owned(pointer) }).collect())
}

type BoxedBackward = Box<dyn Fn(Backward) -> std::result::Result<Vec<Option<Tensor>>, ClosureError> + Send>;

struct Closure {
    name: &'static str,
    backward: BoxedBackward,
}

/// # Safety
/// `pointer` is null or a tensor that the caller owns and gives up.
unsafe fn owned(pointer: *mut ffi::Tensor) -> Option<Tensor> {
    // SAFETY: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { Tensor::from_ptr(pointer) })
}

/// A list from C++ as a slice. The address of an empty list may be null.
///
/// # Safety
/// `data` points to `count` pointers that nobody else uses for as long as the slice lives.
unsafe fn list<'a>(data: *mut *mut ffi::Tensor, count: usize) -> &'a mut [*mut ffi::Tensor] {
    match count {
        0 => &mut [],
        // SAFETY: the caller's promise.
        _ => unsafe { std::slice::from_raw_parts_mut(data, count) },
    }
}

/// Called by C++ in the backward pass. Never unwinds: an error or a panic of the closure becomes the returned message.
unsafe extern "C" fn run_backward(
    closure: *mut c_void,
    grads: *mut *mut ffi::Tensor,
    grad_count: usize,
    saved: *mut *mut ffi::Tensor,
    saved_count: usize,
    results: *mut *mut ffi::Tensor,
    result_count: usize,
) -> ffi::Message {
    // SAFETY: the box that `function` passed to the shim, alive until the shim drops it. Autograd holds the node's lock, so
    // no other thread is in here with the same closure.
    let closure = unsafe { &*closure.cast::<Closure>() };
    // SAFETY: the shim passes lists of these lengths, and we own their tensors.
    let (back, results) = unsafe {
        let grads = list(grads, grad_count).iter().map(|&pointer| owned(pointer)).collect();
        let saved = list(saved, saved_count).iter().filter_map(|&pointer| owned(pointer)).collect();
        (Backward { grads, saved }, list(results, result_count))
    };
    // Format the error inside `catch_unwind`, because its `Display` may panic too.
    let outcome = catch_unwind(AssertUnwindSafe(|| (closure.backward)(back).map_err(|error| error.to_string())));
    let failure = match outcome {
        Ok(Ok(given)) if given.len() == results.len() => {
            for (result, tensor) in results.iter_mut().zip(given) {
                *result = tensor.map_or(std::ptr::null_mut(), |tensor| {
                    let pointer = tensor.as_ptr().cast_mut();
                    std::mem::forget(tensor);
                    pointer
                });
            }
            return std::ptr::null_mut();
        }
        Ok(Ok(given)) => format!("returned {} gradients for {} inputs", given.len(), results.len()),
        Ok(Err(error)) => format!("failed: {error}"),
        Err(panic) => {
            let text = format!("panicked: {}", panic_text(panic.as_ref()));
            discard(panic);
            text
        }
    };
    let text = format!("the backward pass of '{}' {failure}", closure.name);
    // SAFETY: a live string of that length.
    unsafe { ffi::sw_message_new(text.as_ptr().cast(), text.len()) }
}

/// Called by C++ when the last owner of the closure is dropped.
unsafe extern "C" fn drop_closure(closure: *mut c_void) {
    // SAFETY: the box that `function` passed to the shim, which calls this once.
    discard(unsafe { Box::from_raw(closure.cast::<Closure>()) });
}

/// Drops a value that came from the closure. If its destructor panics, does not unwind into C++: the panic hook has already
/// printed the panic, and its payload is leaked.
fn discard<T>(value: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        std::mem::forget(panic);
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("with a value that is not text")
}
