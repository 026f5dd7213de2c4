//! A store of checkpoints: a folder of a local or shared file system, or a bucket.

use std::fmt;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, ObjectStoreScheme, RetryConfig};
use tokio::runtime::Runtime;
use url::Url;

use crate::{Error, Manifest, Result};

/// The name of the folder of a step's checkpoint.
pub fn step_folder(step: u64) -> String {
    format!("step-{step:08}")
}

fn step_of(folder: &str) -> Option<u64> {
    let digits = folder.strip_prefix("step-")?;
    let step: u64 = digits.parse().ok()?;
    (step_folder(step) == folder).then_some(step)
}

/// A store of checkpoints. Writes are atomic and durable: when a call returns, the file is complete and on the disk.
pub struct Store {
    address: String,
    /// The folder, if the store is in a file system.
    local: Option<PathBuf>,
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    runtime: Runtime,
}

impl Store {
    /// Like [`Store::open`], but creates the folder if it does not exist.
    pub fn create(address: &str) -> Result<Self> {
        if let Location::Folder(folder) = parse_address(address)? {
            let created = std::fs::create_dir_all(&folder);
            let parents = folder.ancestors().skip(1).take_while(|parent| !parent.as_os_str().is_empty());
            // Sync the parents, so that the folder survives a power failure. Errors are ignored: some parents belong to other
            // users.
            parents.for_each(|parent| drop(std::fs::File::open(parent).and_then(|parent| parent.sync_all())));
            created.map_err(|error| Error::Address { address: address.to_string(), problem: error.to_string() })?;
        }
        Store::open(address)
    }

    /// Opens a folder, or a bucket: `s3://bucket/folder`, `gs://…`, `az://…`. Credentials come from the environment
    /// (`AWS_ACCESS_KEY_ID` and so on), where the `object_store` crate looks for them.
    pub fn open(address: &str) -> Result<Self> {
        let fail = |problem: String| Error::Address { address: address.to_string(), problem };
        // One thread for I/O, in addition to the calling one.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("storage")
            .on_thread_start(lower_priority)
            .enable_all()
            .build()
            .map_err(|error| fail(error.to_string()))?;
        let (local, objects, prefix) = match parse_address(address)? {
            Location::Folder(folder) => {
                if !folder.is_dir() {
                    return Err(fail("the folder does not exist".to_string()));
                }
                let objects = LocalFileSystem::new_with_prefix(&folder).map_err(|error| fail(error.to_string()))?;
                (Some(folder), Arc::new(objects.with_fsync(true)) as Arc<dyn ObjectStore>, Path::default())
            }
            Location::Bucket(url) => {
                let (objects, prefix) = bucket(&url).map_err(|error| fail(error.to_string()))?;
                (None, objects, prefix)
            }
        };
        Ok(Store { address: address.trim_end_matches('/').to_string(), local, objects, prefix, runtime })
    }

    /// The full address of a file, for messages.
    pub fn display(&self, path: &str) -> String {
        format!("{}/{path}", self.address)
    }

    /// The steps that have a manifest, newest first. The manifests are not checked.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps = Vec::new();
        for step in self.folders()? {
            if self.file_len(&format!("{}/{}", step_folder(step), Manifest::file_name()))?.is_some() {
                steps.push(step);
            }
        }
        steps.sort_unstable_by(|a, b| b.cmp(a));
        Ok(steps)
    }

    /// The steps that have a folder, complete or not.
    pub(crate) fn folders(&self) -> Result<Vec<u64>> {
        let prefix = (self.prefix != Path::default()).then_some(&self.prefix);
        let listed = self.runtime.block_on(self.objects.list_with_delimiter(prefix));
        let listed = listed.map_err(|error| self.storage_error("", error))?;
        Ok(listed.common_prefixes.iter().filter_map(|folder| step_of(folder.filename()?)).collect())
    }

    /// The files of a folder, with their sizes.
    pub fn files(&self, folder: &str) -> Result<Vec<(String, u64)>> {
        let at = self.path(folder);
        let listed = self.runtime.block_on(self.objects.list(Some(&at)).try_collect::<Vec<_>>());
        let listed = listed.map_err(|error| self.storage_error(folder, error))?;
        let named = |meta: object_store::ObjectMeta| Some((meta.location.filename()?.to_string(), meta.size));
        Ok(listed.into_iter().filter_map(named).collect())
    }

    /// The size of a file, if it exists.
    pub fn file_len(&self, path: &str) -> Result<Option<u64>> {
        match self.runtime.block_on(self.objects.head(&self.path(path))) {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.storage_error(path, error)),
        }
    }

    /// Reads a whole file. Fails if it has more than `most` bytes.
    pub fn read(&self, path: &str, most: u64) -> Result<Bytes> {
        let all = self.runtime.block_on(async {
            let found = self.objects.get(&self.path(path)).await?;
            match found.meta.size <= most {
                true => found.bytes().await.map(Ok),
                false => Ok(Err(found.meta.size)),
            }
        });
        match all.map_err(|error| self.storage_error(path, error))? {
            Ok(bytes) => Ok(bytes),
            Err(size) => Err(self.damaged_error(path, format!("it has {size} bytes; the maximum is {most}"))),
        }
    }

    /// Reads a range of a file.
    pub fn read_range(&self, path: &str, range: Range<u64>) -> Result<Bytes> {
        let wanted = range.end - range.start;
        let bytes = self.runtime.block_on(self.objects.get_range(&self.path(path), range));
        let bytes = bytes.map_err(|error| self.storage_error(path, error))?;
        match bytes.len() as u64 == wanted {
            true => Ok(bytes),
            false => {
                Err(self.damaged_error(path, format!("{wanted} bytes were requested, but {} arrived", bytes.len())))
            }
        }
    }

    /// Reads a part of a file into memory that the caller reuses.
    pub(crate) fn read_into(&self, path: &str, start: u64, bytes: &mut [u8]) -> Result<()> {
        let read = |folder: &PathBuf, bytes: &mut [u8]| {
            std::fs::File::open(folder.join(path)).and_then(|file| file.read_exact_at(bytes, start))
        };
        if self.local.as_ref().is_some_and(|folder| read(folder, bytes).is_ok()) {
            return Ok(());
        }
        // This also finds out what is wrong with a local file.
        bytes.copy_from_slice(&self.read_range(path, start..start + bytes.len() as u64)?);
        Ok(())
    }

    /// Writes a whole file.
    pub fn write(&self, path: &str, bytes: impl Into<Bytes>) -> Result<()> {
        let written = self.runtime.block_on(self.objects.put(&self.path(path), bytes.into().into()));
        written.map(drop).map_err(|error| self.storage_error(path, error))
    }

    /// Removes a file, if it exists.
    pub fn remove(&self, path: &str) -> Result<()> {
        match self.runtime.block_on(self.objects.delete(&self.path(path))) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.storage_error(path, error)),
        }
    }

    /// Removes a step's checkpoint: the manifest first, so that a partial checkpoint never looks complete.
    pub fn remove_step(&self, step: u64) -> Result<()> {
        let folder = step_folder(step);
        self.remove(&format!("{folder}/{}", Manifest::file_name()))?;
        if let Some(local) = &self.local {
            // Make that durable before anything else is removed. A folder that does not exist needs no sync.
            drop(std::fs::File::open(local.join(&folder)).and_then(|folder| folder.sync_all()));
        }
        self.remove_files(&folder, |_| true)?;
        if let Some(local) = &self.local {
            match std::fs::remove_dir_all(local.join(&folder)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::Address { address: self.display(&folder), problem: error.to_string() });
                }
                _ => (),
            }
        }
        Ok(())
    }

    /// Removes the files of a folder that `which` selects, and leftovers of crashed writers.
    pub(crate) fn remove_files(&self, folder: &str, which: impl Fn(&str) -> bool) -> Result<()> {
        for (name, _) in self.files(folder)? {
            if which(&name) {
                self.remove(&format!("{folder}/{name}"))?;
            }
        }
        // Files being written have a '#' in their names, and are not listed.
        let Some(entries) = self.local.as_ref().and_then(|local| std::fs::read_dir(local.join(folder)).ok()) else {
            return Ok(());
        };
        for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().contains('#')) {
            // Another rank may have removed it already.
            drop(std::fs::remove_file(entry.path()));
        }
        Ok(())
    }

    pub(crate) fn path(&self, path: &str) -> Path {
        // Names that are not valid for objects are encoded, and will not be found.
        let joined = format!("{}/{path}", self.prefix);
        Path::parse(joined.trim_matches('/')).unwrap_or_else(|_| Path::from(joined))
    }

    /// The path of a file, if the store is in a file system.
    pub(crate) fn local(&self, path: &str) -> Option<PathBuf> {
        Some(self.local.as_ref()?.join(path))
    }

    pub(crate) fn objects(&self) -> &Arc<dyn ObjectStore> {
        &self.objects
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn storage_error(&self, path: &str, error: object_store::Error) -> Error {
        Error::Storage { path: self.display(path), error }
    }

    pub(crate) fn damaged_error(&self, path: &str, problem: String) -> Error {
        Error::Damaged { path: self.display(path), problem }
    }
}

/// Gives this thread the lowest priority, so that writing a checkpoint does not slow down training.
pub fn lower_priority() {
    // Failure only costs speed.
    let _ = rustix::process::setpriority_process(None, LOWEST_PRIORITY);
}

/// The highest `nice` value, which means the lowest priority.
const LOWEST_PRIORITY: i32 = 19;

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.address).finish()
    }
}

enum Location {
    Folder(PathBuf),
    Bucket(Url),
}

/// Parses the address of a store.
fn parse_address(address: &str) -> Result<Location> {
    let fail = |problem: String| Error::Address { address: address.to_string(), problem };
    if !address.contains("://") {
        return std::path::absolute(address).map(Location::Folder).map_err(|error| fail(error.to_string()));
    }
    let url: Url = address.parse().map_err(|error: url::ParseError| fail(error.to_string()))?;
    match url.scheme() {
        "file" => url.to_file_path().map(Location::Folder).map_err(|()| fail("it is not a valid file URL".to_string())),
        _ => Ok(Location::Bucket(url)),
    }
}

/// How long a request to a bucket is retried: long enough for a server to restart.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);

fn bucket(url: &Url) -> std::result::Result<(Arc<dyn ObjectStore>, Path), object_store::Error> {
    // An error means that a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig { retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
    let (scheme, prefix) = ObjectStoreScheme::parse(url)?;
    let objects: Arc<dyn ObjectStore> = match scheme {
        ObjectStoreScheme::AmazonS3 => {
            Arc::new(AmazonS3Builder::from_env().with_url(url.as_str()).with_retry(retry).build()?)
        }
        ObjectStoreScheme::GoogleCloudStorage => {
            Arc::new(GoogleCloudStorageBuilder::from_env().with_url(url.as_str()).with_retry(retry).build()?)
        }
        ObjectStoreScheme::MicrosoftAzure => {
            Arc::new(MicrosoftAzureBuilder::from_env().with_url(url.as_str()).with_retry(retry).build()?)
        }
        _ => {
            let source = "unsupported scheme; use a folder, s3://, gs:// or az://".into();
            return Err(object_store::Error::Generic { store: "address", source });
        }
    };
    Ok((objects, prefix))
}
