//! Strangers at the doors of a process: many, silent, or slow with what they say. `vmferry-bench limits` is the same with thousands.

use crate::support::{Folder, Run, can_track, code, errors, vmferry};
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

/// More than a target lets be silent, and more than it hears at once.
const SILENT: usize = 300;
const HALF: usize = 64;
/// What a process may have open meanwhile, and its threads.
const MOST_DESCRIPTORS: usize = 400;
const MOST_THREADS: usize = 80;

fn count(run: &Run, what: &str) -> usize {
    std::fs::read_dir(format!("/proc/{}/{what}", run.child.id())).unwrap().count()
}

#[test]
fn a_crowd_keeps_no_source_out_and_costs_a_bounded_amount() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let (target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    let at = uri.strip_prefix("tcp:").unwrap();
    let mut strangers: Vec<TcpStream> = (0..SILENT).map(|_| TcpStream::connect(at).unwrap()).collect();
    for _ in 0..HALF {
        let mut stream = TcpStream::connect(at).unwrap();
        // Half a word, and no more of it; it may have been sent away already.
        let _ = stream.write_all(b"v");
        strangers.push(stream);
    }
    // The control socket of the source has a crowd, too.
    let clients: Vec<UnixStream> = (0..20).filter_map(|_| UnixStream::connect(&source.api).ok()).collect();
    let moved = vmferry(&["migrate", "--api", &source.api, &uri]);
    assert_eq!(code(&moved), 0, "{}", errors(&moved));
    assert!(count(&target, "fd") <= MOST_DESCRIPTORS, "{} descriptors", count(&target, "fd"));
    assert!(count(&target, "task") <= MOST_THREADS, "{} threads", count(&target, "task"));
    target.goes_on();
    drop((strangers, clients));
}
