//! The thread that watches the calls that are queued on GPUs.
//!
//! The host never waits for a call on a GPU, so nobody would notice one that never ends. This thread asks about every
//! call until it has ended. It keeps the flight recorder's times, to within [`INTERVAL`], and the memory of calls that nobody waits for. If
//! a call makes no progress for the group's timeout, or NCCL reports that one has failed, it aborts the group's communicator. That
//! ends the calls on the GPU, so the host gets on, and finds the reason in [`Watch::check`].

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::communicator::Handle;
use super::event::{Context, Event};
use super::running_buffers::RunningBuffers;
use crate::instruments::EntryHandle;
use crate::{Call, Error, Result};

/// How often the calls that are under way are looked at.
const INTERVAL: Duration = Duration::from_millis(1);

/// A call on a GPU.
pub(super) struct Watched {
    pub(super) call: Call,
    pub(super) handle: EntryHandle,
    /// Passed when libtorch's work before the call is done.
    pub(super) ready: Event,
    pub(super) end: Arc<Event>,
    /// When it was first seen to have started.
    pub(super) started: Option<Instant>,
}

/// The calls of a group that have not ended, and the first failure.
pub(super) struct Watch {
    communicator: Handle,
    context: Context,
    timeout: Duration,
    calls: Mutex<VecDeque<Watched>>,
    /// The call that a thread is just handing to NCCL, which can block until the other ranks do the same.
    entering: Arc<Mutex<Option<(Call, Instant)>>>,
    /// The memory of calls that nobody waits for.
    unclaimed: Mutex<Vec<RunningBuffers>>,
    failure: OnceLock<Error>,
}

impl Watch {
    pub(super) fn new(communicator: Handle, context: Context, timeout: Duration) -> Arc<Self> {
        let watch = Arc::new(Watch {
            communicator,
            context,
            timeout,
            calls: Mutex::default(),
            entering: Arc::default(),
            unclaimed: Mutex::default(),
            failure: OnceLock::new(),
        });
        watcher().add(&watch);
        watch
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Looks at the calls right now, and fails if one of them has failed. What the host has just read from the device may come from a call
    /// that failed a moment ago, before the watcher has looked.
    pub(super) fn check_now(&self) -> Result<()> {
        let _ = self.context.enter();
        self.poll();
        self.check()
    }

    /// Fails if the group is known to be unusable.
    pub(super) fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Whether the GPU has nothing left to do for the group.
    pub(super) fn is_idle(&self) -> bool {
        self.poll();
        self.failure.get().is_none() && lock(&self.calls).is_empty() && lock(&self.entering).is_none()
    }

    /// Hands a call to NCCL.
    pub(super) fn enter<T>(&self, call: &Call, hand_over: impl FnOnce() -> T) -> T {
        *lock(&self.entering) = Some((call.clone(), Instant::now()));
        watcher().wake();
        let result = hand_over();
        *lock(&self.entering) = None;
        result
    }

    /// Watches a call until it ends.
    pub(super) fn push(&self, watched: Watched) {
        lock(&self.calls).push_back(watched);
        watcher().wake();
    }

    /// Keeps the memory of a call until the call ends.
    pub(super) fn keep(&self, buffers: RunningBuffers) {
        lock(&self.unclaimed).push(buffers);
        watcher().wake();
    }

    /// Makes all further calls fail, and ends those on the GPU.
    pub(super) fn fail(&self, failure: Error) {
        let cause = failure.to_string();
        if self.failure.set(failure.clone()).is_err() {
            return;
        }
        // On its own thread, because it may wait for the GPU, and so for calls of other groups that must be aborted, too.
        let (communicator, entering, timeout) = (self.communicator.clone(), self.entering.clone(), self.timeout);
        let wait_for_calls = move || {
            while lock(&entering).as_ref().is_some_and(|(_, entered)| entered.elapsed() <= timeout) {
                std::thread::sleep(INTERVAL);
            }
        };
        let abort = move || communicator.abort(wait_for_calls);
        drop(std::thread::Builder::new().name("nccl abort".to_string()).spawn(abort));
        let mut first = Some(failure);
        for Watched { call, handle, .. } in lock(&self.calls).drain(..) {
            let broken = || Error::Broken { call: Box::new(call), cause: cause.clone() };
            handle.mark_ended::<()>(&Err(first.take().unwrap_or_else(broken)));
        }
    }

    /// Looks at the calls, which run one after the other. Returns whether there is something left to watch.
    fn poll(&self) -> bool {
        if let Some(failure) = self.find_failure() {
            self.fail(failure);
        }
        let mut unclaimed = lock(&self.unclaimed);
        unclaimed.retain(|buffers| !buffers.end.has_passed().unwrap_or(false));
        let is_busy = !unclaimed.is_empty() || !lock(&self.calls).is_empty() || lock(&self.entering).is_some();
        is_busy && self.failure.get().is_none()
    }

    fn find_failure(&self) -> Option<Error> {
        let timed_out = |call: &Call| Error::TimedOut {
            call: Box::new(call.clone()),
            timeout: self.timeout,
            waiting_for: String::new(),
        };
        if let Some((call, entered)) = &*lock(&self.entering)
            && entered.elapsed() > self.timeout
        {
            return Some(timed_out(call));
        }
        let mut calls = lock(&self.calls);
        while let Some(first) = calls.front_mut() {
            let transport = |message| Some(Error::Transport { call: Box::new(first.call.clone()), message });
            let has_passed = match first.end.has_passed() {
                Ok(has_passed) => has_passed,
                Err(message) => return transport(message),
            };
            // A call that has failed ends as well.
            if let Err(message) = self.communicator.check() {
                return transport(message);
            }
            if first.started.is_none() && (has_passed || first.ready.has_passed().unwrap_or(false)) {
                first.handle.mark_started();
                first.started = Some(Instant::now());
            }
            if has_passed {
                first.handle.mark_ended(&Ok(()));
                calls.pop_front();
                continue;
            }
            let is_late = first.started.is_some_and(|started| started.elapsed() > self.timeout);
            return is_late.then(|| timed_out(&first.call));
        }
        None
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The GPU may still use the rest.
        for buffers in lock(&self.unclaimed).drain(..) {
            if !buffers.end.has_passed().unwrap_or(false) {
                std::mem::forget(buffers);
            }
        }
    }
}

struct Watcher {
    watches: Mutex<Vec<Weak<Watch>>>,
    changed: Condvar,
}

fn watcher() -> &'static Watcher {
    static WATCHER: OnceLock<&'static Watcher> = OnceLock::new();
    WATCHER.get_or_init(|| {
        let watcher: &'static Watcher =
            Box::leak(Box::new(Watcher { watches: Mutex::default(), changed: Condvar::new() }));
        std::thread::Builder::new()
            .name("nccl watcher".to_string())
            .spawn(|| watcher.run())
            .expect("a process can start a thread");
        watcher
    })
}

impl Watcher {
    fn add(&self, watch: &Arc<Watch>) {
        lock(&self.watches).push(Arc::downgrade(watch));
    }

    fn wake(&self) {
        let _watches = lock(&self.watches);
        self.changed.notify_one();
    }

    fn run(&self) {
        let mut watches = lock(&self.watches);
        loop {
            watches.retain(|watch| watch.strong_count() > 0);
            let alive: Vec<Arc<Watch>> = watches.iter().filter_map(Weak::upgrade).collect();
            drop(watches);
            let is_busy = alive.iter().fold(false, |is_busy, watch| {
                // Each device has its own context. Without one, a query fails, and says so.
                let _ = watch.context.enter();
                watch.poll() || is_busy
            });
            drop(alive);
            if is_busy {
                std::thread::sleep(INTERVAL);
            }
            watches = lock(&self.watches);
            if !is_busy {
                // What was pushed since it was looked at has woken nobody up, hence the limit.
                let waited = self.changed.wait_timeout(watches, 10 * INTERVAL);
                watches = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
