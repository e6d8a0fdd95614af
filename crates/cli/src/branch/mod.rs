//! `vmferry branch`: starts guests that continue from one instant of a running guest.
//!
//! The process of the parent is confined and cannot start processes, so this command starts the
//! children. Each child inherits one end of a pair of sockets. The parent gets one end of another
//! pair over its control socket (`getfd`), and passes the files of the branch over it.
//!
//! | step | parent | command | child |
//! |---|---|---|---|
//! | 1 | prepares its memory while the guest runs | passes files for the disks, starts the children | builds its VM |
//! | 2 | | waits for all children | sends `READY` |
//! | 3 | | sends `READY` to the parent | |
//! | 4 | pauses the guest, takes the branch point, resumes the guest | | |
//! | 5 | sends the branch point | copies the disks for further children, passes the point to each child | maps the memory, starts the guest |
//! | 6 | seals the files, sends a line of JSON | waits for all | sends a line of JSON |

mod child;
mod children;
mod files;
mod overlay;
mod parent;

pub(crate) use child::{arrive, ready};
pub(crate) use parent::{BranchRequest, order};

use crate::api::Client;
use crate::successor::{StartArguments, SuccessorArguments};
use crate::{Status, output};
use anyhow::{Context, Result, bail, ensure};
use children::Children;
use clap::Args;
use overlay::Overlays;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmferry_client::printable;
use vmferry_engine::BranchPoint;

/// Byte with which a process says that it is ready.
const READY: u8 = b'r';
/// Byte with which the parent begins a branch point.
const POINT: u8 = b'p';
/// Byte with which the parent begins the reason of a failure.
const FAILED: u8 = b'e';
/// Maximum length of a line over a socket, in bytes.
const LONGEST_LINE: u64 = 64 << 10;
/// Time for which the command waits for a step of another process.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum number of children of one command.
const MOST: u32 = 1024;

#[derive(Debug, Args)]
pub(crate) struct BranchArgs {
    /// Control socket of the process whose guest is branched
    #[arg(long, value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Number of children to start
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST)))]
    pub(crate) count: u32,
    /// Folder for the control sockets and logs of the children
    ///
    /// Child I gets the control socket DIR/I.sock, and writes its messages to DIR/I.log. If the
    /// guest has a serial port, the output of the child's is in DIR/I.serial. The first child is
    /// number 0. The command creates the folder if it does not exist.
    #[arg(long, value_name = "DIR")]
    pub(crate) api_dir: PathBuf,
    /// Tap of the children's network interface (repeatable, in order)
    ///
    /// The value is tap=NAME, in which {} stands for the number of the child, or none. Give the
    /// option once for each interface of the guest. Without the option, the children's interfaces
    /// have no tap, and their links are down. Each child gets new MAC addresses, which a driver
    /// reads when it starts next.
    #[arg(long = "net", value_name = "tap=NAME|none", value_parser = child_net)]
    pub(crate) nets: Vec<String>,
    /// Folder for copy-on-write copies of the disks (needs reflinks)
    ///
    /// Child I gets the file DIR/I.diskN as its disk number N. The file has the content of the
    /// parent's disk at the instant of the branch. The folder must be on the file system of the
    /// disks, which must have reflinks, such as btrfs or XFS. Read-only disks are not copied.
    /// Without the option, a guest with a disk that it can write to is not branched. The command
    /// creates the folder if it does not exist, and replaces no file.
    #[arg(long, value_name = "DIR")]
    pub(crate) disk_overlay: Option<PathBuf>,
    /// Write the result as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Branches the guest. If a step fails, the children that were started end, and the parent
/// continues.
pub(crate) fn branch(args: &BranchArgs) -> Result<Status> {
    let began = Instant::now();
    // Opened first, so that a mistyped name fails before any child runs.
    let mut output = args.json.as_deref().map(output::open).transpose()?;
    let mut client = Client::connect(&args.api)?;
    let start = StartArguments::ask(&mut client)?;
    let arguments = arguments(&start, args)?;
    let folder = folder(&args.api_dir)?;
    // Dropped after the children, which have the files open.
    let overlays = match &args.disk_overlay {
        Some(folder) => Overlays::create(&arguments, folder, args.count)?,
        None => Overlays::default(),
    };
    let parent = ask(&mut client, overlays.count())?;
    overlays.pass(parent.as_fd())?;
    // The parent prepares its memory while the children start. If a child fails, the parent notices
    // the end of this connection.
    let mut parent = BufReader::new(parent);
    let mut children = Children::start((&arguments, &args.nets, &overlays), &folder, args.count, began)?;
    children.wait_until_ready()?;
    // A parent that has refused the branch does not read any more, and has sent the reason.
    let _ = parent.get_ref().write_all(&[READY]);
    let mut kind = [0];
    // Not through the buffer: files come with the bytes that follow.
    let read = (&mut parent.get_ref()).read_exact(&mut kind);
    read.context("the process of the parent has ended")?;
    if kind != [POINT] {
        figures(&mut parent)?;
        bail!("the parent did not send a branch");
    }
    let point = BranchPoint::receive(parent.get_ref().as_fd()).context("cannot receive the branch")?;
    overlays.spread()?;
    children.pass(&point.context("the process of the parent has ended")?)?;
    children.wait_until_running()?;
    let document = document(&children, figures(&mut parent)?, began.elapsed());
    children.leave();
    overlays.keep();
    match &mut output {
        None => print(&document),
        Some(to) => writeln!(to, "{}", serde_json::to_string_pretty(&document)?)?,
    }
    Ok(Status::Done)
}

/// Asks the parent for a branch with copies of `disks` disks. Returns the connection over which the
/// parent sends it.
fn ask(client: &mut Client, disks: usize) -> Result<UnixStream> {
    let (own, theirs) = UnixStream::pair().context("cannot create a pair of sockets")?;
    let name = format!("vmferry-branch-{}", std::process::id());
    client.pass(&name, theirs.as_fd())?;
    drop(theirs);
    if let Err(error) = client.call("branch", request(&name, disks)) {
        // The parent does not have the descriptor any more if it began to use it.
        let _ = client.close(&name);
        return Err(error);
    }
    Ok(own)
}

/// Returns the arguments of the command `branch`. A parent of an older version does not know the
/// number of disks, and is not asked for copies of none.
fn request(name: &str, disks: usize) -> Value {
    if disks == 0 { json!({ "fd": name }) } else { json!({ "fd": name, "disks": disks }) }
}

/// Reads the line with which the parent ends a branch: the times, or the reason of a failure.
fn figures(parent: &mut BufReader<UnixStream>) -> Result<Value> {
    let mut line = String::new();
    parent.take(LONGEST_LINE).read_line(&mut line).context("the process of the parent has ended")?;
    let told: Value = serde_json::from_str(&line).context("the process of the parent has ended")?;
    match told["error"].as_str() {
        None => Ok(told),
        Some(why) => bail!("{}", printable(why)),
    }
}

/// Sends `bytes` over a socket.
fn tell(socket: &OwnedFd, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        let sent = rustix::net::send(socket, bytes, rustix::net::SendFlags::NOSIGNAL);
        bytes = &bytes[sent.context("the command that started this branch has ended")?..];
    }
    Ok(())
}

/// Returns the arguments of a child, without its control socket and its origin.
fn arguments(start: &StartArguments, args: &BranchArgs) -> Result<SuccessorArguments> {
    let parent = SuccessorArguments::from_start(start)?;
    ensure!(
        parent.value("jail").is_none(),
        "the guest's process is in a jail, which its branches cannot share; start it without --jail"
    );
    let interfaces = parent.values("net").count();
    ensure!(
        args.nets.is_empty() || args.nets.len() == interfaces,
        "--net: {} are given, and the guest has {interfaces} network interfaces; give one for each",
        args.nets.len()
    );
    ensure!(
        args.count == 1 || args.nets.iter().all(|net| net == "none" || net.contains("{}")),
        "--net: {} children cannot share a tap; write tap=NAME{{}}, where {{}} stands for the number of the child",
        args.count
    );
    // A second process cannot listen at the same address. The descriptors that were passed belong
    // to the parent, which may itself be the successor of another process. A child's memory is
    // never allocated in advance.
    let metrics = ["metrics", "metrics-public", "metrics-descriptor"];
    let own = ["pass-fd", "successor", "prealloc", "balloon-auto"];
    Ok(metrics.iter().chain(&own).fold(parent, |all, name| all.without(name)))
}

/// Parses a `--net` option of the command.
fn child_net(text: &str) -> Result<String, String> {
    if text.contains("mac=") {
        return Err("children get random MAC addresses; omit mac=".into());
    }
    crate::net::net(&text.replace("{}", "0")).map(|_| text.to_owned())
}

/// Returns the absolute path of the folder for control sockets, which is created if it does not
/// exist.
fn folder(path: &Path) -> Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let failed = || format!("cannot use --api-dir {}", path.display());
    if !path.is_dir() {
        // A process that can connect to a control socket controls the guest.
        std::fs::DirBuilder::new().mode(0o700).create(path).with_context(failed)?;
    }
    path.canonicalize().with_context(failed)
}

fn document(children: &Children, figures: Value, total: Duration) -> Value {
    let mut document = figures;
    document["total_ms"] = json!(ms(total));
    document["children"] = children.document();
    document
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn print(document: &Value) {
    for child in document["children"].as_array().into_iter().flatten() {
        println!(
            "{}  process {}, runs after {:.1} ms",
            child["api"].as_str().unwrap_or_default(),
            child["pid"],
            child["runs_ms"].as_f64().unwrap_or_default()
        );
    }
    println!("the parent was paused for {:.2} ms", document["pause_ms"].as_f64().unwrap_or_default());
}
