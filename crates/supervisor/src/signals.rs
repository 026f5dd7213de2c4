//! The signals that ask a supervisor to save and stop, or to stop at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

use crate::error::{Error, Result};
use crate::exit_codes::{INTERRUPTED, RESUME};

/// Requests made by signal.
#[derive(Clone, Default)]
pub(crate) struct Signals {
    /// Save and stop: SIGTERM, SIGUSR1, SIGHUP when the terminal closes, or the first SIGINT.
    save: Arc<AtomicBool>,
    /// A SIGINT that has not been handled yet: save and stop, or stop at once if a save was already requested.
    interrupt: Arc<AtomicBool>,
    /// Whether there was a SIGINT.
    interrupted: Arc<AtomicBool>,
    /// Stop at once.
    stop: Arc<AtomicBool>,
}

impl Signals {
    pub(crate) fn register() -> Result<Self> {
        let signals = Signals::default();
        let fail = |error: std::io::Error| Error::failed("cannot install a signal handler", error);
        // A second SIGTERM kills the supervisor at once; the ranks notice and exit.
        signal_hook::flag::register_conditional_default(SIGTERM, signals.save.clone()).map_err(fail)?;
        let mut flags = vec![(SIGTERM, &signals.save), (SIGUSR1, &signals.save), (SIGINT, &signals.interrupt)];
        if !is_hangup_ignored() {
            flags.push((SIGHUP, &signals.save));
        }
        for (signal, flag) in flags {
            signal_hook::flag::register(signal, flag.clone()).map_err(fail)?;
        }
        Ok(signals)
    }

    pub(crate) fn should_save(&self) -> bool {
        self.handle_interrupt();
        self.save.load(Ordering::Relaxed)
    }

    /// The first Ctrl-C asks for a save, the second for an immediate stop.
    fn handle_interrupt(&self) {
        if self.interrupt.swap(false, Ordering::Relaxed) {
            self.interrupted.store(true, Ordering::Relaxed);
            if self.save.swap(true, Ordering::Relaxed) {
                self.stop.store(true, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// The exit code if the run was asked to stop between two attempts.
    pub(crate) fn exit_code(&self) -> Option<u8> {
        match (self.should_stop(), self.should_save()) {
            (true, _) => Some(INTERRUPTED),
            (false, true) => Some(RESUME),
            (false, false) => None,
        }
    }

    pub(crate) fn should_stop(&self) -> bool {
        self.handle_interrupt();
        self.stop.load(Ordering::Relaxed)
    }
}

/// Whether this process was started to outlive its terminal, for example with `nohup`.
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ignored.is_some_and(|ignored| ignored & (1 << (SIGHUP - 1)) != 0)
}
