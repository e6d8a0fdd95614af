//! The workload specification: what a guest does to its memory.

use crate::text::Text;
use crate::units::{parse_rate, parse_size, write_rate, write_size};
use crate::{Fill, PAGE_SIZE};
use core::fmt;
use core::str::FromStr;

/// The skew of a zipf distribution: the k-th hottest page is written in proportion to `k^-theta`.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Theta(f64);

impl Theta {
    /// Accepts exponents in `(0, 8]`; with more, all writes go to one page.
    #[must_use]
    pub fn new(theta: f64) -> Option<Self> {
        (theta > 0.0 && theta <= 8.0).then_some(Self(theta))
    }

    /// The exponent.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }
}

/// Which page of the working set is written next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// No writes; memory is filled at start and then only checked, slowly.
    Idle,
    /// Every page is equally likely.
    Uniform,
    /// One page after the other, round and round.
    Sequential,
    /// Few hot pages and a long tail.
    Zipf(Theta),
}

/// What a guest does to its memory. Parsed from, and printed as, `PATTERN[,key=value]...` without spaces:
///
/// | part | meaning | default |
/// |---|---|---|
/// | `idle`, `uniform`, `sequential`, `zipf:THETA` | the pattern of writes | required |
/// | `ws=256M` | working set: the memory that is written to | `data`, or all usable memory |
/// | `data=1G` | memory that is filled with content at start, at least `ws` | `ws` |
/// | `rate=100k` | writes per second and vCPU, 0 = as fast as it can | 0 |
/// | `skew=4` | vCPU i writes at `rate / skew^i`, at least once a second; needs a rate | 1 |
/// | `fill=random` | content at start: see [`Fill`] | `random` |
/// | `sweep=4k` | pages per second and vCPU that are checked in sequence, besides one for each write; 0 = no sweep | 4k and one for each write |
///
/// Sizes are cut to whole pages. `alloc=` (the density workload) is recognised and refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// The pattern of writes.
    pub pattern: Pattern,
    /// Working set in bytes; `None`: as much as `data`.
    pub ws: Option<u64>,
    /// Memory filled at start in bytes; `None`: as much as `ws`, or all there is.
    pub data: Option<u64>,
    /// Writes per second and vCPU; 0: as fast as it can.
    pub rate: u64,
    /// How many times slower each vCPU writes than the one before it: `1..=1000`, 1 = all alike. More than 1 needs a rate.
    pub skew: u64,
    /// Content at start.
    pub fill: Fill,
    /// Pages per second and vCPU that are checked in sequence. `None`: the default, one for each write and at least 4000 a
    /// second. `Some(rate)`: exactly that many, independent of the writes (0: no sweep, for measurements of access patterns).
    pub sweep: Option<u64>,
}

impl Workload {
    /// A workload with every key at its default.
    #[must_use]
    pub fn new(pattern: Pattern) -> Self {
        Self { pattern, ws: None, data: None, rate: 0, skew: 1, fill: Fill::Random, sweep: None }
    }

    /// Writes per second of vCPU `cpu`; 0: as fast as it can.
    #[must_use]
    pub fn rate_of(&self, cpu: u64) -> u64 {
        if self.rate == 0 {
            return 0;
        }
        let slower = u32::try_from(cpu).ok().and_then(|cpu| self.skew.max(1).checked_pow(cpu));
        slower.map_or(1, |slower| (self.rate / slower).max(1))
    }
}

const PATTERNS: &str = "idle, uniform, sequential or zipf:THETA";
const KEYS: &str = "ws, data, rate, skew, fill, sweep";
const SIZE: &str = "a size of at least 4K, such as 256M or 4G";
const RATE: &str = "a number per second, such as 0, 2500 or 100k";
const SKEW: &str = "a whole number from 1 to 1000, such as 4";
const FILL: &str = "random, zero, text or mix:PERCENT with PERCENT from 0 to 100";

/// Why a workload specification was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkloadError {
    /// The first part is no known pattern.
    Pattern {
        /// What stood there.
        found: Text,
    },
    /// `zipf:` without a usable exponent.
    Theta {
        /// What stood there.
        found: Text,
    },
    /// A part is not `key=value` with a known key.
    Key {
        /// What stood there.
        found: Text,
    },
    /// A key stands there twice.
    Twice {
        /// The key.
        key: &'static str,
    },
    /// A value cannot be used.
    Value {
        /// The key.
        key: &'static str,
        /// What stood there.
        found: Text,
        /// What would have been accepted.
        accepted: &'static str,
    },
    /// `skew` without a rate that it could divide.
    SkewWithoutRate,
    /// `data` is smaller than `ws`.
    DataBelowWs {
        /// Bytes of `data`.
        data: u64,
        /// Bytes of `ws`.
        ws: u64,
    },
    /// A key of contracts.md that no guest of this version implements.
    NotSupported {
        /// The key.
        key: &'static str,
    },
}

impl fmt::Display for WorkloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pattern { found } => write!(f, "workload: '{found}' is no pattern; use {PATTERNS}"),
            Self::Theta { found } => {
                write!(
                    f,
                    "workload: '{found}' is no exponent for zipf; use a number above 0, up to 8, such as zipf:0.99"
                )
            }
            Self::Key { found } => {
                write!(f, "workload: '{found}' is not KEY=VALUE with one of the keys {KEYS}")
            }
            Self::Twice { key } => write!(f, "workload: {key}= is given twice; give it once"),
            Self::Value { key, found, accepted } => {
                write!(f, "workload: {key}={found} cannot be used; use {accepted}")
            }
            Self::SkewWithoutRate => {
                f.write_str("workload: skew= divides a rate; give rate= too, or leave skew out")
            }
            Self::DataBelowWs { data, ws } => {
                write!(
                    f,
                    "workload: data={data} bytes is less than the working set ws={ws}; raise data or lower ws"
                )
            }
            Self::NotSupported { key } => write!(f, "workload: {key}= is not supported yet; leave it out"),
        }
    }
}

impl core::error::Error for WorkloadError {}

impl FromStr for Pattern {
    type Err = WorkloadError;

    fn from_str(text: &str) -> Result<Self, WorkloadError> {
        match text.split_once(':') {
            None if text == "idle" => Ok(Self::Idle),
            None if text == "uniform" => Ok(Self::Uniform),
            None if text == "sequential" => Ok(Self::Sequential),
            Some(("zipf", theta)) => theta
                .parse()
                .ok()
                .and_then(Theta::new)
                .map(Self::Zipf)
                .ok_or(WorkloadError::Theta { found: Text::new(theta) }),
            _ if text == "zipf" => Err(WorkloadError::Theta { found: Text::new("") }),
            _ => Err(WorkloadError::Pattern { found: Text::new(text) }),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle => f.write_str("idle"),
            Self::Uniform => f.write_str("uniform"),
            Self::Sequential => f.write_str("sequential"),
            Self::Zipf(theta) => write!(f, "zipf:{}", theta.get()),
        }
    }
}

/// The keys of one specification as they are read, each at most once.
#[derive(Default)]
struct Keys {
    ws: Option<u64>,
    data: Option<u64>,
    rate: Option<u64>,
    skew: Option<u64>,
    fill: Option<Fill>,
    sweep: Option<u64>,
}

impl Keys {
    fn take(&mut self, part: &str) -> Result<(), WorkloadError> {
        let (key, value) = part.split_once('=').ok_or(WorkloadError::Key { found: Text::new(part) })?;
        let size = |text: &str| parse_size(text).filter(|bytes| *bytes >= PAGE_SIZE);
        match key {
            "ws" => set(&mut self.ws, "ws", value, size(value), SIZE),
            "data" => set(&mut self.data, "data", value, size(value), SIZE),
            "rate" => set(&mut self.rate, "rate", value, parse_rate(value), RATE),
            "sweep" => set(&mut self.sweep, "sweep", value, parse_rate(value), RATE),
            "skew" => {
                let skew = value.parse().ok().filter(|skew| (1..=1000).contains(skew));
                set(&mut self.skew, "skew", value, skew, SKEW)
            }
            "fill" => set(&mut self.fill, "fill", value, Fill::parse(value), FILL),
            "alloc" => Err(WorkloadError::NotSupported { key: "alloc" }),
            _ => Err(WorkloadError::Key { found: Text::new(part) }),
        }
    }
}

fn set<T>(
    slot: &mut Option<T>,
    key: &'static str,
    found: &str,
    value: Option<T>,
    accepted: &'static str,
) -> Result<(), WorkloadError> {
    let value = value.ok_or(WorkloadError::Value { key, found: Text::new(found), accepted })?;
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(WorkloadError::Twice { key }),
    }
}

impl FromStr for Workload {
    type Err = WorkloadError;

    fn from_str(text: &str) -> Result<Self, WorkloadError> {
        let mut parts = text.split(',');
        let pattern = parts.next().unwrap_or("").parse()?;
        let mut keys = Keys::default();
        for part in parts {
            keys.take(part)?;
        }
        if let (Some(data), Some(ws)) = (keys.data, keys.ws)
            && data < ws
        {
            return Err(WorkloadError::DataBelowWs { data, ws });
        }
        let (rate, skew) = (keys.rate.unwrap_or(0), keys.skew.unwrap_or(1));
        if skew > 1 && rate == 0 {
            return Err(WorkloadError::SkewWithoutRate);
        }
        Ok(Self {
            pattern,
            ws: keys.ws,
            data: keys.data,
            rate,
            skew,
            fill: keys.fill.unwrap_or(Fill::Random),
            sweep: keys.sweep,
        })
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pattern)?;
        if let Some(ws) = self.ws {
            f.write_str(",ws=")?;
            write_size(f, ws)?;
        }
        if let Some(data) = self.data {
            f.write_str(",data=")?;
            write_size(f, data)?;
        }
        if self.rate != 0 {
            f.write_str(",rate=")?;
            write_rate(f, self.rate)?;
        }
        if self.skew != 1 {
            write!(f, ",skew={}", self.skew)?;
        }
        if self.fill != Fill::Random {
            write!(f, ",fill={}", self.fill)?;
        }
        if let Some(sweep) = self.sweep {
            f.write_str(",sweep=")?;
            write_rate(f, sweep)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::string::ToString;

    #[test]
    fn parses_the_example_of_the_contract() {
        let workload: Workload = "uniform,ws=256M,rate=100k,fill=random".parse().unwrap();
        assert_eq!(workload.pattern, Pattern::Uniform);
        assert_eq!(workload.ws, Some(256 << 20));
        assert_eq!(workload.rate, 100_000);
        assert_eq!(workload.fill, Fill::Random);
        assert_eq!(workload.data, None);
    }

    #[test]
    fn parses_every_pattern_and_fill() {
        for text in ["idle", "uniform", "sequential", "zipf:0.99", "zipf:1"] {
            assert_eq!(text.parse::<Workload>().unwrap().to_string(), text);
        }
        for fill in ["zero", "text", "mix:30"] {
            let text = std::format!("idle,fill={fill}");
            assert_eq!(text.parse::<Workload>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn each_vcpu_is_slower_than_the_one_before_by_the_skew() {
        let rates = |text: &str| {
            let workload: Workload = text.parse().unwrap();
            [0, 1, 2, 63].map(|cpu| workload.rate_of(cpu))
        };
        assert_eq!(rates("uniform,rate=100k,skew=4"), [100_000, 25_000, 6_250, 1]);
        assert_eq!(rates("uniform,rate=100k"), [100_000; 4]);
        assert_eq!(rates("uniform"), [0; 4]);
    }

    #[test]
    fn refuses_with_the_reason() {
        let cases = [
            ("", "is no pattern; use idle"),
            ("unifrom", "'unifrom' is no pattern"),
            ("zipf", "is no exponent"),
            ("zipf:0", "'0' is no exponent"),
            ("zipf:nan", "'nan' is no exponent"),
            ("uniform:1", "is no pattern"),
            ("uniform,ws=1", "ws=1 cannot be used; use a size of at least 4K"),
            ("uniform,ws=256M,ws=1G", "ws= is given twice"),
            ("uniform,rate=fast", "rate=fast cannot be used"),
            ("uniform,rate=10k,skew=0", "skew=0 cannot be used; use a whole number from 1 to 1000"),
            ("uniform,skew=4", "skew= divides a rate"),
            ("uniform,fill=mix:101", "fill=mix:101 cannot be used"),
            ("uniform,speed=1", "'speed=1' is not KEY=VALUE"),
            ("uniform,", "'' is not KEY=VALUE"),
            ("uniform,ws=1G,data=1M", "less than the working set"),
            ("uniform,alloc=4G", "alloc= is not supported yet"),
        ];
        for (text, reason) in cases {
            let error = text.parse::<Workload>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC{0,60}") {
            let _ = text.parse::<Workload>();
        }

        #[test]
        fn print_then_parse_is_the_same(
            pattern in prop_oneof![
                Just(Pattern::Idle), Just(Pattern::Uniform), Just(Pattern::Sequential),
                (0.001f64..8.0).prop_map(|theta| Pattern::Zipf(Theta::new(theta).unwrap())),
            ],
            ws in proptest::option::of(4096u64..1 << 45),
            more in proptest::option::of(0u64..1 << 45),
            rate in prop_oneof![Just(0), 1u64..1 << 40],
            fill in prop_oneof![
                Just(Fill::Random), Just(Fill::Zero), Just(Fill::Text), (0u8..=100).prop_map(Fill::Mix),
            ],
            sweep in proptest::option::of(0u64..1 << 30),
            skew in 1u64..=1000,
        ) {
            let data = more.map(|more| ws.unwrap_or(4096) + more);
            let skew = if rate == 0 { 1 } else { skew };
            let workload = Workload { pattern, ws, data, rate, skew, fill, sweep };
            prop_assert_eq!(workload.to_string().parse::<Workload>().unwrap(), workload);
        }
    }
}
