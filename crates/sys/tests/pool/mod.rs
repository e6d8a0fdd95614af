//! Huge pages for tests. Enlarges the pool of the host temporarily if that is allowed. Other
//! crates' tests include this file.

use std::fs::{File, read_to_string};

const NUMBER: &str = "/proc/sys/vm/nr_hugepages";

/// Guard that keeps the requested number of huge pages free and excludes the pools of other tests.
#[derive(Debug)]
pub(crate) struct Pool {
    before: String,
    _alone: File,
}

impl Pool {
    /// Creates a pool with `pages` free huge pages of 2 MiB.
    ///
    /// # Errors
    /// Returns the reason why this host or this user cannot have the pool.
    pub(crate) fn with(pages: u64) -> Result<Self, String> {
        let lock = std::env::temp_dir().join("vmferry-test-huge-pages");
        let alone = File::options().create(true).truncate(false).write(true).open(&lock);
        let alone = alone.map_err(|error| format!("{}: {error}", lock.display()))?;
        alone.lock().map_err(|error| format!("{}: {error}", lock.display()))?;
        let before = read_to_string(NUMBER).map_err(|error| format!("{NUMBER}: {error}"))?;
        let all: u64 = before.trim().parse().map_err(|_| format!("{NUMBER} has the value {before}"))?;
        if free() < pages {
            let want = (all + pages - free()).to_string();
            std::fs::write(NUMBER, want).map_err(|error| format!("{NUMBER} cannot be raised: {error}"))?;
        }
        let pool = Self { before, _alone: alone };
        // The host can provide only pages for which it has contiguous memory.
        if free() < pages { Err(format!("the host has {} huge pages of {pages}", free())) } else { Ok(pool) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = std::fs::write(NUMBER, self.before.trim());
    }
}

fn free() -> u64 {
    let number = |name: &str| {
        let text = read_to_string(format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}"));
        text.unwrap_or_default().trim().parse::<u64>().unwrap_or(0)
    };
    number("free_hugepages").saturating_sub(number("resv_hugepages"))
}
