//! Groups of GPU ranks over NCCL (cargo feature `nccl`).
//!
//! NCCL's calls are queued on a CUDA stream of the group's own. Events order that stream and libtorch's: a call starts when
//! the work is done that libtorch had queued before it, and what libtorch queues after [`Pending::wait`](crate::Pending)
//! starts when the call is done. The host waits for neither.
//!
//! Start-up and sub-groups are those of the group of CPU ranks underneath ([`over`]): NCCL's id travels by its broadcast.
//! NCCL sums in its own order and in the payload's type; the note on numbers in the crate's documentation holds between
//! runs on the same machines, not between NCCL and MPI.
//!
//! This has been compiled and linked, and its library loaded; it has not run, for want of a GPU.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result as cuda, sys as cuda_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use shardwise_plan::{Dtype, RankSet};
use shardwise_torch::tch::Device;

use crate::pending::{Completion, Luggage};
use crate::transport::{Job, Transport, Work};
use crate::{Error, Group, Reduce, Result};

/// The version of the NCCL library that is loaded, as in `2.29.7`, or why there is none.
pub fn library_version() -> Result<String> {
    look_for("NCCL", "libnccl.so", present_nccl())?;
    let code = nccl::get_nccl_version().map_err(|error| Error::Setup(explained("ncclGetVersion", &error)))?;
    Ok(format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100))
}

/// A group of the same ranks as `control`, a group of CPU ranks, in which each rank moves memory of its GPU `device`.
pub fn over(control: Group, device: usize) -> Result<Group> {
    look_for("the CUDA driver", "libcuda.so.1", present_cuda())?;
    look_for("NCCL", "libnccl.so", present_nccl())?;
    let (ranks, rank, instruments) = (control.ranks(), control.rank(), control.instruments());
    let transport = NcclGroup::connect(control, device)?;
    Ok(Group::new("gpu", ranks, rank, Arc::new(transport), instruments))
}

fn present_nccl() -> bool {
    // SAFETY: opens a library of that name, if there is one.
    unsafe { nccl_sys::is_culib_present() }
}

fn present_cuda() -> bool {
    // SAFETY: as above.
    unsafe { cuda_sys::is_culib_present() }
}

/// The bindings panic where a library is missing, so we look first.
fn look_for(what: &str, file: &str, present: bool) -> Result<()> {
    match present {
        true => Ok(()),
        false => Err(Error::Setup(format!(
            "{what} was not found: {file} is not on the library path; `shardwise doctor` says what to install"
        ))),
    }
}

fn explained(function: &str, error: &nccl::NcclError) -> String {
    format!("{function} failed: {:?}", error.0)
}

struct NcclGroup {
    control: Group,
    device: usize,
    context: Context,
    /// NCCL wants the calls on one communicator one at a time.
    wire: Mutex<Wire>,
}

#[derive(Clone, Copy)]
struct Context(cuda_sys::CUcontext);
// SAFETY: a primary context may be made current on any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes it this thread's.
    fn enter(&self) -> std::result::Result<(), String> {
        // SAFETY: a context that was retained, and is never released.
        unsafe { cuda::ctx::set_current(self.0) }.map_err(|error| format!("{error:?}"))
    }
}

struct Wire {
    comm: nccl_sys::ncclComm_t,
    stream: cuda_sys::CUstream,
}
// SAFETY: handles that may be used from any thread, one at a time, which the mutex around them sees to.
unsafe impl Send for Wire {}

impl NcclGroup {
    fn connect(control: Group, device: usize) -> Result<Self> {
        let setup = |what: &str, error: &dyn std::fmt::Debug| {
            Error::Setup(format!("{what} for GPU {device} in group '{}' failed: {error:?}", control.name()))
        };
        let mut id = vec![0u8; size_of::<nccl_sys::ncclUniqueId>()];
        if control.rank() == 0 {
            let made = nccl::get_uniqueid().map_err(|error| setup("making an NCCL id", &error.0))?;
            id.iter_mut().zip(made.internal).for_each(|(byte, made)| *byte = made.cast_unsigned());
        }
        let id = control.broadcast("nccl id", 0, id).wait()?;
        let mut unique = nccl_sys::ncclUniqueId { internal: [0; 128] };
        unique.internal.iter_mut().zip(id).for_each(|(place, byte)| *place = byte.cast_signed());

        cuda::init().map_err(|error| setup("starting CUDA", &error))?;
        let ordinal = cuda::device::get(int(device)).map_err(|error| setup("finding the device", &error))?;
        // SAFETY: a device that CUDA has just returned; the context is the one that libtorch uses.
        let context = unsafe {
            let context = cuda::primary_ctx::retain(ordinal).map_err(|error| setup("opening the device", &error))?;
            cuda::ctx::set_current(context).map_err(|error| setup("opening the device", &error))?;
            Context(context)
        };
        let stream = cuda::stream::create(cuda::stream::StreamKind::NonBlocking)
            .map_err(|error| setup("making a stream", &error))?;
        let mut comm = MaybeUninit::uninit();
        // SAFETY: the id that rank 0 made; `comm` is written where the call succeeds.
        let comm = unsafe {
            nccl::comm_init_rank(comm.as_mut_ptr(), int(control.size()), unique, int(control.rank()))
                .map_err(|error| setup("connecting NCCL", &error.0))?;
            comm.assume_init()
        };
        Ok(NcclGroup { control, device, context, wire: Mutex::new(Wire { comm, stream }) })
    }

    /// Queues a call behind what libtorch has queued, and returns the event of its end.
    fn queue(&self, job: &Job) -> std::result::Result<Event, String> {
        let torch = self.torch_stream()?;
        let wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.enter()?;
        // SAFETY: live streams and events of the current context.
        unsafe {
            let ready = Event::record(torch)?;
            let held = ready.hold_up(wire.stream);
            let _ = cuda::event::destroy(ready.0);
            held?;
            wire.call(job.call.dtype, &job.work, self.control.rank(), self.control.size())
                .map_err(|error| explained("NCCL", &error))?;
            wire.check()?;
            Event::record(wire.stream)
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
        job.ticket.started();
        if matches!(job.work, Work::Barrier) {
            let barrier = self.control.barrier(&job.call.label);
            return Box::new(move || {
                let result = barrier.wait();
                job.ticket.ended(&result);
                result.map(|()| job.luggage)
            });
        }
        let queued = self.queue(&job);
        let call = job.call.clone();
        let Ok(end) = queued else {
            // Part of the call may be queued, and the GPU may still write to the buffers.
            std::mem::forget(job.luggage);
            let result = queued.map(drop).map_err(|message| Error::Transport { call: Box::new(call), message });
            job.ticket.ended(&result);
            return Box::new(move || Err(result.err().unwrap_or(Error::Stopped)));
        };
        let under_way = UnderWay { luggage: Some(job.luggage), end: Some(end) };
        let (device, context, ticket) = (self.device, self.context, job.ticket);
        Box::new(move || {
            let result = shardwise_torch::cuda::current_stream(device)
                .map_err(|error| error.to_string())
                .and_then(|torch| {
                    context.enter()?;
                    // SAFETY: a live event and libtorch's stream, in the context of both, on whichever thread waits.
                    unsafe { end.hold_up(torch.cast()) }
                })
                .map_err(|message| Error::Transport { call: Box::new(call), message });
            ticket.ended(&result);
            result.map(|()| under_way.land())
        })
    }

    fn split(&self, ranks: RankSet, _: &Arc<str>) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(NcclGroup::connect(self.control.subgroup("gpu", ranks)?, self.device)?))
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        let wire = self.wire.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: nobody else has these handles. An error on the way out has nobody to go to.
        unsafe {
            let _ = nccl::comm_destroy(wire.comm);
            let _ = cuda::stream::destroy(wire.stream);
        }
    }
}

/// The buffers of a call that the GPU works on. Dropped before their time, they wait for the GPU first.
struct UnderWay {
    luggage: Option<Luggage>,
    end: Option<Event>,
}

impl UnderWay {
    /// Gives the buffers to someone whose stream waits for the call.
    fn land(mut self) -> Luggage {
        self.luggage.take().expect("the buffers are taken once")
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            // SAFETY: a live event, destroyed once.
            unsafe {
                if self.luggage.is_some() {
                    let _ = cuda::event::synchronize(end.0);
                }
                let _ = cuda::event::destroy(end.0);
            }
        }
    }
}

/// A point in the work of a stream.
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
        // SAFETY: the caller's promise, and an event that was just made.
        unsafe { cuda::event::record(event, stream) }.map_err(|error| format!("{error:?}"))?;
        Ok(Event(event))
    }

    /// Lets `stream` go on only after this point.
    ///
    /// # Safety
    /// Event and stream are alive.
    unsafe fn hold_up(self, stream: cuda_sys::CUstream) -> std::result::Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { cuda::stream::wait_event(stream, self.0, cuda_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .map_err(|error| format!("{error:?}"))
    }
}

impl Wire {
    /// # Safety
    /// The addresses of `work` are the device's, and stay so until the stream has come past this call.
    unsafe fn call(
        &self,
        dtype: Dtype,
        work: &Work,
        rank: usize,
        size: usize,
    ) -> std::result::Result<(), nccl::NcclError> {
        let kind = nccl_type(dtype);
        let (comm, stream) = (self.comm, self.stream.cast());
        let at = |data: *const u8, element: usize| data.wrapping_add(element * dtype.bytes()).cast::<c_void>();
        // SAFETY: the caller's promise; lengths were checked by `Group`.
        unsafe {
            match work {
                Work::AllGather { part, whole, partition } if partition.is_even() => {
                    nccl::all_gather(at(*part, 0), whole.cast(), partition.part_len(0), kind, comm, stream)?;
                }
                Work::AllGather { part, whole, partition } => {
                    together(|| {
                        (0..size).try_for_each(|root| {
                            let range = partition.range(root);
                            let from = if root == rank { at(*part, 0) } else { at(*whole, range.start) };
                            let to = at(*whole, range.start).cast_mut();
                            nccl::broadcast(from, to, range.len(), kind, int(root), comm, stream).map(drop)
                        })
                    })?;
                }
                Work::ReduceScatter { whole, part, partition, reduce } if partition.is_even() => {
                    let (op, len) = (nccl_reduction(*reduce), partition.part_len(0));
                    nccl::reduce_scatter(at(*whole, 0), part.cast(), len, kind, op, comm, stream)?;
                }
                Work::ReduceScatter { whole, part, partition, reduce } => {
                    together(|| {
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
                Work::AllReduce { buffer, partition, reduce } => {
                    let op = nccl_reduction(*reduce);
                    nccl::all_reduce(at(*buffer, 0), buffer.cast(), partition.len(), kind, op, comm, stream)?;
                }
                Work::AllToAll { send, sends, receive, receives } => {
                    together(|| {
                        (0..size).try_for_each(|peer| {
                            let (from, to) = (sends.range(peer), receives.range(peer));
                            nccl::send(at(*send, from.start), from.len(), kind, int(peer), comm, stream)?;
                            nccl::recv(at(*receive, to.start).cast_mut(), to.len(), kind, int(peer), comm, stream)
                                .map(drop)
                        })
                    })?;
                }
                Work::Broadcast { buffer, len, root } => {
                    nccl::broadcast(at(*buffer, 0), buffer.cast(), *len, kind, int(*root), comm, stream)?;
                }
                Work::Send { buffer, len, to } => {
                    nccl::send(at(*buffer, 0), *len, kind, int(*to), comm, stream)?;
                }
                Work::Receive { buffer, len, from } => {
                    nccl::recv(buffer.cast(), *len, kind, int(*from), comm, stream)?;
                }
                Work::Barrier => unreachable!("a barrier is the control group's"),
            }
        }
        Ok(())
    }

    /// What NCCL has noticed since.
    fn check(&self) -> std::result::Result<(), String> {
        let mut state = nccl_sys::ncclResult_t::ncclSuccess;
        // SAFETY: a live communicator; `state` is written.
        unsafe { nccl_sys::ncclCommGetAsyncError(self.comm, &mut state) };
        state.result().map(drop).map_err(|error| explained("an earlier NCCL call", &error))
    }
}

/// Queues several calls as one. The group is ended whatever happens: an open one would swallow all later calls.
fn together(
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

fn nccl_reduction(reduce: Reduce) -> nccl_sys::ncclRedOp_t {
    match reduce {
        Reduce::Sum => nccl_sys::ncclRedOp_t::ncclSum,
        Reduce::Mean => nccl_sys::ncclRedOp_t::ncclAvg,
        Reduce::Max => nccl_sys::ncclRedOp_t::ncclMax,
    }
}
