//! A real etcd for tests and benches, on loopback and with its data in a folder of its own; ended when it is dropped, or with its process.

use crate::child::Reaped;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum NoEtcd {
    /// Not installed, or not to be started.
    #[error("cannot start etcd: {0}; install etcd 3.4 or later")]
    Start(#[source] io::Error),
    /// It was started, several times.
    #[error("etcd was started and does not serve")]
    Silent,
    /// The host.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// An etcd of one member.
#[derive(Debug)]
pub struct Etcd {
    child: Reaped,
    folder: tempfile::TempDir,
    port: u16,
    /// Where it says that it is well, in the clear.
    health: u16,
}

/// Guard against hangs: a starved host takes long to start a program.
const LONGEST_START: Duration = Duration::from_secs(180);

/// What makes an etcd speak https, and ask for certificates: options, and the files in its folder.
const FILES: [(&str, &str); 3] =
    [("--cert-file", "host.crt"), ("--key-file", "host.key"), ("--trusted-ca-file", "authority.crt")];

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A folder in memory, if that can be: a flush to a busy disk can take longer than a client waits
/// for an answer.
fn folder() -> io::Result<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())
}

impl Etcd {
    /// Starts one, and waits until it serves.
    ///
    /// # Errors
    /// If it is not installed, or does not serve.
    pub fn start() -> Result<Self, NoEtcd> {
        Self::start_with(|_| Ok(()))
    }

    /// The same for https, with this certificate and its key, and for clients with certificates of this authority only: all PEM.
    ///
    /// # Errors
    /// As [`start`](Self::start).
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
            // Somebody else has taken a port meanwhile.
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

    /// Where it serves, on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// As `--fence` wants it.
    pub fn fence(&self) -> String {
        format!("etcd:http://127.0.0.1:{}", self.port)
    }

    /// Stops it as it stands (`STOP`), or lets it go on (`CONT`).
    ///
    /// # Errors
    /// If it has ended.
    pub fn signal(&self, signal: rustix::process::Signal) -> io::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("no process id"))?;
        Ok(rustix::process::kill_process(pid, signal)?)
    }

    /// Kills it, as a host that loses its power.
    ///
    /// # Errors
    /// If the kernel does not say that it has ended.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.child().kill()?;
        self.child.child().wait().map(drop)
    }

    /// Starts it again where it was.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_again(&mut self) -> Result<(), NoEtcd> {
        self.child = Self::spawn(self.folder.path(), self.port, self.health)?;
        if self.serves()? { Ok(()) } else { Err(NoEtcd::Silent) }
    }
}
