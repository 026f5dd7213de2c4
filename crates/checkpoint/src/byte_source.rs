//! Where the bytes of a file come from.

use std::io;

use bytes::{Buf, Bytes};

/// Consecutive bytes of a file, which are read only when there is room for them where they are written from.
pub trait ByteSource: Sized {
    /// The number of bytes that have not been read yet.
    fn remaining(&self) -> usize;

    /// Reads the next bytes, as many as fit into `into`, which is not longer than what remains.
    fn read(&mut self, into: &mut [u8]) -> io::Result<()>;

    /// Reads all that remains.
    fn read_all(mut self) -> io::Result<Bytes> {
        // If memory is short, a failed save is better than a rank that dies.
        let mut all = Vec::new();
        all.try_reserve_exact(self.remaining())?;
        all.resize(self.remaining(), 0);
        self.read(&mut all)?;
        Ok(all.into())
    }
}

impl ByteSource for Bytes {
    fn remaining(&self) -> usize {
        self.len()
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<()> {
        self.copy_to_slice(into);
        Ok(())
    }

    fn read_all(self) -> io::Result<Bytes> {
        Ok(self)
    }
}
