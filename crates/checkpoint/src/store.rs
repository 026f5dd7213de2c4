//! Where checkpoints are: a folder of this or a shared file system, or a bucket.

use std::fmt;
use std::ops::Range;
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

/// The folder of a step's checkpoint.
pub fn folder_of(step: u64) -> String {
    format!("step-{step:08}")
}

fn step_of(folder: &str) -> Option<u64> {
    let digits = folder.strip_prefix("step-")?;
    let step: u64 = digits.parse().ok()?;
    (folder_of(step) == folder).then_some(step)
}

/// A place for checkpoints. Files appear in it whole or not at all, and are on the disk when a call returns.
pub struct Store {
    address: String,
    /// Where it is, if it is a file system's.
    local: Option<PathBuf>,
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    runtime: Runtime,
}

impl Store {
    /// As [`Store::open`], and makes the folder if it is not there.
    pub fn create(address: &str) -> Result<Self> {
        if let Place::Folder(folder) = place(address)? {
            let made = std::fs::create_dir_all(&folder);
            let above = folder.ancestors().skip(1).take_while(|above| !above.as_os_str().is_empty());
            // So that a loss of power leaves the folder where it is. One of another's is not ours to sync.
            above.for_each(|above| drop(std::fs::File::open(above).and_then(|above| above.sync_all())));
            made.map_err(|error| Error::Address { address: address.to_string(), problem: error.to_string() })?;
        }
        Store::open(address)
    }

    /// Opens a folder, or an address: `s3://bucket/folder`, `gs://…`, `az://…`. Credentials are read from the environment
    /// (`AWS_ACCESS_KEY_ID` and so on), as the crate `object_store` reads them.
    pub fn open(address: &str) -> Result<Self> {
        let fail = |problem: String| Error::Address { address: address.to_string(), problem };
        // One thread that moves bytes, beside the one that asks for it.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("storage")
            .on_thread_start(yield_to_others)
            .enable_all()
            .build()
            .map_err(|error| fail(error.to_string()))?;
        let (local, objects, prefix) = match place(address)? {
            Place::Folder(folder) => {
                if !folder.is_dir() {
                    return Err(fail("there is no such folder".to_string()));
                }
                let objects = LocalFileSystem::new_with_prefix(&folder).map_err(|error| fail(error.to_string()))?;
                (Some(folder), Arc::new(objects.with_fsync(true)) as Arc<dyn ObjectStore>, Path::default())
            }
            Place::Bucket(url) => {
                let (objects, prefix) = bucket(&url).map_err(|error| fail(error.to_string()))?;
                (None, objects, prefix)
            }
        };
        Ok(Store { address: address.trim_end_matches('/').to_string(), local, objects, prefix, runtime })
    }

    /// What a file of the store is called.
    pub fn display(&self, path: &str) -> String {
        format!("{}/{path}", self.address)
    }

    /// The steps that have a manifest, the newest first. Whether it is a good one is not asked.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps = Vec::new();
        for step in self.folders()? {
            if self.bytes_of(&format!("{}/{}", folder_of(step), Manifest::file()))?.is_some() {
                steps.push(step);
            }
        }
        steps.sort_unstable_by(|a, b| b.cmp(a));
        Ok(steps)
    }

    /// The steps that have a folder, whatever is in it.
    pub(crate) fn folders(&self) -> Result<Vec<u64>> {
        let prefix = (self.prefix != Path::default()).then_some(&self.prefix);
        let listed = self.runtime.block_on(self.objects.list_with_delimiter(prefix));
        let listed = listed.map_err(|error| self.failed("", error))?;
        Ok(listed.common_prefixes.iter().filter_map(|folder| step_of(folder.filename()?)).collect())
    }

    /// The files of a folder, with their lengths.
    pub fn files(&self, folder: &str) -> Result<Vec<(String, u64)>> {
        let at = self.path(folder);
        let listed = self.runtime.block_on(self.objects.list(Some(&at)).try_collect::<Vec<_>>());
        let listed = listed.map_err(|error| self.failed(folder, error))?;
        let named = |meta: object_store::ObjectMeta| Some((meta.location.filename()?.to_string(), meta.size));
        Ok(listed.into_iter().filter_map(named).collect())
    }

    /// A file's length, if there is such a file.
    pub fn bytes_of(&self, path: &str) -> Result<Option<u64>> {
        match self.runtime.block_on(self.objects.head(&self.path(path))) {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(path, error)),
        }
    }

    /// A whole file, if it is no longer than `most` bytes.
    pub fn read(&self, path: &str, most: u64) -> Result<Bytes> {
        let all = self.runtime.block_on(async {
            let found = self.objects.get(&self.path(path)).await?;
            match found.meta.size <= most {
                true => found.bytes().await.map(Ok),
                false => Ok(Err(found.meta.size)),
            }
        });
        match all.map_err(|error| self.failed(path, error))? {
            Ok(bytes) => Ok(bytes),
            Err(size) => Err(self.damaged(path, format!("it has {size} bytes, and at most {most} are read"))),
        }
    }

    /// Some bytes of a file.
    pub fn read_range(&self, path: &str, range: Range<u64>) -> Result<Bytes> {
        let wanted = range.end - range.start;
        let bytes = self.runtime.block_on(self.objects.get_range(&self.path(path), range));
        let bytes = bytes.map_err(|error| self.failed(path, error))?;
        match bytes.len() as u64 == wanted {
            true => Ok(bytes),
            false => Err(self.damaged(path, format!("{wanted} bytes were asked for, and {} came", bytes.len()))),
        }
    }

    /// Writes a whole file at once.
    pub fn write(&self, path: &str, bytes: impl Into<Bytes>) -> Result<()> {
        let written = self.runtime.block_on(self.objects.put(&self.path(path), bytes.into().into()));
        written.map(drop).map_err(|error| self.failed(path, error))
    }

    /// Removes a file.
    pub fn remove(&self, path: &str) -> Result<()> {
        match self.runtime.block_on(self.objects.delete(&self.path(path))) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(path, error)),
        }
    }

    /// Removes a step: its manifest first, so that there is no moment at which half a checkpoint looks like one.
    pub fn remove_step(&self, step: u64) -> Result<()> {
        let folder = folder_of(step);
        self.remove(&format!("{folder}/{}", Manifest::file()))?;
        if let Some(local) = &self.local {
            // On the disk as well, before anything else goes. A folder that is not there needs no sync.
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

    /// Removes the files of a folder whose names are so, and what a writer that died has left of a file.
    pub(crate) fn remove_files(&self, folder: &str, which: impl Fn(&str) -> bool) -> Result<()> {
        for (name, _) in self.files(folder)? {
            if which(&name) {
                self.remove(&format!("{folder}/{name}"))?;
            }
        }
        // Files on their way have a '#' in their names, and are not listed.
        let Some(entries) = self.local.as_ref().and_then(|local| std::fs::read_dir(local.join(folder)).ok()) else {
            return Ok(());
        };
        for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().contains('#')) {
            // Another rank may have removed it, which is as good.
            drop(std::fs::remove_file(entry.path()));
        }
        Ok(())
    }

    pub(crate) fn path(&self, path: &str) -> Path {
        // Names as they are, where they can be names of objects; others are encoded, and will not be found.
        let joined = format!("{}/{path}", self.prefix);
        Path::parse(joined.trim_matches('/')).unwrap_or_else(|_| Path::from(joined))
    }

    /// Where a file is, if it is a file system's.
    pub(crate) fn local(&self, path: &str) -> Option<PathBuf> {
        Some(self.local.as_ref()?.join(path))
    }

    pub(crate) fn objects(&self) -> &Arc<dyn ObjectStore> {
        &self.objects
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn failed(&self, path: &str, error: object_store::Error) -> Error {
        Error::Storage { path: self.display(path), error }
    }

    pub(crate) fn damaged(&self, path: &str, problem: String) -> Error {
        Error::Damaged { path: self.display(path), problem }
    }
}

/// Lets the processors be taken by whoever has work beside this thread, as training has while a checkpoint is written.
pub fn yield_to_others() {
    // It is only a matter of speed.
    let _ = rustix::process::setpriority_process(None, LOWEST_PRIORITY);
}

/// As `nice` counts.
const LOWEST_PRIORITY: i32 = 19;

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.address).finish()
    }
}

enum Place {
    Folder(PathBuf),
    Bucket(Url),
}

/// What an address means.
fn place(address: &str) -> Result<Place> {
    let fail = |problem: String| Error::Address { address: address.to_string(), problem };
    if !address.contains("://") {
        return std::path::absolute(address).map(Place::Folder).map_err(|error| fail(error.to_string()));
    }
    let url: Url = address.parse().map_err(|error: url::ParseError| fail(error.to_string()))?;
    match url.scheme() {
        "file" => url.to_file_path().map(Place::Folder).map_err(|()| fail("it is no path of a file".to_string())),
        _ => Ok(Place::Bucket(url)),
    }
}

/// How long a request to a bucket is tried again: long enough for a server that is started anew, not for one that is gone.
const RETRIED_FOR: Duration = Duration::from_secs(30);

fn bucket(url: &Url) -> std::result::Result<(Arc<dyn ObjectStore>, Path), object_store::Error> {
    // An error means that a provider is installed already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig { retry_timeout: RETRIED_FOR, ..RetryConfig::default() };
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
            let source = "checkpoints are kept in a folder, or at s3://, gs:// or az://".into();
            return Err(object_store::Error::Generic { store: "address", source });
        }
    };
    Ok((objects, prefix))
}
