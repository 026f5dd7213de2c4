//! Groups of GPU ranks over NCCL.
//!
//! Each group queues its NCCL calls on its own CUDA stream. Events order that stream and libtorch's: a call starts after the
//! work that libtorch had queued before it, and work that libtorch queues after [`Pending::wait`](crate::Pending) starts after
//! the call. The host blocks on neither. So a call can fail after its `wait` has returned; [`Group::check`] tells.
//!
//! Initialization and subgroups use an underlying group of CPU ranks ([`connect`]), which broadcasts NCCL's unique id. NCCL
//! sums in its own order and in the payload's dtype. So the crate's note on deterministic reductions does not hold here, and a
//! sum of bf16 or f16 is less precise than over MPI. Where that matters, reduce in f32.
//!
//! Both libraries are loaded at run time, when the first group is made.
//!
//! Status: this code has not run on a GPU yet, for lack of one. Tests run it on libraries that stand in for CUDA's driver and for NCCL,
//! and real NCCL is loaded and asked for its version.

mod communicator;
mod event;
mod running_buffers;
mod watcher;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::{result as cuda, sys as cuda_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use shardwise_plan::RankSet;
use shardwise_torch::Stream;
use shardwise_torch::tch::Device;

use self::communicator::{Communicator, Padded, explain_nccl, int};
use self::event::{Context, CudaResult, Event, explain};
use self::running_buffers::RunningBuffers;
use self::watcher::{Watch, Watched};
use crate::pending::{Buffers, Completion};
use crate::transport::{Job, Operation, Transport};
use crate::{Error, Group, ReduceOp, Result};

/// Returns the version of the loaded NCCL library, as in `2.29.7`.
pub fn library_version() -> Result<String> {
    require_library("NCCL", "libnccl.so", has_nccl())?;
    let code = nccl::get_nccl_version().map_err(|error| Error::Setup(explain_nccl("ncclGetVersion", &error)))?;
    Ok(format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100))
}

/// Creates a group for buffers on `device`, a GPU, with the same ranks and timeout as `control`, a group of CPU ranks.
pub fn connect(control: Group, device: Device) -> Result<Group> {
    let timeout = control.transport().timeout();
    connect_with_timeout(control, device, timeout)
}

/// Like [`connect`], with a timeout of its own.
pub fn connect_with_timeout(control: Group, device: Device, timeout: Duration) -> Result<Group> {
    require_library("the CUDA driver", "libcuda.so.1", has_cuda())?;
    require_library("NCCL", "libnccl.so", has_nccl())?;
    let transport = Arc::new(NcclGroup::connect(control, device, timeout)?);
    Ok(transport.control.over("gpu", transport.clone()))
}

/// The number that a GPU has, in this process and in every other.
pub fn device_uuid(device: Device) -> Result<[u64; 2]> {
    require_library("the CUDA driver", "libcuda.so.1", has_cuda())?;
    let uuid = find(device).and_then(|ordinal| cuda::device::get_uuid(ordinal).map_err(explain));
    let bytes = uuid.map_err(|error| Error::Setup(format!("asking for {device:?} failed: {error}")))?.bytes;
    let half = |index: usize| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[8 * index + byte].cast_unsigned()));
    Ok([half(0), half(1)])
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

struct NcclGroup {
    control: Group,
    device: Device,
    context: Context,
    communicator: Mutex<Communicator>,
    watch: Arc<Watch>,
}

impl NcclGroup {
    fn connect(control: Group, device: Device, timeout: Duration) -> Result<Self> {
        let setup = |what: &str, error: &str| {
            Error::Setup(format!("{what} for {device:?} in group '{}' failed: {error}", control.name()))
        };
        let context = open(device).map_err(|error| setup("opening the device", &error));
        // NCCL would wait forever for a rank that cannot open its device.
        let failed = control.all_reduce("nccl", ReduceOp::Max, vec![i64::from(context.is_err())]).wait()?[0];
        let context = context?;
        if failed > 0 {
            return Err(setup("connecting NCCL", "another rank of the group could not open its device"));
        }
        let id = share_id(&control)?.map_err(|error| setup("creating an NCCL id", &error))?;
        let communicator = Communicator::connect(id, control.rank(), control.size())
            .map_err(|error| setup("connecting NCCL", &error))?;
        let watch = Watch::new(communicator.handle().clone(), context, timeout);
        Ok(NcclGroup { control, device, context, communicator: Mutex::new(communicator), watch })
    }

    /// Queues a call behind libtorch's queued work.
    fn queue(&self, job: &Job, padded: Option<&Padded>) -> CudaResult<Queued> {
        let torch = libtorch_stream(self.device)?;
        let communicator = self.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.enter()?;
        let (rank, size) = (self.control.rank(), self.control.size());
        // SAFETY: the streams are live and belong to the current context; the job's buffers live until the call's end.
        unsafe {
            let ready = Event::record(torch)?;
            ready.block_stream(communicator.stream())?;
            self.watch.enter(&job.call, || communicator.call(job.call.dtype, &job.operation, rank, size, padded))?;
            let end = Arc::new(Event::record(communicator.stream())?);
            Ok(Queued { ready, end })
        }
    }
}

/// A call on the GPU.
struct Queued {
    ready: Event,
    end: Arc<Event>,
}

/// The id with which the ranks of a group connect, from its first rank.
fn share_id(control: &Group) -> Result<CudaResult<nccl_sys::ncclUniqueId>> {
    // If the first rank has no id, it broadcasts zeros, so that the others fail as well instead of waiting for it.
    let mut bytes = vec![0u8; size_of::<nccl_sys::ncclUniqueId>()];
    let own = (control.rank() == 0).then(nccl::get_uniqueid).transpose();
    if let Ok(Some(own)) = &own {
        bytes.iter_mut().zip(own.internal).for_each(|(byte, own)| *byte = own.cast_unsigned());
    }
    let bytes = control.broadcast("nccl id", 0, bytes).wait()?;
    if let Err(error) = own {
        return Ok(Err(explain_nccl("ncclGetUniqueId", &error)));
    }
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(Err("see the error of the group's first rank".to_string()));
    }
    let mut id = nccl_sys::ncclUniqueId { internal: [0; 128] };
    id.internal.iter_mut().zip(bytes).for_each(|(target, byte)| *target = byte.cast_signed());
    Ok(Ok(id))
}

/// Makes the context of a device, which is the one that libtorch uses, current on this thread.
fn open(device: Device) -> CudaResult<Context> {
    // SAFETY: CUDA has just returned the device.
    let context = Context(unsafe { cuda::primary_ctx::retain(find(device)?) }.map_err(explain)?);
    context.enter()?;
    Ok(context)
}

/// CUDA's name for a device.
fn find(device: Device) -> CudaResult<cuda_sys::CUdevice> {
    let index = if let Device::Cuda(index) = device { index } else { 0 };
    cuda::init().map_err(explain)?;
    cuda::device::get(int(index)).map_err(explain)
}

/// The stream on which libtorch queues this thread's work.
fn libtorch_stream(device: Device) -> CudaResult<cuda_sys::CUstream> {
    let handle = Stream::current(device).and_then(|stream| stream.handle());
    handle.map(<*mut std::ffi::c_void>::cast).map_err(|error| error.to_string())
}

impl Transport for NcclGroup {
    fn device(&self) -> Device {
        self.device
    }

    fn start(&self, job: Job) -> Completion {
        if matches!(job.operation, Operation::Barrier) {
            job.handle.mark_started();
            let barrier = self.control.barrier(&job.call.label);
            return Box::new(move || {
                let result = barrier.wait();
                job.handle.mark_ended(&result);
                result.map(|()| job.buffers)
            });
        }
        let call = Box::new(job.call.clone());
        if let Err(failure) = self.watch.check() {
            let result = Err(Error::Broken { call, cause: failure.to_string() });
            job.handle.mark_ended(&result);
            return Box::new(move || result);
        }
        // The memory is libtorch's, so it may be in use by work that libtorch has queued before. The call starts after that.
        let padded = Padded::new(&job.operation, job.call.dtype, self.control.size(), self.device);
        let queued = padded.and_then(|padded| match self.queue(&job, padded.as_ref()) {
            Ok(queued) => Ok((queued, padded)),
            Err(message) => {
                // Part of the call may be queued, and the GPU may still use its memory.
                std::mem::forget(padded);
                Err(message)
            }
        });
        let (Queued { ready, end }, padded) = match queued {
            Ok(queued) => queued,
            Err(message) => {
                std::mem::forget(job.buffers);
                let error = Error::Transport { call, message };
                // This rank has not made a call that the others make, so none of its later calls would meet theirs.
                self.watch.fail(error.clone());
                let result = Err(error);
                job.handle.mark_ended(&result);
                return Box::new(move || result);
            }
        };
        self.watch.push(Watched { call: job.call, handle: job.handle, ready, end: end.clone(), started: None });
        let running =
            Running { memory: Some(RunningBuffers { buffers: job.buffers, padded, end }), watch: self.watch.clone() };
        let (device, context) = (self.device, self.context);
        Box::new(move || {
            running.watch.check()?;
            let held = libtorch_stream(device).and_then(|torch| {
                context.enter()?;
                // SAFETY: the event and libtorch's stream are live, and their context is current on the waiting thread.
                unsafe { running.end().block_stream(torch) }
            });
            held.map_err(|message| Error::Transport { call, message }).map(|()| running.release())
        })
    }

    fn split(&self, ranks: RankSet, _: &Arc<str>) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(NcclGroup::connect(self.control.subgroup("gpu", ranks)?, self.device, self.watch.timeout())?))
    }

    fn timeout(&self) -> Duration {
        self.watch.timeout()
    }

    fn check(&self) -> Result<()> {
        self.watch.check_now()
    }

    fn abort(&self) {
        self.control.transport().abort();
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        let communicator = self.communicator.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = self.context.enter();
        if self.watch.is_idle() {
            communicator.handle().clone().destroy(self.context);
        }
        // Otherwise the process is about to end because of a failure, and must not wait for the other ranks before it says why.
    }
}

/// A running call. If it is dropped, the watcher keeps its memory until it has ended.
struct Running {
    memory: Option<RunningBuffers>,
    watch: Arc<Watch>,
}

impl Running {
    fn end(&self) -> &Event {
        &self.memory.as_ref().expect("released at the end").end
    }

    /// Returns the buffers. The caller's stream must already wait for the call.
    fn release(mut self) -> Buffers {
        self.memory.take().expect("released once").buffers
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.watch.keep(memory);
        }
    }
}
