//! Guests that move over encrypted connections, and connections that do not come about.

use crate::authority::Authority;
use crate::support::{
    Folder, Need, Run, beside, can_track, code, document, errors, finish, kinds, skip, vmferry,
};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use vmferry_testkit::wait;

/// `--tls-*` for a host of `name`, with files in `folder`.
fn options(folder: &Folder, authority: &Authority, name: &str) -> Vec<String> {
    let (certificate, key) = authority.issue(name);
    let mut options = Vec::new();
    for (option, file, text) in [
        ("--tls-cert", format!("{name}.crt"), &certificate),
        ("--tls-key", format!("{name}.key"), &key),
        ("--tls-ca", format!("{name}.ca"), &authority.pem),
    ] {
        let path = folder.path(&file);
        std::fs::write(&path, text).unwrap();
        options.extend([option.to_owned(), path]);
    }
    options
}

fn target(kind: &str, folder: &Folder, own: &[String]) -> (Run, String) {
    let mut more = vec!["--incoming", "tcp:127.0.0.1:0", "--peer-timeout", "120s"];
    more.extend(own.iter().map(String::as_str));
    let run = Run::start(kind, folder, "target", &more);
    let status = run.wait("the target listening", |status| status["vm"]["incoming"].is_string());
    let uri = status["vm"]["incoming"].as_str().unwrap().to_owned();
    (run, uri)
}

#[test]
fn a_guest_moves_encrypted_and_by_no_other_way() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let (folder, ours, theirs) = (Folder::new(), Authority::new(), Authority::new());
        let (there, uri) = target(kind, &folder, &options(&folder, &ours, "127.0.0.1"));
        let here = Run::source(kind, &folder);
        // In the clear; from a stranger's host; to another host than was meant.
        let plain = here.migrate(&uri, &[]);
        assert!(errors(&plain).contains("it takes encrypted connections only"), "{plain:?}");
        let stranger = options(&folder, &theirs, "stranger");
        let stranger: Vec<_> = stranger.iter().map(String::as_str).collect();
        let refused = here.migrate(&uri, &stranger);
        assert!(errors(&refused).contains("certificate is not accepted"), "{refused:?}");
        // One whom the target does not know, and who knows the target.
        let mut unknown = options(&folder, &theirs, "unknown");
        unknown[5] = options(&folder, &ours, "known")[5].clone();
        let unknown: Vec<_> = unknown.iter().map(String::as_str).collect();
        let unwanted = here.migrate(&uri, &unknown);
        assert!(errors(&unwanted).contains("check that each side has a certificate"), "{unwanted:?}");
        let own = options(&folder, &ours, "source.example");
        let own: Vec<_> = own.iter().map(String::as_str).collect();
        let elsewhere = here.migrate(&uri, &[&own[..], &["--tls-peer", "elsewhere.example"]].concat());
        assert!(errors(&elsewhere).contains("not valid for"), "{elsewhere:?}");
        for output in [&plain, &refused, &unwanted, &elsewhere] {
            assert_eq!(code(output), 1, "{output:?}");
        }
        here.goes_on();
        // And as it is meant.
        let moved = here.migrate(&uri, &[&own[..], &["--verify", "--json", "-"]].concat());
        assert_eq!(code(&moved), 0, "{moved:?}");
        assert_eq!(document(&moved)["mismatched_pages"], 0);
        there.goes_on();
        there.whole();
    });
}

#[test]
fn what_is_missing_or_does_not_fit_is_said_before_anything_begins() {
    let (folder, authority) = (Folder::new(), Authority::new());
    let mut own = options(&folder, &authority, "host");
    let words: Vec<_> = own.iter().map(String::as_str).collect();
    let usage = vmferry(&[&["run", "--guest", "process"], &words[..4]].concat());
    assert!(code(&usage) == 2 && errors(&usage).contains("--tls-ca"), "{usage:?}");
    // The key of another.
    own[3] = options(&folder, &authority, "other")[3].clone();
    let words: Vec<_> = own.iter().map(String::as_str).collect();
    let refused = vmferry(&[&["run", "--guest", "process"], &words[..]].concat());
    assert_eq!(code(&refused), 1);
    assert!(errors(&refused).contains("the certificate and its key cannot be used"), "{refused:?}");
    std::fs::remove_file(&own[1]).unwrap();
    let missing = vmferry(&[&["run", "--guest", "process"], &words[..]].concat());
    assert!(errors(&missing).contains(&format!("--tls-cert {}", own[1])), "{missing:?}");
}

/// Whoever was quicker to listen where a control socket is looked for is given no key.
#[test]
fn keys_are_not_for_whoever_listens() {
    if !rustix::process::geteuid().is_root() {
        return skip(Need::Root, "only root can become another user");
    }
    const ANOTHER: u32 = 65_534;
    let (folder, authority) = (Folder::new(), Authority::new());
    let own = options(&folder, &authority, "host");
    std::fs::set_permissions(folder.path("."), std::fs::Permissions::from_mode(0o777)).unwrap();
    let api = folder.path("api");
    let script = r#"
import os, socket, sys
# Its name is there once it listens.
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1] + ".new"); s.listen(9); os.rename(sys.argv[1] + ".new", sys.argv[1])
for _ in range(2):
    c = s.accept()[0]; f = c.makefile("rw")
    print('{"QMP": {"version": {}, "capabilities": []}}', file=f, flush=True)
    f.readline(); print('{"return": {}, "id": 1}', file=f, flush=True)
    print("heard", f.readline(), flush=True)
"#;
    let mut other = Command::new("python3");
    other.args(["-c", script, &api]).uid(ANOTHER).gid(ANOTHER).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = other.spawn() else { return skip(Need::Program, "there is no python3") };
    wait("a listener", || std::path::Path::new(&api).exists() || child.try_wait().unwrap().is_some());
    let migrate = ["migrate", "--api", &api, "tcp:127.0.0.1:1"];
    let words: Vec<_> = own.iter().map(String::as_str).collect();
    let refused = vmferry(&[&migrate[..], &words[..]].concat());
    // Where only that user can make sockets it is the one who is meant.
    std::os::unix::fs::chown(folder.path("."), Some(ANOTHER), Some(ANOTHER)).unwrap();
    std::fs::set_permissions(folder.path("."), std::fs::Permissions::from_mode(0o755)).unwrap();
    let meant = vmferry(&[&migrate[..], &words[..]].concat());
    let heard = finish(child);
    if !heard.status.success() {
        return skip(Need::Root, format!("as another user: {}", errors(&heard)));
    }
    assert!(code(&refused) == 1 && errors(&refused).contains("is not given keys"), "{refused:?}");
    assert_eq!(code(&meant), 1);
    let heard = String::from_utf8(heard.stdout).unwrap();
    let (first, second) = heard.split_at(heard.rfind("heard").unwrap());
    assert!(!first.contains("PRIVATE KEY") && second.contains("PRIVATE KEY"), "{first}");
}
