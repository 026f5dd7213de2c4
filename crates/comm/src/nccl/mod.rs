//! Groups of GPU ranks over NCCL (cargo feature `nccl`).
//!
//! Each group queues its NCCL calls on its own CUDA stream. Events order that stream and libtorch's: a call starts after the
//! work that libtorch had queued before it, and work that libtorch queues after [`Pending::wait`](crate::Pending) starts after
//! the call. The host blocks on neither.
//!
//! Initialization and subgroups use an underlying group of CPU ranks ([`connect`]), which broadcasts NCCL's unique id. NCCL
//! sums in its own order and in the payload's dtype, so the crate's note on deterministic reductions holds between runs on the
//! same machines, but not between NCCL and MPI.
//!
//! Status: this code compiles, links and loads NCCL. It has not run yet, for lack of a GPU.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result as cuda, sys as cuda_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use shardwise_plan::{Dtype, RankSet};
use shardwise_torch::tch::Device;

use crate::pending::{Buffers, Completion};
use crate::transport::{Job, Operation, Transport};
use crate::{Error, Group, ReduceOp, Result};

/// Returns the version of the loaded NCCL library, as in `2.29.7`.
pub fn library_version() -> Result<String> {
    require_library("NCCL", "libnccl.so", has_nccl())?;
    let code = nccl::get_nccl_version().map_err(|error| Error::Setup(explain("ncclGetVersion", &error)))?;
    Ok(format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100))
}

/// Creates a group for buffers on GPU `device`, with the same ranks as `control`, a group of CPU ranks.
pub fn connect(control: Group, device: usize) -> Result<Group> {
    require_library("the CUDA driver", "libcuda.so.1", has_cuda())?;
    require_library("NCCL", "libnccl.so", has_nccl())?;
    let transport = Arc::new(NcclGroup::connect(control, device)?);
    Ok(transport.control.over("gpu", transport.clone()))
}

fn has_nccl() -> bool {
    // SAFETY: opens a library of that name, if one exists.
    unsafe { nccl_sys::is_culib_present() }
}

fn has_cuda() -> bool {
    // SAFETY: as above.
    unsafe { cuda_sys::is_culib_present() }
}

/// Returns an error if a library is missing; the bindings would panic.
fn require_library(what: &str, file: &str, present: bool) -> Result<()> {
    match present {
        true => Ok(()),
        false => Err(Error::Setup(format!(
            "{what} was not found: {file} is not on the library path; run `shardwise doctor` to see what to install"
        ))),
    }
}

fn explain(function: &str, error: &nccl::NcclError) -> String {
    format!("{function} failed: {:?}", error.0)
}

struct NcclGroup {
    control: Group,
    device: usize,
    context: Context,
    /// NCCL allows only one call at a time on a communicator.
    communicator: Mutex<Communicator>,
}

#[derive(Clone, Copy)]
struct Context(cuda_sys::CUcontext);
// SAFETY: a primary context may be made current on any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes this context current on this thread.
    fn enter(&self) -> std::result::Result<(), String> {
        // SAFETY: the context was retained, and is never released.
        unsafe { cuda::ctx::set_current(self.0) }.map_err(|error| format!("{error:?}"))
    }
}

struct Communicator {
    comm: nccl_sys::ncclComm_t,
    stream: cuda_sys::CUstream,
}
// SAFETY: the handles may be used from any thread, one at a time, which the mutex around them guarantees.
unsafe impl Send for Communicator {}

impl NcclGroup {
    fn connect(control: Group, device: usize) -> Result<Self> {
        let setup = |what: &str, error: &dyn std::fmt::Debug| {
            Error::Setup(format!("{what} for GPU {device} in group '{}' failed: {error:?}", control.name()))
        };
        // If the first rank has no id, it broadcasts zeros, so that the others fail as well instead of waiting for it.
        let mut id = vec![0u8; size_of::<nccl_sys::ncclUniqueId>()];
        let own = (control.rank() == 0).then(nccl::get_uniqueid).transpose();
        if let Ok(Some(own)) = &own {
            id.iter_mut().zip(own.internal).for_each(|(byte, own)| *byte = own.cast_unsigned());
        }
        let id = control.broadcast("nccl id", 0, id).wait()?;
        own.map_err(|error| setup("creating an NCCL id", &error.0))?;
        if id.iter().all(|byte| *byte == 0) {
            return Err(setup("creating an NCCL id", &"see the error of the group's first rank"));
        }
        let mut unique = nccl_sys::ncclUniqueId { internal: [0; 128] };
        unique.internal.iter_mut().zip(id).for_each(|(target, byte)| *target = byte.cast_signed());

        cuda::init().map_err(|error| setup("starting CUDA", &error))?;
        let ordinal = cuda::device::get(int(device)).map_err(|error| setup("finding the device", &error))?;
        // SAFETY: CUDA has just returned the device; the primary context is the one that libtorch uses.
        let context = unsafe {
            let context = cuda::primary_ctx::retain(ordinal).map_err(|error| setup("opening the device", &error))?;
            cuda::ctx::set_current(context).map_err(|error| setup("opening the device", &error))?;
            Context(context)
        };
        let stream = cuda::stream::create(cuda::stream::StreamKind::NonBlocking)
            .map_err(|error| setup("creating a stream", &error))?;
        let mut comm = MaybeUninit::uninit();
        // SAFETY: the id is the one that rank 0 created; `comm` is written if the call succeeds.
        let comm = unsafe {
            nccl::comm_init_rank(comm.as_mut_ptr(), int(control.size()), unique, int(control.rank()))
                .map_err(|error| setup("connecting NCCL", &error.0))?;
            comm.assume_init()
        };
        Ok(NcclGroup { control, device, context, communicator: Mutex::new(Communicator { comm, stream }) })
    }

    /// Queues a call behind libtorch's queued work, and returns the event that marks its completion.
    fn queue(&self, job: &Job) -> std::result::Result<Event, String> {
        let torch = self.torch_stream()?;
        let communicator = self.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.enter()?;
        // SAFETY: the streams and events are live and belong to the current context.
        unsafe {
            let ready = Event::record(torch)?;
            let held = ready.block_stream(communicator.stream);
            let _ = cuda::event::destroy(ready.0);
            held?;
            communicator
                .call(job.call.dtype, &job.operation, self.control.rank(), self.control.size())
                .map_err(|error| explain("NCCL", &error))?;
            communicator.check()?;
            Event::record(communicator.stream)
        }
    }

    fn torch_stream(&self) -> std::result::Result<cuda_sys::CUstream, String> {
        shardwise_torch::cuda::current_stream(self.device).map(<*mut c_void>::cast).map_err(|error| error.to_string())
    }
}

impl Transport for NcclGroup {
    fn device(&self) -> Device {
        Device::Cuda(self.device)
    }

    fn start(&self, job: Job) -> Completion {
        job.handle.mark_started();
        if matches!(job.operation, Operation::Barrier) {
            let barrier = self.control.barrier(&job.call.label);
            return Box::new(move || {
                let result = barrier.wait();
                job.handle.mark_ended(&result);
                result.map(|()| job.buffers)
            });
        }
        let queued = self.queue(&job);
        let call = job.call.clone();
        let Ok(end) = queued else {
            // Part of the call may be queued, and the GPU may still write to the buffers.
            std::mem::forget(job.buffers);
            let result = queued.map(drop).map_err(|message| Error::Transport { call: Box::new(call), message });
            job.handle.mark_ended(&result);
            return Box::new(move || Err(result.err().unwrap_or(Error::Stopped)));
        };
        let running = RunningBuffers { buffers: Some(job.buffers), end: Some(end) };
        let (device, context, handle) = (self.device, self.context, job.handle);
        Box::new(move || {
            let result = shardwise_torch::cuda::current_stream(device)
                .map_err(|error| error.to_string())
                .and_then(|torch| {
                    context.enter()?;
                    // SAFETY: the event and libtorch's stream are live, and their context is current on the waiting thread.
                    unsafe { end.block_stream(torch.cast()) }
                })
                .map_err(|message| Error::Transport { call: Box::new(call), message });
            handle.mark_ended(&result);
            result.map(|()| running.release())
        })
    }

    fn split(&self, ranks: RankSet, _: &Arc<str>) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(NcclGroup::connect(self.control.subgroup("gpu", ranks)?, self.device)?))
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        let communicator = self.communicator.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: nobody else has these handles. There is nobody to report an error to.
        unsafe {
            let _ = nccl::comm_destroy(communicator.comm);
            let _ = cuda::stream::destroy(communicator.stream);
        }
    }
}

/// The buffers of a running call. Dropping them early waits for the GPU first.
struct RunningBuffers {
    buffers: Option<Buffers>,
    end: Option<Event>,
}

impl RunningBuffers {
    /// Returns the buffers. The caller's stream must already wait for the call.
    fn release(mut self) -> Buffers {
        self.buffers.take().expect("the buffers are taken once")
    }
}

impl Drop for RunningBuffers {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            // SAFETY: a live event, destroyed once.
            unsafe {
                if self.buffers.is_some() {
                    let _ = cuda::event::synchronize(end.0);
                }
                let _ = cuda::event::destroy(end.0);
            }
        }
    }
}

/// A CUDA event: a point in a stream's work.
#[derive(Clone, Copy)]
struct Event(cuda_sys::CUevent);
// SAFETY: a handle that may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// # Safety
    /// `stream` is alive.
    unsafe fn record(stream: cuda_sys::CUstream) -> std::result::Result<Self, String> {
        let event = cuda::event::create(cuda_sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|error| format!("{error:?}"))?;
        // SAFETY: the caller's promise, and the event was just created.
        unsafe { cuda::event::record(event, stream) }.map_err(|error| format!("{error:?}"))?;
        Ok(Event(event))
    }

    /// Makes `stream` wait for this event.
    ///
    /// # Safety
    /// The event and the stream are alive.
    unsafe fn block_stream(self, stream: cuda_sys::CUstream) -> std::result::Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { cuda::stream::wait_event(stream, self.0, cuda_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .map_err(|error| format!("{error:?}"))
    }
}

impl Communicator {
    /// # Safety
    /// The addresses of `operation` are on the device, and stay valid until the stream has completed this call.
    unsafe fn call(
        &self,
        dtype: Dtype,
        operation: &Operation,
        rank: usize,
        size: usize,
    ) -> std::result::Result<(), nccl::NcclError> {
        let kind = nccl_type(dtype);
        let (comm, stream) = (self.comm, self.stream.cast());
        let at = |data: *const u8, element: usize| data.wrapping_add(element * dtype.bytes()).cast::<c_void>();
        // SAFETY: the caller's promise; lengths were checked by `Group`.
        unsafe {
            match operation {
                Operation::AllGather { part, whole, partition } if partition.is_even() => {
                    nccl::all_gather(at(*part, 0), whole.cast(), partition.part_len(0), kind, comm, stream)?;
                }
                Operation::AllGather { part, whole, partition } => {
                    with_nccl_group(|| {
                        (0..size).try_for_each(|root| {
                            let range = partition.range(root);
                            let from = if root == rank { at(*part, 0) } else { at(*whole, range.start) };
                            let to = at(*whole, range.start).cast_mut();
                            nccl::broadcast(from, to, range.len(), kind, int(root), comm, stream).map(drop)
                        })
                    })?;
                }
                Operation::ReduceScatter { whole, part, partition, reduce } if partition.is_even() => {
                    let (op, len) = (nccl_reduction(*reduce), partition.part_len(0));
                    nccl::reduce_scatter(at(*whole, 0), part.cast(), len, kind, op, comm, stream)?;
                }
                Operation::ReduceScatter { whole, part, partition, reduce } => {
                    with_nccl_group(|| {
                        (0..size).try_for_each(|root| {
                            let (range, op) = (partition.range(root), nccl_reduction(*reduce));
                            nccl::reduce(
                                at(*whole, range.start),
                                part.cast(),
                                range.len(),
                                kind,
                                op,
                                int(root),
                                comm,
                                stream,
                            )
                            .map(drop)
                        })
                    })?;
                }
                Operation::AllReduce { buffer, partition, reduce } => {
                    let op = nccl_reduction(*reduce);
                    nccl::all_reduce(at(*buffer, 0), buffer.cast(), partition.len(), kind, op, comm, stream)?;
                }
                Operation::AllToAll { send, sends, receive, receives } => {
                    with_nccl_group(|| {
                        (0..size).try_for_each(|peer| {
                            let (from, to) = (sends.range(peer), receives.range(peer));
                            nccl::send(at(*send, from.start), from.len(), kind, int(peer), comm, stream)?;
                            nccl::recv(at(*receive, to.start).cast_mut(), to.len(), kind, int(peer), comm, stream)
                                .map(drop)
                        })
                    })?;
                }
                Operation::Broadcast { buffer, len, root } => {
                    nccl::broadcast(at(*buffer, 0), buffer.cast(), *len, kind, int(*root), comm, stream)?;
                }
                Operation::Send { buffer, len, to } => {
                    nccl::send(at(*buffer, 0), *len, kind, int(*to), comm, stream)?;
                }
                Operation::Receive { buffer, len, from } => {
                    nccl::recv(buffer.cast(), *len, kind, int(*from), comm, stream)?;
                }
                Operation::Barrier => unreachable!("barriers use the control group"),
            }
        }
        Ok(())
    }

    /// Returns the asynchronous error of an earlier call, if there was one.
    fn check(&self) -> std::result::Result<(), String> {
        let mut state = nccl_sys::ncclResult_t::ncclSuccess;
        // SAFETY: a live communicator; `state` is written.
        unsafe { nccl_sys::ncclCommGetAsyncError(self.comm, &mut state) };
        state.result().map(drop).map_err(|error| explain("an earlier NCCL call", &error))
    }
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

fn int(value: usize) -> c_int {
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
