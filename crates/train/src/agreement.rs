//! What one rank could not do, none relies on.

use shardwise_comm::{Group, Reduce};

use crate::Result;

/// How long a message between ranks may be.
const MESSAGE_BYTES: usize = 1 << 10;

/// What this rank has, if all ranks have theirs; or else what the first of those that have not says.
pub(crate) fn agreed<T>(world: &Group, own: std::result::Result<T, String>) -> Result<std::result::Result<T, String>> {
    let key = if own.is_err() { (world.size() - world.rank()) as i64 } else { 0 };
    let first = world.all_reduce("agreement", Reduce::Max, vec![key]).wait()?[0];
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
