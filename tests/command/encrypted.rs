//! Migrations over encrypted connections, and refused connections.

use crate::authority::Authority;
use crate::support::{
    Folder, Need, Run, beside, can_track, code, document, errors, finish, kinds, skip, vmferry,
};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use vmferry_testkit::wait;

/// Returns the options `--tls-*` for a host with the name `name`, with files in `folder`.
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
fn target_with_certificate_accepts_only_encrypted_connections_of_known_hosts() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let (folder, ours, theirs) = (Folder::new(), Authority::new(), Authority::new());
        let (there, uri) = target(kind, &folder, &options(&folder, &ours, "127.0.0.1"));
        let here = Run::source(kind, &folder);
        // Unencrypted; with a certificate of a foreign authority; with the name of another host.
        let plain = here.migrate(&uri, &[]);
        assert!(errors(&plain).contains("takes encrypted connections only"), "{plain:?}");
        let foreign = options(&folder, &theirs, "foreign");
        let foreign: Vec<_> = foreign.iter().map(String::as_str).collect();
        let refused = here.migrate(&uri, &foreign);
        assert!(errors(&refused).contains("certificate is not accepted"), "{refused:?}");
        // The target does not know the authority of the source, but the source knows that of the
        // target.
        let mut unknown = options(&folder, &theirs, "unknown");
        unknown[5] = options(&folder, &ours, "known")[5].clone();
        let unknown: Vec<_> = unknown.iter().map(String::as_str).collect();
        let unwanted = here.migrate(&uri, &unknown);
        assert!(
            errors(&unwanted).contains("check that source and target each have a certificate"),
            "{unwanted:?}"
        );
        let own = options(&folder, &ours, "source.example");
        let own: Vec<_> = own.iter().map(String::as_str).collect();
        let elsewhere = here.migrate(&uri, &[&own[..], &["--tls-peer", "elsewhere.example"]].concat());
        assert!(errors(&elsewhere).contains("not valid for"), "{elsewhere:?}");
        for output in [&plain, &refused, &unwanted, &elsewhere] {
            assert_eq!(code(output), 1, "{output:?}");
        }
        here.goes_on();
        // With matching certificates.
        let moved = here.migrate(&uri, &[&own[..], &["--verify", "--json", "-"]].concat());
        assert_eq!(code(&moved), 0, "{moved:?}");
        assert_eq!(document(&moved)["mismatched_pages"], 0);
        there.goes_on();
        there.whole();
    });
}

#[test]
fn missing_and_mismatched_credentials_are_refused_before_the_start() {
    let (folder, authority) = (Folder::new(), Authority::new());
    let mut own = options(&folder, &authority, "host");
    let words: Vec<_> = own.iter().map(String::as_str).collect();
    let usage = vmferry(&[&["run", "--guest", "process"], &words[..4]].concat());
    assert!(code(&usage) == 2 && errors(&usage).contains("--tls-ca"), "{usage:?}");
    // The key belongs to another certificate.
    own[3] = options(&folder, &authority, "other")[3].clone();
    let words: Vec<_> = own.iter().map(String::as_str).collect();
    let refused = vmferry(&[&["run", "--guest", "process"], &words[..]].concat());
    assert_eq!(code(&refused), 1);
    assert!(errors(&refused).contains("the certificate and its key cannot be used"), "{refused:?}");
    std::fs::remove_file(&own[1]).unwrap();
    let missing = vmferry(&[&["run", "--guest", "process"], &words[..]].concat());
    assert!(errors(&missing).contains(&format!("cannot read {} (--tls-cert)", own[1])), "{missing:?}");
}

/// A process of another user that listens at the path of a control socket gets no key.
#[test]
fn keys_are_sent_only_to_trusted_processes() {
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
    // If only that user can create sockets in the folder, its process is trusted.
    std::os::unix::fs::chown(folder.path("."), Some(ANOTHER), Some(ANOTHER)).unwrap();
    std::fs::set_permissions(folder.path("."), std::fs::Permissions::from_mode(0o755)).unwrap();
    let meant = vmferry(&[&migrate[..], &words[..]].concat());
    let output = finish(child);
    if !output.status.success() {
        return skip(Need::Root, format!("as another user: {}", errors(&output)));
    }
    assert!(code(&refused) == 1 && errors(&refused).contains("is not given keys"), "{refused:?}");
    // The process ends after it has heard the command, so the owner of a guest would be unknown.
    assert_eq!(code(&meant), 3);
    let output = String::from_utf8(output.stdout).unwrap();
    let (first, second) = output.split_at(output.rfind("heard").unwrap());
    assert!(!first.contains("PRIVATE KEY") && second.contains("PRIVATE KEY"), "{first}");
}
