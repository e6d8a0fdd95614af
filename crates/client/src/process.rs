//! `vmferry run` processes, which are started with the options that operators use.

use crate::Client;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Maximum time that a process may take to open its control socket, and that a guest may take to
/// fill its memory.
const START: Duration = Duration::from_secs(60);
/// Maximum time that a process may take to end after the command `quit`.
const QUIT: Duration = Duration::from_secs(5);

/// Role of a process in a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The process that starts the guest.
    Source,
    /// The process that waits for the guest.
    Target,
}

/// Environment in which processes are started, such as a network, a memory limit, or credentials.
///
/// Every method has a default implementation, with which the processes run like this one and listen
/// on loopback.
pub trait Environment: std::fmt::Debug {
    /// Returns the IPv4 address at which the process with the role `role` listens.
    fn address(&self, role: Role) -> Ipv4Addr {
        let _ = role;
        Ipv4Addr::LOCALHOST
    }

    /// Returns additional command-line options for the process with the role `role`.
    fn options(&self, role: Role) -> Vec<OsString> {
        let _ = role;
        Vec::new()
    }

    /// Prepares `command`, which has not been started yet.
    ///
    /// # Errors
    /// Returns an error if the process cannot be started in this environment.
    fn enter(&self, role: Role, command: &mut Command) -> io::Result<()> {
        let _ = (role, command);
        Ok(())
    }

    /// Checks the process with the id `pid` right after its start. If the check fails, the process
    /// is killed.
    ///
    /// # Errors
    /// Returns an error if the process does not run in this environment.
    fn started(&self, role: Role, pid: u32) -> io::Result<()> {
        let _ = (role, pid);
        Ok(())
    }
}

/// Environment of processes that run like this one, and that connect over loopback.
#[derive(Debug, Clone, Copy, Default)]
pub struct SameHost;

impl Environment for SameHost {}

/// Description of a guest and of the processes that run it.
#[derive(Debug, Clone)]
pub struct Setup<'a> {
    /// Path of the executable `vmferry`.
    pub program: &'a Path,
    /// Kind of guest, in the format of the option `--guest`.
    pub guest: &'a str,
    /// Memory of the guest in bytes.
    pub memory: u64,
    /// Number of vCPUs.
    pub cpus: u32,
    /// Workload of the guest, in the format of the option `--workload`.
    pub workload: String,
    /// Additional arguments for the guest, in the format of the option `--guest-args`.
    pub guest_args: String,
    /// Number of entries in the dirty ring of each vCPU, or `None` for the default of the option
    /// `--dirty-ring`.
    pub dirty_ring: Option<u32>,
    /// Confinement of the processes, in the format of the option `--sandbox`.
    pub sandbox: &'a str,
    /// True if the guest has a balloon.
    pub balloon: bool,
    /// Environment in which the processes are started.
    pub environment: &'a dyn Environment,
}

impl<'a> Setup<'a> {
    /// Creates the description of a KVM guest with one vCPU, `memory` bytes of memory and a
    /// balloon, in confined processes on this host.
    pub fn new(program: &'a Path, memory: u64, workload: impl Into<String>) -> Self {
        Self {
            program,
            guest: "kvm",
            memory,
            cpus: 1,
            workload: workload.into(),
            guest_args: String::new(),
            dirty_ring: None,
            sandbox: "on",
            balloon: true,
            environment: &SameHost,
        }
    }

    /// Returns the command of one process. Its control socket is at `api`.
    fn command(&self, role: Role, api: &Path) -> io::Result<Command> {
        let mut command = Command::new(self.program);
        command.args(["run", "--die-with-parent", "--guest", self.guest]);
        command.args(["--memory", &self.memory.to_string(), "--cpus", &self.cpus.to_string()]);
        command.arg("--api").arg(api).args(["--sandbox", self.sandbox]);
        command.args(["--balloon", if self.balloon { "on" } else { "off" }]);
        if let Some(entries) = self.dirty_ring {
            command.args(["--dirty-ring", &entries.to_string()]);
        }
        match role {
            Role::Source => {
                command.args(["--workload", &self.workload, "--guest-args", &self.guest_args]);
            }
            Role::Target => {
                let address = self.environment.address(role);
                command.args(["--incoming", &format!("tcp:{address}:0")]);
                if !address.is_loopback() {
                    command.arg("--insecure");
                }
            }
        }
        command.args(self.environment.options(role));
        self.environment.enter(role, &mut command)?;
        // Ctrl-C on the terminal must reach only this process, which then ends the others.
        command.process_group(0);
        Ok(command)
    }
}

/// Running `vmferry run` process. Dropping this value ends the process: it receives `quit`, and is
/// killed if it does not end within 5 seconds.
#[derive(Debug)]
pub struct Runner {
    child: Child,
    /// Connection to the control socket of the process.
    pub client: Client,
}

impl Runner {
    /// Starts a process, and waits until its control socket answers.
    fn start(setup: &Setup<'_>, role: Role, folder: &Path, name: &str) -> Result<Self> {
        let api = folder.join(format!("{name}.sock"));
        let log = folder.join(format!("{name}.log"));
        let mut command =
            setup.command(role, &api).with_context(|| format!("cannot start the {name} process"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&log)?);
        let mut child =
            command.spawn().with_context(|| format!("cannot start {}", setup.program.display()))?;
        match Self::reached(&mut child, setup.environment, role, &api, name) {
            Ok(Some(client)) => Ok(Self { child, client }),
            Ok(None) => {
                let status = child.wait()?;
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("the {name} process ended ({status}): {}", said.trim())
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Returns a connection to the process, or `None` if the process has ended.
    fn reached(
        child: &mut Child,
        environment: &dyn Environment,
        role: Role,
        api: &Path,
        name: &str,
    ) -> Result<Option<Client>> {
        environment
            .started(role, child.id())
            .with_context(|| format!("the {name} process is in the wrong place"))?;
        let deadline = Instant::now() + START;
        loop {
            if let Ok(client) = Client::connect(api) {
                return Ok(Some(client));
            }
            if child.try_wait()?.is_some() {
                return Ok(None);
            }
            if Instant::now() > deadline {
                bail!("the {name} process did not come up within {START:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the exit status of the process, or `None` while the process runs.
    ///
    /// # Errors
    /// Returns an error if the kernel cannot report the status.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Returns the status of the guest and of its migration.
    ///
    /// # Errors
    /// Returns an error if the process does not answer.
    pub fn status(&mut self) -> Result<Value> {
        self.client.call("status", json!({}))
    }

    /// Requests the status every 10 ms until `ready` returns a value for it, and returns that
    /// value. `what` names the event in error messages.
    ///
    /// # Errors
    /// Returns an error if the process does not answer, if `stop` becomes true, or if `ready`
    /// returns no value within the time `within`.
    pub fn wait<T>(
        &mut self,
        what: &str,
        within: Duration,
        stop: &AtomicBool,
        ready: impl Fn(&Value) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(found) = ready(&self.status()?) {
                return Ok(found);
            }
            if stop.load(Ordering::Acquire) {
                bail!("interrupted while waiting for {what}");
            }
            if Instant::now() > deadline {
                bail!("{what} did not happen within {within:?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the target listens, and returns its URI.
    fn incoming(&mut self, stop: &AtomicBool) -> Result<String> {
        self.wait("the target listening", START, stop, |status| {
            status["vm"]["incoming"].as_str().map(str::to_owned)
        })
    }

    /// Waits until the guest runs its workload.
    fn running(&mut self, stop: &AtomicBool) -> Result<()> {
        self.wait("the guest filling its memory", START, stop, |status| match status["vm"]["guest"]["state"]
            .as_str()
        {
            Some("running" | "corrupt") => Some(()),
            _ => None,
        })
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        if self.client.call("quit", json!({})).is_ok() {
            let deadline = Instant::now() + QUIT;
            while Instant::now() < deadline {
                if matches!(self.child.try_wait(), Ok(Some(_))) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Source process whose guest runs its workload, and target process that waits for the guest.
///
/// Dropping this value ends both processes, the source first.
#[derive(Debug)]
pub struct Pair {
    /// Process that started the guest.
    pub source: Runner,
    /// Process that waits for the guest.
    pub target: Runner,
    /// URI at which the target listens for the migration.
    pub uri: String,
    // Dropped last: the sockets of both processes are in it.
    _folder: Folder,
}

impl Pair {
    /// Starts both processes, and waits until the guest runs its workload.
    ///
    /// # Errors
    /// Returns an error if a process does not become ready within 60 seconds, or if `stop` becomes
    /// true.
    pub fn start(setup: &Setup<'_>, stop: &AtomicBool) -> Result<Self> {
        let folder = Folder::new()?;
        let mut target = Runner::start(setup, Role::Target, folder.path(), "target")?;
        let uri = target.incoming(stop)?;
        let mut source = Runner::start(setup, Role::Source, folder.path(), "source")?;
        source.running(stop)?;
        Ok(Self { source, target, uri, _folder: folder })
    }

    /// Starts the migration that `request` describes, and does not wait for its end.
    /// [`Runner::status`] of the source reports the progress.
    ///
    /// # Errors
    /// Returns an error if the source refuses the request.
    pub fn migrate(&mut self, request: &impl Serialize) -> Result<()> {
        self.source.client.call("migrate", serde_json::to_value(request)?)?;
        Ok(())
    }
}

/// Single process, whose guest has no target yet.
#[derive(Debug)]
pub struct SingleProcess {
    /// Process that runs the guest.
    pub runner: Runner,
    // Dropped last: the socket of the process is in it.
    folder: Folder,
}

impl SingleProcess {
    /// Starts the process, and waits until its control socket answers, but not for the guest.
    ///
    /// # Errors
    /// Returns an error if the process ends, or if its control socket does not answer within 60
    /// seconds.
    pub fn start(setup: &Setup<'_>) -> Result<Self> {
        let folder = Folder::new()?;
        Ok(Self { runner: Runner::start(setup, Role::Source, folder.path(), "guest")?, folder })
    }

    /// Waits until the guest runs its workload.
    ///
    /// # Errors
    /// Returns an error if the guest does not run within 60 seconds, or if `stop` becomes true.
    pub fn runs(&mut self, stop: &AtomicBool) -> Result<()> {
        self.runner.running(stop)
    }

    /// Starts a migration, as [`Pair::migrate`] does.
    ///
    /// # Errors
    /// Returns an error if the process refuses the request.
    pub fn migrate(&mut self, request: &impl Serialize) -> Result<()> {
        self.runner.client.call("migrate", serde_json::to_value(request)?)?;
        Ok(())
    }

    /// Starts a target for the guest of this process.
    ///
    /// # Errors
    /// Returns an error if the target does not listen within 60 seconds, or if `stop` becomes true.
    pub fn with_target(self, setup: &Setup<'_>, stop: &AtomicBool) -> Result<Pair> {
        let Self { runner: source, folder } = self;
        let mut target = Runner::start(setup, Role::Target, folder.path(), "target")?;
        let uri = target.incoming(stop)?;
        Ok(Pair { source, target, uri, _folder: folder })
    }
}

/// Temporary folder for sockets and logs. Dropping this value removes the folder.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("vmferry-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).with_context(|| format!("cannot make the folder {}", path.display()))?;
        Ok(Self(path))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A place with a network of its own.
    #[derive(Debug)]
    struct Elsewhere;

    impl Environment for Elsewhere {
        fn address(&self, _: Role) -> Ipv4Addr {
            Ipv4Addr::new(192, 0, 2, 2)
        }

        fn options(&self, role: Role) -> Vec<OsString> {
            vec![format!("--role={role:?}").into()]
        }
    }

    fn words(setup: &Setup<'_>, role: Role) -> String {
        let command = setup.command(role, Path::new("/x/api")).unwrap();
        command.get_args().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn source_gets_the_workload_and_target_the_address() {
        let setup = Setup { dirty_ring: Some(4096), ..Setup::new(Path::new("vmferry"), 4096, "idle") };
        let common = "--memory 4096 --cpus 1 --api /x/api --sandbox on --balloon on --dirty-ring 4096";
        let (source, target) = (words(&setup, Role::Source), words(&setup, Role::Target));
        assert!(source.contains(common) && source.ends_with("--workload idle --guest-args "), "{source}");
        assert!(target.contains(common) && target.ends_with("--incoming tcp:127.0.0.1:0"), "{target}");
    }

    #[test]
    fn target_on_another_network_accepts_unencrypted_connections() {
        let setup = Setup { environment: &Elsewhere, ..Setup::new(Path::new("vmferry"), 4096, "idle") };
        let target = words(&setup, Role::Target);
        assert!(target.ends_with("--incoming tcp:192.0.2.2:0 --insecure --role=Target"), "{target}");
        assert!(!words(&setup, Role::Source).contains("--insecure"));
    }

    #[test]
    fn process_that_ends_early_is_reported_with_its_output() {
        // `cat` has no such options, and says so.
        let error = SingleProcess::start(&Setup::new(Path::new("cat"), 4096, "idle")).unwrap_err();
        let said = format!("{error:#}");
        assert!(said.contains("the guest process ended (exit status: 1): "), "{said}");
        assert!(said.contains("die-with-parent"), "{said}");
    }

    #[test]
    fn missing_executable_is_named() {
        let error =
            SingleProcess::start(&Setup::new(Path::new("/nonexistent/vmferry"), 4096, "idle")).unwrap_err();
        assert!(format!("{error:#}").contains("cannot start /nonexistent/vmferry"), "{error:#}");
    }
}
