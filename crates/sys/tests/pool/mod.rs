//! Huge pages for tests: the host's pool, made larger for a while where that is allowed. Other crates' tests include this.

use std::fs::{File, read_to_string};

const NUMBER: &str = "/proc/sys/vm/nr_hugepages";

/// So many huge pages are free while this lives, and no other test's pool does.
#[derive(Debug)]
pub(crate) struct Pool {
    before: String,
    _alone: File,
}

impl Pool {
    /// A pool with `pages` free huge pages of 2 MiB.
    ///
    /// # Errors
    /// Why this host or this user cannot have it.
    pub(crate) fn with(pages: u64) -> Result<Self, String> {
        let lock = std::env::temp_dir().join("vmferry-test-huge-pages");
        let alone = File::options().create(true).truncate(false).write(true).open(&lock);
        let alone = alone.map_err(|error| format!("{}: {error}", lock.display()))?;
        alone.lock().map_err(|error| format!("{}: {error}", lock.display()))?;
        let before = read_to_string(NUMBER).map_err(|error| format!("{NUMBER}: {error}"))?;
        let all: u64 = before.trim().parse().map_err(|_| format!("{NUMBER} says {before}"))?;
        if free() < pages {
            let want = (all + pages - free()).to_string();
            std::fs::write(NUMBER, want).map_err(|error| format!("{NUMBER} cannot be raised: {error}"))?;
        }
        let pool = Self { before, _alone: alone };
        // The host gives what it has in one piece.
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
