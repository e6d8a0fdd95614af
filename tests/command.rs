//! The command end to end: real processes, real sockets, and a guest that must be the same afterwards.

use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const VMFERRY: &str = env!("CARGO_BIN_EXE_vmferry");
const WORKLOAD: &str = "uniform,ws=16M,data=48M,rate=20k,fill=random";
/// Longer than anything here takes on a busy host.
const PATIENCE: Duration = Duration::from_secs(60);

/// Past the test harness, which hides what passing tests print.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// The kinds of guest that run here; says so for KVM.
fn kinds() -> Vec<&'static str> {
    match std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => {
            say("KVM: ran");
            vec!["process", "kvm"]
        }
        Err(error) => {
            say(&format!("KVM: not run: /dev/kvm: {error}"));
            vec!["process"]
        }
    }
}

/// Whether process guests can be tracked by this user; says so if not.
fn can_track() -> bool {
    let checked = vmferry(&["check"]);
    let text = String::from_utf8_lossy(&checked.stdout).into_owned();
    let yes = text.lines().any(|line| line.starts_with("yes") && line.contains("tracking by wp"));
    if !yes {
        say(&format!("not run: this user cannot track by write protection: {text}"));
    }
    yes
}

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("vmferry-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn vmferry(args: &[&str]) -> Output {
    finish(spawn(args))
}

fn spawn(args: &[&str]) -> Child {
    Command::new(VMFERRY)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for the end, with a limit.
fn finish(mut child: Child) -> Output {
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("it did not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A `vmferry run`, ended and waited for when dropped.
struct Run {
    child: Child,
    api: String,
}

impl Run {
    fn start(kind: &str, folder: &Folder, name: &str, more: &[&str]) -> Self {
        Self::sized(kind, "96M", folder, name, more)
    }

    fn sized(kind: &str, memory: &str, folder: &Folder, name: &str, more: &[&str]) -> Self {
        let api = folder.path(name);
        let mut args = vec!["run", "--guest", kind, "--memory", memory, "--api", &api];
        args.extend(more);
        let run = Self { child: spawn(&args), api };
        run.wait("its control socket", |_| true);
        run
    }

    fn source(kind: &str, folder: &Folder) -> Self {
        let run = Self::start(kind, folder, "source", &["--workload", WORKLOAD]);
        run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        run
    }

    fn target(kind: &str, folder: &Folder, name: &str, uri: &str) -> (Self, String) {
        let run = Self::start(kind, folder, name, &["--incoming", uri, "--peer-timeout", "3s"]);
        let status = run.wait("the target listening", |s| s["vm"]["incoming"].is_string());
        let uri = status["vm"]["incoming"].as_str().unwrap().to_owned();
        (run, uri)
    }

    fn status(&self) -> Option<Value> {
        let output = vmferry(&["status", "--api", &self.api]);
        serde_json::from_slice(&output.stdout).ok()
    }

    fn wait(&self, what: &str, done: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.status().filter(&done) {
                return status;
            }
            assert!(Instant::now() < deadline, "waited in vain for {what}: {:?}", self.status());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The guest goes on here: it writes more than it had, and finds nothing wrong.
    fn goes_on(&self) {
        let before = self.wait("statistics", |s| s["vm"]["guest"]["writes"].is_u64());
        let writes = before["vm"]["guest"]["writes"].as_u64();
        let after = self.wait("the guest going on", |s| s["vm"]["guest"]["writes"].as_u64() > writes);
        assert_eq!(after["vm"]["guest"]["corrupt"], 0, "{after}");
        assert_eq!(after["vm"]["place"], "running", "{after}");
    }

    /// All pages of the guest are as it left them.
    fn whole(&self) {
        // Through the socket: a request that only tests and demonstrations make has no subcommand.
        let mut stream = std::os::unix::net::UnixStream::connect(&self.api).unwrap();
        stream.write_all(b"{\"execute\": \"verify-guest\", \"arguments\": {\"request\": 77}}\n").unwrap();
        let status = self.wait("the guest checking itself", |s| s["vm"]["guest"]["verify_done"] == 77);
        assert_eq!(status["vm"]["guest"]["corrupt"], 0, "{status}");
    }

    fn migrate(&self, uri: &str, more: &[&str]) -> Output {
        let mut args = vec!["migrate", "--api", &self.api, uri];
        args.extend(more);
        vmferry(&args)
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = vmferry(&["quit", "--api", &self.api]);
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn document(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn the_demo_moves_a_guest_of_each_kind_and_reports() {
    if !can_track() {
        return;
    }
    for kind in kinds() {
        let output =
            vmferry(&["demo", "--guest", kind, "--memory", "96M", "--workload", WORKLOAD, "--json", "-"]);
        assert_eq!(code(&output), 0, "{output:?}");
        let report = document(&output);
        assert_eq!((&report["outcome"], &report["state"]), (&"completed".into(), &"completed".into()));
        assert_eq!(report["mismatched_pages"], 0);
        assert_eq!(report["verified_pages"], 96 << 8, "every page was compared");
        for field in ["mode", "tracker", "total_ms", "downtime_ms", "setup_ms", "passes", "throughput_mbps"] {
            assert!(!report[field].is_null(), "{field} of {report}");
        }
        for field in
            ["pause_ms", "last_harvest_ms", "last_pages_ms", "device_state_ms", "commit_ms", "resume_ms"]
        {
            assert!(report["downtime"][field].is_number(), "downtime.{field} of {report}");
        }
        assert!(report["bytes"]["raw_pages"].as_u64() >= Some(48 << 8), "the content was sent: {report}");
        assert!(report["guest"]["before_writes_per_s"].as_f64() > Some(0.0), "{report}");
        let shown = errors(&output);
        assert!(shown.contains("checked every page of its own"), "{shown}");
        assert!(shown.contains("pages;"), "progress lines: {shown}");
    }
}

#[test]
fn a_guest_goes_there_and_on_and_through_a_file() {
    if !can_track() {
        return;
    }
    for kind in kinds() {
        let folder = Folder::new();
        let source = Run::source(kind, &folder);
        let (second, uri) = Run::target(kind, &folder, "second", "tcp:127.0.0.1:0");
        let output = source.migrate(&uri, &["--verify", "--channels", "1", "--json", "-"]);
        assert_eq!(code(&output), 0, "{output:?}");
        assert_eq!(document(&output)["mismatched_pages"], 0);
        second.wait("the guest at the target", |s| s["vm"]["place"] == "running");
        second.goes_on();
        let (third, uri) = Run::target(kind, &folder, "third", &format!("unix:{}", folder.path("wire")));
        let output = second.migrate(&uri, &["--tracker", "wp", "--channels", "4"]);
        assert_eq!(code(&output), 0, "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("outcome      completed"));
        third.wait("the guest at the third", |s| s["vm"]["place"] == "running");
        third.goes_on();
        let file = format!("file:{}", folder.path("saved"));
        assert_eq!(code(&third.migrate(&file, &[])), 0);
        let fourth = Run::start(kind, &folder, "fourth", &["--incoming", &file]);
        fourth.wait("the guest out of the file", |s| s["vm"]["place"] == "running");
        fourth.goes_on();
        fourth.whole();
    }
}

/// The most memory that was ever resident in the process, in KiB; none if it has ended.
fn peak_kib(run: &Run) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", run.child.id())).ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?.trim().trim_end_matches(" kB").parse().ok()
}

#[test]
fn a_migration_adds_little_memory_whatever_the_size_of_the_guest() {
    const MOST_ADDED_KIB: u64 = 64 << 10;
    if !can_track() {
        return;
    }
    for (kind, (memory, data)) in
        kinds().into_iter().flat_map(|kind| [("192M", 128), ("1G", 832)].map(|size| (kind, size)))
    {
        let folder = Folder::new();
        let workload = format!("uniform,ws=16M,data={data}M,rate=20k,fill=random");
        let source = Run::sized(kind, memory, &folder, "source", &["--workload", &workload]);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let args = ["--incoming", "tcp:127.0.0.1:0"];
        let target = Run::sized(kind, memory, &folder, "target", &args);
        let status = target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
        let before = peak_kib(&source).unwrap();
        let uri = status["vm"]["incoming"].as_str().unwrap();
        let mut child = spawn(&["migrate", "--api", &source.api, uri, "--channels", "4"]);
        let mut during = before;
        // The source ends soon after its report was read: it is looked at all the time.
        while child.try_wait().unwrap().is_none() {
            during = during.max(peak_kib(&source).unwrap_or(0));
            std::thread::sleep(Duration::from_millis(1));
        }
        let output = finish(child);
        assert_eq!(code(&output), 0, "{output:?}");
        target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
        let source_added = during - before;
        let target_added = peak_kib(&target).unwrap().saturating_sub(before);
        say(&format!("{kind} guest of {memory}: source adds {source_added} KiB, target {target_added} KiB"));
        assert!(before > data << 10, "the guest's content is there: {before} KiB");
        assert!(source_added <= MOST_ADDED_KIB, "{source_added} KiB at the source");
        assert!(target_added <= MOST_ADDED_KIB, "{target_added} KiB at the target");
        target.goes_on();
    }
}

#[test]
fn whoever_cannot_take_the_guest_is_named_and_the_guest_stays() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let fails = |uri: &str, more: &[&str], words: &[&str]| {
        let output = source.migrate(uri, more);
        assert_eq!(code(&output), 1, "{uri}: {output:?}");
        let text = errors(&output);
        assert!(words.iter().all(|word| text.contains(word)), "{uri}: {words:?} in {text}");
        source.goes_on();
    };
    // Nobody there: a port that was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    fails(&format!("tcp:{free}"), &[], &["cannot connect", "--incoming"]);
    fails("tcp:192.0.2.1:7000", &[], &["not on this host", "--insecure"]);
    fails("unix:/nonexistent/x", &[], &["cannot connect"]);
    fails("file:/nonexistent/x", &[], &["cannot use file:/nonexistent/x"]);
    // Somebody else: one that talks, one that is silent.
    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("tcp:{}", stranger.local_addr().unwrap());
    std::thread::spawn(move || {
        let (mut talks, _) = stranger.accept().unwrap();
        talks.write_all(&[b'x'; 4096]).unwrap();
        let (mut silent, _) = stranger.accept().unwrap();
        let _ = silent.read_to_end(&mut Vec::new());
    });
    fails(&at, &[], &["does not speak the vmferry protocol"]);
    fails(&at, &["--peer-timeout", "500ms"], &["did not answer the greeting"]);
    // A target whose machine differs says how, and goes on waiting.
    let (target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    let other = Run::start("process", &folder, "other", &["--workload", "idle,ws=4M", "--cpus", "2"]);
    other.wait("the guest running", |s| s["vm"]["guest"]["state"] == "running");
    let output = other.migrate(&uri, &[]);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("vCPUs: 1 here and 2 there"), "{output:?}");
    // A second target cannot have the same port; the first still takes the right guest.
    let output = vmferry(&["run", "--guest", "process", "--memory", "96M", "--incoming", &uri]);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("cannot listen"), "{output:?}");
    assert_eq!(code(&source.migrate(&uri, &["--verify"])), 0);
    target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    target.whole();
}

/// A migration that takes seconds, and is well under way.
fn slow(source: &Run, uri: &str, more: &[&str]) -> Child {
    let mut args = vec!["migrate", "--api", &source.api, uri, "--max-bandwidth", "8M/s"];
    args.extend(more);
    let child = spawn(&args);
    source.wait("the first pages sent", |s| s["progress"]["wire_bytes"].as_u64() > Some(1 << 20));
    child
}

#[test]
fn a_migration_that_is_called_off_leaves_the_guest_where_it_was() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    // By `cancel`.
    let (mut target, uri) = Run::target("process", &folder, "t1", "tcp:127.0.0.1:0");
    let child = slow(&source, &uri, &[]);
    assert_eq!(code(&vmferry(&["pause", "--api", &source.api])), 1, "not while it is being moved");
    assert_eq!(code(&vmferry(&["cancel", "--api", &source.api])), 0);
    let output = finish(child);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("cancelled"), "{output:?}");
    source.goes_on();
    let ended = wait_for_end(&mut target.child);
    assert_eq!(ended, Some(1), "the target ends without having run the guest");
    // By Ctrl-C.
    let (_t2, uri) = Run::target("process", &folder, "t2", "tcp:127.0.0.1:0");
    let child = slow(&source, &uri, &[]);
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(),
        rustix::process::Signal::INT,
    )
    .unwrap();
    assert_eq!(code(&finish(child)), 1);
    source.goes_on();
    // By the clock; and by the clock the other way.
    let (_t3, uri) = Run::target("process", &folder, "t3", "tcp:127.0.0.1:0");
    let output = source.migrate(&uri, &["--max-bandwidth", "8M/s", "--timeout", "500ms"]);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("not done within"), "{output:?}");
    source.goes_on();
    let (t4, uri) = Run::target("process", &folder, "t4", "tcp:127.0.0.1:0");
    let output =
        source.migrate(&uri, &["--max-bandwidth", "60M/s", "--timeout", "200ms", "--on-timeout", "switch"]);
    assert_eq!(code(&output), 0, "{output:?}");
    t4.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    t4.whole();
}

fn wait_for_end(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the process did not end");
}

#[test]
fn the_death_of_one_side_costs_the_other_nothing() {
    if !can_track() {
        return;
    }
    for kind in kinds() {
        let folder = Folder::new();
        let mut source = Run::source(kind, &folder);
        let (mut target, uri) = Run::target(kind, &folder, "t1", "tcp:127.0.0.1:0");
        let child = slow(&source, &uri, &[]);
        target.kill();
        let output = finish(child);
        assert_eq!(code(&output), 1, "{output:?}");
        assert!(errors(&output).contains("goes on where it was"), "{output:?}");
        source.goes_on();
        source.whole();
        let (mut target, uri) = Run::target(kind, &folder, "t2", "tcp:127.0.0.1:0");
        let child = slow(&source, &uri, &[]);
        source.kill();
        assert_eq!(code(&finish(child)), 1);
        assert_eq!(wait_for_end(&mut target.child), Some(1), "a guest that did not come was not run");
        assert!(!Path::new(&target.api).exists(), "no socket is left behind");
    }
}

#[test]
fn wrong_usage_is_told_before_anything_begins() {
    for args in [
        &["migrate"][..],
        &["run", "--memory", "lots"],
        &["run", "--workload", "jogging"],
        &["run", "--kernel", "x", "--workload", "idle"],
        &["migrate", "--api", "x", "tcp:h:1", "--max-bandwidth", "fast"],
        &["recover", "--api", "x"],
        &["migrate", "--api", "x", "nonsense"],
        &["nonsense"],
    ] {
        let output = vmferry(args);
        assert_eq!(code(&output), 2, "{args:?}: {output:?}");
    }
    let output = vmferry(&["run", "--kernel", "/nonexistent/kernel"]);
    assert_eq!(code(&output), 1);
    let output = vmferry(&["status", "--api", "/nonexistent/api"]);
    assert_eq!(code(&output), 1);
    assert!(errors(&output).contains("--api /nonexistent/api"), "{output:?}");
}

#[test]
fn a_guest_is_paused_resumed_and_asked_about() {
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    assert_eq!(code(&vmferry(&["pause", "--api", &source.api])), 0);
    let still = source.wait("the pause", |s| s["vm"]["place"] == "paused");
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(source.status().unwrap()["vm"]["guest"]["writes"], still["vm"]["guest"]["writes"]);
    let output = source.migrate("tcp:127.0.0.1:1", &[]);
    assert!(errors(&output).contains("resume it first"), "{output:?}");
    assert_eq!(code(&vmferry(&["resume", "--api", &source.api])), 0);
    source.goes_on();
    assert_eq!(code(&vmferry(&["cancel", "--api", &source.api])), 1, "there is nothing to cancel");
    let output = vmferry(&["recover", "--api", &source.api, "--take"]);
    assert!(errors(&output).contains("nothing to recover"), "{output:?}");
    let output = source.migrate("tcp:127.0.0.1:1", &["--json", "/nonexistent/report"]);
    assert!(errors(&output).contains("cannot write /nonexistent/report"), "{output:?}");
}

#[test]
fn the_dirty_rate_falls_with_the_window_and_the_guest_goes_on() {
    if !can_track() {
        return;
    }
    for kind in kinds() {
        let folder = Folder::new();
        let source = Run::source(kind, &folder);
        let output =
            vmferry(&["dirty-rate", "--api", &source.api, "--windows", "50ms,200ms,1s", "--json", "-"]);
        assert_eq!(code(&output), 0, "{output:?}");
        let result = document(&output);
        let windows = result["windows"].as_array().unwrap();
        assert_eq!(windows.len(), 3, "{result}");
        for (shorter, longer) in windows.iter().zip(&windows[1..]) {
            assert!(shorter["pages"].as_u64() <= longer["pages"].as_u64(), "{result}");
            // Half as much again for a host that was busy in the shorter one.
            let (shorter, longer) = (shorter["bytes_per_s"].as_f64(), longer["bytes_per_s"].as_f64());
            assert!(longer < shorter.map(|rate| rate * 1.5), "{result}");
        }
        // Within a second 20,000 writes reach nearly all of the 4096 pages, and reads and counters some more.
        let pages = windows[2]["pages"].as_u64().unwrap();
        assert!((2048..=48 << 8).contains(&pages), "{result}");
        source.goes_on();
        assert_eq!(code(&vmferry(&["pause", "--api", &source.api])), 0);
        let output = vmferry(&["dirty-rate", "--api", &source.api]);
        assert_eq!(code(&output), 1);
        assert!(errors(&output).contains("does not run"), "{output:?}");
        let output = vmferry(&["dirty-rate", "--api", &source.api, "--windows", "2s,1s"]);
        assert!(errors(&output).contains("must ascend"), "{output:?}");
        assert_eq!(code(&vmferry(&["resume", "--api", &source.api])), 0);
        source.goes_on();
    }
}

#[test]
fn a_guest_with_dirty_rings_moves_by_them_and_is_measured_by_vcpu() {
    let rings = String::from_utf8_lossy(&vmferry(&["check"]).stdout).into_owned();
    if !rings.lines().any(|line| line.starts_with("yes") && line.contains("dirty rings")) {
        return say(&format!("rings: not run: {rings}"));
    }
    say("KVM: ran");
    let folder = Folder::new();
    let with = ["--dirty-ring", "1024", "--cpus", "2"];
    let source = Run::start("kvm", &folder, "source", &[&with[..], &["--workload", WORKLOAD]].concat());
    source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
    let output = vmferry(&["dirty-rate", "--api", &source.api, "--windows", "100ms,500ms", "--json", "-"]);
    let result = document(&output);
    assert_eq!(result["tracker"], "ring", "{result}");
    let each = result["windows"][1]["vcpu_pages_per_s"].as_array().unwrap();
    assert!(each.len() == 2 && each.iter().all(|rate| rate.as_f64() > Some(0.0)), "{result}");
    let target =
        Run::start("kvm", &folder, "target", &[&with[..], &["--incoming", "tcp:127.0.0.1:0"]].concat());
    let status = target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
    let uri = status["vm"]["incoming"].as_str().unwrap();
    let refused = source.migrate(uri, &["--tracker", "log"]);
    assert_eq!(code(&refused), 1);
    assert!(errors(&refused).contains("no dirty log"), "{refused:?}");
    let more = ["--reaper", "predict", "--verify", "--max-bandwidth", "100M/s", "--json", "-"];
    let output = source.migrate(uri, &more);
    assert_eq!(code(&output), 0, "{output:?}");
    let report = document(&output);
    assert_eq!((&report["tracker"], &report["ring"]["policy"]), (&"ring".into(), &"predict".into()));
    for field in ["full_exits", "full_stall_us", "harvests", "reaper_cpu_ms"] {
        assert!(report["ring"][field].is_number(), "{field} of {report}");
    }
    assert_eq!(report["mismatched_pages"], 0);
    target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    target.whole();
}
