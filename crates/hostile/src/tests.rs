//! Runs every target with the inputs in `fuzz/seeds` and with noise around them.

mod kvm;

use super::*;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum length of an input, in bytes.
const LONGEST: usize = 4096;

fn seeds(name: &str) -> Vec<Vec<u8>> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(name);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

/// Xorshift generator.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).unwrap()
    }

    /// Returns the bytes of one or two inputs with changes, or only noise.
    fn input(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = if self.below(8) == 0 { Vec::new() } else { seeds[self.below(seeds.len())].clone() };
        if self.below(4) == 0 {
            let other = &seeds[self.below(seeds.len())];
            bytes.truncate(self.below(bytes.len() + 1));
            bytes.extend(&other[self.below(other.len() + 1)..]);
        }
        for _ in 0..=self.below(6) {
            let at = self.below(bytes.len() + 1);
            match self.below(5) {
                0 => bytes.truncate(at),
                1 | 2 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                3 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
                _ => {
                    let some: Vec<u8> = (0..self.below(64)).map(|_| self.next().to_le_bytes()[0]).collect();
                    drop(bytes.splice(at..at, some));
                }
            }
        }
        bytes.truncate(LONGEST);
        bytes
    }
}

/// Waits for the turn of the calling test: memory is counted for all threads, so the tests run one
/// at a time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `inputs` noisy inputs, or as many as `VMFERRY_HOSTILE_INPUTS` says. The inputs are the same
/// in every run.
fn bears(name: &str, inputs: u32) {
    let _turn = turn();
    let wanted = std::env::var("VMFERRY_HOSTILE_INPUTS");
    let inputs = wanted.map_or(inputs, |inputs| inputs.parse().expect("a number of inputs"));
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let seeds = seeds(name);
    assert!(!seeds.is_empty(), "{name}: inputs to begin with");
    let mut most = seeds.iter().map(|seed| target.run(seed)).max().unwrap();
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    for _ in 0..inputs {
        most = most.max(target.run(&noise.input(&seeds)));
    }
    writeln!(
        std::io::stdout(),
        "{name}: {} seeds and {inputs} noisy inputs, at most {} KiB of memory for one",
        seeds.len(),
        most >> 10
    )
    .unwrap();
}

macro_rules! each {
    ($($name:ident: $inputs:literal),*) => {
        $(#[test] fn $name() { bears(stringify!($name), $inputs); })*

        #[test]
        fn no_target_is_left_out() {
            let tried = [$(stringify!($name)),*];
            assert_eq!(TARGETS.map(|target| target.name), tried);
            let manifest = include_str!("../../../fuzz/Cargo.toml");
            for name in tried {
                assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}: no fuzz target");
            }
        }
    };
}
// Number of inputs that take half a second or so. The fuzz targets of the same names run more.
each!(
    hello: 20_000, messages: 20_000, frames: 2000, lanes: 2000, source: 10_000, target: 10_000, snapshot: 1000, state: 5000,
    process: 4000, balloon: 3000, blk: 400, net: 3000, rng: 2500, qmp: 8000, words: 20_000, tls: 400, etcd: 20_000,
    codec: 2000, delta: 20_000
);

/// Checks that the memory limit is enforced: an excessive request is detected even if it was
/// refused or the memory never touched.
#[test]
fn excessive_memory_use_is_detected() {
    let _turn = turn();
    let greedy = super::target("greedy", |bytes| drop(Vec::<u8>::with_capacity(bytes.len() << 10)), (KIB, 4));
    greedy.run(&[]);
    let caught = std::panic::catch_unwind(|| greedy.run(&[7; 100])).unwrap_err();
    let said = caught.downcast_ref::<String>().unwrap();
    // The threads of the test harness allocate and free a little, too.
    let peak = said.strip_prefix("greedy: ").and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
    assert!(peak.is_some_and(|peak| (100_352..112_640).contains(&peak)), "{said}");
    let absurd =
        super::target("absurd", |_| assert!(Vec::<u8>::new().try_reserve(1 << 46).is_err()), (KIB, 0));
    assert!(std::panic::catch_unwind(|| absurd.run(&[])).is_err());
}
