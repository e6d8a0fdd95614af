//! Migrations over sockets that the processes inherit, or get over their control sockets.

use crate::support::{
    Folder, PATIENCE, Run, VMFERRY, can_track, code, document, errors, finish, kinds, vmferry,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use vmferry_control::Client;

/// Number of the first passed descriptor in its process. Further descriptors have the next numbers.
const FIRST: RawFd = 200;

/// Starts the command with `descriptors` open under their numbers.
fn spawn_with(args: &[&str], descriptors: Vec<OwnedFd>) -> Child {
    let mut command = Command::new(VMFERRY);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let arrange = move || {
        // Duplicate to high numbers first: a descriptor may have a number that another one gets.
        let high: Vec<_> = descriptors
            .iter()
            // SAFETY: the call duplicates a descriptor that is open.
            .map(|descriptor| unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 400) })
            .collect();
        for (from, to) in high.into_iter().zip(FIRST..) {
            // SAFETY: the call takes two numbers; no code in the child owns the second one.
            if unsafe { libc::dup2(from, to) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes only calls that are permitted between fork and exec. The vector was
    // allocated before the fork. The small vector in the child is allocated by an allocator that
    // handles fork.
    unsafe { command.pre_exec(arrange) };
    command.spawn().unwrap()
}

/// Starts a `run` with `descriptors` open under their numbers. A forbidden system call ends the
/// process.
fn run_with(kind: &str, folder: &Folder, name: &str, more: &[&str], descriptors: Vec<OwnedFd>) -> Run {
    let api = folder.path(name);
    let mut args = vec!["run", "--guest", kind, "--memory", "96M", "--api", &api, "--peer-timeout", "120s"];
    args.extend(["--sandbox", "kill"]);
    args.extend(more);
    let run = Run::of(spawn_with(&args, descriptors), api);
    run.wait("its control socket", |_| true);
    run
}

fn unix_pair() -> (OwnedFd, OwnedFd) {
    let (here, there) = UnixStream::pair().unwrap();
    (here.into(), there.into())
}

fn tcp_pair() -> (OwnedFd, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (here.into(), listener.accept().unwrap().0.into())
}

fn connection(uri: &str) -> OwnedFd {
    TcpStream::connect(uri.strip_prefix("tcp:").unwrap()).unwrap().into()
}

/// Returns a URI `fd:` with `count` numbers.
fn numbered(count: usize) -> String {
    let numbers: Vec<_> = (FIRST..).take(count).map(|number| number.to_string()).collect();
    format!("fd:{}", numbers.join(","))
}

/// Begins a migration over `descriptors` of the command's process.
fn begin_over(source: &Run, descriptors: Vec<OwnedFd>, more: &[&str]) -> Child {
    let uri = numbered(descriptors.len());
    let args = ["migrate", "--api", &source.api, &uri, "--peer-timeout", "120s"];
    spawn_with(&[&args[..], more].concat(), descriptors)
}

/// Migrates over `descriptors` of the command's process.
fn migrate_over(source: &Run, descriptors: Vec<OwnedFd>, more: &[&str]) -> std::process::Output {
    finish(begin_over(source, descriptors, more))
}

fn arrived(target: &Run, moved: &std::process::Output) -> Value {
    assert_eq!(code(moved), 0, "{moved:?}");
    let report = document(moved);
    assert!(report["outcome"] == "completed" && report["mismatched_pages"] == 0, "{report}");
    target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    target.goes_on();
    target.whole();
    report
}

fn client(run: &Run) -> Client {
    Client::connect(Path::new(&run.api), PATIENCE).unwrap()
}

fn refused(client: &mut Client, command: &str, arguments: Value) -> String {
    client.execute(command, arguments).unwrap_err().to_string()
}

/// A client cannot name descriptors that the process has opened itself: its control socket, its
/// memory, its log.
#[test]
fn client_cannot_name_descriptors_that_were_not_passed() {
    let folder = Folder::new();
    let (here, _there) = unix_pair();
    let args = ["--incoming", "defer", "--pass-fd", "200"];
    let target = run_with("process", &folder, "target", &args, vec![here]);
    let mut qmp = client(&target);
    let open: Vec<RawFd> = std::fs::read_dir(format!("/proc/{}/fd", target.child.id()))
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        .collect();
    assert!(open.contains(&FIRST) && open.len() > 5, "{open:?}");
    for number in open.into_iter().filter(|number| *number != FIRST) {
        let error = refused(&mut qmp, "migrate-incoming", json!({ "uri": format!("fd:{number}") }));
        let want = format!("no descriptor '{number}' was passed to this process");
        assert!(error.contains(&want) && error.contains("known: 200"), "{number}: {error}");
    }
    // The control socket still accepts clients.
    client(&target).execute("query-status", json!({})).unwrap();
    let status = target.status().unwrap();
    assert!(status["vm"]["place"] == "awaited" && status["vm"]["incoming"].is_null(), "{status}");
    qmp.execute("migrate-incoming", json!({ "uri": "fd:200" })).unwrap();
    target.wait("the target waiting", |s| s["vm"]["incoming"] == "fd:200");
}

#[test]
fn guest_arrives_over_inherited_listening_sockets() {
    if !can_track() {
        return;
    }
    let listening = || TcpListener::bind("127.0.0.1:0").unwrap();
    for way in ["--incoming", "--pass-fd", "LISTEN_FDS"] {
        let folder = Folder::new();
        let socket = listening();
        let uri = format!("tcp:{}", socket.local_addr().unwrap());
        let target = match way {
            "--incoming" => {
                run_with("process", &folder, "target", &["--incoming", "fd:200"], vec![socket.into()])
            }
            "--pass-fd" => {
                let args = ["--incoming", "defer", "--pass-fd", "200"];
                let target = run_with("process", &folder, "target", &args, vec![socket.into()]);
                client(&target).execute("migrate-incoming", json!({ "uri": "fd:200" })).unwrap();
                target
            }
            _ => {
                // Start the target as a service manager does.
                let script = r#"exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@""#;
                let api = folder.path("target");
                let args = ["run", "--guest", "process", "--memory", "96M", "--api", &api];
                let child = Command::new("sh")
                    .args(["-c", script, "sh", VMFERRY])
                    .args(args)
                    .args(["--sandbox", "kill", "--peer-timeout", "120s", "--incoming", "defer"])
                    .stdin(OwnedFd::from(socket))
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap();
                let target = Run::of(child, api);
                target.wait("its control socket", |_| true);
                client(&target).execute("migrate-incoming", json!({ "uri": "fd:3" })).unwrap();
                target
            }
        };
        target.wait("the target listening", |s| s["vm"]["incoming"] == *uri);
        let source = Run::source("process", &folder);
        arrived(&target, &source.migrate(&uri, &["--verify", "--json", "-"]));
    }
}

#[test]
fn guest_moves_over_one_or_several_connected_sockets() {
    if !can_track() {
        return;
    }
    let ways: [(usize, &[&str]); 4] = [
        (1, &["--verify"]),
        (4, &["--verify"]),
        (1, &["--mode", "postcopy"]),
        // Control, two bulk, two urgent, probe.
        (6, &["--mode", "postcopy", "--max-bandwidth", "40M/s"]),
    ];
    for kind in kinds() {
        for (count, more) in ways {
            let folder = Folder::new();
            let source = Run::source(kind, &folder);
            let more = [more, &["--json", "-"]].concat();
            let moved = if count == 6 {
                // The target listens.
                let (target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
                // The kernel accepts the connections for a target that has not started. A running
                // target would close a connection that is silent for 5 s, which a starved host may
                // need to start the command.
                target.signal(Signal::STOP);
                let here = (0..count).map(|_| connection(&uri)).collect();
                let child = begin_over(&source, here, &more);
                source.wait("the migration", |s| s["vm"]["place"] == "moving");
                target.signal(Signal::CONT);
                (finish(child), target)
            } else {
                let pair = if kind == "process" { tcp_pair } else { unix_pair };
                let (here, there) = (0..count).map(|_| pair()).unzip();
                let at = numbered(count);
                let target = run_with(kind, &folder, "target", &["--incoming", &at], there);
                (migrate_over(&source, here, &more), target)
            };
            let report = arrived(&moved.1, &moved.0);
            let postcopy = more.contains(&"--mode");
            assert_eq!(report["postcopy"].is_object(), postcopy, "{report}");
            if !postcopy {
                // Pages that the guest reports as free are not compared.
                let compared = report["verified_pages"].as_u64().zip(report["skipped_pages"].as_u64());
                assert_eq!(compared.map(|(verified, skipped)| verified + skipped), Some(96 << 8), "{report}");
            }
            assert!(report["bytes"]["raw_pages"].as_u64() > Some(4000), "{report}");
        }
    }
}

/// The way of QEMU's management tools: one connection to a listening target, passed to the source.
#[test]
fn guest_moves_with_getfd_and_migrate() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let (target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    let mut qmp = client(&source);
    let error = refused(&mut qmp, "migrate", json!({ "uri": "fd:migrate" }));
    assert!(error.contains("no descriptor 'migrate'") && error.contains("getfd"), "{error}");
    let error = refused(&mut qmp, "getfd", json!({ "fdname": "migrate" }));
    assert!(error.contains("SCM_RIGHTS"), "{error}");
    let null = std::fs::File::open("/dev/null").unwrap();
    let error = qmp.pass("migrate", null.as_fd()).unwrap_err().to_string();
    assert!(error.contains("not a socket"), "{error}");
    qmp.pass("migrate", unix_pair().0.as_fd()).unwrap();
    qmp.execute("closefd", json!({ "fdname": "migrate" })).unwrap();
    let error = refused(&mut qmp, "closefd", json!({ "fdname": "migrate" }));
    assert!(error.contains("no descriptor 'migrate'"), "{error}");

    // As above, the kernel accepts the connection for a target that has not started.
    target.signal(Signal::STOP);
    qmp.pass("migrate", connection(&uri).as_fd()).unwrap();
    qmp.execute("migrate", json!({ "uri": "fd:migrate" })).unwrap();
    target.signal(Signal::CONT);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = qmp.execute("query-migrate", json!({})).unwrap();
        match status["status"].as_str() {
            Some("completed") => break,
            Some("failed" | "cancelled") => panic!("{status}"),
            _ => assert!(Instant::now() < deadline, "it does not end: {status}"),
        }
        std::thread::yield_now();
    }
    target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    target.goes_on();
    target.whole();
}

#[test]
fn unsuitable_sockets_are_named_and_the_guest_stays() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let ends = |count: usize| (0..count).map(|_| unix_pair().0).collect::<Vec<_>>();
    let listening = OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap());
    let cases: [(Vec<OwnedFd>, &[&str], i32, &str); 5] = [
        (ends(3), &["--mode", "postcopy"], 1, "3 sockets were passed for 5 channels"),
        (ends(3), &["--channels", "4"], 1, "3 sockets were passed for 5 channels"),
        (vec![null()], &[], 1, "the descriptor is not a socket"),
        (vec![listening], &[], 1, "the socket listens, and is not connected"),
        (ends(1), &["--mode", "auto"], 2, "omit --plan and --mode auto"),
    ];
    for (descriptors, more, status, words) in cases {
        let output = migrate_over(&source, descriptors, more);
        assert!(code(&output) == status && errors(&output).contains(words), "{words}: {output:?}");
        source.goes_on();
    }
    let output = source.migrate("fd:200", &[]);
    assert!(errors(&output).contains("started without descriptor 200"), "{output:?}");
    // A descriptor that was passed for a refused migration is closed.
    let error = refused(&mut client(&source), "closefd", json!({ "fdname": "none" }));
    assert!(error.contains("none waits to be used"), "{error}");
    // The peer closes the connection.
    let (here, there) = tcp_pair();
    drop(there);
    let output = migrate_over(&source, vec![here], &[]);
    assert!(code(&output) == 1 && errors(&output).contains("did not answer the greeting"), "{output:?}");
    source.goes_on();
    // A target whose only connection has ended cannot be reached by a source any more.
    let (here, there) = tcp_pair();
    let mut target = run_with("process", &folder, "target", &["--incoming", "fd:200"], vec![there]);
    drop(here);
    assert_eq!(crate::support::wait_for_end(&mut target.child), Some(1));
    for (args, status, words) in [
        (&["--pass-fd", "200"][..], 1, "--pass-fd 200: this process was started without descriptor 200"),
        (&["--incoming", "fd:200"], 1, "no descriptor '200' was passed"),
        (&["--pass-fd", "2"], 2, "a standard stream"),
    ] {
        let output = vmferry(&[&["run", "--guest", "process", "--memory", "64M"][..], args].concat());
        assert!(code(&output) == status && errors(&output).contains(words), "{words}: {output:?}");
    }
}
