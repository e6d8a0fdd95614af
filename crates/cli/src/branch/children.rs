//! Processes of the children, as the command sees them.

use super::overlay::Overlays;
use super::{LONGEST_LINE, PATIENCE, READY, ms};
use crate::successor::SuccessorArguments;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use vmferry_client::printable;
use vmferry_engine::BranchPoint;

/// Line with which a child says that it runs, or why it does not.
#[derive(Debug, Deserialize)]
pub(super) struct Told {
    #[serde(default)]
    pub(super) error: Option<String>,
}

/// Process of one child.
#[derive(Debug)]
struct Started {
    process: Child,
    socket: BufReader<UnixStream>,
    api: PathBuf,
    log: PathBuf,
    /// Time from the start of the command until the child ran.
    runs: Option<Duration>,
}

/// Processes of all children. Dropping the value kills and waits for them, unless
/// [`leave`](Self::leave) was called.
#[derive(Debug)]
pub(super) struct Children {
    all: Vec<Started>,
    began: Instant,
}

impl Children {
    /// Starts `count` processes with these arguments, these taps and these disks.
    pub(super) fn start(
        (arguments, nets, overlays): (&SuccessorArguments, &[String], &Overlays),
        folder: &Path,
        count: u32,
        began: Instant,
    ) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find the program vmferry")?;
        let mut children = Self { all: Vec::new(), began };
        for index in 0..count {
            let arguments = overlays.with_disks(with_nets(arguments, nets, index), index as usize);
            let started = Started::start(arguments, &program, folder, index)
                .with_context(|| format!("cannot start child {index}"))?;
            children.all.push(started);
        }
        Ok(children)
    }

    /// Waits until every child has built its VM.
    pub(super) fn wait_until_ready(&mut self) -> Result<()> {
        for child in &mut self.all {
            let mut byte = [0];
            match child.socket.read_exact(&mut byte) {
                Ok(()) if byte == [READY] => {}
                _ => return Err(child.failed()),
            }
        }
        Ok(())
    }

    /// Passes the branch point to every child.
    pub(super) fn pass(&mut self, point: &BranchPoint) -> Result<()> {
        for child in &mut self.all {
            if point.send(child.socket.get_ref().as_fd()).is_err() {
                return Err(child.failed());
            }
        }
        Ok(())
    }

    /// Waits until every child runs.
    pub(super) fn wait_until_running(&mut self) -> Result<()> {
        for child in &mut self.all {
            let mut line = String::new();
            let read = child.socket.by_ref().take(LONGEST_LINE).read_line(&mut line);
            let told = read.ok().and_then(|_| serde_json::from_str::<Told>(&line).ok());
            match told {
                Some(Told { error: None }) => child.runs = Some(self.began.elapsed()),
                Some(Told { error: Some(why) }) => {
                    bail!("{}: {}", child.api.display(), printable(&why))
                }
                None => return Err(child.failed()),
            }
        }
        Ok(())
    }

    pub(super) fn document(&self) -> Value {
        let one = |child: &Started| {
            json!({
                "api": child.api.display().to_string(),
                "pid": child.process.id(),
                "runs_ms": child.runs.map(ms),
            })
        };
        self.all.iter().map(one).collect()
    }

    /// Leaves the children running.
    pub(super) fn leave(mut self) {
        self.all.clear();
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.all {
            let _ = child.process.kill();
        }
        for child in &mut self.all {
            let _ = child.process.wait();
            let _ = std::fs::remove_file(&child.api);
        }
    }
}

/// Returns the arguments of child `index`, with its own taps.
fn with_nets(arguments: &SuccessorArguments, nets: &[String], index: u32) -> SuccessorArguments {
    let interfaces = arguments.values("net").count();
    let child = arguments.clone().arriving_from("defer").without("net");
    let unplugged = std::iter::repeat_n("none".to_owned(), interfaces);
    let own = nets.iter().map(|net| net.replace("{}", &index.to_string())).chain(unplugged).take(interfaces);
    let child = own.fold(child, |child, net| child.with("net", net));
    if interfaces > 0 { child.flag("new-mac") } else { child }
}

impl Started {
    fn start(arguments: SuccessorArguments, program: &Path, folder: &Path, index: u32) -> Result<Self> {
        let api = folder.join(format!("{index}.sock"));
        if UnixStream::connect(&api).is_ok() {
            bail!("a process listens at {}; choose another folder, or end that process", api.display());
        }
        let log = folder.join(format!("{index}.log"));
        // The messages may name files of the operator.
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let to = options.open(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let (own, theirs) = UnixStream::pair()?;
        own.set_read_timeout(Some(PATIENCE))?;
        let mut arguments = arguments
            .replace("api", api.as_os_str())
            .replace("incoming", format!("branch:fd:{}", theirs.as_raw_fd()));
        // Two processes cannot write to the same file.
        if arguments.value("serial").is_some() {
            arguments = arguments.replace("serial", folder.join(format!("{index}.serial")));
        }
        let process = arguments.spawn(program, &[theirs.as_fd()], Stdio::from(to))?;
        Ok(Self { process, socket: BufReader::new(own), api, log, runs: None })
    }

    /// Returns the error of a child that does not answer, with its messages.
    fn failed(&mut self) -> anyhow::Error {
        let ended = self.process.try_wait().ok().flatten();
        let ended = ended.map_or_else(|| "did not answer in time".to_owned(), |how| format!("ended ({how})"));
        let said = end_of(&self.log).unwrap_or_default();
        let said = said.lines().last().unwrap_or("it left no message");
        anyhow::anyhow!("the process of {} {ended}: {}", self.api.display(), printable(said))
    }
}

/// Returns the end of the file at `path`, at most 4 KiB of it.
fn end_of(path: &Path) -> io::Result<String> {
    const MOST: u64 = 4096;
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(MOST)))?;
    let mut bytes = Vec::new();
    file.take(MOST).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
