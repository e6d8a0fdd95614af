//! Programs that are started, fed, watched and ended at some place: here, or on another machine of the lab (see [`crate::peer`]).
//!
//! A scenario says the same to both, so that it can move a guest between two processes or between two kernels.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

/// What can be asked of a place.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Start a program that goes on: its output into one file, its errors into another.
    Start {
        /// The program and its arguments.
        command: Vec<String>,
        /// For standard output.
        output: PathBuf,
        /// For standard error.
        errors: PathBuf,
    },
    /// Run a program to its end.
    Run {
        /// The program and its arguments.
        command: Vec<String>,
    },
    /// Give a program this on its standard input.
    Type {
        /// What `Start` answered.
        id: u32,
        /// The text.
        text: String,
    },
    /// How a program ended, if it did.
    Ended {
        /// What `Start` answered.
        id: u32,
    },
    /// End a program at once, and wait until it is gone.
    Kill {
        /// What `Start` answered.
        id: u32,
    },
    /// What a file holds from a place on.
    Read {
        /// The file.
        path: PathBuf,
        /// Where to begin, in bytes.
        from: u64,
    },
}

/// What a place answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The program has this number.
    Started {
        /// The number.
        id: u32,
    },
    /// The program ended.
    Ran(Ran),
    /// The program ended so; `None` if it did not, 128 and more for signals.
    Ended(Option<i32>),
    /// What was read.
    Read(Vec<u8>),
    /// Done.
    Done,
    /// It cannot be done.
    Failed(String),
}

/// How a program ended, and what it said.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ran {
    /// Its status; 128 and more for signals.
    pub status: i32,
    /// Its standard output.
    pub output: String,
    /// Its standard error.
    pub errors: String,
}

/// Where programs run.
pub trait Place: std::fmt::Debug {
    /// Has it done.
    ///
    /// # Errors
    /// If it cannot be done, or nobody answers.
    fn ask(&self, request: Request) -> Result<Answer>;
}

/// This machine.
#[derive(Debug, Default)]
pub struct Here {
    desk: RefCell<Desk>,
}

impl Place for Here {
    fn ask(&self, request: Request) -> Result<Answer> {
        self.desk.borrow_mut().handle(request)
    }
}

/// Most that one `Read` answers: consoles are short, and the next one goes on.
const MOST_READ: u64 = 1 << 20;

/// Programs of one place. When it is dropped they end.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    next: u32,
    programs: BTreeMap<u32, Program>,
}

#[derive(Debug)]
struct Program {
    child: Child,
    input: ChildStdin,
}

impl Desk {
    /// Does what is asked.
    pub(crate) fn handle(&mut self, request: Request) -> Result<Answer> {
        Ok(match request {
            Request::Start { command, output, errors } => {
                Answer::Started { id: self.start(&command, &output, &errors)? }
            }
            Request::Run { command } => Answer::Ran(run(&command)?),
            Request::Type { id, text } => {
                let program = self.program(id)?;
                program.input.write_all(text.as_bytes()).context("the program does not listen")?;
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

impl Drop for Desk {
    fn drop(&mut self) {
        for program in self.programs.values_mut() {
            let _ = program.child.kill();
            let _ = program.child.wait();
        }
    }
}

fn run(command: &[String]) -> Result<Ran> {
    let [program, arguments @ ..] = command else { bail!("no command") };
    let output = Command::new(program)
        .args(arguments)
        .env("VMFERRY_LOG", "info")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    Ok(Ran {
        status: number(&output.status),
        output: String::from_utf8_lossy(&output.stdout).into_owned(),
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// The status as a shell would give it.
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
        let mut desk = Desk::default();
        let start = Request::Start { command: words("cat"), output: output.clone(), errors };
        let Answer::Started { id } = desk.handle(start).unwrap() else { panic!() };
        desk.handle(Request::Type { id, text: "hello\n".into() }).unwrap();
        let read =
            |desk: &mut Desk| match desk.handle(Request::Read { path: output.clone(), from: 2 }).unwrap() {
                Answer::Read(bytes) => bytes,
                other => panic!("{other:?}"),
            };
        vmferry_testkit::wait("what `cat` writes", || !read(&mut desk).is_empty());
        assert_eq!(read(&mut desk), b"llo\n");
        assert!(matches!(desk.handle(Request::Ended { id }).unwrap(), Answer::Ended(None)));
        desk.handle(Request::Kill { id }).unwrap();
        assert!(matches!(desk.handle(Request::Ended { id }).unwrap(), Answer::Ended(Some(137))));
        assert!(desk.handle(Request::Ended { id: id + 1 }).is_err());
    }

    #[test]
    fn a_program_that_ran_says_how() {
        let ran = run(&["sh".to_owned(), "-c".to_owned(), "echo a; echo b >&2; exit 3".to_owned()]).unwrap();
        assert_eq!((ran.status, ran.output.as_str(), ran.errors.as_str()), (3, "a\n", "b\n"));
        assert!(run(&words("/nowhere/program")).is_err());
    }
}
