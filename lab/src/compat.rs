//! `cargo xtask compat REVISION`: moves of guests between the command of an older revision and this
//! one, in both directions, over a link, through files, and inside one host without a copy.
//!
//! The test runs whole programs, to show that the frozen formats (docs/compatibility.md) are
//! compatible.

use crate::host;
use anyhow::{Context, Result, bail, ensure};
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
const MEMORY: &str = "64M";
const LOAD: &str = "uniform,ws=4M,data=24M,rate=5k,fill=random";
const WAYS: [&str; 6] = ["precopy", "postcopy", "hybrid", "file", "local", "upgrade"];
/// Options of a guest whose memory another process can map.
const SHAREABLE: [&str; 4] = ["--workload", LOAD, "--memory-backing", "memfd"];

/// Build of the command.
#[derive(Debug)]
struct Build {
    name: String,
    program: PathBuf,
}

impl Build {
    /// Returns whether the subcommand `command` exists and has the option `option`. An empty option
    /// stands for the subcommand alone.
    fn has(&self, command: &str, option: &str) -> Result<bool> {
        let help = Command::new(&self.program).args([command, "--help"]).stdin(Stdio::null()).output();
        let help = help.with_context(|| format!("cannot start {}", self.program.display()))?;
        Ok(help.status.success() && String::from_utf8_lossy(&help.stdout).contains(option))
    }

    /// Returns why this build cannot hand a guest over with the subcommand `command`, or `None` if
    /// it can.
    fn lacks(&self, command: &str, option: &str) -> Result<Option<String>> {
        if !self.has(command, option)? {
            return Ok(Some(format!("{} has no `{}`", self.name, format!("{command} {option}").trim())));
        }
        if !self.has("run", "--memory-backing")? {
            return Ok(Some(format!("{} has no `run --memory-backing`", self.name)));
        }
        Ok(None)
    }
}

/// Result of a move that was possible or refused as expected.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Arrived,
    /// A build is too old for this way. The move was refused, and the guest stayed where it was.
    Refused(String),
    /// No command can be given.
    NotApplicable(String),
}

impl Outcome {
    /// Returns the word for the count of such results.
    fn kind(&self) -> &'static str {
        match self {
            Self::Arrived => "arrived",
            Self::Refused(_) => "refused",
            Self::NotApplicable(_) => "not applicable",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arrived => f.write_str(self.kind()),
            Self::Refused(why) => write!(f, "refused as expected, and the guest stayed: {why}"),
            Self::NotApplicable(why) => write!(f, "not applicable: {why}"),
        }
    }
}

/// Process `vmferry run`. It ends on drop, or with this process.
struct Side<'a> {
    build: &'a Build,
    /// `None` for a process that an upgrade has started.
    child: Option<Child>,
    api: PathBuf,
}

impl<'a> Side<'a> {
    fn start(build: &'a Build, folder: &Path, name: &str, guest: &str, more: &[&str]) -> Result<Self> {
        let api = folder.join(name);
        let log = folder.join(format!("{name}.log"));
        let child = Command::new(&build.program)
            .args(["run", "--die-with-parent", "--guest", guest, "--memory", MEMORY, "--migrate-dir"])
            .arg(folder)
            .arg("--api")
            .arg(&api)
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .spawn()
            .with_context(|| format!("cannot start {}", build.program.display()))?;
        let mut side = Self { build, child: Some(child), api };
        side.wait(&format!("the {name} ({})", build.name), |_| true).with_context(|| {
            format!("its output: {}", std::fs::read_to_string(&log).unwrap_or_default().trim())
        })?;
        Ok(side)
    }

    /// Runs a command of the same build with the control socket of this process.
    fn run_command(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.build.program);
        let (word, rest) = words.split_first().context("no command")?;
        let output =
            command.arg(word).arg("--api").arg(&self.api).args(rest).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{} ({}) ended with {}: {}", words.join(" "), self.build.name, output.status, said.trim());
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    fn status(&self) -> Option<Value> {
        serde_json::from_str(&self.run_command(&["status"]).ok()?).ok()
    }

    fn wait(&mut self, what: &str, done: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if let Some(status) = status.as_ref().filter(|status| done(status)) {
                return Ok(status.clone());
            }
            if let Some(ended) = self.child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                bail!("the process ended ({ended}) while waiting for {what}");
            }
            ensure!(Instant::now() < deadline, "timed out while waiting for {what}: {status:?}");
            std::thread::sleep(POLL);
        }
    }

    /// Checks that the guest runs in this process, makes progress, and has found no damaged pages.
    fn whole(&mut self) -> Result<()> {
        let writes = |status: &Value| status["vm"]["guest"]["writes"].as_u64();
        let before = self.wait("the guest's statistics", |status| writes(status).is_some())?;
        let later = self.wait("the guest making progress", |status| writes(status) > writes(&before))?;
        let guest = &later["vm"]["guest"];
        ensure!(guest["corrupt"] == 0, "the guest finds damaged pages: {guest}");
        Ok(())
    }
}

impl Drop for Side<'_> {
    fn drop(&mut self) {
        match &mut self.child {
            Some(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            // The socket answers only as long as the process runs.
            None => drop(self.run_command(&["quit"])),
        }
    }
}

/// Starts a guest, and waits until it has filled its memory.
fn source<'a>(from: &'a Build, folder: &Path, guest: &str, more: &[&str]) -> Result<Side<'a>> {
    let mut source = Side::start(from, folder, "source", guest, more)?;
    source.wait("the guest filling its memory", |status| status["vm"]["guest"]["state"] == "running")?;
    Ok(source)
}

/// Moves one guest in a new folder. Every page is compared or checked on the way.
fn once((from, to): (&Build, &Build), guest: &str, way: &str, folder: &Path) -> Result<Outcome> {
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder)?;
    match way {
        "local" => local((from, to), guest, folder),
        "upgrade" => upgrade((from, to), guest, folder),
        _ => copied((from, to), guest, way, folder).map(|()| Outcome::Arrived),
    }
}

/// Hands a guest over to a process of `to` that waits for it.
fn local((from, to): (&Build, &Build), guest: &str, folder: &Path) -> Result<Outcome> {
    if let Some(why) = from.lacks("migrate", "--local")? {
        return Ok(Outcome::NotApplicable(why));
    }
    let mut source = source(from, folder, guest, &SHAREABLE)?;
    let uri = format!("unix:{}", folder.join("move").display());
    let mut target = Side::start(to, folder, "target", guest, &["--incoming", &uri])?;
    let moved = source.run_command(&["migrate", &uri, "--local"]);
    if to.lacks("migrate", "--local")?.is_some() {
        let why = moved.err().context("a build without handoffs has taken a guest over")?;
        source.whole().context("the guest of a refused handoff")?;
        let there = target.status();
        let runs = there.as_ref().is_some_and(|status| status["vm"]["place"] == "running");
        ensure!(!runs, "the guest runs on both sides: {there:?}");
        return Ok(Outcome::Refused(format!("{why:#}")));
    }
    moved?;
    target.whole()?;
    Ok(Outcome::Arrived)
}

/// Continues a guest of `from` in a new process of `to`, with the command `upgrade` of the older
/// build that has it.
fn upgrade((from, to): (&Build, &Build), guest: &str, folder: &Path) -> Result<Outcome> {
    let reasons = [from.lacks("upgrade", "")?, to.lacks("upgrade", "")?];
    let command = match &reasons {
        [None, _] => from,
        [_, None] => to,
        [Some(why), Some(_)] => return Ok(Outcome::NotApplicable(why.clone())),
    };
    let options = if from.has("run", "--memory-backing")? { &SHAREABLE[..] } else { &SHAREABLE[..2] };
    let mut source = source(from, folder, guest, options)?;
    let upgraded = Command::new(&command.program)
        .args(["upgrade", "--api"])
        .arg(&source.api)
        .arg("--binary")
        .arg(&to.program)
        .arg("--log")
        .arg(folder.join("successor.log"))
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&upgraded.stderr).trim().to_owned();
    if reasons.iter().any(Option::is_some) {
        ensure!(!upgraded.status.success(), "a build without upgrades has taken a guest over: {said}");
        source.whole().context("the guest of a refused upgrade")?;
        return Ok(Outcome::Refused(said));
    }
    ensure!(upgraded.status.success(), "upgrade ({}) ended with {}: {said}", command.name, upgraded.status);
    // The new process has the control socket of the old one.
    let mut successor = Side { build: to, child: None, api: source.api.clone() };
    successor.whole()?;
    Ok(Outcome::Arrived)
}

/// Moves one guest by a copy of its memory.
fn copied((from, to): (&Build, &Build), guest: &str, way: &str, folder: &Path) -> Result<()> {
    let source = source(from, folder, guest, &SHAREABLE[..2])?;
    if way == "file" {
        let file = format!("file:{}", folder.join("guest").display());
        source.run_command(&["migrate", &file])?;
        return Side::start(to, folder, "target", guest, &["--incoming", &file])?.whole();
    }
    let mut target = Side::start(to, folder, "target", guest, &["--incoming", "tcp:127.0.0.1:0"])?;
    let status = target.wait("the target listening", |status| status["vm"]["incoming"].is_string())?;
    let at = status["vm"]["incoming"].as_str().context("no address")?.to_owned();
    source.run_command(&["migrate", &at, "--mode", way, "--verify"])?;
    target.whole()
}

/// Builds the command of `revision` from its commit, or that of the working tree without a
/// revision.
fn build(revision: Option<&str>) -> Result<Build> {
    let root = host::parts::workspace();
    let kept = root.join("target/compat");
    let (name, tree) = match revision {
        None => ("this tree".to_owned(), root.clone()),
        Some(revision) => {
            let commit = format!("{revision}^{{commit}}");
            let sha = run(Command::new("git")
                .args(["rev-parse", "--verify", "--short=12", &commit])
                .current_dir(&root))
            .with_context(|| format!("there is no revision '{revision}' in this repository"))?;
            let sha = sha.trim().to_owned();
            let tree = kept.join(&sha);
            if !tree.join("Cargo.toml").exists() {
                std::fs::create_dir_all(&tree)?;
                let archive = kept.join(format!("{sha}.tar"));
                run(Command::new("git")
                    .args(["archive", "--output"])
                    .args([&archive, Path::new(&sha)])
                    .current_dir(&root))?;
                run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&tree))?;
                std::fs::remove_file(&archive)?;
            }
            (sha, tree)
        }
    };
    eprintln!("compat: building vmferry of {name}");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // Each build has a separate folder, because cargo takes the same package in two places for one.
    let target = kept.join(format!("build-{}", name.replace(' ', "-")));
    let mut command = Command::new(cargo);
    // The package is not named, because older revisions have the program in another package.
    command.args(["build", "--quiet", "--locked", "--bin", "vmferry", "--target-dir"]);
    run(command.arg(&target).current_dir(&tree))?;
    Ok(Build { name, program: target.join("debug/vmferry") })
}

/// Returns the output of a command.
///
/// # Errors
///
/// Fails if the command does not succeed.
fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "{command:?} ended with {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Moves guests of each kind in every way and direction. Returns `true` if all guests arrived,
/// except in ways that a build does not have.
pub(crate) fn compat(revision: &str, json: Option<&Path>) -> Result<bool> {
    let (old, new) = (build(Some(revision))?, build(None)?);
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(["guest", "way", "from", "to", "result"]);
    let (mut cases, mut good, mut counts) = (Vec::new(), true, BTreeMap::<_, u64>::new());
    let folder = std::env::temp_dir().join(format!("vmferry-compat-{}", std::process::id()));
    for guest in ["process", "kvm"] {
        if guest == "kvm"
            && let Err(error) = File::options().read(true).write(true).open("/dev/kvm")
        {
            println!("kvm guests were not moved: /dev/kvm: {error}");
            continue;
        }
        for way in WAYS {
            for (from, to) in [(&old, &new), (&new, &old)] {
                let moved = once((from, to), guest, way, &folder);
                good &= moved.is_ok();
                *counts.entry(moved.as_ref().map_or("failed", Outcome::kind)).or_default() += 1;
                let result = moved.map_or_else(|error| format!("{error:#}"), |outcome| outcome.to_string());
                eprintln!("compat: {guest}, {way}, {} to {}: {result}", from.name, to.name);
                table.add_row([guest, way, &from.name, &to.name, &result]);
                cases.push(
                    json!({ "guest": guest, "way": way, "from": from.name, "to": to.name, "result": result }),
                );
            }
        }
    }
    let _ = std::fs::remove_dir_all(&folder);
    println!("{table}");
    let counted: Vec<_> = counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    println!("{}", counted.join(", "));
    if let Some(path) = json {
        let document = json!({ "compat": { "old": old.name, "cases": cases, "counts": counts } });
        std::fs::write(path, serde_json::to_string_pretty(&document)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(good)
}
