//! Huge pages of 2 MiB in the host's pool, reserved for the time of a measurement.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folder in which the kernel shows the pool.
pub(crate) const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
/// Size of a huge page in bytes.
const HUGE: u64 = 2 << 20;
/// Number of huge pages beyond the memory of the guests.
const SPARE: u64 = 8;

/// Returns the number of huge pages that `guests` bytes of guest memory need.
pub(crate) fn pages_for(guests: u64) -> u64 {
    guests.div_ceil(HUGE) + SPARE
}

/// Huge pages that are free for a measurement. Dropping the value restores the size that the pool
/// had before.
#[derive(Debug)]
pub(crate) struct Pool {
    folder: PathBuf,
    /// Former size of the pool in pages. `None` if the pool was large enough.
    before: Option<u64>,
}

impl Pool {
    /// Makes sure that the pool in `folder` has `pages` free huge pages. A process with root
    /// privileges (`root`) enlarges the pool if necessary.
    ///
    /// A process that is killed does not restore the pool. The operator then writes the former size
    /// to `nr_hugepages`.
    ///
    /// # Errors
    ///
    /// Returns the reason as text if the pool has too few free pages.
    pub(crate) fn reserve(folder: &Path, pages: u64, root: bool) -> Result<Self, String> {
        let read = |name| number(folder, name);
        // A reserved page is free, but belongs to a mapping that has not touched it yet.
        let free = read("free_hugepages")?.saturating_sub(read("resv_hugepages")?);
        if free >= pages {
            return Ok(Self { folder: folder.into(), before: None });
        }
        let size = read("nr_hugepages")?;
        let wanted = size + (pages - free);
        if !root {
            return Err(format!(
                "needs {pages} free huge pages of 2 MiB, {free} are free: run it as root, or set \
                 vm.nr_hugepages={wanted}"
            ));
        }
        let pool = Self { folder: folder.into(), before: Some(size) };
        pool.resize(wanted).map_err(|error| format!("cannot reserve {wanted} huge pages: {error}"))?;
        // The kernel reserves as many pages as it finds, without an error. If it found too few,
        // dropping `pool` restores the former size.
        let got = read("nr_hugepages")?;
        if got < wanted {
            return Err(format!(
                "needs {pages} free huge pages of 2 MiB, and the kernel found only {} more of {}: host memory \
                 is short or fragmented",
                got.saturating_sub(size),
                wanted - size
            ));
        }
        Ok(pool)
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        fs::write(self.folder.join("nr_hugepages"), pages.to_string())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(before) = self.before
            && let Err(error) = self.resize(before)
        {
            eprintln!(
                "cannot restore the pool of huge pages: {error}; set vm.nr_hugepages={before} yourself"
            );
        }
    }
}

fn number(folder: &Path, name: &str) -> Result<u64, String> {
    let path = folder.join(name);
    let text = fs::read_to_string(&path);
    let text = text.map_err(|error| format!("no pool of huge pages: {}: {error}", path.display()))?;
    text.trim().parse().map_err(|_| format!("{} is not a number: {text}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a folder like the kernel's, with a pool of `size` pages, of which some are free.
    fn folder(size: u64, free: u64, reserved: u64) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, pages) in [("nr_hugepages", size), ("free_hugepages", free), ("resv_hugepages", reserved)]
        {
            fs::write(folder.path().join(name), format!("{pages}\n")).unwrap();
        }
        folder
    }

    fn size(folder: &tempfile::TempDir) -> u64 {
        number(folder.path(), "nr_hugepages").unwrap()
    }

    #[test]
    fn guests_need_their_memory_and_a_few_pages() {
        assert_eq!(pages_for(1 << 30), 520);
        assert_eq!(pages_for((2 << 20) + 1), 10);
    }

    #[test]
    fn pool_with_enough_free_pages_is_not_changed() {
        let folder = folder(700, 600, 80);
        let pool = Pool::reserve(folder.path(), 520, false).unwrap();
        assert_eq!(size(&folder), 700);
        drop(pool);
        assert_eq!(size(&folder), 700);
    }

    #[test]
    fn pool_is_enlarged_and_restored() {
        let folder = folder(100, 60, 10);
        let pool = Pool::reserve(folder.path(), 520, true).unwrap();
        assert_eq!(size(&folder), 570, "50 pages are neither used nor reserved");
        drop(pool);
        assert_eq!(size(&folder), 100);
    }

    #[test]
    fn reason_names_the_pool_that_a_run_needs() {
        let short = folder(0, 0, 0);
        let why = Pool::reserve(short.path(), 520, false).unwrap_err();
        assert!(why.contains("vm.nr_hugepages=520"), "{why}");
        let why = Pool::reserve(&short.path().join("absent"), 520, true).unwrap_err();
        assert!(why.contains("no pool of huge pages"), "{why}");
        assert_eq!(size(&short), 0);
    }
}
