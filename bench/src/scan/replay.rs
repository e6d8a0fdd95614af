//! Replay of recorded dirty bitmaps, as in the published test of a guest of 512 MB.
//!
//! The published test counted the calls that walk the bitmap, and their time. It compared a walk by
//! bytes with one by words, in two guests.

use std::hint::black_box;
use std::time::{Duration, Instant};

use vmferry_bitmap::Scanner;
use vmferry_report::Spread;
use vmferry_report::json::{Case, Document};

use super::sides::{Forms, Seen, Side};
use super::{Options, Recording};
use crate::rounds::turns;

/// Published figures of one guest.
#[derive(Debug, Clone, Copy)]
struct Published {
    guest: &'static str,
    calls: usize,
    bytes_ms: f64,
    word_bytes_ms: f64,
}

const PUBLISHED: [Published; 2] = [
    Published { guest: "idle", calls: 114, bytes_ms: 1.00, word_bytes_ms: 0.15 },
    Published { guest: "busy", calls: 2196, bytes_ms: 38.1, word_bytes_ms: 10.6 },
];

/// Work of a call.
#[derive(Debug, Clone, Copy)]
enum Work {
    Read,
    ReadAndClear,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Work::Read => "read",
            Work::ReadAndClear => "read-and-clear",
        }
    }

    fn walk(self, side: Side, forms: &mut Forms) -> Seen {
        match self {
            Work::Read => side.bits(forms),
            Work::ReadAndClear => side.take_bits(forms),
        }
        .expect("these sides need only words and bytes")
    }
}

/// Adds the cases of all recordings to the document.
///
/// # Panics
///
/// Panics if a recording has no harvest, or if two sides see different pages.
pub(super) fn measure(
    options: &Options,
    recordings: &[Recording],
    progress: &mut dyn FnMut(&str),
    document: &mut Document,
) {
    for recording in recordings {
        for work in [Work::Read, Work::ReadAndClear] {
            progress(&format!("recorded/{}/{}", recording.guest, work.name()));
            document.cases.push(replay(options, recording, work));
        }
    }
}

/// Returns the sides with the names of their figures. The first one is vmferry's, to which the
/// others are ratios.
fn sides() -> [(&'static str, Side); 4] {
    [
        ("ours", Side::Ours(Scanner::best())),
        ("bytes", Side::Bytes),
        ("words", Side::Words),
        ("word_bytes", Side::WordBytes),
    ]
}

fn replay(options: &Options, recording: &Recording, work: Work) -> Case {
    let published = PUBLISHED.iter().find(|published| published.guest == recording.guest);
    let calls = published.map_or(recording.harvests.len(), |published| published.calls);
    let words = recording.harvests.first().expect("a recording has harvests").bitmap.len();
    let mut forms = Forms::new(vec![0; words], false);
    let sides = sides();
    let (mut times, mut clock) = (vec![Vec::new(); sides.len()], Vec::new());
    let mut expected = None;
    for round in 0..options.rounds {
        clock.push(ms(clock_reads(calls)));
        for turn in turns(sides.len(), round) {
            let (name, side) = sides[turn];
            let (took, seen) = time_calls(recording, calls, work, side, &mut forms);
            times[turn].push(Some(ms(took)));
            let expected = *expected.get_or_insert(seen);
            assert_eq!(seen, expected, "{name} sees different pages of the guest {}", recording.guest);
        }
    }
    let mut case = described(recording, published, calls, work).param("rounds", options.rounds);
    for ((name, _), theirs) in sides.iter().zip(&times) {
        case.spread(&format!("{name}_ms"), Spread::of(theirs.iter().flatten().copied()));
        if *name != "ours" {
            case.spread(&format!("ratio_to_{name}"), Spread::of_ratios(theirs, &times[0]));
        }
    }
    case.spread("bytes_to_word_bytes", Spread::of_ratios(&times[1], &times[3]));
    case.spread("clock_ms", Spread::of(clock));
    let of = |figure: fn(&super::Harvest) -> Option<f64>| {
        Spread::of(recording.harvests.iter().filter_map(figure)).map(|spread| spread.median)
    };
    #[expect(clippy::cast_precision_loss, reason = "counts below 2^53")]
    let medians = [
        ("recorded_kernel_us", of(|harvest| harvest.kernel_us)),
        ("recorded_walk_us", of(|harvest| Some(harvest.walk_us))),
        ("recorded_pages", of(|harvest| Some(harvest.pages as f64))),
    ];
    for (name, value) in medians {
        case.metric(name, value.unwrap_or(f64::NAN));
    }
    case
}

fn described(recording: &Recording, published: Option<&Published>, calls: usize, work: Work) -> Case {
    let case = Case::new(format!("recorded/{}/{calls}-calls/{}", recording.guest, work.name()))
        .param("kind", "recorded")
        .param("memory", format!("{}M", recording.memory_bytes >> 20))
        .param("bitmap_bytes", recording.memory_bytes / 4096 / 8)
        .param("guest", recording.guest.as_str())
        .param("workload", recording.workload.as_str())
        .param("tracker", recording.tracker.as_str())
        .param("bitmaps", recording.harvests.len())
        .param("calls", calls);
    match published {
        Some(published) => case
            .param("published_bytes_ms", published.bytes_ms)
            .param("published_word_bytes_ms", published.word_bytes_ms)
            .param("published_bytes_to_word_bytes", published.bytes_ms / published.word_bytes_ms),
        None => case,
    }
}

/// Returns the total time of `calls` calls, and the result of their scans. The calls use the
/// recorded bitmaps in their order, again and again.
///
/// The bitmap is copied before each call, outside the measured time. In a harvest the kernel has
/// just written the bitmap, so there, too, the bitmap is in the cache.
fn time_calls(
    recording: &Recording,
    calls: usize,
    work: Work,
    side: Side,
    forms: &mut Forms,
) -> (Duration, Seen) {
    let (mut took, mut all) = (Duration::ZERO, Seen::default());
    for harvest in recording.harvests.iter().cycle().take(calls) {
        forms.refill(&harvest.bitmap);
        let began = Instant::now();
        let seen = black_box(work.walk(side, black_box(&mut *forms)));
        took += began.elapsed();
        all.add(seen);
    }
    (took, all)
}

/// Returns the time that the clock takes in the measurement of `calls` calls. The figures of all
/// sides include this time.
fn clock_reads(calls: usize) -> Duration {
    (0..calls).map(|_| Instant::now().elapsed()).sum()
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::super::pattern::{Pattern, build};
    use super::super::{Harvest, Recording};
    use super::*;
    use vmferry_report::host::Host;

    fn recording(guest: &str) -> Recording {
        let harvest = |density| {
            let bitmap = build(2048, density, Pattern::Uniform);
            let pages = bitmap.iter().map(|word| u64::from(word.count_ones())).sum();
            Harvest { at_ms: 1.0, kernel_us: Some(2.0), walk_us: 3.0, pages, bitmap }
        };
        Recording {
            guest: guest.into(),
            memory_bytes: 512 << 20,
            workload: "idle".into(),
            tracker: "log".into(),
            max_bandwidth_bytes_per_s: 1,
            host: Host::default(),
            harvests: [0.0, 1e-3, 0.1].map(harvest).into(),
        }
    }

    #[test]
    fn known_guest_is_replayed_with_the_published_number_of_calls() {
        let options = Options { rounds: 2, ..Options::quick() };
        let mut document = Document::new("scan", Host::default());
        measure(&options, &[recording("idle"), recording("other")], &mut |_| (), &mut document);
        let names: Vec<&str> = document.cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "recorded/idle/114-calls/read",
                "recorded/idle/114-calls/read-and-clear",
                "recorded/other/3-calls/read",
                "recorded/other/3-calls/read-and-clear",
            ]
        );
        for case in &document.cases {
            for metric in ["ours_ms", "word_bytes_ms", "ratio_to_bytes", "bytes_to_word_bytes", "clock_ms"] {
                assert!(case.metrics[metric] > 0.0, "{metric} of {}", case.name);
            }
            assert_eq!(case.metrics["recorded_kernel_us"], 2.0);
            assert_eq!(case.params.contains_key("published_bytes_ms"), case.name.contains("idle"));
        }
    }
}
