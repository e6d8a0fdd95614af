//! Common parts of the tests: processes of the command, which are ended and waited for in every
//! case.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashSet};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc;
use vmferry_control::Client;
pub(crate) use vmferry_testkit::{Folder, Need, PATIENCE, print_line, skip, wait_for};

pub(crate) const VMFERRY: &str = env!("CARGO_BIN_EXE_vmferry");
pub(crate) const WORKLOAD: &str = "uniform,ws=16M,data=48M,rate=20k,fill=random";

/// Returns the kinds of guests that run on this host. The calling test is skipped for KVM if there
/// is none.
pub(crate) fn kinds() -> Vec<&'static str> {
    if has_kvm() { vec!["process", "kvm"] } else { vec!["process"] }
}

/// Returns whether KVM guests run on this host. The calling test is skipped if they do not.
pub(crate) fn has_kvm() -> bool {
    let opened = std::fs::File::options().read(true).write(true).open("/dev/kvm");
    opened.map_err(|error| skip(Need::Kvm, format!("/dev/kvm: {error}"))).is_ok()
}

/// Returns the report of `vmferry check`. It is the same for all tests.
fn checked() -> &'static Value {
    static CHECKED: OnceLock<Value> = OnceLock::new();
    CHECKED.get_or_init(|| document(&vmferry(&["check", "--json", "-"])))
}

/// Returns whether the check `id` is fulfilled. The calling test is skipped if it is not.
pub(crate) fn can(need: Need, id: &str) -> bool {
    let checks = checked()["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["id"] == id).unwrap();
    if check["ok"] == false {
        skip(need, check);
    }
    check["ok"] == true
}

/// Returns whether this user can track the pages of process guests. The calling test is skipped if
/// not.
pub(crate) fn can_track() -> bool {
    can(Need::Uffd, "wp")
}

/// Runs `test` for each of `cases`, all at once: these tests wait most of the time.
pub(crate) fn beside<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            let test = &test;
            scope.spawn(move || test(case));
        }
    });
}

pub(crate) fn vmferry(args: &[&str]) -> Output {
    finish(spawn(args))
}

/// Starts the command.
///
/// A forbidden system call ends a `run`, so that no test misses it. A `migrate` tolerates silence
/// for longer than a thread pauses on a starved host, unless the test says otherwise.
pub(crate) fn spawn(args: &[&str]) -> Child {
    let of = |command, option| args.first() == Some(&command) && !args.contains(&option);
    let more: &[&str] = if of("run", "--sandbox") {
        &["--sandbox", "kill"]
    } else if of("migrate", "--peer-timeout") {
        &["--peer-timeout", "120s"]
    } else {
        &[]
    };
    Command::new(VMFERRY)
        .args(args)
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for the end of `child`, and reads all of its output.
pub(crate) fn finish(child: Child) -> Output {
    let (pid, (send, ended)) = (Pid::from_child(&child), mpsc::channel());
    std::thread::spawn(move || send.send(child.wait_with_output()));
    let output = ended.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        panic!("it did not end: {:?}", ended.recv())
    });
    output.unwrap()
}

pub(crate) fn wait_for_end(child: &mut Child) -> Option<i32> {
    wait_for("the end of a process", || child.try_wait().unwrap().ok_or("it runs")).code()
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

pub(crate) fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A guest, as its control socket shows it.
pub(crate) struct Guest {
    pub(crate) api: String,
}

/// A process `vmferry run`. It is ended and waited for when this value is dropped.
pub(crate) struct Run {
    pub(crate) child: Child,
    guest: Guest,
}

impl std::ops::Deref for Run {
    type Target = Guest;

    fn deref(&self) -> &Guest {
        &self.guest
    }
}

impl Run {
    pub(crate) fn of(child: Child, api: String) -> Self {
        Self { child, guest: Guest { api } }
    }

    pub(crate) fn start(kind: &str, folder: &Folder, name: &str, more: &[&str]) -> Self {
        Self::sized(kind, "96M", folder, name, more)
    }

    pub(crate) fn sized(kind: &str, memory: &str, folder: &Folder, name: &str, more: &[&str]) -> Self {
        let api = folder.path(name);
        let own = folder.path("");
        let mut args = vec!["run", "--guest", kind, "--memory", memory, "--api", &api, "--migrate-dir", &own];
        args.extend(more);
        let run = Self::of(spawn(&args), api.clone());
        run.wait("its control socket", |_| true);
        run
    }

    pub(crate) fn source(kind: &str, folder: &Folder) -> Self {
        let run = Self::start(kind, folder, "source", &["--workload", WORKLOAD]);
        run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        run
    }

    pub(crate) fn target(kind: &str, folder: &Folder, name: &str, uri: &str) -> (Self, String) {
        let run = Self::start(kind, folder, name, &["--incoming", uri, "--peer-timeout", "120s"]);
        let status = run.wait("the target listening", |s| s["vm"]["incoming"].is_string());
        let uri = status["vm"]["incoming"].as_str().unwrap().to_owned();
        (run, uri)
    }
}

impl Guest {
    pub(crate) fn status(&self) -> Option<Value> {
        self.execute("x-vmferry-status", json!({}))
    }

    /// Returns the answer of the control socket; `None` if the socket cannot be reached.
    fn execute(&self, command: &str, arguments: Value) -> Option<Value> {
        Client::connect(Path::new(&self.api), PATIENCE).ok()?.execute(command, arguments).ok()
    }

    pub(crate) fn wait(&self, what: &str, done: impl Fn(&Value) -> bool) -> Value {
        wait_for(what, || match self.status() {
            Some(status) if done(&status) => Ok(status),
            other => Err(other),
        })
    }

    /// Checks that the guest continues in this process: its write count rises, and it finds no
    /// corrupt page.
    pub(crate) fn goes_on(&self) {
        let before = self.wait("statistics", |s| s["vm"]["guest"]["writes"].is_u64());
        let writes = before["vm"]["guest"]["writes"].as_u64();
        let after = self.wait("the guest going on", |s| s["vm"]["guest"]["writes"].as_u64() > writes);
        assert_eq!(after["vm"]["guest"]["corrupt"], 0, "{after}");
        assert_eq!(after["vm"]["place"], "running", "{after}");
    }

    /// Checks that all pages of the guest are intact.
    pub(crate) fn whole(&self) {
        self.execute("x-vmferry-verify-guest", json!({ "request": 77 })).unwrap();
        let status = self.wait("the guest checking itself", |s| s["vm"]["guest"]["verify_done"] == 77);
        assert_eq!(status["vm"]["guest"]["corrupt"], 0, "{status}");
    }

    pub(crate) fn migrate(&self, uri: &str, more: &[&str]) -> Output {
        let mut args = vec!["migrate", "--api", &self.api, uri];
        args.extend(more);
        vmferry(&args)
    }
}

impl Run {
    /// Returns the address of the metrics, and the rest of standard error, which must stay open.
    pub(crate) fn metrics(&mut self) -> (String, BufReader<ChildStderr>) {
        let mut said = BufReader::new(self.child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("metrics at http://") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "it does not say where its metrics are");
        }
        (line.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned(), said)
    }

    /// Stops the process (`STOP`) or continues it (`CONT`).
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Ends the process with `quit`, and waits for its end.
    pub(crate) fn quit(mut self) {
        assert_eq!(code(&vmferry(&["quit", "--api", &self.api])), 0);
        assert_eq!(wait_for_end(&mut self.child), Some(0));
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Ends the process. A failed test reports how the process had ended by then, and its standard
/// error.
///
/// A process that its confinement ended fails the test, even if the test expects the process to
/// end.
impl Drop for Run {
    fn drop(&mut self) {
        let ended = self.child.try_wait();
        let _ = self.child.kill();
        let _ = self.child.wait();
        let confined = matches!(&ended, Ok(Some(status)) if status.signal() == Some(Signal::SYS.as_raw()));
        if !confined && !std::thread::panicking() {
            return;
        }
        let mut said = Vec::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_end(&mut said);
        }
        let said = String::from_utf8_lossy(&said);
        eprintln!("{}: before the test ended it: {ended:?}; its standard error:\n{said}", self.api);
        assert!(!confined || std::thread::panicking(), "{} was ended by its confinement", self.api);
    }
}

/// Parses the JSON that a command printed.
///
/// # Panics
/// If docs/json.md does not name one of its fields.
pub(crate) fn document(output: &Output) -> Value {
    let value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/json.md");
    let page = std::fs::read_to_string(page).unwrap();
    let named: HashSet<_> = page.split('`').skip(1).step_by(2).flat_map(|code| code.split('.')).collect();
    let mut unnamed = BTreeSet::new();
    for_each_field(&value, &mut |name| {
        // Keys of histograms are numbers.
        if !named.contains(name) && name.parse::<u64>().is_err() {
            unnamed.insert(name.to_owned());
        }
    });
    assert!(unnamed.is_empty(), "docs/json.md does not name {unnamed:?}");
    value
}

fn for_each_field(value: &Value, each: &mut impl FnMut(&str)) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            each(name);
            for_each_field(value, each);
        }),
        Value::Array(values) => values.iter().for_each(|value| for_each_field(value, each)),
        _ => {}
    }
}
