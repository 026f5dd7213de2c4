//! MPI's functions with checked results. All but `library_version`, which MPI allows at any time, run on the communication
//! thread.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;

use mpi::ffi;
use mpi::traits::AsRaw;
use shardwise_plan::RankSet;

/// An error in MPI's words.
pub(super) type Outcome<T> = Result<T, String>;

fn check(code: c_int) -> Outcome<()> {
    if code == 0 {
        return Ok(());
    }
    let mut text = vec![0u8; 4096];
    let mut length = 0;
    // SAFETY: the buffer is longer than any MPI's MPI_MAX_ERROR_STRING.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    text.truncate(usize::try_from(length).unwrap_or(0));
    Err(format!("MPI says: {}", String::from_utf8_lossy(&text)))
}

/// A count or rank as MPI wants it.
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

/// An initialised MPI; dropping it finalizes.
pub(super) struct Universe {
    inner: std::mem::ManuallyDrop<mpi::environment::Universe>,
    abandoned: bool,
}

impl Drop for Universe {
    fn drop(&mut self) {
        // Finalizing waits for all ranks; one that panics does not.
        if !self.abandoned && !std::thread::panicking() {
            // SAFETY: dropped here only, and not used after.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.inner) }
        }
    }
}

impl Universe {
    pub(super) fn start() -> Outcome<Self> {
        let (inner, threading) = mpi::initialize_with_threading(mpi::Threading::Funneled)
            .ok_or("MPI was initialised before in this process; comm::mpi::world can be called once")?;
        if threading < mpi::Threading::Funneled {
            return Err(format!(
                "this MPI library grants {threading:?}, and a communication thread needs Funneled; use an MPI that was \
                 built with thread support"
            ));
        }
        Ok(Universe { inner: std::mem::ManuallyDrop::new(inner), abandoned: false })
    }

    /// Ends without finalizing.
    pub(super) fn abandon(&mut self) {
        self.abandoned = true;
    }

    /// Ends this process and all others of the run.
    pub(super) fn abort(&self) -> ! {
        // SAFETY: MPI is initialised, and not finalized before this is dropped.
        unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
        // MPI may return where it could not reach the others.
        std::process::exit(1)
    }

    pub(super) fn world(&self) -> Outcome<Communicator> {
        Communicator::new(self.inner.world().as_raw())
    }
}

/// An MPI communicator whose errors are returned, not fatal.
#[derive(Clone, Copy)]
pub(super) struct Communicator {
    raw: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    tag_max: usize,
}

/// The largest tag that every MPI has.
const TAG_MAX_GRANTED: usize = 32_767;

impl Communicator {
    fn new(raw: ffi::MPI_Comm) -> Outcome<Self> {
        let (mut rank, mut size) = (0, 0);
        let (mut tag_max, mut has_tag_max) = (std::ptr::null_mut::<c_int>(), 0);
        // SAFETY: a valid communicator, on the thread that initialised MPI.
        unsafe {
            check(ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN))?;
            check(ffi::MPI_Comm_rank(raw, &mut rank))?;
            check(ffi::MPI_Comm_size(raw, &mut size))?;
            let place = (&raw mut tag_max).cast::<c_void>();
            // The world has the attribute in every MPI.
            check(ffi::MPI_Comm_get_attr(ffi::RSMPI_COMM_WORLD, ffi::MPI_TAG_UB as c_int, place, &mut has_tag_max))?;
        }
        // SAFETY: MPI says that it has written the address of a number of its own, which lasts as long as MPI.
        let tag_max = (has_tag_max != 0 && !tag_max.is_null()).then(|| unsafe { *tag_max });
        let whole = |value: c_int| usize::try_from(value).map_err(|_| format!("MPI gave {value} as a rank or size"));
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

    /// The same ranks, with messages of their own. All ranks do it together.
    pub(super) fn duplicate(&self) -> Outcome<Communicator> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: `raw` is written where the call succeeds.
        unsafe {
            check(ffi::MPI_Comm_dup(self.raw, raw.as_mut_ptr()))?;
            Communicator::new(raw.assume_init())
        }
    }

    /// A communicator of some of the ranks, made by just those.
    pub(super) fn sub(&self, ranks: &RankSet) -> Outcome<Communicator> {
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
    pub(super) unsafe fn send(&self, data: *const u8, bytes: usize, to: usize, tag: usize) -> Outcome<Request> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: the caller's promise; `raw` is written where the call succeeds.
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
    pub(super) unsafe fn receive(&self, data: *mut u8, bytes: usize, from: usize, tag: usize) -> Outcome<Request> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: the caller's promise; `raw` is written where the call succeeds.
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

    /// Starts a barrier that is complete when all ranks have started it.
    pub(super) fn start_barrier(&self) -> Outcome<Request> {
        let mut raw = MaybeUninit::uninit();
        // SAFETY: `raw` is written where the call succeeds.
        unsafe {
            check(ffi::MPI_Ibarrier(self.raw, raw.as_mut_ptr()))?;
            Ok(Request(raw.assume_init()))
        }
    }

    /// Receives a message of no bytes, if one with that tag has arrived, and says from whom. It lets MPI work in any case.
    pub(super) fn take_empty_message(&self, tag: usize) -> Outcome<Option<usize>> {
        let mut arrived = 0;
        // SAFETY: a status is plain numbers and pointers, which MPI overwrites.
        let mut status: ffi::MPI_Status = unsafe { MaybeUninit::zeroed().assume_init() };
        // SAFETY: a valid communicator and a status. The message that is received has arrived, so that this does not wait, and
        // has no bytes to write.
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

/// A message or a barrier under way. Dropping it does not end it.
pub(super) struct Request(ffi::MPI_Request);

impl Request {
    /// Lets MPI work, and says whether that has completed it.
    pub(super) fn is_complete(&mut self) -> Outcome<bool> {
        let mut complete = 0;
        // SAFETY: a request of MPI's, which it replaces by one that is complete; no status is wanted.
        check(unsafe { ffi::MPI_Test(&mut self.0, &mut complete, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(complete != 0)
    }
}

/// Requests under way at once, each with what it is about.
pub(super) struct Requests<T> {
    raw: Vec<ffi::MPI_Request>,
    about: Vec<T>,
    completed: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

impl<T> Requests<T> {
    pub(super) fn new() -> Self {
        Requests { raw: Vec::new(), about: Vec::new(), completed: Vec::new(), statuses: Vec::new() }
    }

    pub(super) fn push(&mut self, request: Request, about: T) {
        self.raw.push(request.0);
        self.about.push(about);
    }

    pub(super) fn len(&self) -> usize {
        self.raw.len()
    }

    pub(super) fn about(&self) -> &[T] {
        &self.about
    }

    /// Lets MPI work, and hands what has completed to `done`, with the number of bytes that a receive has received.
    /// Returns whether anything has.
    pub(super) fn poll(&mut self, mut done: impl FnMut(T, usize) -> Outcome<()>) -> Outcome<bool> {
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
        // From the back, so that removing one does not move the others.
        finished.sort_unstable_by_key(|&(index, _)| std::cmp::Reverse(index));
        for &(index, bytes) in &finished {
            self.raw.swap_remove(index);
            done(self.about.swap_remove(index), bytes)?;
        }
        Ok(count > 0)
    }

    /// What the statuses say of a failure, which is more than the code of the call that returned them.
    fn failure(&self) -> Option<String> {
        self.statuses.iter().find_map(|status| {
            let specific = check(status.MPI_ERROR).err()?;
            Some(format!("{specific} (message from rank {} of the group)", status.MPI_SOURCE))
        })
    }
}
