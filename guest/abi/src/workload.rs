//! Workload specification: the memory activity of a guest.

use crate::allocation::MAX_FRAG;
use crate::text::Text;
use crate::units::{parse_rate, parse_size, write_rate, write_size};
use crate::{Allocation, Fill, PAGE_SIZE, Write};
use core::fmt;
use core::str::FromStr;

/// Skew of a zipf distribution: the k-th hottest page is written in proportion to `k^-theta`.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Theta(f64);

impl Theta {
    /// Returns the skew for an exponent in `(0, 8]`. With larger exponents all writes would go to
    /// one page.
    #[must_use]
    pub fn new(theta: f64) -> Option<Self> {
        (theta > 0.0 && theta <= 8.0).then_some(Self(theta))
    }

    /// Returns the exponent.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }
}

/// Pattern that determines the next page of the working set to write.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// No writes. Memory is filled at start and then only checked slowly.
    Idle,
    /// Every page is equally likely.
    Uniform,
    /// One page after the other, repeatedly.
    Sequential,
    /// Few hot pages and a long tail.
    Zipf(Theta),
}

/// Memory activity of a guest. Parsed from, and printed as, `PATTERN[,key=value]...` without
/// spaces:
///
/// | part | meaning | default |
/// |---|---|---|
/// | `idle`, `uniform`, `sequential`, `zipf:THETA` | the pattern of writes | required |
/// | `ws=256M` | working set: the memory that is written to | `data`, or all usable memory |
/// | `data=1G` | memory that is filled with content at start, at least `ws` | `ws` |
/// | `rate=100k` | writes per second and vCPU, 0 = as fast as possible | 0 |
/// | `skew=4` | vCPU i writes at `rate / skew^i`, at least once a second; needs a rate | 1 |
/// | `burst=500` | the vCPUs write for this many milliseconds, and then sleep as long, in turn; 0 = no sleep | 0 |
/// | `write=counter` | what a write changes: see [`Write`] | `counter` |
/// | `fill=random` | content at start: see [`Fill`] | `random` |
/// | `sweep=4k` | pages per second and vCPU that are checked in sequence, besides one for each write; 0 = no sweep | 4k and one for each write |
/// | `alloc=4G` | memory to allocate, touch and free in addition, see [`Allocation`]; a busy pattern then needs `ws` or `data` | none |
/// | `rounds=1` | number of rounds; 0 = no end | 0 |
/// | `frag=64` | one page in this many is kept until the next round; 0 = none | 0 |
///
/// Sizes are cut to whole pages. With `alloc`, `data` is empty by default, and memory that neither
/// `data` nor the counters use belongs to the guest's allocator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Pattern of writes.
    pub pattern: Pattern,
    /// Size of the working set in bytes; `None` means as much as `data`.
    pub ws: Option<u64>,
    /// Size of the memory that is filled at start in bytes; `None` means as much as `ws`, or all
    /// memory.
    pub data: Option<u64>,
    /// Number of writes per second and vCPU; 0 means as fast as possible.
    pub rate: u64,
    /// Factor by which each vCPU writes slower than the previous one: `1..=1000`, where 1 means all
    /// alike. More than 1 needs a rate.
    pub skew: u64,
    /// Time in milliseconds for which the vCPUs write before they sleep as long: `10..=60_000`, or
    /// 0 for vCPUs that do not sleep. All vCPUs write and sleep at the same times.
    pub burst_ms: u64,
    /// Change that each write makes to its page.
    pub write: Write,
    /// Content at start.
    pub fill: Fill,
    /// Number of pages per second and vCPU that are checked in sequence. `None` means one for each
    /// write and at least 4000 per second. `Some(rate)` means exactly this many, independent of the
    /// writes (0: no sweep, for measurements of access patterns).
    pub sweep: Option<u64>,
    /// Memory to allocate and free in addition.
    pub alloc: Option<Allocation>,
}

impl Workload {
    /// Returns a workload with every key at its default.
    #[must_use]
    pub fn new(pattern: Pattern) -> Self {
        Self {
            pattern,
            ws: None,
            data: None,
            rate: 0,
            skew: 1,
            burst_ms: 0,
            write: Write::Counter,
            fill: Fill::Random,
            sweep: None,
            alloc: None,
        }
    }

    /// Returns the number of writes per second of vCPU `cpu`; 0 means as fast as possible.
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
const KEYS: &str = "ws, data, rate, skew, burst, write, fill, sweep, alloc, rounds, frag";
const SIZE: &str = "a size of at least 4K, such as 256M or 4G";
const RATE: &str = "a number per second, such as 0, 2500 or 100k";
const SKEW: &str = "a whole number from 1 to 1000, such as 4";
const BURST: &str = "a whole number of milliseconds from 10 to 60000, or 0";
const ROUNDS: &str = "a whole number, 0 for no end";
const FRAG: &str = "a whole number from 2 to 1024, or 0";
const WRITE: &str = "counter, append or whole";
const FILL: &str = "random, zero, text, pointers or mix:PERCENT with PERCENT from 0 to 100";

/// Reason for which a workload specification was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkloadError {
    /// The first part is not a known pattern.
    Pattern {
        /// Text that was found.
        found: Text,
    },
    /// `zipf:` is followed by an invalid exponent.
    Theta {
        /// Text that was found.
        found: Text,
    },
    /// A part is not `key=value` with a known key.
    Key {
        /// Text that was found.
        found: Text,
    },
    /// A key is given twice.
    Twice {
        /// Name of the key.
        key: &'static str,
    },
    /// A value is invalid.
    Value {
        /// Name of the key.
        key: &'static str,
        /// Value that was found.
        found: Text,
        /// Description of the accepted values.
        accepted: &'static str,
    },
    /// `skew` is given without a rate that it could divide.
    SkewWithoutRate,
    /// `burst` is given with the pattern `idle`, which writes nothing.
    BurstOfIdle,
    /// `data` is smaller than `ws`.
    DataBelowWs {
        /// Size of `data` in bytes.
        data: u64,
        /// Size of `ws` in bytes.
        ws: u64,
    },
    /// `rounds` or `frag` is given without `alloc`.
    WithoutAlloc {
        /// Name of the key.
        key: &'static str,
    },
    /// `alloc` is given with a pattern that would write to all memory.
    AllocWithoutWs,
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
                f.write_str("workload: skew= divides a rate; add rate=, or remove skew=")
            }
            Self::BurstOfIdle => f.write_str(
                "workload: burst= divides the time of a pattern that writes; \
                     remove it, or use another pattern than idle",
            ),
            Self::DataBelowWs { data, ws } => {
                write!(
                    f,
                    "workload: data={data} bytes is less than the working set ws={ws}; raise data or lower ws"
                )
            }
            Self::WithoutAlloc { key } => {
                write!(f, "workload: {key}= needs alloc=; add alloc=, or remove {key}=")
            }
            Self::AllocWithoutWs => f.write_str(
                "workload: alloc= needs memory that the pattern does not write to; give ws= too, or use idle",
            ),
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

/// Keys of one specification as they are read, each at most once.
#[derive(Default)]
struct Keys {
    ws: Option<u64>,
    data: Option<u64>,
    rate: Option<u64>,
    skew: Option<u64>,
    burst: Option<u64>,
    write: Option<Write>,
    fill: Option<Fill>,
    sweep: Option<u64>,
    alloc: Option<u64>,
    rounds: Option<u64>,
    frag: Option<u64>,
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
            "burst" => {
                let burst = whole(value).filter(|ms| *ms == 0 || (10..=60_000).contains(ms));
                set(&mut self.burst, "burst", value, burst, BURST)
            }
            "write" => set(&mut self.write, "write", value, Write::parse(value), WRITE),
            "fill" => set(&mut self.fill, "fill", value, Fill::parse(value), FILL),
            "alloc" => set(&mut self.alloc, "alloc", value, size(value), SIZE),
            "rounds" => set(&mut self.rounds, "rounds", value, whole(value), ROUNDS),
            "frag" => {
                let frag = whole(value).filter(|frag| *frag == 0 || (2..=MAX_FRAG).contains(frag));
                set(&mut self.frag, "frag", value, frag, FRAG)
            }
            _ => Err(WorkloadError::Key { found: Text::new(part) }),
        }
    }

    fn allocation(&self) -> Result<Option<Allocation>, WorkloadError> {
        let Some(bytes) = self.alloc else {
            let alone = [("rounds", self.rounds), ("frag", self.frag)];
            let given = alone.into_iter().find(|(_, value)| value.is_some());
            return given.map_or(Ok(None), |(key, _)| Err(WorkloadError::WithoutAlloc { key }));
        };
        Ok(Some(Allocation { bytes, rounds: self.rounds.unwrap_or(0), frag: self.frag.unwrap_or(0) }))
    }
}

fn whole(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
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
        let burst_ms = keys.burst.unwrap_or(0);
        if burst_ms != 0 && pattern == Pattern::Idle {
            return Err(WorkloadError::BurstOfIdle);
        }
        let alloc = keys.allocation()?;
        if alloc.is_some() && pattern != Pattern::Idle && keys.ws.or(keys.data).is_none() {
            return Err(WorkloadError::AllocWithoutWs);
        }
        Ok(Self {
            pattern,
            ws: keys.ws,
            data: keys.data,
            rate,
            skew,
            burst_ms,
            write: keys.write.unwrap_or_default(),
            fill: keys.fill.unwrap_or(Fill::Random),
            sweep: keys.sweep,
            alloc,
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
        if self.burst_ms != 0 {
            write!(f, ",burst={}", self.burst_ms)?;
        }
        if self.write != Write::Counter {
            write!(f, ",write={}", self.write)?;
        }
        if self.fill != Fill::Random {
            write!(f, ",fill={}", self.fill)?;
        }
        if let Some(sweep) = self.sweep {
            f.write_str(",sweep=")?;
            write_rate(f, sweep)?;
        }
        if let Some(alloc) = self.alloc {
            write!(f, ",{alloc}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "workload_tests.rs"]
mod tests;
