//! Panels of the dashboard, evaluated by a real Prometheus that has watched migrations; and the
//! checks of `promtool`.

use crate::support::{Folder, Need, PATIENCE, Run, can_track, code, kinds, print_line, skip, wait_for};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

const DASHBOARD: &str = include_str!("../../docs/grafana/vmferry.json");
/// Interval of the scrapes. A scrape that takes longer is lost.
const SCRAPE: &str = "500ms";
/// Time over which the rates of a panel are computed.
const RATE: &str = "5s";

/// Returns the body of the answer to a GET request.
fn get(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: x\r\n\r\n").as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

struct Prometheus {
    child: Child,
    port: u16,
}

impl Prometheus {
    /// Starts a Prometheus that scrapes these addresses.
    fn start(folder: &Folder, targets: &[&str]) -> Self {
        // Prometheus does not report a port that it chooses itself.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = folder.path("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: {SCRAPE}, scrape_timeout: {SCRAPE}}}\n\
             scrape_configs: [{{job_name: vmferry, static_configs: [{{targets: {targets:?}}}]}}]\n"
        );
        std::fs::write(&config, text).unwrap();
        let child = Command::new("prometheus")
            .arg(format!("--config.file={config}"))
            .arg(format!("--storage.tsdb.path={}", folder.path("series")))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.path("prometheus.log")).unwrap())
            .spawn()
            .unwrap();
        let mut own = Self { child, port };
        let log = || std::fs::read_to_string(folder.path("prometheus.log"));
        own.until("scrapes of all", log, |own| {
            let up = own.query("query?query=count(up%20%3D%3D%201)")?;
            Some(up["data"]["result"][0]["value"][1].as_str()?.parse() == Ok(targets.len()))
        });
        own
    }

    fn until<T: std::fmt::Debug>(
        &mut self,
        what: &str,
        why: impl Fn() -> T,
        done: impl Fn(&Self) -> Option<bool>,
    ) {
        wait_for(what, || {
            assert_eq!(self.child.try_wait().unwrap(), None, "{:?}", why());
            if done(self) == Some(true) { Ok(()) } else { Err(why()) }
        });
    }

    /// Returns the answer of the API; `None` if the API cannot be reached.
    fn query(&self, query: &str) -> Option<Value> {
        serde_json::from_str(&get(self.port, &format!("/api/v1/{query}")).ok()?).ok()
    }

    /// Returns the series of an expression since a time.
    fn series(&self, expression: &str, since: f64) -> Vec<Value> {
        let encoded: String = expression.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let end = now();
        let answer =
            self.query(&format!("query_range?query={encoded}&start={since}&end={end}&step=0.5")).unwrap();
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        answer["data"]["result"].as_array().unwrap().clone()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// Returns whether these programs are installed; otherwise reports the skipped test.
fn installed(programs: &[&str]) -> bool {
    let missing = |program: &&&str| Command::new(program).arg("--version").output().is_err();
    let missing: Vec<_> = programs.iter().filter(missing).collect();
    if !missing.is_empty() {
        skip(Need::Program, format!("{missing:?} not found; Debian has both in the package prometheus"));
    }
    missing.is_empty()
}

/// Returns the values of a series that are numbers.
fn values(series: &Value) -> Vec<f64> {
    let points = series["values"].as_array().unwrap().iter();
    points.map(|point| point[1].as_str().unwrap().parse::<f64>().unwrap()).filter(|v| v.is_finite()).collect()
}

/// Returns the labels that a panel names.
fn labels(legend: &str) -> Vec<&str> {
    legend.split("{{").skip(1).map(|part| part.split("}}").next().unwrap().trim()).collect()
}

/// Evaluates a panel, and checks its values by their unit.
fn check_panel(prometheus: &Prometheus, panel: &Value, since: f64, instances: &BTreeSet<String>) {
    let title = panel["title"].as_str().unwrap();
    let unit = panel["fieldConfig"]["defaults"]["unit"].as_str().unwrap();
    for target in panel["targets"].as_array().unwrap() {
        let expression = target["expr"].as_str().unwrap();
        let expression = expression.replace("$instance", ".*").replace("$__rate_interval", RATE);
        let series = prometheus.series(&expression, since);
        let numbers: Vec<f64> = series.iter().flat_map(values).collect();
        assert!(!numbers.is_empty(), "{title}: {expression} gives nothing: {series:?}");
        for one in &series {
            for label in labels(target["legendFormat"].as_str().unwrap_or_default()) {
                let value = one["metric"][label].as_str();
                assert!(
                    value.is_some_and(|value| !value.is_empty()),
                    "{title}: no {label} in {}",
                    one["metric"]
                );
                assert!(
                    label != "instance" || instances.contains(value.unwrap()),
                    "{title}: {}",
                    one["metric"]
                );
            }
        }
        let most = numbers.iter().copied().fold(f64::MIN, f64::max);
        let least = numbers.iter().copied().fold(f64::MAX, f64::min);
        // The bounds hold for a guest of 96 MiB. A scale that is wrong by a factor of 1000 exceeds
        // them.
        let bound = match unit {
            // A heatmap contains counts; the unit belongs to its other axis.
            _ if panel["type"] == "heatmap" => f64::MAX,
            "percentunit" => 4.0,
            "s" => 600.0,
            "bytes" => 1e9,
            "Bps" => 1e11,
            _ => f64::MAX,
        };
        assert!(least >= 0.0 && most <= bound, "{title}: {least} to {most} {unit}");
        print_line(format!("{title}: {} series, {least:.4} to {most:.4} {unit}", series.len()));
    }
}

#[test]
fn every_panel_of_the_dashboard_shows_real_migrations() {
    if !installed(&["prometheus", "promtool"]) || !can_track() {
        return;
    }
    let kvm = kinds().contains(&"kvm");
    let kind = if kvm { "kvm" } else { "process" };
    let folder = Folder::new();
    let ring: &[&str] = if kvm { &["--dirty-ring", "4096"] } else { &[] };
    let run = |name: &str, own: &[&str]| {
        let mut run = Run::start(kind, &folder, name, &[own, ring, &["--metrics", "127.0.0.1:0"]].concat());
        let (address, said) = run.metrics();
        (run, address, said)
    };
    let (source, first, _one) = run("source", &["--workload", crate::support::WORKLOAD]);
    let awaits = ["--incoming", "tcp:127.0.0.1:0", "--peer-timeout", "120s"];
    let (middle, second, _two) = run("middle", &awaits);
    let (target, third, _three) = run("target", &awaits);
    let since = now();
    let prometheus = Prometheus::start(&folder, &[&first, &second, &third]);
    check_metrics(&first, &folder);
    // A guest that has not arrived has no write count, which differs from a rate of 0.
    let (here, awaited) = (metrics(&first), metrics(&second));
    assert!(
        here.contains("vmferry_guest_writes_total") && !awaited.contains("vmferry_guest_writes_total"),
        "{awaited}"
    );

    let uri = |run: &Run| {
        let status = run.wait("its address", |s| s["vm"]["incoming"].is_string());
        status["vm"]["incoming"].as_str().unwrap().to_owned()
    };
    // Six seconds each, which a starved host scrapes several times; and then the 16 MB that the
    // guest writes fit the limit.
    let slow = ["--max-bandwidth", "8M/s", "--downtime-limit", "4s", "--json", "-"];
    let encoded = ["--verify", "--codec", "lz4", "--delta", "on"];
    let moved = source.migrate(&uri(&middle), &[&slow[..], &encoded].concat());
    assert_eq!(code(&moved), 0, "{moved:?}");
    let report: Value = serde_json::from_slice(&moved.stdout).unwrap();
    let moved =
        middle.migrate(&uri(&target), &[&slow[..], &["--mode", "postcopy", "--pace", "8M/s"]].concat());
    let postcopy = code(&moved) == 0;
    if !postcopy {
        skip(Need::Uffd, crate::support::errors(&moved));
    }
    // The source waits for a scrape of its final report before it ends.
    for (name, address) in [("downtime", &first), ("total", &first)] {
        let expression = format!("vmferry_migration_{name}_seconds{{instance=\"{address}\"}}");
        let told = prometheus.series(&expression, since);
        let (told, want) = (values(&told[0]), report[format!("{name}_ms")].as_f64().unwrap() / 1e3);
        assert!(told.iter().all(|told| (told - want).abs() < 1e-6), "{name}: {told:?}, {want}");
    }
    let instances = BTreeSet::from([first, second, third]);
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        let lacks = (!kvm && ["rings", "Full rings", "Memory"].iter().any(|part| title.contains(part)))
            || (!postcopy && title.contains("Waits for a page"));
        if lacks {
            print_line(format!("{title}: skipped: no guest of this test has the values"));
            continue;
        }
        check_panel(&prometheus, panel, since, &instances);
    }
}

fn metrics(address: &str) -> String {
    get(address.rsplit(':').next().unwrap().parse().unwrap(), "/metrics").unwrap()
}

/// Checks the metrics with `promtool`.
fn check_metrics(address: &str, folder: &Folder) {
    let file = folder.path("metrics");
    std::fs::write(&file, metrics(address)).unwrap();
    let stdin = std::fs::File::open(&file).unwrap();
    let checked = Command::new("promtool").args(["check", "metrics"]).stdin(stdin).output().unwrap();
    assert!(checked.status.success() && checked.stderr.is_empty(), "{checked:?}");
}
