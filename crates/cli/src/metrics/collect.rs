//! Conversion of the status to metrics. Each scrape reads the status once; this module counts
//! nothing.
//!
//! Names end in their base unit (seconds, bytes), counters in `_total`. Unknown values are left
//! out, never reported as zero.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use serde_json::Value;
use std::fmt;

/// Size of a page in bytes.
const PAGE: f64 = 4096.0;

/// Kind of a metric.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Gauge,
    Counter,
}
use Kind::{Counter, Gauge};

/// Form of a metric: kind, unit, and factor from the status.
type Form = (Kind, &'static str, f64);

const COUNTER: Form = (Counter, "", 1.0);
const NUMBER: Form = (Gauge, "", 1.0);
const RATIO: Form = (Gauge, "ratio", 1.0);
const S: Form = (Gauge, "seconds", 1.0);
const MS: Form = (Gauge, "seconds", 1e-3);
const US: Form = (Gauge, "seconds", 1e-6);
const BYTES: Form = (Gauge, "bytes", 1.0);
const PAGES: Form = (Gauge, "bytes", PAGE);
const PAGES_TOTAL: Form = (Counter, "bytes", PAGE);
const NS_TOTAL: Form = (Counter, "seconds", 1e-9);
const NS: Form = (Gauge, "seconds", 1e-9);
const RATE: Form = (Gauge, "bytes_per_second", 1.0);
const PAGES_PER_S: Form = (Gauge, "bytes_per_second", PAGE);
const MBPS: Form = (Gauge, "bytes_per_second", 125_000.0);

/// Single numbers of the status: name without prefix and unit, form, help text, and path in the
/// status.
type Number = (&'static str, Form, &'static str, &'static str);

const NUMBERS: &[Number] = &[
    ("guest_writes", COUNTER, "Writes that the guest has counted", "vm.guest.writes"),
    ("guest_clock", US, "The guest's own clock", "vm.guest.t_us"),
    ("guest_damaged_pages", NUMBER, "Pages that the guest found corrupt", "vm.guest.corrupt"),
    ("guest_longest_stall", US, "Longest stall of a vCPU, by its own clock", "vm.guest.stall_max_us"),
    ("balloon_memory", BYTES, "The guest's memory without its balloon", "vm.balloon.memory"),
    ("balloon_target", BYTES, "Target of the guest's memory", "vm.balloon.target"),
    ("balloon_actual", BYTES, "Memory that the guest has", "vm.balloon.actual"),
    (
        "balloon_unmet",
        MS,
        "Time for which the guest has given up no memory although it has more than its target",
        "vm.balloon.unmet_ms",
    ),
    (
        "guest_oom_kills",
        COUNTER,
        "Processes that the guest killed for lack of memory",
        "vm.balloon.stats.oom_kills",
    ),
    (
        "guest_allocation_stalls",
        COUNTER,
        "Allocations of the guest that waited for reclaim",
        "vm.balloon.stats.allocation_stalls",
    ),
    (
        "allocator_inflate_short",
        COUNTER,
        "Requests to inflate that stopped because the guest's memory was low",
        "vm.balloon.allocator.inflate_short",
    ),
    (
        "allocator_deferred_reports",
        COUNTER,
        "Reports of free pages that the guest deferred",
        "vm.balloon.allocator.deferred",
    ),
    ("allocator_wait", NS_TOTAL, "Time for which allocations waited", "vm.balloon.allocator.wait_ns"),
    ("allocator_longest_wait", NS, "Longest wait of an allocation", "vm.balloon.allocator.wait_max_ns"),
    ("ring_entries", NUMBER, "Entries of each vCPU's dirty ring", "vm.rings.entries"),
    (
        "ring_full_exits",
        NUMBER,
        "Times that a vCPU found its dirty ring full, since tracking began",
        "vm.rings.full_exits",
    ),
    (
        "ring_full_stall",
        US,
        "Time for which full rings stopped vCPUs, since tracking began",
        "vm.rings.full_stall_us",
    ),
    ("ring_harvests", NUMBER, "Harvests of a dirty ring, since tracking began", "vm.rings.harvests"),
    ("ring_reaper_cpu", MS, "Processor time of the reaper, since tracking began", "vm.rings.reaper_cpu_ms"),
    (
        "ring_reaper_iterations",
        NUMBER,
        "Times that the reaper woke up, since tracking began",
        "vm.rings.reaper.iterations",
    ),
    ("ring_reaper_sleep", US, "Length of the reaper's current sleep", "vm.rings.reaper.sleep_us"),
    ("migration_elapsed", MS, "Time since the migration under way began", "progress.elapsed_ms"),
    ("migration_pass", NUMBER, "Number of the pass under way, from 0", "progress.pass"),
    ("migration_pass_pages", NUMBER, "Pages of the pass under way", "progress.pass_pages"),
    (
        "migration_pass_done_pages",
        NUMBER,
        "Pages of the pass under way that are sent or skipped",
        "progress.pass_done",
    ),
    ("migration_remaining", PAGES, "Dirty memory that is not sent", "progress.remaining_pages"),
    (
        "migration_left",
        PAGES,
        "Memory that a guest at the target is still missing, seen from the source",
        "progress.left_pages",
    ),
    (
        "migration_dirty_rate",
        PAGES_PER_S,
        "Memory that the guest dirtied per second, in the last pass",
        "progress.dirty_pages_per_s",
    ),
    (
        "migration_bandwidth",
        RATE,
        "Bytes per second that the last meaningful pass sent",
        "progress.bandwidth",
    ),
    (
        "migration_sending_channels",
        NUMBER,
        "Bulk channels that may send at the same time",
        "progress.senders.now",
    ),
    (
        "migration_vcpu_wait",
        US,
        "Time for which vCPUs waited for processors while the migration ran",
        "progress.senders.vcpu_wait_us",
    ),
    ("migration_pace", RATE, "Pace of the bulk in postcopy", "progress.pace"),
    ("migration_eta", S, "Expected time until the guest runs at the target", "progress.verdict.eta_s"),
    (
        "migration_converging",
        NUMBER,
        "1 if precopy is expected to converge, 0 if not",
        "progress.verdict.converging",
    ),
    ("migration_total", MS, "Duration of the migration", "total_ms"),
    ("migration_setup", MS, "From the beginning of the migration to the first page", "setup_ms"),
    ("migration_downtime", MS, "Time during which no vCPU ran", "downtime_ms"),
    (
        "migration_predicted_downtime",
        MS,
        "Downtime that was predicted when the guest was stopped",
        "predicted_downtime_ms",
    ),
    ("migration_verify", MS, "Time for comparing pages, outside the downtime", "verify_ms"),
    (
        "migration_throughput",
        MBPS,
        "Bytes on the wire over the time from the first page to the end",
        "throughput_mbps",
    ),
    ("migration_delta", BYTES, "Bytes of pages sent as differences", "bytes.delta"),
    ("migration_compressed", BYTES, "Bytes of pages sent compressed", "bytes.compressed"),
    (
        "migration_delta_cache_admitted_pages",
        NUMBER,
        "Versions of pages that entered the cache for deltas",
        "delta_cache.admitted",
    ),
    (
        "migration_delta_cache_evicted_pages",
        NUMBER,
        "Versions of pages that lost their place in the cache to another page",
        "delta_cache.evicted",
    ),
    (
        "migration_known_saved",
        BYTES,
        "Bytes of the pages that came from files of the target",
        "known_pages.known_bytes",
    ),
    (
        "migration_delta_cache_saved",
        BYTES,
        "Bytes by which deltas were shorter than their pages",
        "delta_cache.saved_bytes",
    ),
    ("migration_delta_cache_memory", BYTES, "Memory of the cache for deltas", "delta_cache.memory_bytes"),
    (
        "migration_delta_cache_limit",
        BYTES,
        "Largest memory that the cache for deltas may have",
        "delta_cache.limit_bytes",
    ),
    ("migration_verified_pages", NUMBER, "Pages compared on both sides", "verified_pages"),
    ("migration_mismatched_pages", NUMBER, "Pages that differed", "mismatched_pages"),
    (
        "migration_skipped_pages",
        NUMBER,
        "Pages that were not compared because the guest reported them as free",
        "skipped_pages",
    ),
    (
        "migration_suspect_pages_resent",
        NUMBER,
        "Pages that were sent again after a digest mismatch",
        "suspect_pages_resent",
    ),
    ("migration_interruptions", NUMBER, "Times that the link was lost in postcopy", "interruptions"),
    (
        "migration_throttle_highest",
        RATIO,
        "Highest share of its time for which a vCPU was throttled",
        "throttle.highest_share",
    ),
    ("postcopy_left_pages", NUMBER, "Pages that are still missing, seen from the target", "left"),
    ("postcopy_requests", NUMBER, "Pages that were requested", "postcopy.requests"),
    ("postcopy_pages", NUMBER, "Pages that arrived with content", "postcopy.pages"),
    ("postcopy_duplicate_pages", NUMBER, "Pages that arrived twice", "postcopy.duplicates"),
    ("postcopy_prefetched_pages", NUMBER, "Pages requested ahead of a run of faults", "postcopy.prefetched"),
    ("postcopy_prefetched_used_pages", NUMBER, "Prefetched pages that were used", "postcopy.prefetched_used"),
    (
        "postcopy_duration",
        MS,
        "Time from the guest's start at the target until its last page arrived",
        "postcopy.ms",
    ),
];

/// Numbers with one label: name, form, help text, label, and path for each value of the label.
type Labelled = (&'static str, Form, &'static str, &'static str, &'static [(&'static str, &'static str)]);

const LABELLED: &[Labelled] = &[
    (
        "balloon_guest_memory",
        BYTES,
        "Memory of the guest, as its balloon driver reports",
        "kind",
        &[
            ("free", "vm.balloon.stats.free"),
            ("total", "vm.balloon.stats.total"),
            ("available", "vm.balloon.stats.available"),
            ("caches", "vm.balloon.stats.caches"),
        ],
    ),
    (
        "balloon_activity",
        PAGES_TOTAL,
        "Memory that the balloon has handled",
        "kind",
        &[
            ("inflated", "vm.balloon.figures.inflated_pages"),
            ("deflated", "vm.balloon.figures.deflated_pages"),
            ("taken_back", "vm.balloon.figures.taken_back_pages"),
            ("reported", "vm.balloon.figures.reported_pages"),
            ("dropped", "vm.balloon.figures.dropped_pages"),
            ("held", "vm.balloon.figures.held_pages"),
            ("poisoned", "vm.balloon.figures.poisoned_pages"),
            ("hinted", "vm.balloon.figures.hinted_pages"),
        ],
    ),
    (
        "balloon_ignored_hints",
        COUNTER,
        "Hints about free pages that came too late",
        "reason",
        &[("command_ended", "vm.balloon.figures.stale_hints"), ("no_request", "vm.balloon.late_hints")],
    ),
    (
        "allocator_waits",
        COUNTER,
        "Allocations that waited for memory",
        "cause",
        &[
            ("reported", "vm.balloon.allocator.waits_reported"),
            ("held", "vm.balloon.allocator.waits_held"),
            ("balloon", "vm.balloon.allocator.waits_balloon"),
        ],
    ),
    (
        "allocator_failures",
        COUNTER,
        "Allocations that found no memory",
        "cause",
        &[("any", "vm.balloon.allocator.failed"), ("held", "vm.balloon.allocator.failed_held")],
    ),
    (
        "allocator_overflows",
        COUNTER,
        "Freed blocks that did not fit the guest's buffer, and walks that found the queue of hints full",
        "buffer",
        &[("freed", "vm.balloon.allocator.missed"), ("hints", "vm.balloon.allocator.hint_full")],
    ),
    (
        "migration_downtime_part",
        MS,
        "Parts of the downtime",
        "part",
        &[
            ("pause", "downtime.pause_ms"),
            ("send_state", "downtime.send_state_ms"),
            ("last_harvest", "downtime.last_harvest_ms"),
            ("list_pages", "downtime.list_pages_ms"),
            ("last_pages", "downtime.last_pages_ms"),
            ("target_prepare", "downtime.target_prepare_ms"),
            ("device_state", "downtime.device_state_ms"),
            ("commit", "downtime.commit_ms"),
            ("resume", "downtime.resume_ms"),
        ],
    ),
    (
        "migration_pages",
        NUMBER,
        "Pages by the way they were sent",
        "kind",
        &[
            ("raw", "bytes.raw_pages"),
            ("zero", "bytes.zero_pages"),
            ("free_skipped", "bytes.free_pages_skipped"),
        ],
    ),
    (
        "migration_delta_cache_pages",
        NUMBER,
        "Pages by the result of the cache for deltas",
        "result",
        &[("hit", "delta_cache.hits"), ("miss", "delta_cache.misses"), ("large", "delta_cache.large")],
    ),
    (
        "migration_known_pages",
        NUMBER,
        "Pages whose hash was sent, by whether a file of the target has them",
        "result",
        &[("known", "known_pages.known"), ("unknown", "known_pages.unknown")],
    ),
    (
        "migration_guest_speed",
        NUMBER,
        "Writes per second of the guest",
        "when",
        &[("before", "guest.before_writes_per_s"), ("during", "guest.during_writes_per_s")],
    ),
    (
        "migration_cpu",
        MS,
        "Processor time of the engine's threads",
        "side",
        &[("source", "cpu_ms.source"), ("destination", "cpu_ms.destination")],
    ),
    (
        "migration_free_page_reports",
        NUMBER,
        "Reports of free pages",
        "use",
        &[("all", "free_pages.reports"), ("dropped", "free_pages.dropped_reports")],
    ),
    (
        "postcopy_fault_latency",
        US,
        "Time from a fault to its page being placed, for this share of the faults",
        // The label `quantile` is reserved for summaries.
        "share",
        &[("0.5", "postcopy.p50_us"), ("0.99", "postcopy.p99_us"), ("1", "postcopy.max_us")],
    ),
];

/// Lists of numbers: name, form, help text, label and path.
type List = (&'static str, Form, &'static str, &'static str, &'static str);

const LISTS: &[List] = &[
    (
        "ring_used",
        NUMBER,
        "Entries of a vCPU's dirty ring that wait to be harvested",
        "vcpu",
        "vm.rings.used",
    ),
    ("migration_channel", BYTES, "Bytes that a bulk channel has sent", "channel", "progress.channel_bytes"),
];

/// Objects with a member for each value of a label: name, form, help text, label, path of the
/// object, and field of each member.
type Members = (&'static str, Form, &'static str, &'static str, &'static str, &'static str);

const MEMBERS: &[Members] = &[
    ("migration_codec_pages", NUMBER, "Pages that were sent encoded", "codec", "codecs", "pages"),
    (
        "migration_codec_raw",
        BYTES,
        "Bytes of encoded pages before the encoding",
        "codec",
        "codecs",
        "raw_bytes",
    ),
    ("migration_codec_sent", BYTES, "Bytes of encoded pages after the encoding", "codec", "codecs", "bytes"),
    ("migration_codec_cpu", MS, "Processor time of the source for the encoding", "codec", "codecs", "cpu_ms"),
];

/// States of which one is true: name, help text, label, path and possible values.
type States = (&'static str, &'static str, &'static str, &'static str, &'static [&'static str]);

const STATES: &[States] = &[
    (
        "guest_place",
        "Place of the guest",
        "place",
        "vm.place",
        &["awaited", "running", "paused", "moving", "moved", "unknown", "ended"],
    ),
    (
        "ring_reaper_state",
        "State of the reaper of the dirty rings",
        "state",
        "vm.rings.reaper.state",
        &["off", "sleeping", "working", "failed"],
    ),
    (
        "migration_state",
        "State of the current or latest migration",
        "state",
        "state",
        &[
            "setup",
            "precopy",
            "switchover",
            "postcopy",
            "postcopy-paused",
            "completed",
            "cancelled",
            "failed",
            "lost",
            "unknown",
        ],
    ),
];

/// Returns the metrics of a status as text.
pub(crate) fn text(status: Value) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("vmferry");
    registry.register_collector(Box::new(Metrics(status)));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Metrics(Value);

impl Metrics {
    fn at(&self, path: &str) -> &Value {
        path.split('.').fold(&self.0, |value, name| &value[name])
    }

    fn number(&self, path: &str) -> Option<f64> {
        let value = self.at(path);
        let number = match value {
            Value::Bool(yes) => Some(f64::from(u8::from(*yes))),
            value => value.as_f64(),
        };
        number.filter(|number| number.is_finite())
    }

    fn numbers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, form, help, path) in NUMBERS {
            if let Some(number) = self.number(path) {
                metric(encoder, (name, help), *form, &[([], number)])?;
            }
        }
        for (name, form, help, label, values) in LABELLED {
            let known = values
                .iter()
                .filter_map(|(value, path)| Some(([(*label, (*value).to_owned())], self.number(path)?)));
            metric(encoder, (name, help), *form, &known.collect::<Vec<_>>())?;
        }
        for (name, form, help, label, path) in LISTS {
            let values = self.at(path).as_array().into_iter().flatten().enumerate();
            let known =
                values.filter_map(|(index, value)| Some(([(*label, index.to_string())], value.as_f64()?)));
            metric(encoder, (name, help), *form, &known.collect::<Vec<_>>())?;
        }
        for (name, form, help, label, path, field) in MEMBERS {
            let members = self.at(path).as_object().into_iter().flatten();
            let known = members
                .filter_map(|(member, value)| Some(([(*label, member.clone())], value[*field].as_f64()?)));
            metric(encoder, (name, help), *form, &known.collect::<Vec<_>>())?;
        }
        // While the migration runs, `progress` contains the sent bytes, and afterwards the report
        // does.
        let about = ("migration_sent", "Bytes sent by this migration");
        match self.number("bytes.wire").or_else(|| self.number("progress.wire_bytes")) {
            Some(wire) => metric(encoder, about, (Counter, "bytes", 1.0), &[([], wire)]),
            None => Ok(()),
        }
    }

    fn words(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, label, path, all) in STATES {
            let Some(own) = self.at(path).as_str() else { continue };
            let value = |word: &&str| ([(*label, (*word).to_owned())], f64::from(u8::from(*word == own)));
            metric(encoder, (name, help), NUMBER, &all.iter().map(value).collect::<Vec<_>>())?;
        }
        let text = |path: &str| self.at(path).as_str().unwrap_or_default().to_owned();
        let labels = [("version", env!("CARGO_PKG_VERSION").to_owned()), ("kind", text("vm.kind"))];
        let help = "Version of this vmferry, and kind of its guest";
        metric(encoder, ("build_info", help), NUMBER, &[(labels, 1.0)])?;
        if self.at("id").is_string() {
            let labels = ["id", "mode", "tracker", "outcome"].map(|name| (name, text(name)));
            metric(encoder, ("migration_info", "The last migration"), NUMBER, &[(labels, 1.0)])?;
        }
        let passes = self.at("passes").as_array().map(Vec::len);
        passes.map_or(Ok(()), |passes| {
            #[expect(clippy::cast_precision_loss, reason = "a number of passes")]
            let passes = passes as f64;
            metric(encoder, ("migration_passes", "Passes of the last migration"), NUMBER, &[([], passes)])
        })
    }

    /// Encodes the histogram of fault latencies. The status has separate buckets, and a histogram
    /// has cumulative ones.
    fn faults(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(buckets) = self.at("postcopy.hist_us").as_object() else { return Ok(()) };
        let mut buckets: Vec<(f64, u64)> = buckets
            .iter()
            .filter_map(|(bound, count)| Some((bound.parse::<f64>().ok()? * 1e-6, count.as_u64()?)))
            .collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count = buckets.iter().map(|(_, count)| count).sum();
        #[expect(clippy::cast_precision_loss, reason = "a sum of times")]
        let sum = self.number("postcopy.mean_us").unwrap_or(0.0) * 1e-6 * count as f64;
        buckets.push((f64::INFINITY, 0));
        let help = "Time from a fault to its page being placed";
        let mut metric =
            encoder.encode_descriptor("postcopy_fault", help, Some(&Unit::Seconds), MetricType::Histogram)?;
        metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.words(&mut encoder)?;
        self.numbers(&mut encoder)?;
        self.faults(&mut encoder)
    }
}

/// Encodes one metric with the values of all its labels.
fn metric<const LABELS: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    (kind, unit, factor): Form,
    values: &[([(&str, String); LABELS], f64)],
) -> fmt::Result {
    if values.is_empty() {
        return Ok(());
    }
    let unit = match unit {
        "" => None,
        "seconds" => Some(Unit::Seconds),
        "bytes" => Some(Unit::Bytes),
        other => Some(Unit::Other(other.to_owned())),
    };
    let of = if kind == Counter { MetricType::Counter } else { MetricType::Gauge };
    let mut metric = encoder.encode_descriptor(name, help, unit.as_ref(), of)?;
    for (labels, value) in values {
        if labels.is_empty() {
            encode_value(&mut metric, kind, value * factor)?;
        } else {
            encode_value(&mut metric.encode_family(labels)?, kind, value * factor)?;
        }
    }
    Ok(())
}

fn encode_value(metric: &mut MetricEncoder<'_>, kind: Kind, value: f64) -> fmt::Result {
    match kind {
        Counter => metric.encode_counter::<NoLabelSet, f64, f64>(&value, None),
        Gauge => metric.encode_gauge(&value),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
