//! Simulation of a channel: an encoder, a socket with a buffer, and a link that drains the buffer.

use super::*;
use crate::BATCH_BYTES;
use crate::hostile::Noise;
use std::collections::BTreeMap;

const MBIT: f64 = 1e6 / 8.0;
const GB: f64 = 1e9;

/// Ratio and processor time for each byte, in nanoseconds, of each codec.
type Content = [(f64, f64); CODECS.len()];

/// Contents as `vmferry-bench codec` measures them.
const TEXT: Content = [(0.48, 3.0), (0.31, 3.3), (0.303, 3.9), (0.30, 12.7)];
const CODE: Content = [(0.51, 2.05), (0.39, 3.1), (0.37, 5.0), (0.35, 14.0)];
const SPARSE: Content = [(0.078, 0.48), (0.059, 0.9), (0.057, 1.04), (0.056, 3.2)];
const DENSE: Content = [(1.0, 0.12), (1.0, 0.15), (1.0, 0.17), (1.0, 0.35)];
const NEARLY_DENSE: Content = [(0.98, 2.5), (0.90, 5.0), (0.89, 8.0), (0.885, 20.0)];
const CONTENTS: [Content; 5] = [TEXT, CODE, SPARSE, DENSE, NEARLY_DENSE];

const LINKS: [f64; 5] = [100.0 * MBIT, 1000.0 * MBIT, 2000.0 * MBIT, 10_000.0 * MBIT, 10.0 * GB];
const IDLE: [f64; 3] = [0.0, 0.5, 2.0];

/// Conditions during a phase.
#[derive(Debug, Clone, Copy)]
struct World {
    /// Bytes per second.
    link: f64,
    content: Content,
    idle_cores: f64,
    /// True if the target needs the processor with which the sender encodes.
    shared: bool,
}

/// All worlds of the tests.
fn worlds() -> impl Iterator<Item = World> {
    LINKS.into_iter().flat_map(|link| {
        CONTENTS.into_iter().flat_map(move |content| {
            IDLE.into_iter().map(move |idle_cores| World { link, content, idle_cores, shared: false })
        })
    })
}

/// Channel under a fake clock. All times are in seconds.
struct Channel {
    chooser: Chooser,
    /// Arm that is always taken instead of the chooser's choice.
    fixed: Option<usize>,
    now: f64,
    queued: f64,
    buffer: f64,
    noise: Noise,
    /// Time of each batch, its arm, and its processor time of encoding.
    batches: Vec<(f64, usize, f64)>,
}

impl Channel {
    fn new(fixed: Option<usize>) -> Self {
        Self {
            chooser: Chooser::new(Duration::ZERO),
            fixed,
            now: 0.0,
            queued: 0.0,
            buffer: f64::from(1 << 20),
            noise: Noise::new(1),
            batches: Vec::new(),
        }
    }

    fn pass_time(&mut self, seconds: f64, world: &World) {
        self.now += seconds;
        self.queued = (self.queued - seconds * world.link).max(0.0);
    }

    fn clock(&self) -> Duration {
        Duration::from_secs_f64(self.now)
    }

    fn batch(&mut self, world: &World) {
        let bytes = BATCH_BYTES as f64;
        let choice = self.chooser.next(Class::Mixed, BATCH_BYTES, self.clock());
        let chosen = choice.codec().map_or(RAW, |codec| {
            1 + CODECS.iter().position(|arm| arm.codec == codec).expect("a codec of the table")
        });
        let arm = self.fixed.unwrap_or(chosen);
        // The ratio of a batch differs from that of the content by up to a tenth.
        let noise = 0.9 + 0.2 * self.noise.below(1000) as f64 / 1000.0;
        let (ratio, cpu) = match arm {
            RAW => (1.0, 0.0),
            arm => {
                let (ratio, cpu) = world.content[arm - 1];
                let ratio = if ratio < 1.0 { f64::min(ratio * noise, 1.0) } else { 1.0 };
                (ratio, cpu * 1e-9 * bytes)
            }
        };
        let begin = self.now;
        let delay = 2.0 - world.idle_cores.min(1.0);
        if world.shared {
            self.now += cpu * delay;
        } else {
            self.pass_time(cpu * delay, world);
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most a batch")]
        let bytes_out = (bytes * ratio) as u64;
        let out = bytes_out as f64;
        self.pass_time(out * 0.09e-9, world);
        // A target that hardly runs leaves the buffer full.
        let buffer = if world.shared { bytes } else { self.buffer };
        let waited = ((self.queued + out - buffer) / world.link).max(0.0);
        self.pass_time(waited, world);
        self.queued += out;
        let facts = Facts {
            class: Class::Mixed,
            codec: (arm != RAW).then(|| CODECS[arm - 1].codec),
            bytes_in: BATCH_BYTES as u64,
            bytes_out,
            encode: Duration::from_secs_f64(cpu * delay),
            encode_cpu: Duration::from_secs_f64(cpu),
            elapsed: Duration::from_secs_f64(self.now - begin),
            waited: Duration::from_secs_f64(waited),
            idle_cores: world.idle_cores,
        };
        self.chooser.sent(&facts, self.clock());
        let (elapsed, waited) = (facts.elapsed, facts.waited);
        self.chooser.frame_sent(arm != RAW, facts.bytes_in, elapsed, waited, self.clock());
        self.batches.push((begin, arm, cpu));
    }

    /// Sends `bytes` bytes of pages.
    fn phase(&mut self, world: &World, bytes: f64) {
        for _ in 0..batches_of(bytes) {
            self.batch(world);
        }
    }

    /// Waits until the link has taken all bytes, and returns the time.
    fn end(&mut self, world: &World) -> f64 {
        self.now + self.queued / world.link
    }
}

fn batches_of(bytes: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some thousand batches")]
    let batches = (bytes / BATCH_BYTES as f64) as usize;
    batches.max(1)
}

/// Returns the time in which the phases are sent.
fn total(phases: &[(World, f64)], fixed: Option<usize>) -> f64 {
    let mut channel = Channel::new(fixed);
    phases.iter().for_each(|(world, bytes)| channel.phase(world, *bytes));
    channel.end(&phases[phases.len() - 1].0)
}

/// Returns the time with the best single codec in each phase.
fn best(phases: &[(World, f64)]) -> f64 {
    let fastest = |phase| (0..ARMS).map(|arm| total(&[phase], Some(arm))).fold(f64::INFINITY, f64::min);
    phases.iter().map(|phase| fastest(*phase)).sum()
}

#[test]
fn steady_conditions_are_within_bounds_of_raw_and_of_the_best_codec() {
    let (mut to_raw, mut to_best) = (0.0_f64, 0.0_f64);
    for world in worlds() {
        let phases = [(world, 3.0 * world.link.min(2.0 * GB))];
        let (auto, raw, best) = (total(&phases, None), total(&phases, Some(RAW)), best(&phases));
        (to_raw, to_best) = (to_raw.max(auto / raw), to_best.max((auto - 0.15) / best));
        assert!(auto <= 1.03 * raw, "{world:?}: {auto:.3} s, raw {raw:.3} s");
        // The first bytes fill the buffer of the socket before anything is known.
        assert!(auto <= 1.08 * best + 0.15, "{world:?}: {auto:.3} s, best {best:.3} s");
    }
    vmferry_testkit::print_line(format!(
        "chooser, steady: at most {to_raw:.3} of raw, and {to_best:.3} of the best codec after 150 ms"
    ));
}

#[test]
fn short_migrations_are_not_slower_than_raw() {
    for world in worlds() {
        // A tenth of a second on the link.
        let phases = [(world, 0.1 * world.link)];
        let (auto, raw) = (total(&phases, None), total(&phases, Some(RAW)));
        assert!(auto <= 1.03 * raw, "{world:?}: {auto:.4} s, raw {raw:.4} s");
    }
}

#[test]
fn changes_of_conditions_are_followed() {
    let bytes = |world: &World| 0.8 * world.link.min(1.25 * GB);
    let worlds: Vec<(World, f64)> = worlds().map(|world| (world, best(&[(world, bytes(&world))]))).collect();
    let mut longest: f64 = 0.0;
    for (before, best_before) in &worlds {
        for (after, best_after) in &worlds {
            if differences(before, after) != 1 {
                continue;
            }
            let phases = [(*before, bytes(before)), (*after, bytes(after))];
            let (auto, raw) = (total(&phases, None), total(&phases, Some(RAW)));
            // The buffer is full at the change, and the second link drains it.
            let best = best_before + best_after + f64::from(1 << 20) / after.link;
            longest = longest.max(auto - 1.08 * best);
            assert!(auto <= 1.03 * raw + 0.1, "{before:?}, {after:?}: {auto:.3} s, raw {raw:.3} s");
            assert!(auto <= 1.08 * best + 0.3, "{before:?}, {after:?}: {auto:.3} s, best {best:.3} s");
        }
    }
    vmferry_testkit::print_line(format!("chooser, changes: at most {:.0} ms lost", longest * 1e3));
}

/// Returns the number of conditions in which two worlds differ.
fn differences(a: &World, b: &World) -> usize {
    let differ = [a.link != b.link, a.content != b.content, a.idle_cores != b.idle_cores];
    differ.into_iter().filter(|differs| *differs).count()
}

/// Returns the arm that most batches between two times had.
fn usual_arm(channel: &Channel, from: f64, to: f64) -> usize {
    let mut count = BTreeMap::new();
    for (_, arm, _) in channel.batches.iter().filter(|(at, ..)| (from..to).contains(at)) {
        *count.entry(*arm).or_insert(0) += 1;
    }
    count.into_iter().max_by_key(|(_, count)| *count).expect("batches in that time").0
}

#[test]
fn link_faster_than_memory_is_raw_and_hardly_probed() {
    for (content, idle_cores) in CONTENTS.into_iter().flat_map(|content| IDLE.map(|idle| (content, idle))) {
        let fast = World { link: 10.0 * GB, content, idle_cores, shared: false };
        // From the beginning, and after a time on a slow link.
        for (slow_bytes, settled) in [(0.0, 0.1), (200e6, 0.2)] {
            let mut channel = Channel::new(None);
            if slow_bytes > 0.0 {
                channel.phase(&World { link: 1000.0 * MBIT, ..fast }, slow_bytes);
            }
            let begin = channel.now;
            channel.phase(&fast, 10.0 * GB);
            let later = channel.batches.iter().filter(|(at, ..)| *at > begin + settled);
            let (time, cpu): (f64, f64) =
                (channel.now - begin - settled, later.clone().map(|(.., cpu)| cpu).sum());
            assert!(cpu <= 0.01 * time, "{fast:?}: {cpu:.4} s of {time:.3} s");
            assert_eq!(usual_arm(&channel, begin + settled, f64::INFINITY), RAW, "{fast:?}");
        }
    }
}

#[test]
fn changes_are_noticed_within_200_ms() {
    let usual = World { link: 1000.0 * MBIT, content: TEXT, idle_cores: 2.0, shared: false };
    let cases = [
        ("slower link", World { link: 10.0 * GB, ..usual }, usual),
        ("faster link", usual, World { link: 10.0 * GB, ..usual }),
        ("dense content", usual, World { content: DENSE, ..usual }),
        ("text after dense content", World { content: DENSE, ..usual }, usual),
        (
            "no idle processor",
            World { link: 2000.0 * MBIT, ..usual },
            World { link: 2000.0 * MBIT, idle_cores: 0.0, ..usual },
        ),
        (
            "idle processor",
            World { link: 2000.0 * MBIT, idle_cores: 0.0, ..usual },
            World { link: 2000.0 * MBIT, ..usual },
        ),
    ];
    for (name, before, after) in cases {
        let mut channel = Channel::new(None);
        channel.phase(&before, 1.0 * before.link);
        let change = channel.now;
        channel.phase(&after, 2.0 * after.link);
        let settled = usual_arm(&channel, change + 0.5, f64::INFINITY);
        let fixed = |arm| total(&[(after, after.link)], Some(arm));
        let best = (0..ARMS).map(fixed).fold(f64::INFINITY, f64::min);
        assert!(fixed(settled) <= 1.1 * best, "{name}: settled on arm {settled}");
        let soon = usual_arm(&channel, change + 0.2, change + 0.3);
        assert!(fixed(soon) <= 1.2 * best, "{name}: arm {soon} after 200 ms");
    }
}

#[test]
fn steady_conditions_cause_few_changes() {
    for world in worlds() {
        let mut channel = Channel::new(None);
        while channel.now < 3.0 {
            channel.batch(&world);
        }
        let arms: Vec<usize> =
            channel.batches.iter().filter(|(at, ..)| *at > 0.5).map(|(_, arm, _)| *arm).collect();
        // Single batches are probes.
        let used: Vec<usize> =
            arms.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
        let changes = used.windows(2).filter(|pair| pair[0] != pair[1]).count();
        let seconds = channel.now - 0.5;
        assert!(changes as f64 <= 2.0 + 16.0 * seconds, "{world:?}: {changes} changes in {seconds:.1} s");
    }
}

#[test]
fn dense_pages_are_raw_without_a_probe() {
    let mut chooser = Chooser::new(Duration::ZERO);
    assert_eq!(chooser.next(Class::Dense, BATCH_BYTES, Duration::from_secs(1)), Choice::Raw);
    assert_eq!(Choice::Raw.codec(), None);
    assert_eq!(Choice::Probe(Codec::Lz4).codec(), Some(Codec::Lz4));
}

#[test]
fn deltas_are_faster_on_slow_links_only() {
    // Deltas of one counter for each page: nearly nothing remains.
    let (ratio, cpu) = (0.02, 0.5e-9);
    let pays = |link: f64, idle_cores: f64| {
        let mut channel = Channel::new(Some(RAW));
        let world = World { link, content: DENSE, idle_cores, shared: false };
        for _ in 0..2000 {
            channel.batch(&world);
        }
        channel.chooser.is_faster(ratio, cpu, channel.clock())
    };
    assert!(!Chooser::new(Duration::ZERO).is_faster(ratio, cpu, Duration::ZERO), "the link is not known");
    for idle_cores in IDLE {
        assert!(pays(1000.0 * MBIT, idle_cores), "1 Gb/s, {idle_cores} idle");
        assert!(!pays(10.0 * GB, idle_cores), "10 GB/s, {idle_cores} idle");
    }
    assert!(pays(10_000.0 * MBIT, 2.0), "10 Gb/s with idle processors");
    assert!(!pays(2.5 * GB, 0.0), "2.5 GB/s without an idle processor");
}

#[test]
fn target_that_shares_the_processors_gets_raw_pages() {
    // The link seems slow, because the target hardly runs. While the sender encodes, it does not
    // run at all.
    for (link, content) in
        [300e6, 600e6, 1.2 * GB].into_iter().flat_map(|link| CONTENTS.map(|content| (link, content)))
    {
        let world = World { link, content, idle_cores: 0.3, shared: true };
        let phases = [(world, 3.0 * link)];
        let (auto, best) = (total(&phases, None), best(&phases));
        assert!(auto <= 1.1 * best + 0.15, "{world:?}: {auto:.3} s, best {best:.3} s");
    }
}

#[test]
fn slow_link_is_known_after_one_frame() {
    let sent = |elapsed: u64| {
        let (mut chooser, now) = (Chooser::new(Duration::ZERO), Duration::from_millis(elapsed));
        let facts = Facts {
            class: Class::Mixed,
            codec: None,
            bytes_in: 1 << 20,
            bytes_out: 1 << 20,
            encode: Duration::ZERO,
            encode_cpu: Duration::ZERO,
            elapsed: now,
            waited: now,
            idle_cores: 1.0,
        };
        chooser.sent(&facts, now);
        chooser.next(Class::Mixed, 1 << 17, now)
    };
    // 1 MiB takes 84 ms at 100 Mb/s. A shorter time may be that of a target that does not run.
    assert!(matches!(sent(84), Choice::Probe(_)));
    assert_eq!(sent(12), Choice::Raw);
    assert_eq!((windows_in(Duration::ZERO), windows_in(Duration::MAX / 2)), (1, WINDOWS));
}
