//! What the tests share: processes of the command, ended and waited for whatever happens.

use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub(crate) const VMFERRY: &str = env!("CARGO_BIN_EXE_vmferry");
pub(crate) const WORKLOAD: &str = "uniform,ws=16M,data=48M,rate=20k,fill=random";
/// Longer than anything here takes on a busy host.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Past the test harness, which hides what passing tests print.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// The kinds of guest that run here; says so for KVM.
pub(crate) fn kinds() -> Vec<&'static str> {
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
pub(crate) fn can_track() -> bool {
    let checked = vmferry(&["check"]);
    let text = String::from_utf8_lossy(&checked.stdout).into_owned();
    let yes = text.lines().any(|line| line.starts_with("yes") && line.contains("tracking by wp"));
    if !yes {
        say(&format!("not run: this user cannot track by write protection: {text}"));
    }
    yes
}

pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("vmferry-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn vmferry(args: &[&str]) -> Output {
    finish(spawn(args))
}

/// A system call that is on no list ends the process here, so that no test misses it.
pub(crate) fn spawn(args: &[&str]) -> Child {
    let runs = args.first().is_some_and(|first| *first == "run") && !args.contains(&"--sandbox");
    let strict: &[&str] = if runs { &["--sandbox", "kill"] } else { &[] };
    Command::new(VMFERRY)
        .args(args)
        .args(strict)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for the end, with a limit.
pub(crate) fn finish(mut child: Child) -> Output {
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

pub(crate) fn wait_for_end(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the process did not end");
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

pub(crate) fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A `vmferry run`, ended and waited for when dropped.
pub(crate) struct Run {
    pub(crate) child: Child,
    pub(crate) api: String,
}

impl Run {
    pub(crate) fn start(kind: &str, folder: &Folder, name: &str, more: &[&str]) -> Self {
        Self::sized(kind, "96M", folder, name, more)
    }

    pub(crate) fn sized(kind: &str, memory: &str, folder: &Folder, name: &str, more: &[&str]) -> Self {
        let api = folder.path(name);
        let own = folder.path("");
        let mut args = vec!["run", "--guest", kind, "--memory", memory, "--api", &api, "--migrate-dir", &own];
        args.extend(more);
        let run = Self { child: spawn(&args), api };
        run.wait("its control socket", |_| true);
        run
    }

    pub(crate) fn source(kind: &str, folder: &Folder) -> Self {
        let run = Self::start(kind, folder, "source", &["--workload", WORKLOAD]);
        run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        run
    }

    pub(crate) fn target(kind: &str, folder: &Folder, name: &str, uri: &str) -> (Self, String) {
        let run = Self::start(kind, folder, name, &["--incoming", uri, "--peer-timeout", "3s"]);
        let status = run.wait("the target listening", |s| s["vm"]["incoming"].is_string());
        let uri = status["vm"]["incoming"].as_str().unwrap().to_owned();
        (run, uri)
    }

    pub(crate) fn status(&self) -> Option<Value> {
        let output = vmferry(&["status", "--api", &self.api]);
        serde_json::from_slice(&output.stdout).ok()
    }

    pub(crate) fn wait(&self, what: &str, done: impl Fn(&Value) -> bool) -> Value {
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
    pub(crate) fn goes_on(&self) {
        let before = self.wait("statistics", |s| s["vm"]["guest"]["writes"].is_u64());
        let writes = before["vm"]["guest"]["writes"].as_u64();
        let after = self.wait("the guest going on", |s| s["vm"]["guest"]["writes"].as_u64() > writes);
        assert_eq!(after["vm"]["guest"]["corrupt"], 0, "{after}");
        assert_eq!(after["vm"]["place"], "running", "{after}");
    }

    /// All pages of the guest are as it left them.
    pub(crate) fn whole(&self) {
        // Through the socket: a request that only tests and demonstrations make has no subcommand.
        let mut stream = std::os::unix::net::UnixStream::connect(&self.api).unwrap();
        stream.write_all(b"{\"execute\": \"qmp_capabilities\"}\n").unwrap();
        let request = b"{\"execute\": \"x-vmferry-verify-guest\", \"arguments\": {\"request\": 77}}\n";
        stream.write_all(request).unwrap();
        let status = self.wait("the guest checking itself", |s| s["vm"]["guest"]["verify_done"] == 77);
        assert_eq!(status["vm"]["guest"]["corrupt"], 0, "{status}");
    }

    pub(crate) fn migrate(&self, uri: &str, more: &[&str]) -> Output {
        let mut args = vec!["migrate", "--api", &self.api, uri];
        args.extend(more);
        vmferry(&args)
    }

    /// Where its metrics are; and what else it says, which it has to be able to say.
    pub(crate) fn metrics(&mut self) -> (String, BufReader<ChildStderr>) {
        let mut said = BufReader::new(self.child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("metrics at http://") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "it does not say where its metrics are");
        }
        (line.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned(), said)
    }

    /// Stops the process as it stands (`STOP`), or lets it go on (`CONT`).
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
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

pub(crate) fn document(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}
