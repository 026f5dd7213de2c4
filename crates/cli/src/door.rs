//! How those who look on find a run's supervisor: a file in the run's folder with its address and secret, for its user alone.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use shardwise_watch::Secret;

use crate::launched::own_name;

/// The file.
const NAME: &str = "supervisor.json";

/// The most of it that is read.
const BYTES_MAX: u64 = 4096;

#[derive(Serialize, Deserialize)]
struct Written {
    address: SocketAddr,
    secret: String,
    host: String,
    pid: u32,
}

/// A supervisor that can be found, until this is dropped.
pub(crate) struct Door(PathBuf);

impl Door {
    /// Says where the supervisor of the run in this folder listens.
    pub(crate) fn open(folder: &Path, address: SocketAddr, secret: &Secret) -> Result<Self> {
        let written = Written { address, secret: secret.to_hex(), host: own_name(), pid: std::process::id() };
        let (path, aside) = (folder.join(NAME), folder.join(format!(".{NAME}.{}", std::process::id())));
        let write = || {
            std::fs::create_dir_all(folder)?;
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
            file.write_all(&serde_json::to_vec(&written)?)?;
            // In one piece, and never with another's rights.
            std::fs::rename(&aside, &path)
        };
        write().with_context(|| format!("{}: those who want to look on will not find the run", path.display()))?;
        Ok(Door(path))
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // Another supervisor may have put its own there.
        if read(&self.0).is_ok_and(|written| written.is_some_and(|written| written.pid == std::process::id())) {
            drop(std::fs::remove_file(&self.0));
        }
    }
}

/// The supervisor of the run in this folder, if it is at work on this host.
pub(crate) fn find(folder: &Path) -> Result<Option<(SocketAddr, Secret)>> {
    let Some(written) = read(&folder.join(NAME))? else { return Ok(None) };
    // One that was killed takes nothing away.
    let is_here = written.host == own_name() || !written.address.ip().is_loopback();
    let is_alive = written.host != own_name() || Path::new(&format!("/proc/{}", written.pid)).exists();
    if !is_here || !is_alive {
        return Ok(None);
    }
    Ok(Some((written.address, Secret::from_hex(&written.secret)?)))
}

/// The secret in a file: such a one, or the digits alone.
pub(crate) fn secret_in(path: &Path) -> Result<Secret> {
    let text = text(path).with_context(|| path.display().to_string())?;
    let digits =
        serde_json::from_str::<Written>(&text).map_or_else(|_| text.trim().to_string(), |written| written.secret);
    Secret::from_hex(&digits).with_context(|| path.display().to_string())
}

fn read(path: &Path) -> Result<Option<Written>> {
    match text(path) {
        Ok(text) => Ok(Some(serde_json::from_str(&text).with_context(|| path.display().to_string())?)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            bail!("{}: it is another user's, who alone may look on", path.display())
        }
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

fn text(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_door_is_for_its_user_and_is_gone_with_its_supervisor() {
        let folder = tempfile::tempdir().unwrap();
        let (path, secret) = (folder.path().join(NAME), Secret::new().unwrap());
        assert!(find(folder.path()).unwrap().is_none());
        let address = "127.0.0.1:4711".parse().unwrap();
        let door = Door::open(folder.path(), address, &secret).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let (found, known) = find(folder.path()).unwrap().unwrap();
        assert_eq!((found, known.to_hex()), (address, secret.to_hex()));
        assert_eq!(secret_in(&path).unwrap().to_hex(), secret.to_hex());
        drop(door);
        assert!(!path.exists());
        // One whose process is gone is not at work.
        let killed = Written { address, secret: secret.to_hex(), host: own_name(), pid: u32::MAX };
        std::fs::write(&path, serde_json::to_vec(&killed).unwrap()).unwrap();
        assert!(find(folder.path()).unwrap().is_none());
        std::fs::write(&path, "{}").unwrap();
        assert!(find(folder.path()).is_err());
    }
}
