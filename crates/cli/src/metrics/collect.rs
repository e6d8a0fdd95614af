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
const MS: f64 = 1e-3;
const US: f64 = 1e-6;

/// Kind of a metric.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Gauge,
    Counter,
}
use Kind::{Counter, Gauge};

/// Single numbers of the status: name without prefix and unit, unit, help text, kind, path in the
/// status, and factor.
type Number = (&'static str, &'static str, &'static str, Kind, &'static str, f64);

const NUMBERS: &[Number] = &[
    ("guest_writes", "", "Writes that the guest has counted", Counter, "vm.guest.writes", 1.0),
    ("guest_clock", "seconds", "The guest's own clock", Gauge, "vm.guest.t_us", US),
    ("guest_damaged_pages", "", "Pages that the guest found corrupt", Gauge, "vm.guest.corrupt", 1.0),
    (
        "guest_longest_stall",
        "seconds",
        "Longest stall of a vCPU, by its own clock",
        Gauge,
        "vm.guest.stall_max_us",
        US,
    ),
    ("balloon_memory", "bytes", "The guest's memory without its balloon", Gauge, "vm.balloon.memory", 1.0),
    ("balloon_target", "bytes", "Target of the guest's memory", Gauge, "vm.balloon.target", 1.0),
    ("balloon_actual", "bytes", "Memory that the guest has", Gauge, "vm.balloon.actual", 1.0),
    ("ring_entries", "", "Entries of each vCPU's dirty ring", Gauge, "vm.rings.entries", 1.0),
    (
        "ring_full_exits",
        "",
        "Times that a vCPU found its dirty ring full, since tracking began",
        Gauge,
        "vm.rings.full_exits",
        1.0,
    ),
    (
        "ring_full_stall",
        "seconds",
        "Time for which full rings stopped vCPUs, since tracking began",
        Gauge,
        "vm.rings.full_stall_us",
        US,
    ),
    ("ring_harvests", "", "Harvests of a dirty ring, since tracking began", Gauge, "vm.rings.harvests", 1.0),
    (
        "ring_reaper_cpu",
        "seconds",
        "Processor time of the reaper, since tracking began",
        Gauge,
        "vm.rings.reaper_cpu_ms",
        MS,
    ),
    (
        "migration_elapsed",
        "seconds",
        "Time since the migration under way began",
        Gauge,
        "progress.elapsed_ms",
        MS,
    ),
    ("migration_pass", "", "Number of the pass under way, from 0", Gauge, "progress.pass", 1.0),
    ("migration_pass_pages", "", "Pages of the pass under way", Gauge, "progress.pass_pages", 1.0),
    (
        "migration_pass_done_pages",
        "",
        "Pages of the pass under way that are sent or skipped",
        Gauge,
        "progress.pass_done",
        1.0,
    ),
    (
        "migration_remaining",
        "bytes",
        "Dirty memory that is not sent",
        Gauge,
        "progress.remaining_pages",
        PAGE,
    ),
    (
        "migration_left",
        "bytes",
        "Memory that a guest at the target is still missing, seen from the source",
        Gauge,
        "progress.left_pages",
        PAGE,
    ),
    (
        "migration_dirty_rate",
        "bytes_per_second",
        "Memory that the guest dirtied per second, in the last pass",
        Gauge,
        "progress.dirty_pages_per_s",
        PAGE,
    ),
    (
        "migration_bandwidth",
        "bytes_per_second",
        "Bytes per second that the last meaningful pass sent",
        Gauge,
        "progress.bandwidth",
        1.0,
    ),
    ("migration_pace", "bytes_per_second", "Pace of the bulk in postcopy", Gauge, "progress.pace", 1.0),
    (
        "migration_eta",
        "seconds",
        "Expected time until the guest runs at the target",
        Gauge,
        "progress.verdict.eta_s",
        1.0,
    ),
    (
        "migration_converging",
        "",
        "1 if precopy is expected to converge, 0 if not",
        Gauge,
        "progress.verdict.converging",
        1.0,
    ),
    ("migration_total", "seconds", "Duration of the migration", Gauge, "total_ms", MS),
    ("migration_setup", "seconds", "From the first connection to the first page", Gauge, "setup_ms", MS),
    ("migration_downtime", "seconds", "Time during which no vCPU ran", Gauge, "downtime_ms", MS),
    (
        "migration_predicted_downtime",
        "seconds",
        "Downtime that was predicted when the guest was stopped",
        Gauge,
        "predicted_downtime_ms",
        MS,
    ),
    ("migration_verify", "seconds", "Time for comparing pages, outside the downtime", Gauge, "verify_ms", MS),
    (
        "migration_throughput",
        "bytes_per_second",
        "Bytes on the wire over the time from the first page to the end",
        Gauge,
        "throughput_mbps",
        125_000.0,
    ),
    ("migration_delta", "bytes", "Bytes of pages sent as differences", Gauge, "bytes.delta", 1.0),
    ("migration_compressed", "bytes", "Bytes of pages sent compressed", Gauge, "bytes.compressed", 1.0),
    ("migration_verified_pages", "", "Pages compared on both sides", Gauge, "verified_pages", 1.0),
    ("migration_mismatched_pages", "", "Pages that differed", Gauge, "mismatched_pages", 1.0),
    (
        "migration_skipped_pages",
        "",
        "Pages that were not compared because the guest reported them as free",
        Gauge,
        "skipped_pages",
        1.0,
    ),
    (
        "migration_suspect_pages_resent",
        "",
        "Pages that were sent again after a digest mismatch",
        Gauge,
        "suspect_pages_resent",
        1.0,
    ),
    ("migration_interruptions", "", "Times that the link was lost in postcopy", Gauge, "interruptions", 1.0),
    (
        "migration_throttle_highest",
        "ratio",
        "Highest share of its time for which a vCPU was throttled",
        Gauge,
        "throttle.highest_share",
        1.0,
    ),
    ("postcopy_left_pages", "", "Pages that are still missing, seen from the target", Gauge, "left", 1.0),
    ("postcopy_requests", "", "Pages that were requested", Gauge, "postcopy.requests", 1.0),
    ("postcopy_pages", "", "Pages that arrived with content", Gauge, "postcopy.pages", 1.0),
    ("postcopy_duplicate_pages", "", "Pages that arrived twice", Gauge, "postcopy.duplicates", 1.0),
    (
        "postcopy_prefetched_pages",
        "",
        "Pages requested ahead of a run of faults",
        Gauge,
        "postcopy.prefetched",
        1.0,
    ),
    (
        "postcopy_prefetched_used_pages",
        "",
        "Prefetched pages that were used",
        Gauge,
        "postcopy.prefetched_used",
        1.0,
    ),
    (
        "postcopy_duration",
        "seconds",
        "Time from the guest's start at the target until its last page arrived",
        Gauge,
        "postcopy.ms",
        MS,
    ),
];

/// Numbers with one label: name, unit, help text, label, and path and factor for each value of the
/// label.
type Labelled =
    (&'static str, &'static str, &'static str, &'static str, &'static [(&'static str, &'static str, f64)]);

const LABELLED: &[Labelled] = &[
    (
        "migration_downtime_part",
        "seconds",
        "Parts of the downtime",
        "part",
        &[
            ("pause", "downtime.pause_ms", MS),
            ("send_state", "downtime.send_state_ms", MS),
            ("last_harvest", "downtime.last_harvest_ms", MS),
            ("list_pages", "downtime.list_pages_ms", MS),
            ("last_pages", "downtime.last_pages_ms", MS),
            ("target_prepare", "downtime.target_prepare_ms", MS),
            ("device_state", "downtime.device_state_ms", MS),
            ("commit", "downtime.commit_ms", MS),
            ("resume", "downtime.resume_ms", MS),
        ],
    ),
    (
        "migration_pages",
        "",
        "Pages by the way they were sent",
        "kind",
        &[
            ("raw", "bytes.raw_pages", 1.0),
            ("zero", "bytes.zero_pages", 1.0),
            ("free_skipped", "bytes.free_pages_skipped", 1.0),
        ],
    ),
    (
        "migration_guest_speed",
        "",
        "Writes per second of the guest",
        "when",
        &[("before", "guest.before_writes_per_s", 1.0), ("during", "guest.during_writes_per_s", 1.0)],
    ),
    (
        "migration_cpu",
        "seconds",
        "Processor time of the engine's threads",
        "side",
        &[("source", "cpu_ms.source", MS), ("destination", "cpu_ms.destination", MS)],
    ),
    (
        "migration_free_page_reports",
        "",
        "Reports of free pages",
        "use",
        &[("all", "free_pages.reports", 1.0), ("dropped", "free_pages.dropped_reports", 1.0)],
    ),
    (
        "postcopy_fault_latency",
        "seconds",
        "Time from a fault to its page being placed, for this share of the faults",
        // The label `quantile` is reserved for summaries.
        "share",
        &[("0.5", "postcopy.p50_us", US), ("0.99", "postcopy.p99_us", US), ("1", "postcopy.max_us", US)],
    ),
];

/// Lists of numbers: name, unit, help text, label, path and factor.
type List = (&'static str, &'static str, &'static str, &'static str, &'static str, f64);

const LISTS: &[List] = &[
    (
        "ring_used",
        "",
        "Entries of a vCPU's dirty ring that wait to be harvested",
        "vcpu",
        "vm.rings.used",
        1.0,
    ),
    (
        "migration_channel",
        "bytes",
        "Bytes that a bulk channel has sent",
        "channel",
        "progress.channel_bytes",
        1.0,
    ),
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
        for (name, unit, help, kind, path, factor) in NUMBERS {
            if let Some(number) = self.number(path) {
                gauge(encoder, (name, unit, help), *kind, &[(&[], number * factor)])?;
            }
        }
        for (name, unit, help, label, values) in LABELLED {
            let known = values.iter().filter_map(|(value, path, factor)| {
                Some(([(*label, (*value).to_owned())], self.number(path)? * factor))
            });
            let known: Vec<_> = known.collect();
            let shown: Vec<_> = known.iter().map(|(labels, number)| (&labels[..], *number)).collect();
            gauge(encoder, (name, unit, help), Gauge, &shown)?;
        }
        for (name, unit, help, label, path, factor) in LISTS {
            let values = self.at(path).as_array().into_iter().flatten().enumerate();
            let known = values
                .filter_map(|(index, value)| Some(([(*label, index.to_string())], value.as_f64()? * factor)));
            let known: Vec<_> = known.collect();
            let shown: Vec<_> = known.iter().map(|(labels, number)| (&labels[..], *number)).collect();
            gauge(encoder, (name, unit, help), Gauge, &shown)?;
        }
        // While the migration runs, `progress` contains the sent bytes, and afterwards the report
        // does.
        match self.number("bytes.wire").or_else(|| self.number("progress.wire_bytes")) {
            Some(wire) => gauge(
                encoder,
                ("migration_sent", "bytes", "Bytes sent by this migration"),
                Counter,
                &[(&[], wire)],
            ),
            None => Ok(()),
        }
    }

    fn words(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, label, path, all) in STATES {
            let Some(own) = self.at(path).as_str() else { continue };
            let values: Vec<_> = all
                .iter()
                .map(|word| ([(*label, (*word).to_owned())], f64::from(u8::from(*word == own))))
                .collect();
            let shown: Vec<_> = values.iter().map(|(labels, number)| (&labels[..], *number)).collect();
            gauge(encoder, (name, "", help), Gauge, &shown)?;
        }
        let text = |path: &str| self.at(path).as_str().unwrap_or_default().to_owned();
        let about = [("version", env!("CARGO_PKG_VERSION").to_owned()), ("kind", text("vm.kind"))];
        gauge(
            encoder,
            ("build_info", "", "Version of this vmferry, and kind of its guest"),
            Gauge,
            &[(&about[..], 1.0)],
        )?;
        if self.at("id").is_string() {
            let about = [
                ("id", text("id")),
                ("mode", text("mode")),
                ("tracker", text("tracker")),
                ("outcome", text("outcome")),
            ];
            gauge(encoder, ("migration_info", "", "The last migration"), Gauge, &[(&about[..], 1.0)])?;
        }
        let passes = self.at("passes").as_array().map(Vec::len);
        passes.map_or(Ok(()), |passes| {
            #[expect(clippy::cast_precision_loss, reason = "a number of passes")]
            let passes = passes as f64;
            gauge(encoder, ("migration_passes", "", "Passes of the last migration"), Gauge, &[(&[], passes)])
        })
    }

    /// Encodes the histogram of fault latencies. The status has separate buckets, and a histogram
    /// has cumulative ones.
    fn faults(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(buckets) = self.at("postcopy.hist_us").as_object() else { return Ok(()) };
        let mut buckets: Vec<(f64, u64)> = buckets
            .iter()
            .filter_map(|(bound, count)| Some((bound.parse::<f64>().ok()? * US, count.as_u64()?)))
            .collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count = buckets.iter().map(|(_, count)| count).sum();
        #[expect(clippy::cast_precision_loss, reason = "a sum of times")]
        let sum = self.number("postcopy.mean_us").unwrap_or(0.0) * US * count as f64;
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
fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    (name, unit, help): (&str, &str, &str),
    kind: Kind,
    values: &[(&[(&str, String)], f64)],
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
            put(&mut metric, kind, *value)?;
        } else {
            put(&mut metric.encode_family(labels)?, kind, *value)?;
        }
    }
    Ok(())
}

fn put(metric: &mut MetricEncoder<'_>, kind: Kind, value: f64) -> fmt::Result {
    match kind {
        Counter => metric.encode_counter::<NoLabelSet, f64, f64>(&value, None),
        Gauge => metric.encode_gauge(&value),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
