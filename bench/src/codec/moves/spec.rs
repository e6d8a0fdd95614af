//! Specification of the moves: links, guests, and sides.

use std::fmt;
use std::time::Duration;

use crate::link::Shape;
use crate::qemu::{Compression, Stream};

const MIB: u64 = 1 << 20;

/// Memory of a guest beyond its data: the guest itself, its counters, and pages of zeros.
const SPARE: u64 = 64 * MIB;

/// Memory for the versions of pages that deltas refer to, in bytes: `--delta-cache` of vmferry, and
/// `xbzrle-cache-size` of QEMU. It is QEMU's default, and holds the largest working set of a case.
pub const CACHE: u64 = 64 * MIB;

/// Interval at which the guest is read during the migration. Frequent reads would take a
/// considerable part of the processor time of a slow migration.
pub const OBSERVE: Duration = Duration::from_millis(500);

/// Encoding of pages by vmferry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// Choice by measurement, with deltas.
    Auto,
    /// None.
    Raw,
    /// LZ4.
    Lz4,
    /// Zstandard, at the fastest level.
    Zstd,
    /// Deltas only.
    Delta,
}

impl Encoding {
    /// Returns the value of the option `--codec`.
    pub fn codec(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Raw | Self::Delta => "raw",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    /// Returns the value of the option `--delta`.
    pub fn delta(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Raw | Self::Lz4 | Self::Zstd => "off",
            Self::Delta => "on",
        }
    }
}

/// Encoding of pages by QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QemuEncoding {
    /// None, with a single stream.
    Raw,
    /// Zstandard, with two multifd channels.
    Zstd,
    /// zlib, with two multifd channels.
    Zlib,
    /// The capability `xbzrle`, with a single stream.
    Xbzrle,
}

impl QemuEncoding {
    /// Returns the settings of QEMU.
    pub(super) fn stream(self) -> Stream {
        let multifd = |compression| Stream::Multifd { channels: 2, compression };
        match self {
            Self::Raw => Stream::Single,
            Self::Zstd => multifd(Compression::Zstd),
            Self::Zlib => multifd(Compression::Zlib),
            Self::Xbzrle => Stream::Xbzrle { cache: CACHE },
        }
    }
}

/// Program that moves the guest, and its encoding of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// vmferry, with its default number of channels.
    Ours(Encoding),
    /// QEMU.
    Qemu(QemuEncoding),
}

impl Side {
    /// Returns the side of the same program that sends pages as they are.
    pub(super) fn raw(self) -> Self {
        match self {
            Self::Ours(_) => Self::Ours(Encoding::Raw),
            Self::Qemu(_) => Self::Qemu(QemuEncoding::Raw),
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours(Encoding::Auto) => "ours-auto",
            Self::Ours(Encoding::Raw) => "ours-raw",
            Self::Ours(Encoding::Lz4) => "ours-lz4",
            Self::Ours(Encoding::Zstd) => "ours-zstd",
            Self::Ours(Encoding::Delta) => "ours-delta",
            Self::Qemu(QemuEncoding::Raw) => "qemu-raw",
            Self::Qemu(QemuEncoding::Zstd) => "qemu-zstd",
            Self::Qemu(QemuEncoding::Zlib) => "qemu-zlib",
            Self::Qemu(QemuEncoding::Xbzrle) => "qemu-xbzrle",
        })
    }
}

pub(super) const AUTO: Side = Side::Ours(Encoding::Auto);
pub(super) const RAW: Side = Side::Ours(Encoding::Raw);
pub(super) const XBZRLE: Side = Side::Qemu(QemuEncoding::Xbzrle);
const LZ4: Side = Side::Ours(Encoding::Lz4);
const ZSTD: Side = Side::Ours(Encoding::Zstd);
const DELTA: Side = Side::Ours(Encoding::Delta);
const QEMU_RAW: Side = Side::Qemu(QemuEncoding::Raw);
const QEMU_ZSTD: Side = Side::Qemu(QemuEncoding::Zstd);
const QEMU_ZLIB: Side = Side::Qemu(QemuEncoding::Zlib);

/// Sides that compress, and those that do not encode.
const COMPRESSION: [Side; 7] = [AUTO, RAW, LZ4, ZSTD, QEMU_RAW, QEMU_ZSTD, QEMU_ZLIB];
/// The same without zlib, which takes long.
const FAST: [Side; 6] = [AUTO, RAW, LZ4, ZSTD, QEMU_RAW, QEMU_ZSTD];
/// Sides for a case in which compression is no gain.
const FEW: [Side; 4] = [AUTO, RAW, QEMU_RAW, QEMU_ZSTD];
/// Sides that send deltas, and those that do not encode.
const DELTAS: [Side; 5] = [AUTO, RAW, DELTA, QEMU_RAW, XBZRLE];
/// The same, and those that compress.
const BOTH: [Side; 7] = [AUTO, RAW, ZSTD, DELTA, QEMU_RAW, QEMU_ZSTD, XBZRLE];

/// Change that the guest makes to its memory while it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// None.
    None,
    /// A counter in a random page.
    Counter,
    /// 272 bytes in one page after the other.
    Append,
    /// A whole random page.
    Whole,
}

impl Writer {
    /// Returns the name in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Counter => "counter",
            Self::Append => "append",
            Self::Whole => "whole",
        }
    }
}

/// Guest, and the link that it moves over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaseSpec {
    /// Name in the results, without the group.
    pub name: String,
    /// Shape of the link. `None` means loopback.
    pub shape: Option<Shape>,
    /// Name of the link in the results.
    pub link: &'static str,
    /// Content of the memory, in the format of the workload's `fill`, or `files`: files of this
    /// host.
    pub content: &'static str,
    /// Change that the guest makes to its memory.
    pub writer: Writer,
    /// Number of writes per second.
    pub rate: u64,
    /// Bytes of the memory that have content.
    pub data: u64,
    /// Sides that run in turn.
    pub sides: Vec<Side>,
    /// Longest allowed downtime of the switchover.
    pub downtime_limit: Duration,
    /// Time after which any downtime is allowed. A migration that reaches it did not converge.
    pub limit: Duration,
    /// Time for which the guest runs before it is migrated. Its speed before is measured in this
    /// time.
    pub warm_up: Duration,
}

impl CaseSpec {
    /// Returns the memory of the guest in bytes.
    pub fn memory(&self) -> u64 {
        self.data + SPARE
    }

    /// Returns the part of the data that the guest writes to, in bytes: half of the data, and at
    /// most the size of the caches.
    fn working_set(&self) -> u64 {
        (self.data / 2).min(CACHE)
    }

    /// Returns true if the content is that of files of this host, which are loaded into the guest's
    /// memory as an initrd.
    pub(super) fn has_files(&self) -> bool {
        self.content == FILES
    }

    /// Returns the workload, as on the guest's command line.
    pub fn workload(&self) -> String {
        if self.has_files() {
            assert_eq!(self.writer, Writer::None, "a guest does not write to its initrd");
            return "idle,data=4M,fill=zero".into();
        }
        let (data, ws) = (self.data / MIB, self.working_set() / MIB);
        let (fill, rate) = (self.content, self.rate);
        let (pattern, write) = match self.writer {
            Writer::None => return format!("idle,data={data}M,fill={fill}"),
            Writer::Counter => ("uniform", ""),
            Writer::Append => ("sequential", ",write=append"),
            Writer::Whole => ("uniform", ",write=whole"),
        };
        format!("{pattern},ws={ws}M,data={data}M,rate={rate}{write},fill={fill}")
    }

    /// Returns the capacity of the link in bytes per second. `None` means loopback.
    pub(super) fn link_bytes_per_s(&self) -> Option<u64> {
        self.shape.map(|shape| shape.bits_per_s / 8)
    }
}

/// Selection of the moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Guests and links.
    pub cases: Vec<CaseSpec>,
    /// Number of rounds.
    pub repeats: usize,
}

type LinkSpec = (&'static str, Option<u64>);

const SLOW: LinkSpec = ("100mbit", Some(100_000_000));
const ONE: LinkSpec = ("1gbit", Some(1_000_000_000));
const TWO: LinkSpec = ("2gbit", Some(2_000_000_000));
const TEN: LinkSpec = ("10gbit", Some(10_000_000_000));
const LOOPBACK: LinkSpec = ("loopback", None);

/// Longest allowed downtime of the switchover.
const DOWNTIME_LIMIT: Duration = Duration::from_millis(100);

/// Time after which any downtime is allowed.
const LIMIT: Duration = Duration::from_secs(6);

/// Content with random data in a tenth of the pages. Half of the others are zero, half are text.
const MIX: &str = "mix:10";

/// Content of executables and libraries of this host, as in the page cache of a guest.
const FILES: &str = "files";

/// Name of the case whose time is compared with the best QEMU.
pub(super) const TEXT: &str = "1gbit-text";
/// Name of the case whose time is compared with XBZRLE.
pub(super) const COUNTER: &str = "1gbit-counter";

/// Returns a guest that writes nothing.
fn still((link, bits_per_s): LinkSpec, content: &'static str, sides: &[Side]) -> CaseSpec {
    let data = match bits_per_s {
        Some(..500_000_000) => 32 * MIB,
        Some(..5_000_000_000) => 256 * MIB,
        _ => 512 * MIB,
    };
    CaseSpec {
        name: format!("{link}-{}", content.split(':').next().unwrap_or(content)),
        shape: bits_per_s.map(|bits_per_s| Shape { bits_per_s, congestion: None }),
        link,
        content,
        writer: Writer::None,
        rate: 0,
        data,
        sides: sides.into(),
        downtime_limit: DOWNTIME_LIMIT,
        limit: LIMIT,
        warm_up: Duration::from_millis(300),
    }
}

/// Returns a guest that writes at `rate` writes per second.
fn writing(link: LinkSpec, content: &'static str, (writer, rate): (Writer, u64), sides: &[Side]) -> CaseSpec {
    let still = still(link, content, sides);
    CaseSpec {
        name: format!("{}-{}", still.link, writer.name()),
        writer,
        rate,
        data: still.data.min(128 * MIB),
        warm_up: Duration::from_millis(600),
        ..still
    }
}

/// Counters at a rate at which raw pages do not converge at 1 Gb/s. In the 100 ms in which this
/// link carries 2,900 pages, the guest writes to 7,500 of its 16,384 pages.
const FAST_COUNTER: (Writer, u64) = (Writer::Counter, 100_000);

impl Options {
    /// Returns the options of `--quick`: one round of some cases, in about two minutes on two
    /// cores.
    pub fn quick() -> Self {
        let cases = vec![
            still(ONE, "text", &COMPRESSION),
            still(ONE, "random", &FEW),
            writing(ONE, "random", FAST_COUNTER, &DELTAS),
            still(TEN, "text", &FEW),
            still(LOOPBACK, "random", &FEW),
        ];
        Options { cases, repeats: 1 }
    }

    /// Returns the full options: three rounds of all links and contents, in about 25 minutes on two
    /// cores.
    pub fn full() -> Self {
        let cases = vec![
            still(SLOW, "random", &FEW),
            still(SLOW, "text", &COMPRESSION),
            writing(SLOW, "random", (Writer::Counter, 10_000), &DELTAS),
            still(ONE, "random", &FEW),
            still(ONE, "text", &COMPRESSION),
            still(ONE, MIX, &FAST),
            still(ONE, "pointers", &FAST),
            still(ONE, FILES, &COMPRESSION),
            writing(ONE, "random", FAST_COUNTER, &BOTH),
            writing(ONE, "text", (Writer::Append, 40_000), &BOTH),
            writing(ONE, "random", (Writer::Whole, 15_000), &DELTAS),
            still(TWO, "text", &FAST),
            writing(TWO, "random", FAST_COUNTER, &DELTAS),
            still(TEN, "random", &FEW),
            still(TEN, "text", &FAST),
            still(TEN, FILES, &FEW),
            still(LOOPBACK, "random", &FEW),
            still(LOOPBACK, "text", &FEW),
            writing(LOOPBACK, "random", FAST_COUNTER, &DELTAS),
        ];
        Options { cases, repeats: 3 }
    }
}
