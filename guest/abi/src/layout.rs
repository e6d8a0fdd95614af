//! Pages of a guest, and their owners among the vCPUs.

use crate::{MAX_CPUS, PAGE_SIZE, Pattern, Workload};
use core::fmt;
use core::ops::Range;

/// Division of a guest's memory. `1 <= cpus <= 64`, `ws_pages <= data_pages`, and a busy pattern
/// has `ws_pages >= cpus`.
///
/// Pages are numbered `0..data_pages`. The first `ws_pages` of them are the working set. The guest
/// also needs [`table_pages`](Self::table_pages) for its counters, in memory that migrates like the
/// rest. A guest that allocates may have no pages with content, because the remaining memory
/// belongs to its allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of pages that are written to.
    pub ws_pages: u64,
    /// Number of pages that have content, the working set included.
    pub data_pages: u64,
    /// Number of vCPUs that share the pages.
    pub cpus: u64,
}

/// Reason for which a workload does not fit a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// There is no vCPU, or more than the statistics page has room for.
    Cpus {
        /// Number of requested vCPUs.
        cpus: u64,
    },
    /// The guest has less memory than the workload needs.
    Memory {
        /// Number of bytes that the workload needs, its counters included.
        needed: u64,
        /// Number of bytes that the guest can use.
        usable: u64,
    },
    /// The working set has fewer pages than there are vCPUs.
    WorkingSet {
        /// Number of pages of the working set.
        ws_pages: u64,
        /// Number of vCPUs.
        cpus: u64,
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpus { cpus } => write!(f, "{cpus} vCPUs are not possible: use 1 to {MAX_CPUS}"),
            Self::Memory { needed, usable } => write!(
                f,
                "the workload needs {needed} bytes and the guest can use {usable}; lower ws, data or alloc, or give the guest more memory"
            ),
            Self::WorkingSet { ws_pages, cpus } => {
                write!(f, "a working set of {ws_pages} pages is too small for {cpus} vCPUs; raise ws")
            }
        }
    }
}

impl core::error::Error for LayoutError {}

/// Number of counters of 8 bytes in a page.
const COUNTERS_A_PAGE: u64 = PAGE_SIZE / 8;

impl Layout {
    /// Divides `usable_pages` pages (content and counters) among `cpus` vCPUs as the workload
    /// requires.
    ///
    /// # Errors
    /// Returns a [`LayoutError`] if there are too few pages or too many vCPUs.
    pub fn new(workload: &Workload, usable_pages: u64, cpus: u64) -> Result<Self, LayoutError> {
        if !(1..=MAX_CPUS as u64).contains(&cpus) {
            return Err(LayoutError::Cpus { cpus });
        }
        let ws = workload.ws.map(|bytes| bytes / PAGE_SIZE);
        let data = workload.data.map(|bytes| bytes / PAGE_SIZE);
        let idle = workload.pattern == Pattern::Idle;
        let alloc_pages = workload.alloc.map_or(0, |alloc| alloc.bytes / PAGE_SIZE);
        let data_pages = match data.or(ws) {
            Some(pages) => pages,
            None if alloc_pages != 0 => 0,
            None if idle => usable_pages,
            // pages + pages / 512 (rounded up) <= usable
            None => usable_pages - usable_pages.div_ceil(COUNTERS_A_PAGE + 1),
        };
        let ws_pages = if idle { 0 } else { ws.unwrap_or(data_pages) };
        let layout = Self { ws_pages, data_pages, cpus };
        let needed = data_pages.saturating_add(layout.table_pages()).saturating_add(alloc_pages);
        if needed > usable_pages || needed == 0 {
            return Err(LayoutError::Memory {
                needed: needed.max(1).saturating_mul(PAGE_SIZE),
                usable: usable_pages.saturating_mul(PAGE_SIZE),
            });
        }
        if !idle && ws_pages < cpus {
            return Err(LayoutError::WorkingSet { ws_pages, cpus });
        }
        Ok(layout)
    }

    /// Returns the number of pages of the counters: 8 bytes for each page of the working set.
    #[must_use]
    pub fn table_pages(&self) -> u64 {
        self.ws_pages.div_ceil(COUNTERS_A_PAGE)
    }

    /// Returns the pages that vCPU `cpu` (`0..cpus`) owns.
    #[must_use]
    pub fn share(&self, cpu: u64) -> Share {
        let rest = self.data_pages.saturating_sub(self.ws_pages);
        let ws = part(self.ws_pages, cpu, self.cpus);
        let rest = part(rest, cpu, self.cpus);
        Share { ws, rest: rest.start + self.ws_pages..rest.end + self.ws_pages }
    }
}

fn part(pages: u64, index: u64, of: u64) -> Range<u64> {
    let cut = |n: u64| {
        let product = u128::from(pages) * u128::from(n.min(of)) / u128::from(of.max(1));
        u64::try_from(product).unwrap_or(pages)
    };
    cut(index)..cut(index + 1)
}

/// Pages of one vCPU. No other vCPU writes or checks them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Part of the working set.
    pub ws: Range<u64>,
    /// Part of the pages that are filled at start and then only checked.
    pub rest: Range<u64>,
}

impl Share {
    /// Returns the number of all pages.
    #[must_use]
    pub fn len(&self) -> u64 {
        (self.ws.end - self.ws.start) + (self.rest.end - self.rest.start)
    }

    /// Returns true if the share is empty, as for the last of many vCPUs with little memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns page `index` (`0..len`) of the share. The working set comes first.
    #[must_use]
    #[inline]
    pub fn page(&self, index: u64) -> u64 {
        let ws = self.ws.end - self.ws.start;
        if index < ws { self.ws.start + index } else { self.rest.start + (index - ws) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    fn layout(spec: &str, pages: u64, cpus: u64) -> Result<Layout, LayoutError> {
        Layout::new(&spec.parse().unwrap(), pages, cpus)
    }

    #[test]
    fn defaults_use_all_memory() {
        let all = layout("uniform", 1026, 1).unwrap();
        assert_eq!((all.ws_pages, all.data_pages, all.table_pages()), (1024, 1024, 2));
        let idle = layout("idle", 1026, 1).unwrap();
        assert_eq!((idle.ws_pages, idle.data_pages, idle.table_pages()), (0, 1026, 0));
    }

    #[test]
    fn given_sizes_are_used() {
        let both = layout("uniform,ws=1M,data=2M", 100_000, 2).unwrap();
        assert_eq!((both.ws_pages, both.data_pages), (256, 512));
        let ws = layout("uniform,ws=1M", 100_000, 2).unwrap();
        assert_eq!((ws.ws_pages, ws.data_pages), (256, 256));
        let idle = layout("idle,ws=1M", 100_000, 2).unwrap();
        assert_eq!((idle.ws_pages, idle.data_pages), (0, 256));
    }

    #[test]
    fn allocator_memory_has_no_content_pages() {
        let idle = layout("idle,alloc=1M", 300, 2).unwrap();
        assert_eq!((idle.ws_pages, idle.data_pages), (0, 0));
        assert!((0..2).all(|cpu| idle.share(cpu).is_empty()));
        let both = layout("uniform,ws=1M,alloc=1M", 600, 1).unwrap();
        assert_eq!((both.ws_pages, both.data_pages), (256, 256));
        assert!(matches!(layout("idle,alloc=1M", 255, 1), Err(LayoutError::Memory { .. })));
        assert!(matches!(layout("uniform,ws=1M,alloc=1M", 512, 1), Err(LayoutError::Memory { .. })));
    }

    #[test]
    fn workload_that_does_not_fit_is_refused() {
        assert!(matches!(layout("uniform,ws=4M", 1024, 1), Err(LayoutError::Memory { .. })));
        assert!(matches!(layout("idle", 0, 1), Err(LayoutError::Memory { .. })));
        assert!(matches!(layout("uniform,ws=4K", 1024, 2), Err(LayoutError::WorkingSet { .. })));
        assert!(matches!(layout("idle", 1024, 0), Err(LayoutError::Cpus { .. })));
        assert!(matches!(layout("idle", 1024, 65), Err(LayoutError::Cpus { .. })));
    }

    proptest! {
        #[test]
        fn every_page_has_one_owner(ws in 0u64..300, rest in 0u64..300, cpus in 1u64..=64) {
            let layout = Layout { ws_pages: ws, data_pages: ws + rest, cpus };
            let mut owners = vec![0; usize::try_from(ws + rest).unwrap()];
            for cpu in 0..cpus {
                let share = layout.share(cpu);
                for index in 0..share.len() {
                    owners[usize::try_from(share.page(index)).unwrap()] += 1;
                }
            }
            prop_assert!(owners.iter().all(|owners| *owners == 1));
        }

        #[test]
        fn layouts_fit(pages in 0u64..1 << 40, cpus in 1u64..=64, idle: bool) {
            let spec = if idle { "idle" } else { "uniform" };
            if let Ok(layout) = layout(spec, pages, cpus) {
                prop_assert!(layout.data_pages + layout.table_pages() <= pages);
                prop_assert!(layout.data_pages + layout.table_pages() + 1 >= pages);
            }
        }
    }
}
