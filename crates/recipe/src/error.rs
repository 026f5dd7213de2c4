//! Errors in recipes.

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error in a recipe. Every rank that reads the recipe returns the same error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A recipe is invalid.
    #[error("{place}: {problem}")]
    Recipe {
        /// The file and line, or the argument.
        place: String,
        /// What is wrong, and how to fix it.
        problem: String,
    },
    /// A recipe has several errors, one per line.
    #[error("{0}")]
    Recipes(String),
    /// A recipe cannot be written as TOML.
    #[error("{0}")]
    Options(String),
}
