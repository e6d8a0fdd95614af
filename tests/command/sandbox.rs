//! Confinement of the process that runs a guest: of each thread, before and during a migration, at
//! source and target. `crates/confine/tests` tests what a confined thread cannot do. These tests
//! check that the command's threads are confined.

use crate::support::{
    Folder, Need, Run, VMFERRY, WORKLOAD, code, errors, finish, has_kvm, kinds, print_line, skip, spawn,
    vmferry,
};
use crate::terminal::Terminal;
use crate::threads::{can_confine, confined, filters_around, threads};
use std::os::unix::fs::chown;

#[test]
fn every_thread_is_confined_before_and_during_a_migration_at_source_and_target() {
    if !can_confine() {
        return;
    }
    for kind in kinds() {
        let folder = Folder::new();
        let disk = folder.path("disk");
        std::fs::write(&disk, [0; 1 << 16]).unwrap();
        let mut more = vec!["--workload", WORKLOAD, "--metrics", "127.0.0.1:0"];
        if kind == "kvm" {
            more.extend(["--disk", &disk, "--cpus", "2"]);
        }
        let source = Run::start(kind, &folder, "source", &more);
        let status = source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let names = confined(&source, "before");
        let wanted = if kind == "kvm" { vec!["vcpu 0", "vcpu 1", "disk-0"] } else { vec!["vcpu-0"] };
        for name in wanted.iter().chain(&["vmferry", "api", "metrics", "speed", "signals"]) {
            assert!(names.iter().any(|there| there == name), "{name}: {names:?}");
        }
        let told = &status["vm"]["confinement"];
        assert_eq!((&told["mode"], &told["seccomp"]["in_force"]), (&"kill".into(), &true.into()), "{told}");
        assert_eq!(told["capabilities"]["in_force"], true, "{told}");
        print_line(format!("{kind}: {told}"));
        if kind == "kvm" {
            continue;
        }
        let (target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
        confined(&target, "while it waits");
        let args = ["migrate", "--api", &source.api, &uri, "--max-bandwidth", "1M/s", "--channels", "2"];
        let migration = spawn(&args);
        source.wait("a pass", |s| s["progress"]["pass"].as_u64() > Some(0) || s["state"] == "precopy");
        let (here, there) = (confined(&source, "source"), confined(&target, "target"));
        print_line(format!("threads of a migration: {here:?}, {there:?}"));
        assert!(here.iter().any(|name| name.starts_with("source-")), "{here:?}");
        assert!(there.iter().any(|name| name.starts_with("target-")), "{there:?}");
        assert_eq!(code(&vmferry(&["cancel", "--api", &source.api])), 0);
        assert_eq!(code(&finish(migration)), 1);
        source.goes_on();
    }
}

#[test]
fn sandbox_can_be_switched_off_and_status_names_what_is_not_in_force() {
    let folder = Folder::new();
    for (mode, in_force) in [("off", 0), ("log", 2)] {
        let run = Run::start("process", &folder, mode, &["--workload", WORKLOAD, "--sandbox", mode]);
        let status = run.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let told = &status["vm"]["confinement"];
        assert_eq!(told["mode"], mode, "{told}");
        for measure in ["seccomp", "landlock", "capabilities", "jail"] {
            assert_eq!(told[measure]["in_force"], false, "{told}");
            assert!(told[measure]["detail"].as_str().is_some_and(|why| why.len() > 8), "{told}");
        }
        let around = filters_around();
        assert!(threads(&run).iter().all(|thread| thread.number("Seccomp_filters") >= around + in_force));
        // All files can be reached.
        let file = format!("file:{}", folder.path(&format!("{mode}.snapshot")));
        let output = run.migrate(&file, &["--keep-running"]);
        assert_eq!(code(&output), 0, "{output:?}");
    }
}

#[test]
fn only_files_that_the_command_line_names_are_reached() {
    let (folder, elsewhere) = (Folder::new(), Folder::new());
    let run = Run::source("process", &folder);
    let file = format!("file:{}", elsewhere.path("guest"));
    let output = run.migrate(&file, &["--keep-running"]);
    assert!(code(&output) == 1 && errors(&output).contains("--migrate-dir"), "{output:?}");
    run.goes_on();
    // A path with `..` is refused, too.
    let name = elsewhere.path("");
    let name = name.trim_end_matches('/').rsplit('/').next().unwrap();
    let output = run.migrate(&format!("file:{}/../{name}/guest", folder.path("")), &["--keep-running"]);
    assert!(code(&output) == 1 && errors(&output).contains("--migrate-dir"), "{output:?}");
    let file = format!("file:{}", folder.path("guest"));
    assert_eq!(code(&run.migrate(&file, &["--keep-running"])), 0);
    assert!(!std::path::Path::new(&elsewhere.path("guest")).exists());
    let refused = vmferry(&["run", "--guest", "process", "--migrate-dir", &folder.path("missing")]);
    assert!(code(&refused) == 1 && errors(&refused).contains("there is no such folder"), "{refused:?}");
}

#[test]
fn console_is_set_up_read_and_restored() {
    if !has_kvm() {
        return;
    }
    let args = ["run", "--memory", "64M", "--workload", "idle", "--serial", "stdio"];
    let mut terminal = Terminal::foreground(&args);
    terminal.wait_for("Ctrl-] ends vmferry");
    terminal.press("text\r");
    terminal.press("\u{1d}");
    assert_eq!(terminal.end().code(), Some(0), "{}", terminal.text());
}

/// User of a jailed process.
const JAILED: u32 = 64_001;

#[test]
fn jail_contains_only_the_named_files() {
    let folder = Folder::new();
    let jail = folder.path("jail");
    let jailed = ["--jail", &jail, "--uid", "64001", "--gid", "64001"];
    if !rustix::process::geteuid().is_root() {
        let output = vmferry(&[&["run", "--guest", "process", "--memory", "64M"], &jailed[..]].concat());
        assert!(code(&output) == 1 && errors(&output).contains("only root can make a jail"), "{output:?}");
        return skip(Need::Root, "only the refusal of a jail was tested");
    }
    let root = vmferry(&["run", "--guest", "process", "--jail", &jail, "--uid", "0", "--gid", "0"]);
    assert!(code(&root) == 2 && errors(&root).contains("must not be root"), "{root:?}");
    for kind in kinds() {
        let own = Folder::new();
        chown(own.path(""), Some(JAILED), Some(JAILED)).unwrap();
        let serial = own.path("serial");
        let mut more = vec!["--workload", WORKLOAD];
        more.extend(jailed);
        if kind == "kvm" {
            // Root creates no file in a folder of another user.
            let args = ["run", "--memory", "64M", "--serial", &serial];
            let output = vmferry(&[&args[..], &jailed[..]].concat());
            assert!(code(&output) == 1 && errors(&output).contains("must exist"), "{output:?}");
            std::fs::write(&serial, "").unwrap();
            chown(&serial, Some(JAILED), Some(JAILED)).unwrap();
        }
        if kind == "kvm" {
            more.extend(["--serial", &serial]);
        }
        let source = Run::start(kind, &own, "source", &more);
        source.wait("the guest running", |s| s["vm"]["guest"]["writes"].as_u64() > Some(100));
        let root = format!("/proc/{}/root", source.child.id());
        let mut there: Vec<_> = std::fs::read_dir(&root)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        there.sort();
        print_line(format!("{kind}: in the jail: {there:?}"));
        for gone in ["root", "home", "bin", "usr/bin", "etc/passwd", "var/log"] {
            assert!(!std::path::Path::new(&format!("{root}/{gone}")).exists(), "{gone}");
        }
        assert_eq!(std::fs::read_dir(&jail).unwrap().count(), 0, "the host sees an empty folder");
        for thread in threads(&source) {
            assert!(thread.fields["Uid"].split('\t').all(|id| id == "64001"), "{:?}", thread.fields);
            assert_eq!(thread.fields.get("Groups").map(String::as_str).unwrap_or(""), "");
        }
        let told = source.status().unwrap()["vm"]["confinement"].clone();
        assert_eq!(told["jail"]["in_force"], true, "{told}");
        // From jail to jail: files that a migration opens late are in the jail as well.
        let mut more = vec!["--incoming", "tcp:127.0.0.1:0"];
        let other = folder.path("other");
        more.extend(["--jail", &other, "--uid", "64001", "--gid", "64001"]);
        let target = Run::start(kind, &own, "target", &more);
        let status = target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
        let uri = status["vm"]["incoming"].as_str().unwrap().to_owned();
        let moved = source.migrate(&uri, &["--mode", "postcopy"]);
        assert_eq!(code(&moved), 0, "{moved:?}");
        target.wait("the guest being here", |s| s["vm"]["place"] == "running");
        target.goes_on();
        let file = format!("file:{}", own.path("copy"));
        assert_eq!(code(&target.migrate(&file, &["--keep-running"])), 0);
        drop(source);
        target.quit();
        assert!(!std::path::Path::new(&own.path("target")).exists(), "its socket is gone");
        // A process that may have to listen at a low port keeps the capability to do so.
        let third = folder.path("third");
        for mode in ["on", "off"] {
            let more = ["--incoming", "defer", "--jail", &third, "--uid", "64001", "--gid", "64001"];
            let waits = Run::start(kind, &own, mode, &[&more[..], &["--sandbox", mode]].concat());
            let status = waits.wait("the target waiting", |_| true);
            let told = &status["vm"]["confinement"]["capabilities"];
            assert!(told["detail"].as_str().unwrap().contains("CAP_NET_BIND_SERVICE"), "{told}");
            const CAP_NET_BIND_SERVICE: u64 = 1 << 10;
            for thread in threads(&waits) {
                for set in ["CapPrm", "CapEff", "CapBnd"] {
                    let has = u64::from_str_radix(&thread.fields[set], 16).unwrap();
                    assert_eq!(has, CAP_NET_BIND_SERVICE, "{set}: {:?}", thread.fields);
                }
            }
            waits.quit();
        }
    }
}

/// Descriptors of the parent process are closed, and only its user can read the output of a
/// console.
#[test]
fn inherited_descriptors_are_closed_and_console_files_have_mode_0600() {
    let folder = Folder::new();
    let (api, serial) = (folder.path("api"), folder.path("serial"));
    let script = r#"exec 8</etc/hostname 9</etc/passwd; exec "$@""#;
    let child = std::process::Command::new("sh")
        .args(["-c", script, "sh", VMFERRY, "run", "--guest", "process", "--memory", "64M"])
        .args(["--workload", "idle,ws=4M", "--api", &api])
        .spawn()
        .unwrap();
    let run = Run::of(child, api);
    run.wait("its control socket", |_| true);
    let open: Vec<_> = std::fs::read_dir(format!("/proc/{}/fd", run.child.id()))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .collect();
    assert!(open.len() > 2 && open.iter().all(|file| !file.starts_with("/etc")), "{open:?}");
    if has_kvm() {
        let _kvm = Run::start("kvm", &folder, "kvm", &["--serial", &serial, "--workload", "idle,ws=4M"]);
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(&serial).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
