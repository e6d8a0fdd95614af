//! Who is to see the report of a migration before the process that made it ends.

use std::sync::atomic::{AtomicBool, Ordering};

/// A client of the control socket, and where there are metrics, whoever scrapes them.
#[derive(Debug)]
pub(crate) struct Audience {
    client: AtomicBool,
    scraper: Option<AtomicBool>,
}

impl Audience {
    pub(crate) fn new(metrics: bool) -> Self {
        Self { client: AtomicBool::new(false), scraper: metrics.then(|| AtomicBool::new(false)) }
    }

    /// A migration begins: its report has been seen by nobody.
    pub(super) fn forget(&self) {
        for seen in std::iter::once(&self.client).chain(&self.scraper) {
            seen.store(false, Ordering::Release);
        }
    }

    /// A client has it.
    pub(super) fn saw(&self) {
        self.client.store(true, Ordering::Release);
    }

    /// It was scraped.
    pub(crate) fn scraped(&self) {
        if let Some(seen) = &self.scraper {
            seen.store(true, Ordering::Release);
        }
    }

    /// Everybody has seen it. If the process was told to end (`quit`) nobody who scrapes now and then is waited for.
    pub(crate) fn satisfied(&self, quit: bool) -> bool {
        let scraped = quit || self.scraper.as_ref().is_none_or(|seen| seen.load(Ordering::Acquire));
        scraped && self.client.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_satisfied_when_everybody_who_is_there_has_seen_the_report() {
        for metrics in [false, true] {
            let audience = Audience::new(metrics);
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
