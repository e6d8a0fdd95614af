//! Tests of everything that parses untrusted bytes: of a peer, a guest, a user or an arbiter. The
//! tests also limit the memory that a parser takes.
//!
//! A [`Target`] feeds arbitrary bytes to the code that ships, and panics if the code breaks a
//! promise. The promises are documented in the `hostile` module of the crate that contains the
//! code. The fuzz targets in `fuzz/` run a target with libFuzzer, which searches for bytes that
//! reach new code. The test of this crate runs on any toolchain: it runs each target with the
//! inputs of `fuzz/seeds` and with noise around them for some seconds.
//!
//! Each input has a memory limit: a length in untrusted bytes must not reserve memory before it was
//! compared with a limit. Guest memory is mapped and does not count.

mod memory;
mod words;

#[path = "../../cli/src/arbiter/answer.rs"]
mod answer;

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

/// Parser of untrusted bytes.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the fuzz target and of the folder with its inputs.
    pub name: &'static str,
    drive: fn(&[u8]),
    /// Memory limit: bytes in use at once, and additional bytes for each byte of input.
    cap: (usize, usize),
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// All targets.
pub const TARGETS: [Target; 19] = [
    // Fixed blocks; an error may carry some text. 16 bytes are a run of 24 bytes in a working set,
    // which is encoded and decoded again, beside a copy of the input.
    target("hello", vmferry_wire::hostile::drive_hello, (4 * KIB, 6)),
    // Three bytes can create a run of 24 bytes, in a list that doubles as it grows. The target also
    // encodes the parsed messages and parses them again.
    target("messages", vmferry_wire::hostile::drive_messages, (MIB, 40)),
    // A frame of staged pages, a table, and the stream itself, which is at most `MOST_FRAME_BYTES`
    // long and doubles as it grows.
    target("frames", vmferry_engine::hostile::drive_frames, (5 * MIB, 4)),
    // Up to 130 lanes with their waiting bytes, which are also kept as sent, each in a buffer that
    // doubles as it grows.
    target("lanes", vmferry_engine::hostile::drive_lanes, (8 * MIB, 40)),
    target("source", vmferry_engine::hostile::drive_source, (512 * KIB, 40)),
    target("target", vmferry_engine::hostile::drive_target, (512 * KIB, 40)),
    // A window of pages for each of up to 4 threads.
    target("snapshot", vmferry_engine::hostile::drive_snapshot, (8 * MIB, 40)),
    target("state", vmferry_vmm::hostile::drive, (512 * KIB, 40)),
    target("process", vmferry_process::hostile::drive, (512 * KIB, 40)),
    // The checking host records every call of a step, some ten thousand at most.
    target("balloon", vmferry_virtio::hostile::drive, (8 * MIB, 40)),
    target("blk", vmferry_virtio::blk::hostile::drive, (4 * MIB, 40)),
    target("net", vmferry_virtio::net::hostile::drive, (8 * MIB, 40)),
    target("rng", vmferry_virtio::rng::hostile::drive, (512 * KIB, 40)),
    target("qmp", vmferry_control::hostile::drive, (512 * KIB, 40)),
    target("words", words::drive, (64 * KIB, 40)),
    // Two connections with their windows, and the bytes that they send, both in transit and
    // received.
    target("tls", vmferry_engine::hostile::drive_tls, (6 * MIB, 40)),
    // Two bytes of JSON create a value of 32 bytes, in a list that doubles as it grows.
    target("etcd", drive_etcd, (64 * KIB, 80)),
    // The pages of a frame, decoded twice, between two more pages each time; a decoder, and
    // encoders for the pages that were decoded.
    target("codec", vmferry_codec::hostile::drive_frames, (2 * MIB, 2)),
    // Pages before and after each delta, and the buffer of an encoder.
    target("delta", vmferry_codec::hostile::drive_deltas, (16 * KIB, 0)),
];

const fn target(name: &'static str, drive: fn(&[u8]), cap: (usize, usize)) -> Target {
    Target { name, drive, cap }
}

impl Target {
    /// Feeds `bytes` to the target. Returns the maximum number of bytes of memory in use at once.
    /// No other thread may allocate memory meanwhile.
    ///
    /// # Panics
    /// Panics if the code breaks a promise or exceeds its memory limit.
    pub fn run(&self, bytes: &[u8]) -> usize {
        let peak = memory::peak_of(|| (self.drive)(bytes));
        let cap = self.cap.0 + self.cap.1 * bytes.len();
        assert!(
            peak <= cap,
            "{}: {peak} bytes in use at once for {} of input, {cap} are allowed",
            self.name,
            bytes.len()
        );
        peak
    }
}

/// Feeds `bytes` to the target `name`. This function is the body of a fuzz target.
///
/// # Panics
/// Panics in the cases of [`Target::run`], or if no target has this name.
pub fn run(name: &str, bytes: &[u8]) {
    TARGETS.iter().find(|target| target.name == name).expect("a target of that name").run(bytes);
}

fn drive_etcd(bytes: &[u8]) {
    for (status, success) in [("200 OK", true), ("503 Service Unavailable", false)] {
        match answer::read(status, success, bytes) {
            Ok(value) => {
                for range in [Some(&value), answer::refused(&value)].into_iter().flatten() {
                    if let Ok(owner) = answer::held("key x", range) {
                        let words = [answer::OPEN, answer::SOURCE, answer::TARGET, answer::RUNS];
                        assert!(words.iter().any(|word| range["kvs"][0]["value"] == base64(word)), "{owner}");
                    }
                }
            }
            Err(why) => assert!(why.chars().count() < 300 && !why.contains(char::is_control), "{why}"),
        }
    }
}

fn base64(word: &str) -> String {
    base64::Engine::encode(&base64::engine::general_purpose::STANDARD, word)
}

#[cfg(test)]
mod tests;
