//! Agreement between ranks on whether an operation succeeded everywhere.

use shardwise_comm::{Group, ReduceOp};

use crate::error::Result;

/// The maximum length of an error message sent between ranks.
const MESSAGE_BYTES: usize = 1 << 10;

/// Returns this rank's value if all ranks succeeded, and otherwise the error of the first rank that failed. All ranks call it
/// together.
pub(crate) fn agree<T>(world: &Group, own: std::result::Result<T, String>) -> Result<std::result::Result<T, String>> {
    let key = if own.is_err() { (world.size() - world.rank()) as i64 } else { 0 };
    let first = world.all_reduce("agreement", ReduceOp::Max, vec![key]).wait()?[0];
    if first == 0 {
        return Ok(own);
    }
    let first = world.size() - first as usize;
    let mut message = own.err().unwrap_or_default().into_bytes();
    message.resize(MESSAGE_BYTES, 0);
    let message = world.broadcast("why not", first, message).wait()?;
    let message = String::from_utf8_lossy(&message);
    let message = message.trim_end_matches(['\0', char::REPLACEMENT_CHARACTER]);
    Ok(Err(match world.size() {
        1 => message.to_string(),
        _ => format!("rank {first}: {message}"),
    }))
}
