//! The shim's C interface, as declared in `shim/shim.h`.

use std::ffi::{c_char, c_int, c_void};

pub(crate) type Message = *mut c_char;

/// An `at::Tensor`, the target of `tch`'s tensor pointers.
pub(crate) type Tensor = torch_sys::C_tensor;

#[repr(C)]
pub(crate) struct Block {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Stream {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Event {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct CompiledFunction {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Access {
    pub(crate) data: *mut c_void,
    pub(crate) tensor_owners: usize,
    pub(crate) storage_owners: usize,
    pub(crate) contiguous: bool,
    pub(crate) cpu: bool,
}

/// The memory of a device, as libtorch and the driver see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct DeviceMemory {
    /// Not in use by any process.
    pub free_bytes: usize,
    /// What the device has.
    pub total_bytes: usize,
    /// In use by this process's tensors.
    pub allocated_bytes: usize,
    /// The most that was in use by tensors since the start, or since [`reset_peak`](crate::device::reset_peak).
    pub peak_bytes: usize,
    /// Held by libtorch: in use by tensors, or kept for later ones.
    pub reserved_bytes: usize,
    /// How often memory has been asked for.
    pub allocations: usize,
}

/// What libtorch was asked to do. The counts do not depend on how fast a device is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct OperatorCounts {
    /// Calls of the dispatcher, also those that an operator makes itself.
    pub operators: u64,
    /// How often the host waited for a device.
    pub host_waits: u64,
    /// Copies from the host to a device.
    pub to_device: u64,
    /// Copies from a device to the host.
    pub to_host: u64,
}

pub(crate) type Backward = unsafe extern "C" fn(
    closure: *mut c_void,
    grads: *mut *mut Tensor,
    grad_count: usize,
    saved: *mut *mut Tensor,
    saved_count: usize,
    results: *mut *mut Tensor,
    result_count: usize,
) -> Message;
pub(crate) type Drop = unsafe extern "C" fn(closure: *mut c_void);

unsafe extern "C" {
    pub(crate) fn sw_message_new(text: *const c_char, length: usize) -> Message;
    pub(crate) fn sw_message_free(message: Message);
    pub(crate) fn sw_torch_version() -> *const c_char;
    pub(crate) fn sw_malloc_bytes() -> usize;
    pub(crate) fn sw_memory_take_peak() -> usize;
    pub(crate) fn sw_memory_keep();

    pub(crate) fn sw_block_new(device_type: i8, device_index: i8, bytes: usize, out: *mut *mut Block) -> Message;
    pub(crate) fn sw_block_zeros(bytes: usize, out: *mut *mut Block) -> Message;
    pub(crate) fn sw_block_map(file: c_int, start: u64, bytes: usize, out: *mut *mut Block) -> Message;
    pub(crate) fn sw_block_free(block: *mut Block);
    pub(crate) fn sw_block_data(block: *mut Block) -> *mut c_void;
    pub(crate) fn sw_block_bytes(block: *const Block) -> usize;
    pub(crate) fn sw_block_device_type(block: *const Block) -> i8;
    pub(crate) fn sw_block_device_index(block: *const Block) -> i8;

    pub(crate) fn sw_storage_take(tensor: *mut Tensor, reason: *const c_char, out: *mut *mut Block) -> Message;
    pub(crate) fn sw_storage_put(tensor: *mut Tensor, block: *mut Block) -> Message;
    pub(crate) fn sw_block_into_tensor(tensor: *mut Tensor, block: *mut Block, len: i64) -> Message;
    pub(crate) fn sw_storage_is_taken(tensor: *const Tensor, out: *mut bool) -> Message;
    pub(crate) fn sw_storage_bytes(tensor: *const Tensor, out: *mut usize) -> Message;
    pub(crate) fn sw_tensor_access(tensor: *mut Tensor, out: *mut Access) -> Message;

    pub(crate) fn sw_has_device(device_type: i8) -> bool;
    pub(crate) fn sw_device_load_cuda() -> Message;
    pub(crate) fn sw_device_count(device_type: i8) -> usize;
    pub(crate) fn sw_stream_new(device_type: i8, device_index: i8, out: *mut *mut Stream) -> Message;
    pub(crate) fn sw_stream_current(device_type: i8, device_index: i8, out: *mut *mut Stream) -> Message;
    pub(crate) fn sw_stream_free(stream: *mut Stream);
    pub(crate) fn sw_stream_handle(stream: *const Stream, out: *mut *mut c_void) -> Message;
    pub(crate) fn sw_stream_make_current(stream: *const Stream) -> Message;
    pub(crate) fn sw_stream_wait_for(stream: *const Stream, other: *const Stream) -> Message;
    pub(crate) fn sw_stream_synchronize(stream: *const Stream) -> Message;
    pub(crate) fn sw_stream_record(stream: *const Stream, tensor: *const Tensor) -> Message;
    pub(crate) fn sw_event_new(stream: *const Stream, out: *mut *mut Event) -> Message;
    pub(crate) fn sw_event_free(event: *mut Event);
    pub(crate) fn sw_stream_wait_for_event(stream: *const Stream, event: *const Event) -> Message;
    pub(crate) fn sw_event_synchronize(event: *const Event) -> Message;
    pub(crate) fn sw_pinned_bytes(bytes: usize, out: *mut *mut Tensor) -> Message;
    pub(crate) fn sw_tensor_copy_async(to: *mut Tensor, from: *const Tensor) -> Message;
    pub(crate) fn sw_tensor_pin(tensor: *mut Tensor) -> Message;
    pub(crate) fn sw_tensor_read(tensor: *const Tensor, to: *mut c_void, bytes: usize) -> Message;
    pub(crate) fn sw_device_memory(device_type: i8, device_index: i8, out: *mut DeviceMemory) -> Message;
    pub(crate) fn sw_use_deterministic_algorithms(warn_only: bool) -> Message;
    pub(crate) fn sw_device_reset_peak(device_type: i8, device_index: i8) -> Message;
    pub(crate) fn sw_copy_bytes(
        from_type: i8,
        from_index: i8,
        from: *const c_void,
        to_type: i8,
        to_index: i8,
        to: *mut c_void,
        bytes: usize,
    ) -> Message;

    pub(crate) fn sw_count_start(handle: *mut u64) -> Message;
    pub(crate) fn sw_count_stop(handle: u64, out: *mut OperatorCounts);

    pub(crate) fn sw_flash_attention(
        query: *const Tensor,
        key: *const Tensor,
        value: *const Tensor,
        boundaries: *const Tensor,
        longest: i64,
        window: i64,
        out: *mut *mut Tensor,
    ) -> Message;

    pub(crate) fn sw_function(
        inputs: *mut *mut Tensor,
        input_count: usize,
        outputs: *mut *mut Tensor,
        output_count: usize,
        saved: *mut *mut Tensor,
        saved_count: usize,
        closure: *mut c_void,
        backward: Backward,
        drop: Drop,
    ) -> Message;
    pub(crate) fn sw_grad(
        outputs: *mut *mut Tensor,
        grad_outputs: *mut *mut Tensor,
        output_count: usize,
        inputs: *mut *mut Tensor,
        input_count: usize,
        retain_graph: bool,
        results: *mut *mut Tensor,
    ) -> Message;

    pub(crate) fn sw_compiled_provide_libtorch(stub: *const c_char) -> Message;
    pub(crate) fn sw_compiled_load(path: *const c_char, out: *mut *mut CompiledFunction) -> Message;
    pub(crate) fn sw_compiled_free(function: *mut CompiledFunction);
    pub(crate) fn sw_compiled_run(
        function: *mut CompiledFunction,
        arguments: *mut *mut Tensor,
        argument_count: usize,
        results: *mut *mut Tensor,
        result_count: usize,
    ) -> Message;

    pub(crate) fn sw_fused_adamw(
        parameters: *mut *mut Tensor,
        grads: *mut *mut Tensor,
        first_moments: *mut *mut Tensor,
        second_moments: *mut *mut Tensor,
        steps: *mut *mut Tensor,
        count: usize,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
    ) -> Message;
}

/// Collects raw pointers to tensors. The tensors must outlive every use of the pointers.
pub(crate) fn pointers<'a>(tensors: impl IntoIterator<Item = &'a tch::Tensor>) -> Vec<*mut Tensor> {
    tensors.into_iter().map(|tensor| tensor.as_ptr().cast_mut()).collect()
}
