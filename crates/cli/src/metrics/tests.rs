use super::*;
use serde_json::json;
use std::collections::BTreeSet;

/// Returns a status with all members.
fn status() -> Value {
    let mut status = json!({
        "id": "ab", "state": "completed", "outcome": "completed", "mode": "hybrid", "tracker": "ring",
        "total_ms": 1500.0, "passes": [{}, {}], "bytes": {"wire": 1_000_000},
        "progress": {"elapsed_ms": 1500.0, "channel_bytes": [5, 6], "verdict": {"converging": true}},
        "postcopy": {"mean_us": 100.0, "hist_us": {"64": 1, "128": 2, "1024": 1}},
        "vm": {"kind": "kvm", "place": "moved", "rings": {"used": [1, 2, 3], "reaper": {"state": "failed"}}},
    });
    let numbers = NUMBERS.iter().map(|number| number.3);
    let labelled = LABELLED.iter().flat_map(|labelled| labelled.4.iter().map(|value| value.1));
    for path in numbers
        .chain(labelled)
        .filter(|path| !path.starts_with("progress.e") && !path.ends_with("converging"))
    {
        let mut place = &mut status;
        for name in path.split('.') {
            place = &mut place[name];
        }
        if place.is_null() {
            *place = json!(2000.0);
        }
    }
    for (_, _, _, _, path, field) in MEMBERS {
        status[*path]["some"][*field] = json!(2000.0);
    }
    status
}

/// Returns the names of the metrics that have a value, without labels.
fn names(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split(['{', ' ']).next().unwrap().to_owned()).collect()
}

#[test]
fn units_are_base_units_and_kinds_are_given() {
    let text = text(status()).unwrap();
    for line in [
        "vmferry_migration_total_seconds 1.5",
        "vmferry_migration_downtime_seconds 2.0",
        "vmferry_migration_elapsed_seconds 1.5",
        "vmferry_migration_sent_bytes_total 1000000.0",
        "vmferry_migration_downtime_part_seconds{part=\"commit\"} 2.0",
        "vmferry_migration_state{state=\"completed\"} 1.0",
        "vmferry_migration_state{state=\"precopy\"} 0.0",
        "vmferry_migration_converging 1.0",
        "vmferry_ring_reaper_state{state=\"failed\"} 1.0",
        "vmferry_ring_reaper_state{state=\"sleeping\"} 0.0",
        "vmferry_ring_reaper_sleep_seconds 0.002",
        "vmferry_ring_reaper_iterations 2000.0",
        "vmferry_ring_used{vcpu=\"2\"} 3.0",
        "vmferry_migration_channel_bytes{channel=\"1\"} 6.0",
        "vmferry_migration_passes 2.0",
        "vmferry_postcopy_fault_seconds_count 4",
        "vmferry_postcopy_fault_seconds_bucket{le=\"0.000128\"} 3",
        "vmferry_postcopy_fault_seconds_bucket{le=\"+Inf\"} 4",
        "# TYPE vmferry_migration_sent_bytes counter",
        "# UNIT vmferry_migration_downtime_seconds seconds",
    ] {
        assert!(text.lines().any(|own| own == line), "{line} is not in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn encodings_and_the_cache_of_a_report_are_metrics() {
    let text = text(crate::codecs::tests::document()).unwrap();
    for line in [
        "vmferry_migration_codec_raw_bytes{codec=\"lz4\"} 104857600.0",
        "vmferry_migration_codec_sent_bytes{codec=\"lz4\"} 41943040.0",
        "vmferry_migration_codec_pages{codec=\"delta\"} 51200.0",
        "vmferry_migration_codec_cpu_seconds{codec=\"delta\"} 1.5",
        "vmferry_migration_codec_cpu_seconds{codec=\"zstd\"} 0.02",
        "vmferry_migration_delta_cache_pages{result=\"hit\"} 51200.0",
        "vmferry_migration_delta_cache_pages{result=\"miss\"} 25600.0",
        "vmferry_migration_delta_cache_pages{result=\"large\"} 12.0",
        "vmferry_migration_delta_cache_evicted_pages 7.0",
        "vmferry_migration_delta_cache_saved_bytes 207618048.0",
        "vmferry_migration_delta_cache_memory_bytes 50331648.0",
        "vmferry_migration_delta_cache_limit_bytes 67108864.0",
        "vmferry_migration_known_pages{result=\"known\"} 24000.0",
        "vmferry_migration_known_pages{result=\"unknown\"} 1600.0",
        "vmferry_migration_known_saved_bytes 98304000.0",
    ] {
        assert!(text.lines().any(|own| own == line), "{line} is not in\n{text}");
    }
}

#[test]
fn unknown_values_are_left_out_and_hostile_text_stays_a_label() {
    let text = text(
        json!({"state": null, "vm": {"place": "running", "kind": "a\"b\\c\nd", "guest": {"writes": "many"}}}),
    )
    .unwrap();
    let known = names(&text);
    assert_eq!(
        known.iter().map(String::as_str).collect::<Vec<_>>(),
        ["vmferry_build_info", "vmferry_guest_place"]
    );
    assert!(text.contains("kind=\"a\\\"b\\\\c\\nd\""), "{text}");
    assert!(super::text(Value::Null).unwrap().ends_with("# EOF\n"));
}

#[test]
fn promtool_finds_nothing_wrong_with_any_metric() {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut command = Command::new("promtool");
    command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let why = format!("promtool: {error}; Debian has it in the package prometheus");
            return vmferry_testkit::skip(vmferry_testkit::Need::Program, why);
        }
    };
    let plain = crate::metrics::plain::plain(&text(status()).unwrap());
    child.stdin.take().unwrap().write_all(plain.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn every_metric_of_the_dashboard_exists() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/grafana/vmferry.json");
    let dashboard = std::fs::read_to_string(path).unwrap();
    let json: Value = serde_json::from_str(&dashboard).unwrap();
    assert!(json["panels"].as_array().unwrap().len() > 8);
    let known = names(&text(status()).unwrap());
    let mut used = BTreeSet::new();
    for (at, _) in dashboard.match_indices("vmferry_") {
        let name: String =
            dashboard[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        assert!(known.contains(&name), "{name} is in the dashboard and nowhere else");
        used.insert(name);
    }
    assert!(used.len() > 20, "{used:?}");
}
