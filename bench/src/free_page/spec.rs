//! What is run: guests, ways to learn their free pages, and how often.

use std::fmt;

pub use vmferry_guest_abi::InflateBy;

use crate::rounds::MEMORY_RESERVE;

const MIB: u64 = 1 << 20;

/// How a host comes to know a guest's free pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// They go into the balloon, in such portions; what is given to it is, or is not, dropped.
    Inflate(InflateBy, Give),
    /// The guest walks its free lists when it is asked.
    Hints,
    /// The guest keeps a map of them, which the host reads.
    Map,
}

/// What the host does with pages that it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Give {
    /// `MADV_DONTNEED`.
    DontNeed,
    /// `MADV_FREE`.
    Free,
    /// Nothing.
    Nothing,
}

/// Whose guest, and how its pages are learnt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learn {
    /// Under vmferry.
    Ours(Way),
    /// Under QEMU, by so many page numbers a request.
    Qemu(u32),
}

/// What touched memory is made of, and what is done with it when it is given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drop {
    /// How it goes.
    pub give: Give,
    /// Whether it is made of transparent huge pages.
    pub huge: bool,
}

/// Who says which pages are free while a guest moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asking {
    /// Nobody: all that was ever touched is sent.
    Nobody,
    /// The guest, when it is asked.
    Hints,
    /// The guest's map.
    Map,
}

/// Who moves the guest, and whom it asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// vmferry.
    Ours(Asking),
    /// QEMU, with or without hints of its balloon.
    Qemu {
        /// `free-page-hint`.
        hints: bool,
    },
}

impl fmt::Display for Give {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DontNeed => "dontneed",
            Self::Free => "free",
            Self::Nothing => "nothing",
        })
    }
}

impl fmt::Display for Learn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ours(Way::Inflate(by, give)) => {
                match by {
                    InflateBy::Pages(pages) => write!(f, "inflate-{pages}")?,
                    InflateBy::Ranges => f.write_str("inflate-ranges")?,
                }
                if *give == Give::DontNeed { Ok(()) } else { write!(f, "-{give}") }
            }
            Self::Ours(Way::Hints) => f.write_str("hints"),
            Self::Ours(Way::Map) => f.write_str("map"),
            Self::Qemu(pages) => write!(f, "qemu-inflate-{pages}"),
        }
    }
}

impl fmt::Display for Drop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.give, if self.huge { "huge" } else { "small" })
    }
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours(Asking::Nobody) => "off",
            Self::Ours(Asking::Hints) => "hints",
            Self::Ours(Asking::Map) => "map",
            Self::Qemu { hints: false } => "qemu-off",
            Self::Qemu { hints: true } => "qemu-hints",
        })
    }
}

/// An idle guest whose free pages are to be known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LearnSpec {
    /// Its memory in bytes.
    pub memory: u64,
    /// How much of it goes into the balloon, in bytes.
    pub inflate: u64,
    /// Why it is smaller than the published one.
    pub smaller: Option<String>,
}

/// The published guest.
const PUBLISHED: u64 = 8192 * MIB;

impl LearnSpec {
    /// The published one: 8 GiB, all but one inflated; or one of half the size, or a quarter, with the reason, if only so much memory is
    /// available. It is hardly touched, but nothing keeps it from being.
    pub(super) fn fitting(available: Option<u64>) -> Self {
        Self::of(PUBLISHED, available)
    }

    fn of(wanted: u64, available: Option<u64>) -> Self {
        let fits = |memory: u64| available.is_none_or(|available| memory + MEMORY_RESERVE <= available);
        let memory =
            [wanted, wanted / 2, wanted / 4].into_iter().find(|memory| fits(*memory)).unwrap_or(wanted / 8);
        let smaller = (memory < wanted).then(|| {
            format!(
                "{} MiB are available, {} MiB were wanted",
                available.unwrap_or(0) / MIB,
                (wanted + MEMORY_RESERVE) / MIB
            )
        });
        Self { memory, inflate: memory / 8 * 7, smaller }
    }
}

/// A guest that moves after it has freed most of its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoveSpec {
    /// Its memory in bytes.
    pub memory: u64,
    /// What it keeps in use, in bytes.
    pub data: u64,
    /// What it allocates, touches and frees before it moves, in bytes.
    pub alloc: u64,
}

impl MoveSpec {
    /// The guest's workload: one round, then it is idle.
    pub fn workload(&self) -> String {
        format!("idle,data={},fill=random,alloc={},rounds=1", self.data, self.alloc)
    }
}

/// What is run, and how often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The idle guest.
    pub learn: LearnSpec,
    /// How its free pages are learnt.
    pub ways: Vec<Learn>,
    /// How much touched memory is given back at once, in bytes.
    pub touched: u64,
    /// How.
    pub drops: Vec<Drop>,
    /// The guest that moves.
    pub moved: MoveSpec,
    /// Who moves it.
    pub moves: Vec<Move>,
    /// Rounds.
    pub repeats: usize,
    /// Only sides whose names, as in `learn/map`, contain one of these. Empty: all.
    pub only: Vec<String>,
}

impl Options {
    /// The bench of contracts in under three minutes on two cores: the published guest, and one of 1.5 GiB that moves.
    pub fn quick(available: Option<u64>) -> Self {
        Self::sized(
            available,
            3,
            512 * MIB,
            MoveSpec { memory: 1536 * MIB, data: 128 * MIB, alloc: 1280 * MIB },
        )
    }

    /// More rounds, and more memory that is touched.
    pub fn full(available: Option<u64>) -> Self {
        Self::sized(
            available,
            5,
            2048 * MIB,
            MoveSpec { memory: 4096 * MIB, data: 384 * MIB, alloc: 3400 * MIB },
        )
    }

    fn sized(available: Option<u64>, repeats: usize, touched: u64, moved: MoveSpec) -> Self {
        let by = |by, give| Learn::Ours(Way::Inflate(by, give));
        let numbers = InflateBy::Pages;
        let ways = vec![
            by(numbers(256), Give::DontNeed),
            by(numbers(16_384), Give::DontNeed),
            by(InflateBy::Ranges, Give::DontNeed),
            by(numbers(256), Give::Free),
            by(numbers(256), Give::Nothing),
            by(InflateBy::Ranges, Give::Nothing),
            Learn::Ours(Way::Hints),
            Learn::Ours(Way::Map),
            Learn::Qemu(256),
            Learn::Qemu(16_384),
        ];
        let drops = [true, false]
            .into_iter()
            .flat_map(|huge| [Give::DontNeed, Give::Free, Give::Nothing].map(|give| Drop { give, huge }));
        let moves = [Asking::Nobody, Asking::Hints, Asking::Map].map(Move::Ours).into_iter();
        Options {
            learn: LearnSpec::fitting(available),
            ways,
            touched,
            drops: drops.collect(),
            moved,
            moves: moves.chain([false, true].map(|hints| Move::Qemu { hints })).collect(),
            repeats,
            only: Vec::new(),
        }
    }

    /// Whether the side of this name is wanted.
    pub(super) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_host_without_the_memory_has_a_smaller_guest_and_says_why() {
        let whole = LearnSpec::fitting(Some(9 << 30));
        assert_eq!((whole.memory, whole.inflate, whole.smaller), (8 << 30, 7 << 30, None));
        assert_eq!(LearnSpec::fitting(None).smaller, None);
        let half = LearnSpec::fitting(Some(8 << 30));
        assert_eq!(half.memory, 4 << 30);
        assert_eq!(half.smaller.as_deref(), Some("8192 MiB are available, 8704 MiB were wanted"));
        assert_eq!(LearnSpec::fitting(Some(0)).memory, 1 << 30);
    }

    #[test]
    fn sides_have_names_of_their_own_and_workloads_that_are_some() {
        for options in [Options::quick(None), Options::full(None)] {
            let learn: BTreeSet<_> = options.ways.iter().map(ToString::to_string).collect();
            let drops: BTreeSet<_> = options.drops.iter().map(ToString::to_string).collect();
            let moves: BTreeSet<_> = options.moves.iter().map(ToString::to_string).collect();
            assert_eq!((learn.len(), drops.len(), moves.len()), (10, 6, 5));
            assert!(options.moved.workload().parse::<vmferry_guest_abi::Workload>().is_ok());
            assert!(options.moved.data + options.moved.alloc < options.moved.memory);
        }
    }

    #[test]
    fn only_what_is_wanted_is_run() {
        let options = Options { only: vec!["move/".into(), "learn/map".into()], ..Options::quick(None) };
        assert!(options.wants("move/off") && options.wants("learn/map") && !options.wants("learn/hints"));
    }
}
