//! Many foreign, silent or slow connections to a process. `vmferry-bench limits` tests the same
//! with thousands.

use crate::support::{Folder, Run, can_track, code, errors, vmferry};
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

/// More silent connections than a target accepts at once.
const SILENT: usize = 300;
const HALF: usize = 64;
/// Most descriptors that a process may have open meanwhile.
const MOST_DESCRIPTORS: usize = 400;
/// Most threads that a process may have meanwhile.
const MOST_THREADS: usize = 80;

fn count(run: &Run, what: &str) -> usize {
    std::fs::read_dir(format!("/proc/{}/{what}", run.child.id())).unwrap().count()
}

#[test]
fn many_silent_peers_do_not_lock_out_the_source_and_cost_bounded_resources() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let (target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    let at = uri.strip_prefix("tcp:").unwrap();
    let mut unknown_peers: Vec<TcpStream> = (0..SILENT).map(|_| TcpStream::connect(at).unwrap()).collect();
    for _ in 0..HALF {
        let mut stream = TcpStream::connect(at).unwrap();
        // The first byte of a greeting. The write fails if the target has closed the connection.
        let _ = stream.write_all(b"v");
        unknown_peers.push(stream);
    }
    // The control socket of the source gets many silent clients, too.
    let clients: Vec<UnixStream> = (0..20).filter_map(|_| UnixStream::connect(&source.api).ok()).collect();
    let moved = vmferry(&["migrate", "--api", &source.api, &uri]);
    assert_eq!(code(&moved), 0, "{}", errors(&moved));
    assert!(count(&target, "fd") <= MOST_DESCRIPTORS, "{} descriptors", count(&target, "fd"));
    assert!(count(&target, "task") <= MOST_THREADS, "{} threads", count(&target, "task"));
    target.goes_on();
    drop((unknown_peers, clients));
}
