//! The error of a model that cannot be built.

/// An invalid or unsupported configuration of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct ConfigError {
    /// The key at fault.
    pub key: &'static str,
    /// The problem, and how to fix it.
    pub problem: String,
}
