//! The host's pool of huge pages (Linux `Documentation/admin-guide/mm/hugetlbpage.rst`).

use std::fmt;

/// Size of a huge page in bytes.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Directory in which the kernel describes the pool of this page size.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// State of the host's pool of huge pages of 2 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugePagePool {
    /// Number of huge pages in the pool.
    pub pages: u64,
    /// Number of huge pages that are neither in use nor reserved.
    pub free: u64,
}

impl HugePagePool {
    /// Reads the state of the pool. All numbers are 0 if this kernel has no such pool.
    #[must_use]
    pub fn read() -> Self {
        let number = |name: &str| {
            let text = std::fs::read_to_string(format!("{POOL}/{name}")).unwrap_or_default();
            text.trim().parse().unwrap_or(0)
        };
        let (pages, free): (u64, u64) = (number("nr_hugepages"), number("free_hugepages"));
        Self { pages, free: free.saturating_sub(number("resv_hugepages")) }
    }

    /// Returns advice for `bytes` of memory.
    pub(super) fn advice(self, bytes: u64) -> Advice {
        Advice { pool: self, need: bytes.div_ceil(HUGE_PAGE_BYTES) }
    }
}

/// Advice on how to get enough huge pages, displayed as a sentence.
#[derive(Debug, Clone, Copy)]
pub struct Advice {
    pool: HugePagePool,
    need: u64,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool: HugePagePool { pages, free }, need } = *self;
        if free >= need {
            return write!(f, "{need} huge pages of 2 MiB are needed, and the host has {free} free");
        }
        let want = pages + (need - free);
        write!(
            f,
            "{need} huge pages of 2 MiB are needed, and the host has {free} free; `sysctl vm.nr_hugepages={want}` (as root, \
             best soon after boot) gets them, or choose another memory backing"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_says_how_many_pages_the_host_must_have() {
        let pool = HugePagePool { pages: 10, free: 3 };
        let text = pool.advice(64 << 20).to_string();
        assert!(text.contains("32 huge pages") && text.contains("has 3 free"), "{text}");
        assert!(text.contains("vm.nr_hugepages=39"), "{text}");
        assert!(!pool.advice(6 << 20).to_string().contains("sysctl"));
    }
}
