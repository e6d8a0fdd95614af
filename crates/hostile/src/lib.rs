//! Everything that parses bytes of a peer, a guest, a user or a fence: what is tried on it, and how much memory it may take meanwhile.
//!
//! A [`Target`] does what bytes say, any bytes, with the code that ships, and panics where a promise is broken; how, stands in the crate
//! that the code is in (its `hostile` module). `fuzz/` has it done by libFuzzer, which looks for bytes that reach something new. The test
//! of this crate has it done on any toolchain: with the inputs of `fuzz/seeds`, and with noise around them for some seconds.
//!
//! Each input is held to a cap of memory: a length that a stranger says must reserve nothing before it was compared with a limit. Memory of
//! guests is mapped, and not counted.

mod memory;
mod words;

#[path = "../../cli/src/fence/answer.rs"]
mod answer;

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

/// One thing that strangers' bytes come to.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name: of the fuzz target, and of the folder with its inputs.
    pub name: &'static str,
    drive: fn(&[u8]),
    /// Most bytes in use at once, and so many more for each byte of input.
    cap: (usize, usize),
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// All of them.
pub const TARGETS: [Target; 17] = [
    // Fixed blocks; an error may carry some text.
    target("hello", vmferry_wire::hostile::drive_hello, (4 * KIB, 0)),
    // Three bytes can make a run of 24, in a list that doubles as it grows; and what came is written and read again here.
    target("messages", vmferry_wire::hostile::drive_messages, (MIB, 40)),
    // A frame of staged pages, a table, and the stream itself, which is no longer than `MOST_FRAME_BYTES` and doubles as it grows.
    target("frames", vmferry_engine::hostile::drive_frames, (5 * MIB, 4)),
    // Up to 130 lanes with what waits on them, once more as what was sent, each in a buffer that
    // doubles as it grows.
    target("lanes", vmferry_engine::hostile::drive_lanes, (8 * MIB, 40)),
    target("source", vmferry_engine::hostile::drive_source, (512 * KIB, 40)),
    target("target", vmferry_engine::hostile::drive_target, (512 * KIB, 40)),
    // A window of pages for each of up to 4 threads.
    target("snapshot", vmferry_engine::hostile::drive_snapshot, (8 * MIB, 40)),
    target("state", vmferry_vmm::hostile::drive, (512 * KIB, 40)),
    target("process", vmferry_process::hostile::drive, (512 * KIB, 40)),
    // The host that checks what it is called with notes each call of a step, some ten thousand at most.
    target("balloon", vmferry_virtio::hostile::drive, (8 * MIB, 40)),
    target("blk", vmferry_virtio::blk::hostile::drive, (4 * MIB, 40)),
    target("net", vmferry_virtio::net::hostile::drive, (8 * MIB, 40)),
    target("rng", vmferry_virtio::rng::hostile::drive, (512 * KIB, 40)),
    target("qmp", vmferry_control::hostile::drive, (512 * KIB, 40)),
    target("words", words::drive, (64 * KIB, 40)),
    // Two connections with their windows, and what they send, on its way and there.
    target("tls", vmferry_engine::hostile::drive_tls, (6 * MIB, 40)),
    // Two bytes of JSON make a value of 32, in a list that doubles as it grows.
    target("etcd", drive_etcd, (64 * KIB, 80)),
];

const fn target(name: &'static str, drive: fn(&[u8]), cap: (usize, usize)) -> Target {
    Target { name, drive, cap }
}

impl Target {
    /// Does what `bytes` say; says how many bytes of memory that took at once. Nobody else may take memory meanwhile.
    ///
    /// # Panics
    /// If a promise is broken, or it takes more than it may.
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

/// Does what `bytes` say to the target `name`: what a fuzz target is.
///
/// # Panics
/// As [`Target::run`], or if there is no such target.
pub fn run(name: &str, bytes: &[u8]) {
    TARGETS.iter().find(|target| target.name == name).expect("a target of that name").run(bytes);
}

fn drive_etcd(bytes: &[u8]) {
    for (status, success) in [("200 OK", true), ("503 Service Unavailable", false)] {
        match answer::read(status, success, bytes) {
            Ok(value) => {
                for range in [Some(&value), answer::refused(&value)].into_iter().flatten() {
                    if let Ok(ruling) = answer::held("key x", range) {
                        let words = [answer::OPEN, answer::SOURCE, answer::TARGET, answer::RUNS];
                        assert!(
                            words.iter().any(|word| range["kvs"][0]["value"] == base64(word)),
                            "{ruling}"
                        );
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
