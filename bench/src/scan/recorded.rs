//! Dirty bitmaps of real migrations, as a file holds them.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use vmferry_report::host::Host;

/// Recordings that `vmferry-bench scan` replays unless it makes new ones.
const SHIPPED: &str = include_str!("recorded.json");

/// Recorded harvests of one migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recording {
    /// Name of the guest in cases.
    pub guest: String,
    /// Memory of the guest in bytes.
    pub memory_bytes: u64,
    /// Workload of the guest.
    pub workload: String,
    /// Tracker: `log`, `ring` or `wp`.
    pub tracker: String,
    /// Bandwidth limit of the migration, in bytes per second.
    pub max_bandwidth_bytes_per_s: u64,
    /// Host on which the guest ran.
    pub host: Host,
    /// First harvests of the migration, in their order. Each belongs to one pass.
    pub harvests: Vec<Harvest>,
}

/// Recorded harvest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Harvest {
    /// End of the harvest, in ms since tracking began.
    pub at_ms: f64,
    /// Part of the harvest's time that the tracker spent on getting the pages from the kernel, in
    /// microseconds. `None` if the tracker does not measure it.
    pub kernel_us: Option<f64>,
    /// Rest of the harvest's time, in microseconds: the tracker merged the pages into an empty set.
    pub walk_us: f64,
    /// Number of pages that the harvest found.
    pub pages: u64,
    /// Words of the bitmaps of all regions, lowest page first.
    #[serde(with = "text")]
    pub bitmap: Vec<u64>,
}

/// Returns the recordings of this executable.
///
/// # Panics
///
/// Panics if the file is damaged, which a test excludes.
pub(super) fn shipped() -> Vec<Recording> {
    serde_json::from_str(SHIPPED).expect("a test parses the file")
}

/// Writes recordings as JSON.
///
/// # Errors
///
/// Returns the error of `out`.
pub fn write_recordings(recordings: &[Recording], mut out: impl Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut out, recordings)?;
    writeln!(out)
}

/// Words as text: hexadecimal numbers, separated by spaces. A word that is repeated is followed by
/// `*` and the decimal number of repetitions.
mod text {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use std::fmt::Write;

    /// Largest number of words of a bitmap, for a guest of 64 GiB. A damaged file must not exhaust
    /// the memory.
    const MOST_WORDS: usize = 1 << 18;

    pub(super) fn serialize<S: Serializer>(words: &[u64], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&encode(words))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
        parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }

    pub(super) fn encode(words: &[u64]) -> String {
        let mut text = String::new();
        for equal in words.chunk_by(|a, b| a == b) {
            let space = if text.is_empty() { "" } else { " " };
            let written = match equal.len() {
                1 => write!(text, "{space}{:x}", equal[0]),
                count => write!(text, "{space}{:x}*{count}", equal[0]),
            };
            written.expect("a String accepts all text");
        }
        text
    }

    pub(super) fn parse(text: &str) -> Result<Vec<u64>, String> {
        let mut words = Vec::new();
        for item in text.split_ascii_whitespace() {
            let (word, count) = item.split_once('*').unwrap_or((item, "1"));
            let wrong = || format!("`{item}` is not a word of a bitmap");
            let word = u64::from_str_radix(word, 16).map_err(|_| wrong())?;
            let count: usize = count.parse().map_err(|_| wrong())?;
            if count == 0 || count > MOST_WORDS - words.len() {
                return Err(format!("`{item}` makes the bitmap longer than {MOST_WORDS} words or is empty"));
            }
            words.resize(words.len() + count, word);
        }
        Ok(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scan::pattern::{Pattern, build};

    #[test]
    fn bitmaps_survive_the_text_form() {
        for (density, pattern) in [
            (0.0, Pattern::Uniform),
            (1e-3, Pattern::Uniform),
            (0.3, Pattern::Clustered),
            (1.0, Pattern::Uniform),
        ] {
            let words = build(2048, density, pattern);
            assert_eq!(text::parse(&text::encode(&words)).unwrap(), words, "{density}");
        }
        assert_eq!(text::encode(&[0, 0, 0, 0xf0, 1, 1]), "0*3 f0 1*2");
    }

    #[test]
    fn wrong_text_is_rejected() {
        for wrong in
            ["g", "1*", "*2", "1*0", "1*x", "10000000000000000", "0*99999999999", "0*200000 0*200000"]
        {
            assert!(text::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn shipped_recordings_are_consistent() {
        assert!(SHIPPED.len() < 1 << 20, "{} bytes", SHIPPED.len());
        let recordings = shipped();
        let guests: Vec<&str> = recordings.iter().map(|recording| recording.guest.as_str()).collect();
        assert_eq!(guests, ["idle", "busy"]);
        for recording in &recordings {
            assert!(recording.harvests.len() >= 10, "{}", recording.guest);
            for harvest in &recording.harvests {
                let set: u64 = harvest.bitmap.iter().map(|word| u64::from(word.count_ones())).sum();
                assert_eq!(set, harvest.pages);
                assert_eq!(harvest.bitmap.len() as u64, recording.memory_bytes / 4096 / 64);
            }
            let times = recording.harvests.windows(2).all(|pair| pair[0].at_ms < pair[1].at_ms);
            assert!(times, "{}", recording.guest);
        }
    }
}
