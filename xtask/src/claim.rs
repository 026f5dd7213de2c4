//! A claim of the project, and how it is measured.

use anyhow::Result;

/// A claim of the project, and its measurement.
pub(crate) struct Claim {
    pub(crate) group: &'static str,
    pub(crate) name: &'static str,
    /// The claim in one line.
    pub(crate) what: &'static str,
    /// Whether the measurement takes minutes.
    pub(crate) heavy: bool,
    pub(crate) measure: fn() -> Result<Verdict>,
}

/// The result of a measurement.
pub(crate) struct Verdict {
    /// The measured figure.
    pub(crate) figure: String,
    /// The claimed figure, which the measured one is compared with.
    pub(crate) bar: String,
    pub(crate) holds: bool,
}
