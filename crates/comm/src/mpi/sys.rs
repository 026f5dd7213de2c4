//! Wrappers around MPI functions, which turn return codes into errors. All except `library_version`, which MPI allows at any
//! time, must run on the communication thread.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;

use mpi::ffi;
use mpi::traits::AsRaw;
use shardwise_plan::RankSet;

/// A result with MPI's error message.
pub(super) type MpiResult<T> = Result<T, String>;

fn check(code: c_int) -> MpiResult<()> {
    if code == 0 {
        return Ok(());
    }
    let mut text = vec![0u8; 4096];
    let mut length = 0;
    // SAFETY: the buffer is longer than any MPI's MPI_MAX_ERROR_STRING.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    text.truncate(usize::try_from(length).unwrap_or(0));
    Err(format!("MPI error: {}", String::from_utf8_lossy(&text)))
}

/// Converts a count, rank or tag to MPI's type.
fn int(value: usize) -> c_int {
    c_int::try_from(value).expect("ranks, pieces and tags are below 2³¹")
}

pub(super) fn library_version() -> String {
    let mut text = vec![0u8; 16384];
    let mut length = 0;
    // SAFETY: allowed at any time; the buffer is longer than any MPI's MPI_MAX_LIBRARY_VERSION_STRING.
    unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr().cast::<c_char>(), &mut length) };
    text.truncate(usize::try_from(length).unwrap_or(0));
    String::from_utf8_lossy(&text).trim_end_matches('\0').trim().to_string()
}

/// The initialized MPI library; dropping it finalizes MPI.
pub(super) struct Universe {
    inner: std::mem::ManuallyDrop<mpi::environment::Universe>,
    abandoned: bool,
}

impl Drop for Universe {
    fn drop(&mut self) {
        // MPI_Finalize waits for all ranks; a rank that panics must not.
        if !self.abandoned && !std::thread::panicking() {
            // SAFETY: dropped here only, and not used after.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.inner) }
        }
    }
}

impl Universe {
    pub(super) fn start() -> MpiResult<Self> {
        let (inner, threading) = mpi::initialize_with_threading(mpi::Threading::Funneled)
            .ok_or("MPI is already initialized in this process; comm::mpi::world can be called only once")?;
        if threading < mpi::Threading::Funneled {
            return Err(format!(
                "this MPI library supports {threading:?}, but the communication thread needs Funneled; use an MPI that was \
                 built with thread support"
            ));
        }
        Ok(Universe { inner: std::mem::ManuallyDrop::new(inner), abandoned: false })
    }

    /// Skips MPI_Finalize on drop.
    pub(super) fn abandon(&mut self) {
        self.abandoned = true;
    }

    /// Terminates this process and all other ranks of the run.
    pub(super) fn abort(&self) -> ! {
        // SAFETY: MPI is initialized, and not finalized before this is dropped.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
        // MPI_Abort may return if it could not reach the others.
        std::process::exit(1)
    }

    pub(super) fn world(&self) -> MpiResult<Communicator> {
        Communicator::new(self.inner.world().as_raw())
    }
}

/// An MPI communicator that returns errors instead of aborting.
#[derive(Clone, Copy)]
pub(super) struct Communicator {
    raw: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    tag_max: usize,
}

/// The largest tag that every MPI library supports.
const TAG_MAX_GRANTED: usize = 32_767;

impl Communicator {
    fn new(raw: ffi::MPI_Comm) -> MpiResult<Self> {
        let (mut rank, mut size) = (0, 0);
        let (mut tag_max, mut has_tag_max) = (std::ptr::null_mut::<c_int>(), 0);
        // SAFETY: a valid communicator, on the thread that initialized MPI.
        unsafe {
            check(ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN))?;
            check(ffi::MPI_Comm_rank(raw, &mut rank))?;
            check(ffi::MPI_Comm_size(raw, &mut size))?;
            let value = (&raw mut tag_max).cast::<c_void>();
            // MPI guarantees the attribute for the world only.
            check(ffi::MPI_Comm_get_attr(ffi::RSMPI_COMM_WORLD, ffi::MPI_TAG_UB as c_int, value, &mut has_tag_max))?;
        }
        // SAFETY: MPI reports that it has written the address of a number that it owns, which lives as long as MPI.
        let tag_max = (has_tag_max != 0 && !tag_max.is_null()).then(|| unsafe { *tag_max });
        let whole =
            |value: c_int| usize::try_from(value).map_err(|_| format!("MPI returned {value} as a rank or size"));
        let tag_max = tag_max.map_or(Ok(TAG_MAX_GRANTED), whole)?;
        Ok(Communicator { raw, rank: whole(rank)?, size: whole(size)?, tag_max })
    }

    /// The largest tag that a message can have.
    pub(super) fn tag_max(&self) -> usize {
        self.tag_max
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Duplicates the communicator, so that messages on one never match receives on the other. Collective over all of its
    /// ranks.
    pub(super) fn duplicate(&self) -> MpiResult<Communicator> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: `raw` is written if the call succeeds.
        unsafe {
            check(ffi::MPI_Comm_dup(self.raw, raw.as_mut_ptr()))?;
            Communicator::new(raw.assume_init())
        }
    }

    /// Creates a communicator of some of the ranks. Collective over those ranks only.
    pub(super) fn subgroup(&self, ranks: &RankSet) -> MpiResult<Communicator> {
        let mut ranges: Vec<[c_int; 3]> =
            ranks.progressions().iter().map(|&(first, last, stride)| [int(first), int(last), int(stride)]).collect();
        let (mut all, mut some, mut raw) = (MaybeUninit::uninit(), MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: each handle is written by a call that succeeds before it is used.
        unsafe {
            check(ffi::MPI_Comm_group(self.raw, all.as_mut_ptr()))?;
            let all = all.assume_init_mut();
            check(ffi::MPI_Group_range_incl(*all, int(ranges.len()), ranges.as_mut_ptr(), some.as_mut_ptr()))?;
            let some = some.assume_init_mut();
            check(ffi::MPI_Comm_create_group(self.raw, *some, 0, raw.as_mut_ptr()))?;
            check(ffi::MPI_Group_free(some))?;
            check(ffi::MPI_Group_free(all))?;
            Communicator::new(raw.assume_init())
        }
    }

    /// # Safety
    /// `data` has `bytes` bytes that are not written until the request is complete.
    pub(super) unsafe fn send(&self, data: *const u8, bytes: usize, to: usize, tag: usize) -> MpiResult<Request> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: the caller's promise; `raw` is written if the call succeeds.
        unsafe {
            let code = ffi::MPI_Isend(
                data.cast(),
                int(bytes),
                ffi::RSMPI_UINT8_T,
                int(to),
                int(tag),
                self.raw,
                raw.as_mut_ptr(),
            );
            check(code)?;
            Ok(Request(raw.assume_init()))
        }
    }

    /// # Safety
    /// `data` has `bytes` bytes that are left alone until the request is complete.
    pub(super) unsafe fn receive(&self, data: *mut u8, bytes: usize, from: usize, tag: usize) -> MpiResult<Request> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: the caller's promise; `raw` is written if the call succeeds.
        unsafe {
            let code = ffi::MPI_Irecv(
                data.cast(),
                int(bytes),
                ffi::RSMPI_UINT8_T,
                int(from),
                int(tag),
                self.raw,
                raw.as_mut_ptr(),
            );
            check(code)?;
            Ok(Request(raw.assume_init()))
        }
    }

    /// Starts a non-blocking barrier.
    pub(super) fn start_barrier(&self) -> MpiResult<Request> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: `raw` is written if the call succeeds.
        unsafe {
            check(ffi::MPI_Ibarrier(self.raw, raw.as_mut_ptr()))?;
            Ok(Request(raw.assume_init()))
        }
    }

    /// Receives an empty message with that tag, if one has arrived, and returns its sender. Also lets MPI make progress.
    pub(super) fn take_empty_message(&self, tag: usize) -> MpiResult<Option<usize>> {
        let mut arrived = 0;
        // SAFETY: a status is plain numbers and pointers, which MPI overwrites.
        let mut status: ffi::MPI_Status = unsafe { MaybeUninit::zeroed().assume_init() };
        // SAFETY: a valid communicator and a status. The message has arrived, so receiving it does not block, and has no bytes
        // to write.
        unsafe {
            check(ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, int(tag), self.raw, &mut arrived, &mut status))?;
            if arrived == 0 {
                return Ok(None);
            }
            let nowhere = std::ptr::null_mut();
            let from = status.MPI_SOURCE;
            check(ffi::MPI_Recv(nowhere, 0, ffi::RSMPI_UINT8_T, from, int(tag), self.raw, ffi::RSMPI_STATUS_IGNORE))?;
        }
        Ok(usize::try_from(status.MPI_SOURCE).ok())
    }
}

/// A running message or barrier. Dropping it does not cancel it.
pub(super) struct Request(ffi::MPI_Request);

impl Request {
    /// Lets MPI make progress, and returns whether the request is complete.
    pub(super) fn is_complete(&mut self) -> MpiResult<bool> {
        let mut complete = 0;
        // SAFETY: a valid request, which MPI replaces by a null request once complete; the status is ignored.
        check(unsafe { ffi::MPI_Test(&mut self.0, &mut complete, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(complete != 0)
    }
}

/// Requests in progress, each with a context that the caller chooses.
pub(super) struct Requests<T> {
    raw: Vec<ffi::MPI_Request>,
    contexts: Vec<T>,
    completed: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

impl<T> Requests<T> {
    pub(super) fn new() -> Self {
        Requests { raw: Vec::new(), contexts: Vec::new(), completed: Vec::new(), statuses: Vec::new() }
    }

    pub(super) fn push(&mut self, request: Request, context: T) {
        self.raw.push(request.0);
        self.contexts.push(context);
    }

    pub(super) fn len(&self) -> usize {
        self.raw.len()
    }

    pub(super) fn contexts(&self) -> &[T] {
        &self.contexts
    }

    /// Lets MPI make progress, and calls `done` with the context of each completed request and the number of bytes received.
    /// Returns whether any request has completed.
    pub(super) fn poll(&mut self, mut done: impl FnMut(T, usize) -> MpiResult<()>) -> MpiResult<bool> {
        if self.raw.is_empty() {
            return Ok(false);
        }
        self.completed.resize(self.raw.len(), 0);
        // SAFETY: statuses are plain numbers and pointers, which MPI overwrites.
        self.statuses.resize(self.raw.len(), unsafe { MaybeUninit::zeroed().assume_init() });
        let mut count = 0;
        // SAFETY: three lists of one length; the buffers of the requests are alive, as `send` and the others demand.
        let code = unsafe {
            ffi::MPI_Testsome(
                int(self.raw.len()),
                self.raw.as_mut_ptr(),
                &mut count,
                self.completed.as_mut_ptr(),
                self.statuses.as_mut_ptr(),
            )
        };
        if let Err(general) = check(code) {
            return Err(self.failure().unwrap_or(general));
        }
        let Ok(count) = usize::try_from(count) else {
            return Err("MPI lost its requests".to_string());
        };
        let mut finished: Vec<(usize, usize)> = Vec::with_capacity(count);
        for (&index, status) in self.completed[..count].iter().zip(&self.statuses) {
            let mut bytes = 0;
            // SAFETY: a status that MPI has just written.
            check(unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut bytes) })?;
            finished.push((usize::try_from(index).unwrap_or(usize::MAX), usize::try_from(bytes).unwrap_or(usize::MAX)));
        }
        // Remove from the back, so that removing one does not move the others.
        finished.sort_unstable_by_key(|&(index, _)| std::cmp::Reverse(index));
        for &(index, bytes) in &finished {
            self.raw.swap_remove(index);
            done(self.contexts.swap_remove(index), bytes)?;
        }
        Ok(count > 0)
    }

    /// The error from the statuses, which is more specific than the return code of the call.
    fn failure(&self) -> Option<String> {
        self.statuses.iter().find_map(|status| {
            let specific = check(status.MPI_ERROR).err()?;
            Some(format!("{specific} (message from rank {} of the group)", status.MPI_SOURCE))
        })
    }
}
