//! `vmferry branch`: starts guests that continue from one instant of a running guest.
//!
//! The process of the parent is confined and cannot start processes, so this command starts the
//! children. Each child inherits one end of a pair of sockets. The parent gets one end of another
//! pair over its control socket (`getfd`), and passes the files of the branch over it.
//!
//! | step | parent | command | child |
//! |---|---|---|---|
//! | 1 | prepares its memory while the guest runs | starts the children | builds its VM |
//! | 2 | | waits for all children | sends [`READY`] |
//! | 3 | | sends [`READY`] to the parent | |
//! | 4 | pauses the guest, takes the branch point, resumes the guest | | |
//! | 5 | sends the branch point | passes it to each child | maps the memory, starts the guest |
//! | 6 | | waits for all children | sends a line of JSON |

mod child;
mod children;
mod parent;

pub(crate) use child::{arrive, ready};
pub(crate) use parent::{BranchRequest, LONGEST, order};

use crate::api::Client;
use crate::successor::{StartArguments, SuccessorArguments};
use crate::{Status, output};
use anyhow::{Context, Result, anyhow, bail, ensure};
use children::Children;
use clap::Args;
use serde_json::{Value, json};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use vmferry_engine::BranchPoint;

/// Byte with which a process says that it is ready.
pub(crate) const READY: u8 = b'r';
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
    /// Write the result as JSON to this file (- for standard output)
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// Branches the guest. If a step fails, the children that were started end, and the parent
/// continues.
pub(crate) fn branch(args: &BranchArgs) -> Result<Status> {
    let began = Instant::now();
    let mut client = Client::connect(&args.api)?;
    let start = StartArguments::ask(&mut client)?;
    let arguments = arguments(&start)?;
    let folder = folder(&args.api_dir)?;
    let (own, theirs) = UnixStream::pair().context("cannot create a pair of sockets")?;
    own.set_read_timeout(Some(PATIENCE)).context("cannot set a time limit")?;
    let name = format!("vmferry-branch-{}", std::process::id());
    client.pass(&name, theirs.as_fd())?;
    drop(theirs);
    // The parent prepares its memory while the children start.
    let asked = name.clone();
    let asking = std::thread::spawn(move || {
        let answer = client.call("branch", json!({ "fd": asked }));
        if answer.is_err() {
            // The parent does not have the descriptor any more if it began to use it.
            let _ = client.close(&asked);
        }
        answer
    });
    let result = run(own, &arguments, &folder, (args.count, began));
    let answer = asking.join().map_err(|_| anyhow!("the thread that asks the parent panicked"))?;
    // The parent's reason is more helpful than the end of its connection.
    let (children, figures) = match (result, answer) {
        (Ok(children), Ok(figures)) => (children, figures),
        (Err(Failure::Parent), Err(error)) => return Err(error),
        (Err(Failure::Parent), Ok(_)) => bail!("the parent ended the branch without a reason"),
        (Err(Failure::Own(error)), _) => return Err(error.context("the guest goes on, and no branch runs")),
        (Ok(_), Err(error)) => return Err(error),
    };
    let document = document(&children, &figures, began.elapsed());
    children.leave();
    match &args.json {
        None => print(&document),
        Some(path) => {
            let mut to = output::open(path)?;
            writeln!(to, "{}", serde_json::to_string_pretty(&document)?)?;
        }
    }
    Ok(Status::Done)
}

/// Reason why no child runs.
enum Failure {
    /// The parent closed the connection; its answer has the reason.
    Parent,
    Own(anyhow::Error),
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Own(error)
    }
}

/// Starts the children, and lets them run. `parent` is the connection to the parent, which is closed
/// if a child fails.
fn run(
    mut parent: UnixStream,
    arguments: &SuccessorArguments,
    folder: &Path,
    (count, began): (u32, Instant),
) -> Result<Children, Failure> {
    let mut children = Children::start(arguments, folder, count, began)?;
    children.wait_until_ready()?;
    if parent.write_all(&[READY]).is_err() {
        return Err(Failure::Parent);
    }
    let received = BranchPoint::receive(parent.as_fd()).context("cannot receive the branch")?;
    let point = received.ok_or(Failure::Parent)?;
    children.pass(&point)?;
    children.wait_until_running()?;
    Ok(children)
}

/// Returns the arguments of a child, without its control socket and its origin.
fn arguments(start: &StartArguments) -> Result<SuccessorArguments> {
    let parent = SuccessorArguments::from_start(start)?;
    ensure!(
        parent.value("jail").is_none(),
        "the guest's process is in a jail, which its branches cannot share; start it without --jail"
    );
    ensure!(
        parent.values("net").next().is_none(),
        "the guest has a network interface, and a tap cannot be shared with its branches; start it without --net"
    );
    // A second process cannot listen at the same address, and a child's memory is never allocated
    // in advance.
    let unshared = ["metrics", "metrics-public", "pass-fd", "prealloc", "balloon-auto"];
    Ok(unshared.iter().fold(parent, |all, name| all.without(name)))
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

fn document(children: &Children, figures: &Value, total: Duration) -> Value {
    let mut document = figures.clone();
    document["total_ms"] = json!(ms(total));
    document["children"] = children.document();
    document
}

pub(crate) fn ms(time: Duration) -> f64 {
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
