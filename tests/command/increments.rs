//! Snapshots with the pages that differ from those of an earlier one, of guests that write all the
//! while.

use crate::snapshot::{busy, restored, snapshot};
use crate::support::{Folder, Run, beside, can_track, code, document, errors, kinds, spawn, vmferry};

/// The guest writes 24 of its 56 MiB. The others are equal in all snapshots.
#[test]
fn chain_of_snapshots_of_a_busy_guest_is_restored_and_merged() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let run = busy(kind, &folder, &[]);
        let path = |name: &str| folder.path(name);
        let uri = |name: &str| format!("file:{}", folder.path(name));
        let complete = snapshot(&run, &uri("0"), &["--json", "-"]);
        assert_eq!(code(&complete), 0, "{kind}: {complete:?}");
        let all = document(&complete)["bytes"]["raw_pages"].as_u64().unwrap();
        for (base, name) in [("0", "1"), ("1", "2")] {
            run.goes_on();
            let output = snapshot(&run, &uri(name), &["--since", &path(base), "--verify", "--json", "-"]);
            assert_eq!(code(&output), 0, "{kind}: {output:?}");
            let report = document(&output);
            let (new, old) = (&report["bytes"]["raw_pages"], &report["snapshot"]["base_pages"]);
            assert_eq!((&report["snapshot"]["base"], new), (&base.into(), &report["verified_pages"]));
            assert!(new.as_u64() > Some(0) && new.as_u64() < Some(all - (30 << 8)), "{report}");
            assert!(old.as_u64() >= Some(30 << 8), "the pages that are never written: {report}");
            restored(kind, &folder, &format!("{name}.copy"), &uri(name), &report);
        }
        confined(kind, &uri("2"));
        run.goes_on();
        run.whole();
        let merged = vmferry(&["snapshot", "merge", &uri("2"), &uri("merged"), "--json", "-"]);
        assert_eq!(code(&merged), 0, "{merged:?}");
        let merge = document(&merged);
        assert_eq!(merge["files"], 3, "{merge}");
        // The files of the chain are not needed any more.
        (0..3).for_each(|number| std::fs::remove_file(path(&number.to_string())).unwrap());
        restored(kind, &folder, "merged.copy", &uri("merged"), &merge);
    });
}

/// Restores the snapshot in a process that is confined to what its command line names. Of the
/// folder of the snapshot, it can read the files of the chain only.
fn confined(kind: &str, uri: &str) {
    let folder = Folder::new();
    let api = folder.path("api");
    let args = ["run", "--guest", kind, "--memory", "96M", "--api", &api, "--incoming", uri];
    let copy = Run::of(spawn(&args), api.clone());
    copy.wait("the confined copy running", |s| s["vm"]["place"] == "running");
    copy.wait("all of its pages", |s| {
        s["vm"]["restore"].is_null() || s["vm"]["restore"]["state"] == "completed"
    });
    copy.goes_on();
    copy.whole();
}

#[test]
fn errors_of_increments_say_what_to_do() {
    if !can_track() {
        return;
    }
    let (folder, other) = (Folder::new(), Folder::new());
    let run = busy("process", &folder, &["--migrate-dir", &other.path("")]);
    let uri = |name: &str| format!("file:{}", folder.path(name));
    assert_eq!(code(&snapshot(&run, &uri("0"), &[])), 0);
    let base = folder.path("0");
    let elsewhere = snapshot(&run, &format!("file:{}", other.path("1")), &["--since", &base]);
    assert!(errors(&elsewhere).contains("in the folder of its base"), "{elsewhere:?}");
    let missing = snapshot(&run, &uri("1"), &["--since", &folder.path("none")]);
    assert!(errors(&missing).contains("none: No such file"), "{missing:?}");
    assert_eq!(code(&snapshot(&run, &uri("1"), &["--since", &base])), 0);
    let start = ["run", "--guest", "process", "--memory", "96M"];
    let shared = vmferry(&[&start[..], &["--from", &folder.path("1"), "--shared"]].concat());
    assert!(errors(&shared).contains("merge it into a complete file"), "{shared:?}");
    std::fs::remove_file(&base).unwrap();
    let incomplete = vmferry(&[&start[..], &["--incoming", &uri("1")]].concat());
    assert!(errors(&incomplete).contains("needs its base 0, which cannot be opened"), "{incomplete:?}");
    for wrong in [&["merge", "tcp:127.0.0.1:1", "file:x"][..], &["merge", "file:x"], &[]] {
        let output = vmferry(&[&["snapshot"], wrong].concat());
        assert_eq!(code(&output), 2, "{output:?}");
    }
    let merged = vmferry(&["snapshot", "merge", &uri("1"), &uri("merged")]);
    assert!(errors(&merged).contains("needs its base 0"), "{merged:?}");
    assert!(!std::path::Path::new(&folder.path("merged")).exists());
    run.goes_on();
    run.whole();
}
