//! What a run came to.

use std::time::Duration;

use crate::cases::Figures;
use crate::reaper::to_f64;
use crate::result::MigrationResult;

/// Free pages that became known.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Learned {
    /// From the beginning, or from being asked, until the host knew all of them.
    pub total: Duration,
    /// How many.
    pub pages: u64,
    /// How many of them lie above 4 GiB, beyond the hole. None: not known.
    pub high_pages: Option<u64>,
    /// How many the guest said to have.
    pub free_pages: u64,
    /// What an inflation was made of.
    pub inflation: Option<Inflation>,
    /// What the guest's walk of its free lists took, telling the host included. None: it did not walk.
    pub walk: Option<Duration>,
}

/// What an inflation was made of. The host's two parts are in `send`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Inflation {
    /// Requests.
    pub requests: u64,
    /// The guest allocated pages.
    pub alloc: Duration,
    /// The guest sent them and waited until they were taken.
    pub send: Duration,
    /// The host looked at them, and dropped them. None: it does not say.
    pub host: Option<Duration>,
    /// The host dropped them. None: it does not say.
    pub madvise: Option<Duration>,
}

/// Touched memory that was given back.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Given {
    /// Pages.
    pub pages: u64,
    /// What the host took to drop them.
    pub madvise: Duration,
    /// How much memory the host has again, in bytes.
    pub returned: u64,
}

/// A guest that moved.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Moved {
    /// How it went.
    pub result: MigrationResult,
    /// From the command until the first page was sent. None: the program does not say.
    pub first_page: Option<Duration>,
    /// Pages that were left out as free. None: the program does not say.
    pub skipped_pages: Option<u64>,
    /// How much the guest had touched and freed before, in bytes.
    pub freed: u64,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Learned {
    pub(super) fn figures(&self) -> Figures {
        let mut figures = Figures::from([
            ("total_ms", ms(self.total)),
            ("pages", to_f64(self.pages)),
            ("of_free", to_f64(self.pages) / to_f64(self.free_pages)),
        ]);
        figures.extend(self.high_pages.map(|pages| ("pages_above_4g", to_f64(pages))));
        figures.extend(self.walk.map(|walk| ("walk_ms", ms(walk))));
        if let Some(parts) = &self.inflation {
            // What the host does not say of itself is in the guest's time of sending.
            let host = parts.host.unwrap_or_default();
            figures.insert("requests", to_f64(parts.requests));
            figures.insert("alloc_ms", ms(parts.alloc));
            figures.insert("send_ms", ms(parts.send.saturating_sub(host)));
            if let (Some(host), Some(madvise)) = (parts.host, parts.madvise) {
                figures.insert("translate_ms", ms(host.saturating_sub(madvise)));
                figures.insert("madvise_ms", ms(madvise));
            }
        }
        figures
    }
}

impl Given {
    pub(super) fn figures(&self) -> Figures {
        let gib = to_f64(self.pages) / 262_144.0;
        Figures::from([
            ("madvise_ms_per_gib", ms(self.madvise) / gib),
            ("returned_of_given", to_f64(self.returned >> 12) / to_f64(self.pages)),
        ])
    }
}

impl Moved {
    pub(super) fn figures(&self) -> Figures {
        let result = &self.result;
        let mut figures = Figures::from([
            ("total_ms", ms(result.total)),
            ("downtime_ms", ms(result.downtime)),
            ("data_mb", to_f64(result.data_bytes) / 1e6),
            ("freed_mb", to_f64(self.freed) / 1e6),
        ]);
        figures.extend(result.wire_bytes.map(|bytes| ("wire_mb", to_f64(bytes) / 1e6)));
        figures.extend(result.passes.map(|passes| ("passes", to_f64(passes))));
        figures.extend(self.first_page.map(|time| ("first_page_ms", ms(time))));
        figures.extend(self.skipped_pages.map(|pages| ("skipped_pages", to_f64(pages))));
        figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inflation_is_taken_apart() {
        let us = Duration::from_micros;
        let parts = Inflation {
            requests: 7,
            alloc: us(100),
            send: us(700),
            host: Some(us(300)),
            madvise: Some(us(200)),
        };
        let learned = Learned {
            total: us(900),
            pages: 10,
            free_pages: 20,
            inflation: Some(parts),
            ..Learned::default()
        };
        let figures = learned.figures();
        let of = |name: &str| (figures[name] * 1e3).round();
        assert_eq!(
            (of("alloc_ms"), of("send_ms"), of("translate_ms"), of("madvise_ms")),
            (100.0, 400.0, 100.0, 200.0)
        );
        assert_eq!((of("total_ms"), figures["of_free"]), (900.0, 0.5));
        // QEMU says nothing of its own part.
        let qemu = Learned { inflation: Some(Inflation { host: None, madvise: None, ..parts }), ..learned };
        assert_eq!((qemu.figures()["send_ms"] * 1e3).round(), 700.0);
        assert!(!qemu.figures().contains_key("madvise_ms"));
    }

    #[test]
    fn what_was_given_back_is_by_size() {
        let given = Given { pages: 131_072, madvise: Duration::from_millis(10), returned: 256 << 20 };
        let figures = given.figures();
        assert_eq!((figures["madvise_ms_per_gib"], figures["returned_of_given"]), (20.0, 0.5));
    }
}
