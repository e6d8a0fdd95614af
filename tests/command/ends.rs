//! End and restart of a guest's machine: by signals, by its power button, by a reset.

#[path = "../../crates/vmm/src/boot/testing.rs"]
#[expect(dead_code, reason = "the loaders' tests use more of it")]
mod image;

use crate::support::{
    Folder, Run, code, errors, finish, has_kvm, kinds, print_line, spawn, vmferry, wait_for, wait_for_end,
};
use image::TestElf;
use rustix::process::Signal;

/// Waits for the end of the process. Returns its exit status.
fn ended(run: &mut Run) -> i32 {
    wait_for_end(&mut run.child).unwrap_or(-1)
}

#[test]
fn sigterm_ends_a_guest_without_driver_for_its_power_button() {
    for kind in kinds() {
        let folder = Folder::new();
        let mut run = Run::source(kind, &folder);
        let output = vmferry(&["powerdown", "--api", &run.api]);
        assert_eq!(code(&output), 1, "{output:?}");
        let why = if kind == "kvm" { "does not listen for its power button" } else { "has no power button" };
        assert!(errors(&output).contains(why), "{output:?}");
        run.goes_on();
        run.signal(Signal::TERM);
        assert_eq!(ended(&mut run), 0, "{kind}");
        assert!(!std::path::Path::new(&run.api).exists(), "the control socket was left behind");
    }
}

#[test]
fn sighup_and_sigint_end_the_process_in_the_ordinary_way() {
    for signal in [Signal::HUP, Signal::INT] {
        let folder = Folder::new();
        let mut run = Run::source("process", &folder);
        run.signal(signal);
        assert_eq!(ended(&mut run), 0);
        assert!(!std::path::Path::new(&run.api).exists(), "the control socket was left behind");
    }
}

/// Returns a kernel that writes a byte to its serial port, waits a little, and resets its machine.
fn resetting() -> Vec<u8> {
    let code = [
        // mov dx, 0x3f8; mov al, 'r'; out dx, al
        &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'r', 0xee][..],
        // mov ecx, 20000; loop
        &[0xb9, 0x20, 0x4e, 0, 0, 0xe2, 0xfe],
        // mov dx, 0xcf9; mov al, 6; out dx, al; hlt
        &[0x66, 0xba, 0xf9, 0x0c, 0xb0, 6, 0xee, 0xf4],
    ]
    .concat();
    TestElf::with_entry(&code).build()
}

fn times(serial: &str) -> usize {
    std::fs::read(serial).unwrap_or_default().iter().filter(|byte| **byte == b'r').count()
}

#[test]
fn guest_that_resets_during_a_migration_is_started_again_and_runs() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let (kernel, serial) = (folder.path("kernel"), folder.path("serial"));
    std::fs::write(&kernel, resetting()).unwrap();
    // Content that takes seconds to send.
    let initrd = folder.path("initrd");
    std::fs::write(&initrd, (0..4u32 << 20).map(|at| (at % 251).to_le_bytes()[0]).collect::<Vec<_>>())
        .unwrap();
    let boot = ["--kernel", &kernel, "--initrd", &initrd, "--serial", &serial];
    let run = Run::sized("kvm", "16M", &folder, "api", &boot);
    let target = Run::sized("kvm", "16M", &folder, "target", &["--incoming", "tcp:127.0.0.1:0"]);
    let status = target.wait("the target listening", |s| s["vm"]["incoming"].is_string());
    // The guest resets soon after its start, and is not started again before the migration ends.
    let output = run.migrate(status["vm"]["incoming"].as_str().unwrap(), &["--max-bandwidth", "2M/s"]);
    // The migration could not resume a guest that had reset.
    assert_eq!(code(&output), 6, "{output:?}");
    let before = times(&serial);
    wait_for("further starts of the guest", || {
        let times = times(&serial);
        if times < before + 3 { Err(times) } else { Ok(()) }
    });
    assert_eq!(run.status().unwrap()["vm"]["place"], "running");
}

#[test]
fn guest_that_resets_is_started_again_without_leaks() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let (kernel, serial) = (folder.path("kernel"), folder.path("serial"));
    let disk = folder.path("disk");
    std::fs::write(&kernel, resetting()).unwrap();
    std::fs::write(&disk, [0; 1 << 16]).unwrap();
    let common = ["--kernel", &kernel, "--serial", &serial, "--disk", &disk];
    let mut run = Run::sized("kvm", "16M", &folder, "api", &common);
    let reach = |count| {
        wait_for("starts of the guest", || {
            let times = times(&serial);
            if times < count { Err(times) } else { Ok(()) }
        });
    };
    let held = || {
        let here =
            |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", run.child.id())).unwrap().count();
        // A command in progress has a socket and a thread.
        (here("fd"), here("task"))
    };
    reach(3);
    let before = held();
    // After seven resets, a leaked descriptor or thread of each reset is visible. During a reset
    // there may be a few more.
    reach(10);
    wait_for(&format!("files and threads as before, {before:?}"), || {
        let after = held();
        if after.0 <= before.0 + 1 && after.1 <= before.1 + 1 { Ok(()) } else { Err(after) }
    });
    let status = run.status().unwrap();
    assert_eq!(status["vm"]["place"], "running", "{status}");
    // The disk stayed locked.
    let other = vmferry(&["run", "--memory", "16M", "--kernel", &kernel, "--disk", &disk]);
    assert!(code(&other) == 1 && errors(&other).contains("is in use by"), "{other:?}");
    assert_eq!(code(&vmferry(&["quit", "--api", &run.api])), 0);
    assert_eq!(ended(&mut run), 0);
}

#[test]
fn guest_that_resets_ends_the_command_with_on_reset_exit() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let kernel = folder.path("kernel");
    std::fs::write(&kernel, resetting()).unwrap();
    let output = finish(spawn(&["run", "--memory", "16M", "--kernel", &kernel, "--on-reset", "exit"]));
    assert_eq!(code(&output), 5, "{output:?}");
    assert!(errors(&output).contains("it is not started again (exit status 5)"), "{output:?}");
}

#[test]
fn vm_needs_little_memory_besides_guest_memory() {
    if !has_kvm() {
        return;
    }
    let folder = Folder::new();
    let disk = folder.path("disk");
    std::fs::write(&disk, [0; 1 << 16]).unwrap();
    let more = ["--workload", "idle", "--disk", &disk, "--rng", "on", "--balloon", "on", "--cpus", "2"];
    let run = Run::sized("kvm", "1G", &folder, "api", &more);
    let status = run.wait("the guest running", |s| s["vm"]["guest"]["t_us"].as_u64() > Some(0));
    let overhead = status["vm"]["overhead_kib"].as_u64().unwrap();
    print_line(format!("beside its guest's memory the VM takes {overhead} KiB"));
    assert!((256..16 << 10).contains(&overhead), "{overhead} KiB");
}
