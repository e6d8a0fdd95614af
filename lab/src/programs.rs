//! Programs that are started, fed, read and ended on this machine or on another machine of the lab
//! (see [`crate::peer`]).
//!
//! A scenario uses the same requests for both, so that it can move a guest between two processes or
//! between two kernels.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

/// Request to a host.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Start a program, with its output and errors in two files.
    Start {
        /// Program and its arguments.
        command: Vec<String>,
        /// File for standard output.
        output: PathBuf,
        /// File for standard error.
        errors: PathBuf,
    },
    /// Run a program to its end.
    Run {
        /// Program and its arguments.
        command: Vec<String>,
    },
    /// Write text to the standard input of a program.
    Type {
        /// Number from the answer to `Start`.
        id: u32,
        /// Text to write.
        text: String,
    },
    /// Ask whether and how a program ended.
    Ended {
        /// Number from the answer to `Start`.
        id: u32,
    },
    /// Kill a program, and wait until it has ended.
    Kill {
        /// Number from the answer to `Start`.
        id: u32,
    },
    /// Read a file from an offset on.
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Offset in bytes.
        from: u64,
    },
}

/// Answer of a host to a request.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The program was started.
    Started {
        /// Number of the program.
        id: u32,
    },
    /// The program ran to its end.
    Ran(ProgramOutput),
    /// Exit status of a program, or `None` if it still runs. Signals are 128 and more.
    Ended(Option<i32>),
    /// Bytes that were read.
    Read(Vec<u8>),
    /// The request was carried out.
    Done,
    /// The request failed, with the reason.
    Failed(String),
}

/// Exit status and output of a program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProgramOutput {
    /// Exit status. Signals are 128 and more.
    pub status: i32,
    /// Text of standard output.
    pub output: String,
    /// Text of standard error.
    pub errors: String,
}

/// Machine on which programs run.
pub trait ProgramHost: std::fmt::Debug {
    /// Carries out a request.
    ///
    /// # Errors
    ///
    /// Fails if the request cannot be carried out, or the host does not answer.
    fn execute(&self, request: Request) -> Result<Answer>;
}

/// This machine.
#[derive(Debug, Default)]
pub struct LocalHost {
    programs: RefCell<ProgramTable>,
}

impl ProgramHost for LocalHost {
    fn execute(&self, request: Request) -> Result<Answer> {
        self.programs.borrow_mut().handle(request)
    }
}

/// Largest number of bytes that one `Read` returns. Consoles are short, and the next `Read`
/// continues.
const MOST_READ: u64 = 1 << 20;

/// Programs of one host. They end on drop.
#[derive(Debug, Default)]
pub(crate) struct ProgramTable {
    next: u32,
    programs: BTreeMap<u32, Program>,
}

#[derive(Debug)]
struct Program {
    child: Child,
    input: ChildStdin,
}

impl ProgramTable {
    /// Carries out a request.
    pub(crate) fn handle(&mut self, request: Request) -> Result<Answer> {
        Ok(match request {
            Request::Start { command, output, errors } => {
                Answer::Started { id: self.start(&command, &output, &errors)? }
            }
            Request::Run { command } => Answer::Ran(run(&command)?),
            Request::Type { id, text } => {
                let program = self.program(id)?;
                program
                    .input
                    .write_all(text.as_bytes())
                    .context("the program does not read its standard input")?;
                Answer::Done
            }
            Request::Ended { id } => {
                Answer::Ended(self.program(id)?.child.try_wait()?.map(|status| number(&status)))
            }
            Request::Kill { id } => {
                let program = self.program(id)?;
                program.child.kill()?;
                program.child.wait()?;
                Answer::Done
            }
            Request::Read { path, from } => Answer::Read(read(&path, from)?),
        })
    }

    fn program(&mut self, id: u32) -> Result<&mut Program> {
        self.programs.get_mut(&id).with_context(|| format!("there is no program {id}"))
    }

    fn start(&mut self, command: &[String], output: &Path, errors: &Path) -> Result<u32> {
        let [program, arguments @ ..] = command else { bail!("no command") };
        let file =
            |path: &Path| File::create(path).with_context(|| format!("cannot write {}", path.display()));
        let mut child = Command::new(program)
            .args(arguments)
            .env("VMFERRY_LOG", "info")
            .stdin(Stdio::piped())
            .stdout(file(output)?)
            .stderr(file(errors)?)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        let input = child.stdin.take().context("no standard input")?;
        self.next += 1;
        self.programs.insert(self.next, Program { child, input });
        Ok(self.next)
    }
}

impl Drop for ProgramTable {
    fn drop(&mut self) {
        for program in self.programs.values_mut() {
            let _ = program.child.kill();
            let _ = program.child.wait();
        }
    }
}

fn run(command: &[String]) -> Result<ProgramOutput> {
    let [program, arguments @ ..] = command else { bail!("no command") };
    let output = Command::new(program)
        .args(arguments)
        .env("VMFERRY_LOG", "info")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    Ok(ProgramOutput {
        status: number(&output.status),
        output: String::from_utf8_lossy(&output.stdout).into_owned(),
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Returns the status as a shell reports it.
fn number(status: &std::process::ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

fn read(path: &Path, from: u64) -> Result<Vec<u8>> {
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(MOST_READ).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &str) -> Vec<String> {
        command.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn programs_are_run_fed_read_and_ended() {
        let folder = tempfile::tempdir().unwrap();
        let (output, errors) = (folder.path().join("out"), folder.path().join("err"));
        let mut programs = ProgramTable::default();
        let start = Request::Start { command: words("cat"), output: output.clone(), errors };
        let Answer::Started { id } = programs.handle(start).unwrap() else { panic!() };
        programs.handle(Request::Type { id, text: "hello\n".into() }).unwrap();
        let read = |programs: &mut ProgramTable| match programs
            .handle(Request::Read { path: output.clone(), from: 2 })
            .unwrap()
        {
            Answer::Read(bytes) => bytes,
            other => panic!("{other:?}"),
        };
        vmferry_testkit::wait("what `cat` writes", || !read(&mut programs).is_empty());
        assert_eq!(read(&mut programs), b"llo\n");
        assert!(matches!(programs.handle(Request::Ended { id }).unwrap(), Answer::Ended(None)));
        programs.handle(Request::Kill { id }).unwrap();
        assert!(matches!(programs.handle(Request::Ended { id }).unwrap(), Answer::Ended(Some(137))));
        assert!(programs.handle(Request::Ended { id: id + 1 }).is_err());
    }

    #[test]
    fn run_returns_status_and_output() {
        let ran = run(&["sh".to_owned(), "-c".to_owned(), "echo a; echo b >&2; exit 3".to_owned()]).unwrap();
        assert_eq!((ran.status, ran.output.as_str(), ran.errors.as_str()), (3, "a\n", "b\n"));
        assert!(run(&words("/nowhere/program")).is_err());
    }
}
