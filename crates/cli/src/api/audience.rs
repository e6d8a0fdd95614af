//! Record of the readers that have seen the report of a migration. The process of the source waits
//! for them before it ends.

use std::sync::atomic::{AtomicBool, Ordering};

/// Readers of the report: a client of the control socket and, if metrics are served, a scraper.
#[derive(Debug)]
pub(crate) struct ReportReaders {
    client: AtomicBool,
    scraper: Option<AtomicBool>,
}

impl ReportReaders {
    pub(crate) fn new(metrics: bool) -> Self {
        Self { client: AtomicBool::new(false), scraper: metrics.then(|| AtomicBool::new(false)) }
    }

    /// Records that a migration begins, whose report no reader has seen.
    pub(super) fn forget(&self) {
        for seen in std::iter::once(&self.client).chain(&self.scraper) {
            seen.store(false, Ordering::Release);
        }
    }

    /// Records that a client has read the report.
    pub(super) fn saw(&self) {
        self.client.store(true, Ordering::Release);
    }

    /// Records that a scraper has read the report.
    pub(crate) fn scraped(&self) {
        if let Some(seen) = &self.scraper {
            seen.store(true, Ordering::Release);
        }
    }

    /// Returns whether all readers have seen the report. A process that was told to end (`quit`)
    /// does not wait for scrapers, which may come seldom.
    pub(crate) fn satisfied(&self, quit: bool) -> bool {
        let scraped = quit || self.scraper.as_ref().is_none_or(|seen| seen.load(Ordering::Acquire));
        scraped && self.client.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_waits_for_all_readers_of_the_report() {
        for metrics in [false, true] {
            let audience = ReportReaders::new(metrics);
            assert!(!audience.satisfied(true));
            audience.saw();
            assert!(audience.satisfied(true));
            assert_eq!(audience.satisfied(false), !metrics);
            audience.scraped();
            assert!(audience.satisfied(false));
            audience.forget();
            audience.scraped();
            assert!(!audience.satisfied(false) && !audience.satisfied(true));
        }
    }
}
