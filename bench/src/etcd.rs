//! Real etcd for tests and benches, on loopback and with its data in a temporary folder. It ends
//! when it is dropped or when its process ends.

use crate::child::Reaped;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Reason why an etcd could not be started.
#[derive(Debug, thiserror::Error)]
pub enum NoEtcd {
    /// The program is not installed or cannot be executed.
    #[error("cannot start etcd: {0}; install etcd 3.4 or later")]
    Start(#[source] io::Error),
    /// etcd was started several times and never became healthy.
    #[error("etcd was started but did not become healthy")]
    Silent,
    /// The host refused a port, a folder or a process operation.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// Running etcd cluster of one member.
#[derive(Debug)]
pub struct Etcd {
    child: Reaped,
    folder: tempfile::TempDir,
    port: u16,
    /// Port of the health endpoint, which is not encrypted.
    health: u16,
}

/// Guard against hangs: a busy host can take long to start a program.
const LONGEST_START: Duration = Duration::from_secs(180);

/// Options that make etcd serve https and require client certificates, with their files in its
/// folder.
const FILES: [(&str, &str); 3] =
    [("--cert-file", "host.crt"), ("--key-file", "host.key"), ("--trusted-ca-file", "authority.crt")];

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Creates a folder in memory if possible. A flush to a busy disk can take longer than a client
/// waits for an answer.
fn folder() -> io::Result<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())
}

impl Etcd {
    /// Starts an etcd without encryption, and waits until it is healthy.
    ///
    /// # Errors
    ///
    /// Fails if etcd is not installed or does not become healthy.
    pub fn start() -> Result<Self, NoEtcd> {
        Self::start_with(|_| Ok(()))
    }

    /// Starts an etcd that serves https with `certificate` and `key`, and accepts only clients with
    /// certificates of `authority`. All three are PEM.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`start`](Self::start).
    pub fn start_encrypted(certificate: &str, key: &str, authority: &str) -> Result<Self, NoEtcd> {
        Self::start_with(|folder| {
            let texts = FILES.iter().zip([certificate, key, authority]);
            texts.into_iter().try_for_each(|((_, file), text)| std::fs::write(folder.join(file), text))
        })
    }

    fn start_with(prepare: impl Fn(&Path) -> io::Result<()>) -> Result<Self, NoEtcd> {
        for _ in 0..3 {
            let folder = folder()?;
            prepare(folder.path())?;
            let (port, health) = (free_port()?, free_port()?);
            let child = Self::spawn(folder.path(), port, health)?;
            let mut etcd = Self { child, folder, port, health };
            if etcd.serves()? {
                return Ok(etcd);
            }
            // Another process may have taken one of the ports meanwhile.
        }
        Err(NoEtcd::Silent)
    }

    fn spawn(folder: &Path, port: u16, health: u16) -> Result<Reaped, NoEtcd> {
        let encrypted = folder.join(FILES[0].1).exists();
        let client = format!("{}://127.0.0.1:{port}", if encrypted { "https" } else { "http" });
        let peer = format!("http://127.0.0.1:{}", free_port()?);
        let mut command = Command::new("etcd");
        command
            .args(["--name", "test", "--initial-cluster", &format!("test={peer}"), "--data-dir"])
            .arg(folder.join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--listen-metrics-urls", &format!("http://127.0.0.1:{health}")]);
        if encrypted {
            command.arg("--client-cert-auth");
            for (option, file) in FILES {
                command.arg(option).arg(folder.join(file));
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Reaped::spawn(&mut command).map_err(NoEtcd::Start)
    }

    fn serves(&mut self) -> io::Result<bool> {
        let deadline = Instant::now() + LONGEST_START;
        while Instant::now() < deadline && self.child.child().try_wait()?.is_none() {
            if self.healthy() == Some(true) {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(false)
    }

    fn healthy(&self) -> Option<bool> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.health)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n").ok()?;
        let mut answer = String::new();
        let _ = stream.take(4096).read_to_string(&mut answer);
        Some(answer.contains("\"health\":\"true\""))
    }

    /// Returns the client port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the address in the form of the option `--fence`.
    pub fn arbiter(&self) -> String {
        format!("etcd:http://127.0.0.1:{}", self.port)
    }

    /// Stops the process (`STOP`) or continues it (`CONT`).
    ///
    /// # Errors
    ///
    /// Fails if the process has ended.
    pub fn signal(&self, signal: rustix::process::Signal) -> io::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("no process id"))?;
        Ok(rustix::process::kill_process(pid, signal)?)
    }

    /// Kills the process without a shutdown, like a power loss of its host.
    ///
    /// # Errors
    ///
    /// Fails if the process cannot be killed or waited for.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.child().kill()?;
        self.child.child().wait().map(drop)
    }

    /// Starts etcd again with the same data and ports.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`start`](Self::start).
    pub fn start_again(&mut self) -> Result<(), NoEtcd> {
        self.child = Self::spawn(self.folder.path(), self.port, self.health)?;
        if self.serves()? { Ok(()) } else { Err(NoEtcd::Silent) }
    }
}
