//! `supervisor.json` in a run's folder, through which `shardwise watch` finds the run's supervisor. It holds the supervisor's address and
//! secret, and only its owner can read it.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise_watch::Secret;

use crate::error::{Error, Result};
use crate::launcher_env::hostname;

const NAME: &str = "supervisor.json";

/// The longest file that is read.
const BYTES_MAX: u64 = 4096;

#[derive(Serialize, Deserialize)]
struct Contents {
    address: SocketAddr,
    secret: String,
    host: String,
    pid: u32,
}

/// The file of a running supervisor. Dropping it removes the file.
pub(crate) struct SupervisorFile(PathBuf);

impl SupervisorFile {
    /// Writes the file into the run's folder.
    pub(crate) fn create(folder: &Path, address: SocketAddr, secret: &Secret) -> Result<Self> {
        let contents = Contents { address, secret: secret.to_hex(), host: hostname(), pid: std::process::id() };
        let (path, staged) = (folder.join(NAME), folder.join(format!(".{NAME}.{}", std::process::id())));
        let write = || {
            std::fs::create_dir_all(folder)?;
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&staged)?;
            file.write_all(&serde_json::to_vec(&contents)?)?;
            // Renaming is atomic, and the file never has the permissions of an older one.
            std::fs::rename(&staged, &path)
        };
        let fail = |error: std::io::Error| {
            let path = path.display();
            Error::failed(format!("{path}: cannot write it, so `shardwise watch` will not find this run"), error)
        };
        write().map_err(fail)?;
        Ok(SupervisorFile(path))
    }
}

impl Drop for SupervisorFile {
    fn drop(&mut self) {
        // Another supervisor may have replaced it.
        if read(&self.0).is_ok_and(|contents| contents.is_some_and(|contents| contents.pid == std::process::id())) {
            drop(std::fs::remove_file(&self.0));
        }
    }
}

/// Finds the running supervisor of the run in this folder, if this host can reach it.
pub fn find_supervisor(folder: &Path) -> Result<Option<(SocketAddr, Secret)>> {
    let Some(contents) = read(&folder.join(NAME))? else { return Ok(None) };
    // The file may be left over from a supervisor that was killed.
    let is_reachable = contents.host == hostname() || !contents.address.ip().is_loopback();
    let is_alive = contents.host != hostname() || Path::new(&format!("/proc/{}", contents.pid)).exists();
    if !is_reachable || !is_alive {
        return Ok(None);
    }
    Ok(Some((contents.address, Secret::from_hex(&contents.secret)?)))
}

/// Reads the secret from a `supervisor.json`, or from a file that holds only the hexadecimal digits.
pub fn read_secret(path: &Path) -> Result<Secret> {
    let text = read_text(path).map_err(|error| Error::failed(path.display(), error))?;
    let digits =
        serde_json::from_str::<Contents>(&text).map_or_else(|_| text.trim().to_string(), |contents| contents.secret);
    Secret::from_hex(&digits).map_err(|error| Error::failed(path.display(), error))
}

fn read(path: &Path) -> Result<Option<Contents>> {
    match read_text(path) {
        Ok(text) => serde_json::from_str(&text).map(Some).map_err(|error| Error::failed(path.display(), error)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            Err(Error::NotOwner { path: path.to_path_buf() })
        }
        Err(error) => Err(Error::failed(path.display(), error)),
    }
}

fn read_text(path: &Path) -> std::io::Result<String> {
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
    fn only_its_owner_can_read_the_file_and_it_goes_with_the_supervisor() {
        let folder = tempfile::tempdir().unwrap();
        let (path, secret) = (folder.path().join(NAME), Secret::new().unwrap());
        assert!(find_supervisor(folder.path()).unwrap().is_none());
        let address = "127.0.0.1:4711".parse().unwrap();
        let file = SupervisorFile::create(folder.path(), address, &secret).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let (found, known) = find_supervisor(folder.path()).unwrap().unwrap();
        assert_eq!((found, known.to_hex()), (address, secret.to_hex()));
        assert_eq!(read_secret(&path).unwrap().to_hex(), secret.to_hex());
        drop(file);
        assert!(!path.exists());
        // A supervisor that no longer runs is not found.
        let killed = Contents { address, secret: secret.to_hex(), host: hostname(), pid: u32::MAX };
        std::fs::write(&path, serde_json::to_vec(&killed).unwrap()).unwrap();
        assert!(find_supervisor(folder.path()).unwrap().is_none());
        std::fs::write(&path, "{}").unwrap();
        assert!(find_supervisor(folder.path()).is_err());
    }
}
