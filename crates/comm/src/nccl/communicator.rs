//! NCCL's communicators, and the calls on them.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result as cuda, sys as cuda_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use shardwise_plan::{Dtype, Partition};
use shardwise_torch::Block;
use shardwise_torch::tch::Device;

use super::event::{Context, CudaResult, explain};
use crate::ReduceOp;
use crate::transport::Operation;

/// Makes the calls on a communicator. NCCL allows one at a time.
pub(super) struct Communicator(Handle);

/// What may be done to a communicator on any thread, while another thread makes a call.
#[derive(Clone)]
pub(super) struct Handle {
    comm: nccl_sys::ncclComm_t,
    /// The stream of its calls.
    stream: cuda_sys::CUstream,
    /// Whether it was destroyed or aborted.
    is_gone: Arc<Mutex<bool>>,
}
// SAFETY: NCCL allows asking for errors and aborting on any thread, until the communicator is gone. Calls, which it allows one at a time,
// are made by `Communicator` only, around which there is a mutex.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the error of a call that is under way, if there was one.
    pub(super) fn check(&self) -> CudaResult<()> {
        let is_gone = self.lock();
        if *is_gone {
            return Ok(());
        }
        let mut state = nccl_sys::ncclResult_t::ncclSuccess;
        // SAFETY: a live communicator; `state` is written.
        unsafe { nccl_sys::ncclCommGetAsyncError(self.comm, &mut state) };
        state.result().map(drop).map_err(|error| explain_nccl("a call", &error))
    }

    /// Ends the calls that are under way on this rank. Their results are not to be used. Calls that have not been made yet fail from now on.
    /// `wait_for_calls` waits for threads that are just making one, unless they are stuck: then NCCL wakes them up.
    pub(super) fn abort(&self, wait_for_calls: impl FnOnce()) {
        if !std::mem::replace(&mut *self.lock(), true) {
            wait_for_calls();
            // SAFETY: a live communicator, aborted once. There is nobody to report an error to.
            let _ = unsafe { nccl_sys::ncclCommAbort(self.comm) };
        }
    }

    /// Frees the communicator, which must have no calls under way. NCCL may wait for the other ranks to do the same; this does not.
    pub(super) fn destroy(self, context: Context) {
        let destroy = move || {
            let _ = context.enter();
            if !std::mem::replace(&mut *self.lock(), true) {
                // SAFETY: a live communicator and its stream, of which nobody makes use any more. There is nobody to report an error to.
                unsafe {
                    let _ = nccl::comm_destroy(self.comm);
                    let _ = cuda::stream::destroy(self.stream);
                }
            }
        };
        drop(std::thread::Builder::new().name("nccl destroy".to_string()).spawn(destroy));
    }
}

impl Communicator {
    /// Connects the ranks that got the same id. All of them must call this.
    pub(super) fn connect(id: nccl_sys::ncclUniqueId, rank: usize, size: usize) -> CudaResult<Self> {
        let stream = cuda::stream::create(cuda::stream::StreamKind::NonBlocking).map_err(explain)?;
        let mut comm = MaybeUninit::uninit();
        // SAFETY: the id is the one that the first rank created; `comm` is written if the call succeeds.
        let comm = unsafe {
            nccl::comm_init_rank(comm.as_mut_ptr(), int(size), id, int(rank))
                .map_err(|error| explain_nccl("ncclCommInitRank", &error))?;
            comm.assume_init()
        };
        Ok(Communicator(Handle { comm, stream, is_gone: Arc::default() }))
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.0
    }

    pub(super) fn stream(&self) -> cuda_sys::CUstream {
        self.0.stream
    }

    /// Queues a call. `padded` is for those that need it.
    ///
    /// # Safety
    /// The addresses are on the device, and stay valid until the stream has completed this call. CUDA's context is current.
    pub(super) unsafe fn call(
        &self,
        dtype: Dtype,
        operation: &Operation,
        rank: usize,
        size: usize,
        padded: Option<&Padded>,
    ) -> CudaResult<()> {
        if *self.0.lock() {
            return Err("the communicator was aborted".to_string());
        }
        // SAFETY: the caller's promise.
        unsafe {
            match (operation, padded) {
                (Operation::AllGather { part, whole, partition }, Some(padded)) => {
                    self.copy(*part, padded.slot(rank), partition.part_len(rank) * dtype.bytes())?;
                    self.all_gather(dtype, padded.slot(rank), padded.slot(0), padded.slot_len)?;
                    (0..size).try_for_each(|other| {
                        let (to, len) = (at(*whole, partition.range(other).start, dtype), partition.part_len(other));
                        self.copy(padded.slot(other), to.cast_mut().cast(), len * dtype.bytes())
                    })
                }
                (Operation::ReduceScatter { whole, part, partition, reduce, .. }, Some(padded)) => {
                    (0..size).try_for_each(|other| {
                        let (from, len) = (at(*whole, partition.range(other).start, dtype), partition.part_len(other));
                        self.copy(from.cast(), padded.slot(other), len * dtype.bytes())
                    })?;
                    self.reduce_scatter(dtype, padded.slot(0), padded.slot(rank), padded.slot_len, *reduce)?;
                    self.copy(padded.slot(rank), *part, partition.part_len(rank) * dtype.bytes())
                }
                (Operation::AllGather { part, whole, partition }, None) => {
                    self.all_gather(dtype, *part, *whole, partition.part_len(0))
                }
                (Operation::ReduceScatter { whole, part, partition, reduce, .. }, None) => {
                    self.reduce_scatter(dtype, *whole, *part, partition.part_len(0), *reduce)
                }
                (other, _) => self.call_unpadded(dtype, other, size).map_err(|error| explain_nccl("NCCL", &error)),
            }
        }
    }

    unsafe fn all_gather(&self, dtype: Dtype, part: *const u8, whole: *mut u8, len: usize) -> CudaResult<()> {
        let (comm, stream) = (self.0.comm, self.0.stream.cast());
        // SAFETY: the caller's promise.
        let queued = unsafe { nccl::all_gather(part.cast(), whole.cast(), len, nccl_type(dtype), comm, stream) };
        queued.map(drop).map_err(|error| explain_nccl("ncclAllGather", &error))
    }

    unsafe fn reduce_scatter(
        &self,
        dtype: Dtype,
        whole: *const u8,
        part: *mut u8,
        len: usize,
        reduce: ReduceOp,
    ) -> CudaResult<()> {
        let (comm, stream, op) = (self.0.comm, self.0.stream.cast(), nccl_reduction(reduce));
        // SAFETY: the caller's promise.
        let queued =
            unsafe { nccl::reduce_scatter(whole.cast(), part.cast(), len, nccl_type(dtype), op, comm, stream) };
        queued.map(drop).map_err(|error| explain_nccl("ncclReduceScatter", &error))
    }

    /// Queues a copy within the device.
    unsafe fn copy(&self, from: *const u8, to: *mut u8, bytes: usize) -> CudaResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { cuda::memcpy_dtod_async(to as u64, from as u64, bytes, self.0.stream) }.map_err(explain)
    }

    unsafe fn call_unpadded(
        &self,
        dtype: Dtype,
        operation: &Operation,
        size: usize,
    ) -> std::result::Result<(), nccl::NcclError> {
        let kind = nccl_type(dtype);
        let (comm, stream) = (self.0.comm, self.0.stream.cast());
        // SAFETY: the caller's promise; lengths were checked by `Group`.
        unsafe {
            match operation {
                Operation::AllReduce { buffer, partition, reduce } => {
                    let op = nccl_reduction(*reduce);
                    nccl::all_reduce(buffer.cast(), buffer.cast(), partition.len(), kind, op, comm, stream)?;
                }
                Operation::AllToAll { send, sends, receive, receives } => {
                    with_nccl_group(|| {
                        (0..size).try_for_each(|peer| {
                            let (from, to) = (sends.range(peer), receives.range(peer));
                            nccl::send(at(*send, from.start, dtype), from.len(), kind, int(peer), comm, stream)?;
                            let received = at(*receive, to.start, dtype).cast_mut();
                            nccl::recv(received, to.len(), kind, int(peer), comm, stream).map(drop)
                        })
                    })?;
                }
                Operation::Broadcast { buffer, len, root } => {
                    nccl::broadcast(buffer.cast(), buffer.cast(), *len, kind, int(*root), comm, stream)?;
                }
                Operation::Send { buffer, len, to } => {
                    nccl::send(buffer.cast(), *len, kind, int(*to), comm, stream)?;
                }
                Operation::Receive { buffer, len, from } => {
                    nccl::recv(buffer.cast(), *len, kind, int(*from), comm, stream)?;
                }
                Operation::AllGather { .. } | Operation::ReduceScatter { .. } => {
                    unreachable!("these have functions of their own")
                }
                Operation::Barrier => unreachable!("barriers use the control group"),
            }
        }
        Ok(())
    }
}

/// Device memory for a call whose parts differ in length, with a slot of the greatest length for each rank. NCCL's collectives need parts
/// of equal length.
pub(super) struct Padded {
    block: Block,
    slot_len: usize,
    slot_bytes: usize,
}

impl Padded {
    /// Allocates what an operation needs, if it needs anything.
    pub(super) fn new(operation: &Operation, dtype: Dtype, size: usize, device: Device) -> CudaResult<Option<Self>> {
        let partition: Partition = match operation {
            Operation::AllGather { partition, .. } | Operation::ReduceScatter { partition, .. } => *partition,
            _ => return Ok(None),
        };
        if partition.is_even() {
            return Ok(None);
        }
        let slot_len = (0..size).map(|rank| partition.part_len(rank)).max().unwrap_or(0);
        let block = Block::new(dtype, size * slot_len, device).map_err(|error| error.to_string())?;
        Ok(Some(Padded { block, slot_len, slot_bytes: slot_len * dtype.bytes() }))
    }

    fn slot(&self, rank: usize) -> *mut u8 {
        self.block.as_ptr().wrapping_add(rank * self.slot_bytes)
    }
}

fn at(data: *const u8, element: usize, dtype: Dtype) -> *const c_void {
    data.wrapping_add(element * dtype.bytes()).cast()
}

pub(super) fn explain_nccl(function: &str, error: &nccl::NcclError) -> String {
    format!("{function} failed: {:?}", error.0)
}

/// Queues several calls as one NCCL group. Always ends the group, because an open one would swallow all later calls.
fn with_nccl_group(
    calls: impl FnOnce() -> std::result::Result<(), nccl::NcclError>,
) -> std::result::Result<(), nccl::NcclError> {
    nccl::group_start()?;
    let queued = calls();
    let ended = nccl::group_end();
    queued.and(ended.map(drop))
}

pub(super) fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("ranks and devices are far below 2³¹")
}

fn nccl_type(dtype: Dtype) -> nccl_sys::ncclDataType_t {
    match dtype {
        Dtype::F64 => nccl_sys::ncclDataType_t::ncclFloat64,
        Dtype::F32 => nccl_sys::ncclDataType_t::ncclFloat32,
        Dtype::Bf16 => nccl_sys::ncclDataType_t::ncclBfloat16,
        Dtype::F16 => nccl_sys::ncclDataType_t::ncclFloat16,
        Dtype::I64 => nccl_sys::ncclDataType_t::ncclInt64,
        Dtype::U8 => nccl_sys::ncclDataType_t::ncclUint8,
    }
}

fn nccl_reduction(reduce: ReduceOp) -> nccl_sys::ncclRedOp_t {
    match reduce {
        ReduceOp::Sum => nccl_sys::ncclRedOp_t::ncclSum,
        ReduceOp::Mean => nccl_sys::ncclRedOp_t::ncclAvg,
        ReduceOp::Max => nccl_sys::ncclRedOp_t::ncclMax,
    }
}
