//! Command line of a running `vmferry run`, and the start of a second process from it.
//!
//! A process that runs a guest remembers the arguments that it was started with, and tells them to
//! clients of its control socket (`x-vmferry-arguments`). The control socket only accepts clients
//! of the same user and of root. A command can change some options and start a second process,
//! which then has the same machine.
//!
//! # Whose command line is executed
//! A process can tell any command line, for example after a guest has broken into it. A command of
//! the same user executes it, which gives the process no rights of another user. A command of root
//! executes the command line of another user's process only if root itself has written it: a
//! process that enters a jail first puts its arguments into a sealed file ([`Started`]), which then
//! belongs to root and which no process can change. A process of another user cannot create such a
//! file, and that of another process names another control socket.

use crate::api::Client;
use crate::descriptors::Descriptors;
use crate::handed;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Options of `run` that describe the origin of the guest. A second process with the same machine
/// has another origin.
const ORIGIN: [&str; 13] = [
    "workload",
    "guest-args",
    "kernel",
    "initrd",
    "cmdline",
    "incoming",
    "from",
    "shared",
    "record",
    "record-for",
    "prefetch",
    "have",
    "new-mac",
];
/// Environment variables with which a service manager passes descriptors to the process that it
/// starts.
const SERVICE_MANAGER: [&str; 3] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// Seals of a file whose content no process can change.
const FIXED: SealFlags =
    SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);
/// Name of a sealed file with arguments. Only the creator of a memfd can name it.
const SEALED: &str = "vmferry-arguments";
/// Largest sealed file that is read. Linux limits a command line to 2 MiB (execve(2)).
const LARGEST: u64 = 4 << 20;

/// Arguments of this process, and a sealed file with them if the process enters a jail.
pub(crate) struct Started {
    arguments: StartArguments,
    sealed: Option<OwnedFd>,
}

impl Started {
    /// Returns the arguments of this process. Must be called before the process enters its jail, so
    /// that the sealed file belongs to root.
    ///
    /// # Errors
    /// If the working directory is unknown, or the sealed file cannot be created.
    pub(crate) fn of_this_process(jailed: bool) -> Result<Self> {
        let arguments = StartArguments::of_this_process()?;
        // Arguments that are not UTF-8 cannot be told with a sealed file either.
        let told = arguments.answer().ok().filter(|_| jailed);
        let sealed = told.map(|told| seal(told.to_string().as_bytes())).transpose();
        Ok(Self { arguments, sealed: sealed.context("cannot seal the command line")? })
    }

    /// Executes `x-vmferry-arguments`. With a socket, also sends the sealed file over it.
    pub(crate) fn answer(&self, request: &Value, descriptors: &Descriptors) -> Result<Value> {
        let AskArguments { fdname } = serde_json::from_value(request.clone())?;
        let sockets = descriptors.take(fdname.as_slice())?;
        let mut answer = self.arguments.answer()?;
        if let (Some(socket), Some(sealed)) = (sockets.first(), &self.sealed) {
            handed::send(socket, &[sealed.as_fd()]).context("cannot pass the sealed command line")?;
            answer["sealed"] = json!(true);
        }
        Ok(answer)
    }
}

/// Arguments of `x-vmferry-arguments`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AskArguments {
    /// Name of the socket for the sealed file (`getfd`).
    #[serde(default)]
    fdname: Option<String>,
}

/// Returns a file with `content` that no process can change.
fn seal(content: &[u8]) -> std::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create(SEALED, flags)?);
    file.write_all(content)?;
    rustix::fs::fcntl_add_seals(&file, FIXED)?;
    Ok(file.into())
}

/// Arguments that a process was started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StartArguments {
    /// Working directory at the start, which relative paths refer to.
    folder: PathBuf,
    /// Arguments without the name of the executable.
    words: Vec<OsString>,
}

/// Answer to `x-vmferry-arguments`.
#[derive(Debug, Serialize, Deserialize)]
struct StartAnswer {
    folder: String,
    arguments: Vec<String>,
    /// True if a sealed file with the same content is in the socket that the command has passed.
    #[serde(default)]
    sealed: bool,
}

impl From<StartAnswer> for StartArguments {
    fn from(answer: StartAnswer) -> Self {
        let words = answer.arguments.into_iter().map(OsString::from).collect();
        Self { folder: answer.folder.into(), words }
    }
}

impl StartArguments {
    /// Returns the arguments of this process. Must be called before the process changes its root
    /// directory.
    pub(crate) fn of_this_process() -> Result<Self> {
        let folder = std::env::current_dir().context("cannot find the working directory")?;
        Ok(Self { folder, words: std::env::args_os().skip(1).collect() })
    }

    /// Returns arguments for a test, as if they were given in the root directory.
    #[cfg(test)]
    pub(crate) fn of_words<'a>(words: impl Iterator<Item = &'a str>) -> Self {
        Self { folder: "/".into(), words: words.map(OsString::from).collect() }
    }

    /// Returns the arguments as JSON, for a client of the control socket.
    ///
    /// # Errors
    /// If an argument or the working directory is not UTF-8, which JSON cannot contain.
    pub(crate) fn answer(&self) -> Result<Value> {
        let text = |word: &OsStr| {
            let text = word.to_str().map(str::to_owned);
            text.with_context(|| {
                format!(
                    "{} is not UTF-8, so the command line of this process cannot be told; start it with UTF-8 names",
                    word.display()
                )
            })
        };
        let arguments = self.words.iter().map(|word| text(word)).collect::<Result<_>>()?;
        Ok(json!(StartAnswer { folder: text(self.folder.as_os_str())?, arguments, sealed: false }))
    }

    /// Asks the process that `client` is connected to for its arguments, which this command will
    /// execute.
    ///
    /// # Errors
    /// If the process does not answer, is too old to know the command, or belongs to a user who
    /// must not decide what this command executes.
    pub(crate) fn ask(client: &mut Client) -> Result<Self> {
        let (uid, own) = (client.peer_uid()?, rustix::process::geteuid());
        if uid == own.as_raw() || uid == 0 {
            return told(client.call("arguments", json!({}))?).map(Self::from);
        }
        let path = client.path().display().to_string();
        ensure!(
            own.is_root(),
            "the process at {path} runs as user {uid}, who must not decide what another user executes; run this command as user {uid}"
        );
        Self::ask_for_sealed(client, uid).with_context(|| {
            format!(
                "the process at {path} runs as user {uid}, and root executes only a command line that root has given to a process with --jail; \
                 run this command as user {uid}, or move the guest"
            )
        })
    }

    /// Asks a process of the user `uid` for arguments that root has written for this process.
    fn ask_for_sealed(client: &mut Client, uid: u32) -> Result<Self> {
        let (answer, socket) = handed::call(client, "arguments").context("its version is too old")?;
        ensure!(told(answer)?.sealed, "root has not started it with --jail");
        let [file] = <[OwnedFd; 1]>::try_from(handed::receive(&socket)?)
            .map_err(|all| anyhow::anyhow!("{} descriptors came instead of 1", all.len()))?;
        let start = Self::from_sealed(file, 0)?;
        let arguments = SuccessorArguments::from_start(&start)?;
        let real = |path: &Path| path.canonicalize().ok();
        let same_path = arguments.path("api").is_some_and(|api| real(&api) == real(client.path()));
        let same_user = arguments.value("uid").and_then(OsStr::to_str) == Some(&uid.to_string());
        ensure!(same_path && same_user, "it has presented the command line of another process");
        Ok(start)
    }

    /// Reads the arguments in a sealed file, which must belong to the user `owner`.
    fn from_sealed(file: OwnedFd, owner: u32) -> Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file).context("its command line is in no sealed file")?;
        let found = rustix::fs::fstat(&file)?.st_uid;
        let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        ensure!(
            seals.contains(FIXED) && name.to_string_lossy().starts_with(&format!("/memfd:{SEALED} ")),
            "its command line is in a file that can be changed"
        );
        ensure!(found == owner, "its command line was written by user {found}, and not by user {owner}");
        let file = File::from(file);
        let size = file.metadata()?.len();
        ensure!(size <= LARGEST, "its command line has {size} bytes");
        let mut text = vec![0; usize::try_from(size)?];
        file.read_exact_at(&mut text, 0).context("cannot read its command line")?;
        told(serde_json::from_slice(&text)?).map(Self::from)
    }
}

fn told(answer: Value) -> Result<StartAnswer> {
    serde_json::from_value(answer).context("the process told no command line")
}

/// Option of `run`, with its value if it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RunOption {
    /// Long name, without the two dashes.
    name: String,
    value: Option<OsString>,
}

/// Command line of a second `vmferry run`, made from that of a running one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SuccessorArguments {
    folder: PathBuf,
    options: Vec<RunOption>,
}

impl SuccessorArguments {
    /// Returns the options of `start`, without `--die-with-parent`: a second process must not end
    /// with the command that starts it.
    ///
    /// # Errors
    /// If `start` is not the command line of a `vmferry run`, or has options that this version does
    /// not know.
    pub(crate) fn from_start(start: &StartArguments) -> Result<Self> {
        let (first, rest) = start.words.split_first().context("the process has no arguments")?;
        ensure!(
            first == "run",
            "the process was started with '{}', and not with 'run'; start the guest with vmferry run",
            first.display()
        );
        let command = crate::args::command();
        let run = command.find_subcommand("run").context("this version has no command 'run'")?;
        let mut words = rest.iter();
        let mut options = Vec::new();
        while let Some(word) = words.next() {
            options.push(option(run, word, &mut words)?);
        }
        Ok(Self { folder: start.folder.clone(), options }.without("die-with-parent"))
    }

    /// Returns the value of the first option `name`, if the option is given with a value.
    pub(crate) fn value(&self, name: &str) -> Option<&OsStr> {
        self.options.iter().filter(|option| option.name == name).find_map(|option| option.value.as_deref())
    }

    /// Returns the values of all options `name`.
    pub(crate) fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a OsStr> {
        let named = self.options.iter().filter(move |option| option.name == name);
        named.filter_map(|option| option.value.as_deref())
    }

    /// Returns the path in the value of option `name`, made absolute.
    pub(crate) fn path(&self, name: &str) -> Option<PathBuf> {
        self.value(name).map(|path| self.in_folder(path))
    }

    /// Returns `path` of an option, made absolute.
    pub(crate) fn in_folder(&self, path: impl AsRef<Path>) -> PathBuf {
        self.folder.join(path)
    }

    /// Removes all options `name`.
    pub(crate) fn without(mut self, name: &str) -> Self {
        self.options.retain(|option| option.name != name);
        self
    }

    /// Adds the option `name` with `value`.
    pub(crate) fn with(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.options.push(RunOption { name: name.to_owned(), value: Some(value.into()) });
        self
    }

    /// Adds the option `name`, which has no value.
    pub(crate) fn flag(mut self, name: &str) -> Self {
        self.options.push(RunOption { name: name.to_owned(), value: None });
        self
    }

    /// Replaces all options `name` by one with `value`.
    pub(crate) fn replace(self, name: &str, value: impl Into<OsString>) -> Self {
        self.without(name).with(name, value)
    }

    /// Replaces the origin of the guest by `incoming`: a kernel or a workload starts no second
    /// guest.
    pub(crate) fn arriving_from(self, incoming: impl Into<OsString>) -> Self {
        let rest = ORIGIN.iter().fold(self, |all, name| all.without(name));
        rest.with("incoming", incoming)
    }

    /// Returns the arguments in the order of the command line, from `run` on.
    pub(crate) fn words(&self) -> Vec<OsString> {
        let mut words = vec![OsString::from("run")];
        for RunOption { name, value } in &self.options {
            let mut word = OsString::from(format!("--{name}"));
            if let Some(value) = value {
                // In one word, a value may also begin with a dash.
                word.push("=");
                word.push(value);
            }
            words.push(word);
        }
        words
    }

    /// Starts `program` with these arguments in the working directory of the first process.
    ///
    /// The new process has no standard input and output, and its own process group, so that Ctrl-C
    /// on the terminal does not reach it. It inherits the descriptors `inherited` under their
    /// numbers. This process must not start another program at the same time, because that program
    /// would inherit them too.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub(crate) fn spawn(&self, program: &Path, inherited: &[BorrowedFd<'_>], stderr: Stdio) -> Result<Child> {
        if !self.folder.is_dir() {
            bail!("the working directory {} of the process does not exist", self.folder.display());
        }
        let mut command = Command::new(program);
        command.args(self.words()).current_dir(&self.folder).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        for variable in SERVICE_MANAGER {
            command.env_remove(variable);
        }
        let inherit = |flags: FdFlags| inherited.iter().try_for_each(|fd| fcntl_setfd(fd.as_fd(), flags));
        inherit(FdFlags::empty()).context("cannot pass descriptors")?;
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()));
        inherit(FdFlags::CLOEXEC).context("cannot keep passed descriptors")?;
        child
    }
}

/// Parses the option that begins with `word`. Takes its value from `rest` if `word` does not
/// contain it.
fn option<'a>(
    run: &clap::Command,
    word: &OsStr,
    rest: &mut impl Iterator<Item = &'a OsString>,
) -> Result<RunOption> {
    let text = word.to_str().with_context(|| format!("'{}' is not UTF-8", word.display()))?;
    let Some(option) = text.strip_prefix("--").filter(|option| !option.is_empty()) else {
        bail!("'{text}' is not an option of vmferry run");
    };
    let (name, value) =
        option.split_once('=').map_or((option, None), |(name, value)| (name, Some(OsString::from(value))));
    let Some(known) = run.get_arguments().find(|arg| arg.get_long() == Some(name)) else {
        bail!(
            "the process was started with --{name}, which this version does not know; use the vmferry of that process"
        );
    };
    let value = match (known.get_action().takes_values(), value) {
        (false, None) => None,
        (false, Some(_)) => bail!("--{name} takes no value"),
        (true, Some(value)) => Some(value),
        (true, None) => Some(rest.next().with_context(|| format!("--{name} has no value"))?.clone()),
    };
    Ok(RunOption { name: name.to_owned(), value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn start(line: &str) -> StartArguments {
        StartArguments::of_words(line.split(' '))
    }

    fn successor(line: &str) -> SuccessorArguments {
        SuccessorArguments::from_start(&start(line)).unwrap()
    }

    fn line(arguments: &SuccessorArguments) -> String {
        arguments.words().iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn options_are_split_as_the_command_line_defines_them() {
        let arguments = successor(
            "run --memory 1G --huge-pages false --insecure --disk=a,readonly --disk b --die-with-parent --api s",
        );
        assert_eq!(
            line(&arguments),
            "run --memory=1G --huge-pages=false --insecure --disk=a,readonly --disk=b --api=s"
        );
        assert_eq!(arguments.values("disk").collect::<Vec<_>>(), ["a,readonly", "b"]);
        assert_eq!(arguments.path("api"), Some("/s".into()));
        assert_eq!((arguments.value("kernel"), arguments.value("insecure")), (None, None));
    }

    #[test]
    fn second_process_gets_another_origin_and_control_socket() {
        let first = successor(
            "run --kernel k --initrd i --cmdline console=ttyS0 --cpus 2 --api a --incoming tcp:h:1 --have d --new-mac",
        );
        let second = first.arriving_from("fd:7").replace("api", "b").with("pass-fd", "9");
        assert_eq!(line(&second), "run --cpus=2 --incoming=fd:7 --api=b --pass-fd=9");
        let words = std::iter::once(OsString::from("vmferry")).chain(second.words());
        crate::args::Cli::try_parse_from(words).unwrap();
        let workload = successor("run --workload idle --guest-args report=async").arriving_from("unix:s");
        assert_eq!(line(&workload), "run --incoming=unix:s");
    }

    #[test]
    fn foreign_command_lines_are_refused() {
        for (wrong, says) in [
            ("migrate --api s tcp:h:1", "not with 'run'"),
            ("run --no-such-option 5", "--no-such-option, which this version does not know"),
            ("run word", "'word' is not an option"),
            ("run --memory", "--memory has no value"),
            ("run --insecure=yes", "--insecure takes no value"),
        ] {
            let error = SuccessorArguments::from_start(&start(wrong)).unwrap_err().to_string();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }

    #[test]
    fn answer_is_read_back_and_must_be_text() {
        use std::os::unix::ffi::OsStringExt;
        let own = start("run --memory 1G");
        assert_eq!(StartArguments::from(told(own.answer().unwrap()).unwrap()), own);
        let words = vec![OsString::from_vec(vec![0xff])];
        let error = StartArguments { words, ..own }.answer().unwrap_err().to_string();
        assert!(error.contains("is not UTF-8"), "{error}");
    }

    #[test]
    fn command_line_of_another_user_must_be_sealed_by_root() {
        let own = rustix::process::geteuid().as_raw();
        let arguments = start("run --jail j --uid 5");
        let text = arguments.answer().unwrap().to_string();
        let sealed = || seal(text.as_bytes()).unwrap();
        assert_eq!(StartArguments::from_sealed(sealed(), own).unwrap(), arguments);
        let refused = |file, owner| StartArguments::from_sealed(file, owner).unwrap_err().to_string();
        let other = refused(sealed(), own + 1);
        assert!(other.contains(&format!("written by user {own}, and not by user {}", own + 1)), "{other}");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let open = |name| File::from(rustix::fs::memfd_create(name, flags).unwrap());
        let changeable = open(SEALED);
        (&changeable).write_all(text.as_bytes()).unwrap();
        assert!(refused(changeable.into(), own).contains("can be changed"));
        // Memory of a guest, which the process has sealed later.
        let memory = open("vmferry-guest");
        rustix::fs::fcntl_add_seals(&memory, FIXED).unwrap();
        assert!(refused(memory.into(), own).contains("can be changed"));
        let (pipe, _writer) = std::io::pipe().unwrap();
        assert!(refused(pipe.into(), own).contains("no sealed file"));
    }

    #[test]
    fn spawned_program_has_the_folder_and_the_passed_descriptors_only() {
        let (mut read, write) = std::io::pipe().unwrap();
        // `sh run` executes the file `run` in the folder of the arguments.
        let folder = std::env::temp_dir().join(format!("vmferry-successor-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let number = write.as_raw_fd();
        std::fs::write(folder.join("run"), format!("echo \"$1\" $(pwd) > /proc/self/fd/{number}\n")).unwrap();
        let arguments = SuccessorArguments { folder: folder.clone(), options: Vec::new() }.with("cpus", "2");
        let mut child = arguments.spawn(Path::new("/bin/sh"), &[write.as_fd()], Stdio::inherit()).unwrap();
        assert!(child.wait().unwrap().success());
        assert!(rustix::io::fcntl_getfd(&write).unwrap().contains(FdFlags::CLOEXEC));
        drop(write);
        let mut said = String::new();
        std::io::Read::read_to_string(&mut read, &mut said).unwrap();
        let real = folder.canonicalize().unwrap();
        assert_eq!(said.trim(), format!("--cpus=2 {}", real.display()));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
