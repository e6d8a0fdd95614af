//! Runs a block as its reader would: guests in their own shells, and the other commands in one
//! shell.

use crate::page::{Block, words};
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use vmferry_testkit::wait_for;

/// A guest that the block started.
struct Guest {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

impl Guest {
    fn start(place: &str, folder: &Path, number: usize, line: &str) -> Self {
        let words = words(line);
        let socket = words.iter().skip_while(|word| *word != "--api").nth(1);
        let socket =
            socket.unwrap_or_else(|| panic!("{place}: give `{line}` an --api, so that it can be ended"));
        let log = folder.join(format!("guest-{number}.log"));
        let mut guest =
            Self { child: shell(folder, &format!("exec {line}"), &log), socket: folder.join(socket), log };
        wait_for(&format!("{place}: `{line}`: {socket:?}"), || {
            let ended = guest.child.try_wait().unwrap();
            let said = read(&guest.log);
            assert!(ended.is_none(), "{place}: `{line}` ended: {ended:?}: {said}");
            // A guest that is restored from a file prints no message.
            let is_up = ["the guest runs", "waiting for a guest at"];
            let up = line.contains("file:") || is_up.iter().any(|words| said.contains(words));
            if up && guest.socket.exists() { Ok(()) } else { Err(said) }
        });
        guest
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn shell(folder: &Path, command: &str, log: &Path) -> Child {
    let bin = Path::new(env!("CARGO_BIN_EXE_vmferry")).parent().unwrap();
    let path = std::env::join_paths(
        std::iter::once(bin.to_owned())
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    );
    let output = File::create(log).unwrap();
    Command::new("bash")
        .args(["-euo", "pipefail", "-c", command])
        .current_dir(folder)
        .env("PATH", path.unwrap())
        .stdin(Stdio::null())
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .spawn()
        .expect("bash")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Returns a free port. Pages use port 7000, which another process may use.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Panics unless every command of `block` succeeds.
pub(crate) fn run(place: &str, block: &Block) {
    let folder = std::env::temp_dir().join(format!("vmferry-docs-{}-{}", std::process::id(), block.line));
    std::fs::create_dir_all(&folder).unwrap();
    let folder = Folder(folder);
    let port = format!("127.0.0.1:{}", free_port());
    // Guests are dropped before the folder.
    let mut guests = Vec::new();
    for (number, part) in parts(block).into_iter().enumerate() {
        match part.replace("127.0.0.1:7000", &port) {
            line if line.starts_with("vmferry run ") => {
                guests.push(Guest::start(place, &folder.0, number, &line))
            }
            script => foreground(place, &folder.0, number, &script, &guests),
        }
    }
}

/// Splits a block into lines that need their own shell, and the scripts between them.
fn parts(block: &Block) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    for line in block.commands() {
        match parts.last_mut() {
            Some(last) if !line.starts_with("vmferry run ") && !last.starts_with("vmferry run ") => {
                last.push('\n');
                last.push_str(&line);
            }
            _ => parts.push(line),
        }
    }
    parts
}

fn foreground(place: &str, folder: &Path, number: usize, script: &str, guests: &[Guest]) {
    let log = folder.join(format!("part-{number}.log"));
    // The error output names the failed line.
    let mut child = shell(folder, &format!("set -x\n{script}"), &log);
    let status =
        wait_for(&format!("{place}: its end"), || child.try_wait().unwrap().ok_or_else(|| read(&log)));
    let logs: Vec<_> = guests.iter().map(|guest| read(&guest.log)).collect();
    assert!(status.success(), "{place}: {status}: {}\nguests: {logs:?}", read(&log));
}
