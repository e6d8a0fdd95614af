//! The control socket, used by QMP's own client libraries and by hostile clients.

use crate::support::{
    Folder, Need, PATIENCE, Run, VMFERRY, beside, can_track, code, document, errors, finish, kinds,
    print_line, skip, spawn, vmferry, wait_for_end,
};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Instant;

/// A client that sends arbitrary text.
struct Raw(BufReader<UnixStream>);

impl Raw {
    fn connect(run: &Run) -> Self {
        let stream = UnixStream::connect(&run.api).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut raw = Self(BufReader::new(stream));
        assert!(raw.line()["QMP"].is_object());
        raw
    }

    fn ready(run: &Run) -> Self {
        let mut raw = Self::connect(run);
        assert_eq!(raw.execute("qmp_capabilities", &json!({})), json!({"return": {}}));
        raw
    }

    fn send(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// Returns the answer to a command. Events are skipped.
    fn execute(&mut self, command: &str, arguments: &Value) -> Value {
        self.send(&format!("{}\n", json!({"execute": command, "arguments": arguments})));
        std::iter::repeat_with(|| self.line()).find(|message| message.get("event").is_none()).unwrap()
    }
}

#[test]
fn qmp_client_libraries_get_the_expected_answers() {
    if !can_track() {
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/qmp/run");
    let output = Command::new(script).arg(VMFERRY).args(kinds()).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    // Status 77: the client libraries cannot be installed.
    if code(&output) == 77 {
        return skip(Need::Program, text);
    }
    print_line(&text);
    assert_eq!(code(&output), 0, "{}", errors(&output));
}

#[test]
fn hostile_clients_stall_neither_the_guest_nor_a_migration_nor_each_other() {
    if !can_track() {
        return;
    }
    beside(kinds(), |kind| {
        let folder = Folder::new();
        let source = Run::source(kind, &folder);
        let (target, uri) = Run::target(kind, &folder, "target", "tcp:127.0.0.1:0");
        let mut bad = Vec::new();
        for run in [&source, &target] {
            let mut half = Raw::ready(run);
            half.send("{\"execute\": \"query-stat");
            let mut flood = Raw::ready(run);
            flood.0.get_mut().set_nonblocking(true).unwrap();
            // Write until the socket is full: none of the answers is ever read.
            while flood.0.get_mut().write(b"{\"execute\": \"x-vmferry-status\"}\n").is_ok() {}
            bad.extend([half, flood, Raw::connect(run)]);
            let mut huge = Raw::ready(run);
            let _ = huge.0.get_mut().write_all(&vec![b'{'; 2 << 20]);
            assert!(huge.line()["error"]["desc"].as_str().unwrap().contains("deeper"));
            let mut long = Raw::ready(run);
            let _ =
                long.0.get_mut().write_all(format!("{{\"execute\": \"{}", "x".repeat(2 << 20)).as_bytes());
            assert!(long.line()["error"]["desc"].as_str().unwrap().contains("longer"));
            let mut noise = Raw::ready(run);
            noise.send("]]]]\n\u{0}\u{1}\n{\"execute\": \"query-status\"}\n");
            assert!(noise.line().get("error").is_some() && noise.line().get("error").is_some());
            assert!(noise.line()["return"]["status"].is_string());
        }
        let output = source.migrate(
            &uri,
            &["--verify", "--max-bandwidth", "40M/s", "--downtime-limit", "2s", "--json", "-"],
        );
        assert_eq!(code(&output), 0, "{output:?}");
        assert_eq!(document(&output)["mismatched_pages"], 0);
        target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
        target.goes_on();
        let began = Instant::now();
        let mut good = Raw::ready(&target);
        for _ in 0..100 {
            assert_eq!(good.execute("query-status", &json!({}))["return"]["running"], true);
        }
        print_line(format!("{kind}: 100 answers beside hostile clients in {:?}", began.elapsed()));
        drop(bad);
    });
}

#[test]
fn guest_keeps_its_speed_while_a_client_floods_the_socket() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let source = Run::source("process", &folder);
    let writes = |status: &Value| {
        let guest = &status["vm"]["guest"];
        Some((guest["t_us"].as_u64()?, guest["writes"].as_u64()?))
    };
    // Time that the guest needs for one second of work, by its own clock. A stalled guest would
    // never finish.
    let speed = |run: &Run| {
        let (t0, w0) = writes(&run.wait("statistics", |s| writes(s).is_some())).unwrap();
        let done = |s: &Value| writes(s).is_some_and(|(_, now)| now >= w0 + 20_000);
        let (t1, w1) = writes(&run.wait("the guest's work", done)).unwrap();
        (w1 - w0) * 1_000_000 / (t1 - t0).max(1)
    };
    let before = speed(&source);
    let mut clients: Vec<_> = (0..4).map(|_| Raw::ready(&source)).collect();
    for client in &mut clients {
        client.0.get_mut().set_nonblocking(true).unwrap();
        while client.0.get_mut().write(b"{\"execute\": \"query-commands\"}\n").is_ok() {}
    }
    let during = speed(&source);
    print_line(format!("process guest: {before} writes/s alone, {during} beside four that never read"));
}

#[test]
fn socket_accepts_only_its_user_and_root() {
    let folder = Folder::new();
    let run = Run::start("process", &folder, "api", &["--workload", "idle,ws=4M"]);
    let mode = std::fs::metadata(&run.api).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    if !rustix::process::geteuid().is_root() {
        return skip(Need::Root, "only root can become another user");
    }
    // Another user who can open the socket, because its mode was changed, is refused as well.
    std::fs::set_permissions(folder.path("."), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&run.api, std::fs::Permissions::from_mode(0o666)).unwrap();
    let script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(999).decode())";
    let other = Command::new("python3").args(["-c", script, &run.api]).uid(65_534).gid(65_534).output();
    let Ok(output) = other else { return skip(Need::Program, "there is no python3") };
    if !output.status.success() {
        return skip(Need::Root, format!("as another user: {}", errors(&output)));
    }
    let answer = document(&output);
    assert!(answer["error"]["desc"].as_str().unwrap().contains("may not control this guest"), "{answer}");
    assert_eq!(code(&vmferry(&["pause", "--api", &run.api])), 0, "who may still can");
}

#[test]
fn compression_and_xbzrle_of_qmp_apply_to_the_next_migration() {
    if !can_track() {
        return;
    }
    let folder = Folder::new();
    let workload = ["--workload", "uniform,ws=8M,data=32M,rate=2k,fill=text"];
    let source = Run::start("process", &folder, "source", &workload);
    let (target, uri) = Run::target("process", &folder, "target", "tcp:127.0.0.1:0");
    let mut client = Raw::ready(&source);
    let zlib = client.execute("migrate-set-parameters", &json!({"multifd-compression": "zlib"}));
    assert!(zlib["error"]["desc"].as_str().unwrap().contains("it accepts none and zstd"), "{zlib}");
    let capabilities = ["multifd", "xbzrle"].map(|name| json!({"capability": name, "state": true}));
    let parameters = json!({
        "multifd-compression": "zstd", "multifd-zstd-level": 3, "xbzrle-cache-size": 64 << 20, "max-bandwidth": 10_000_000,
    });
    for (command, arguments) in [
        ("migrate-set-capabilities", json!({ "capabilities": capabilities })),
        ("migrate-set-parameters", parameters),
        ("migrate", json!({ "uri": uri })),
    ] {
        assert_eq!(client.execute(command, &arguments), json!({"return": {}}), "{command}");
    }
    let until = Instant::now() + PATIENCE;
    let ended = std::iter::repeat_with(|| client.execute("query-migrate", &json!({}))).find(|answer| {
        assert!(Instant::now() < until, "{answer}");
        answer["return"]["status"] != "setup"
            && !answer["return"]["total-time"].is_null()
            && ["completed", "failed"].iter().any(|end| answer["return"]["status"] == *end)
    });
    let info = ended.unwrap()["return"].clone();
    assert_eq!(info["status"], "completed", "{info}");
    let cache = &info["xbzrle-cache"];
    assert!(cache["pages"].as_u64() > Some(0) && cache["bytes"].as_u64() > Some(0), "{info}");
    assert!(cache["encoding-rate"].as_f64() > Some(2.0), "{info}");
    assert!(cache["cache-miss-rate"].as_f64().is_some_and(|rate| rate > 0.0 && rate < 1.0), "{info}");
    let report = source.status().unwrap();
    let zstd = &report["codecs"]["zstd"];
    assert!(zstd["pages"].as_u64() > Some(4000), "{report}");
    assert!(zstd["bytes"].as_u64() < zstd["raw_bytes"].as_u64().map(|bytes| bytes / 2), "{report}");
    assert_eq!(report["codecs"]["delta"]["pages"], cache["pages"], "{report}");
    target.wait("the guest at the target", |s| s["vm"]["place"] == "running");
    target.whole();
}

#[test]
fn deferred_target_waits_for_its_address_and_can_be_ended() {
    let folder = Folder::new();
    let mut run = Run::start("process", &folder, "api", &["--incoming", "defer"]);
    let status = run.status().unwrap();
    assert!(status["vm"]["place"] == "awaited" && status["vm"]["incoming"].is_null(), "{status}");
    let mut client = Raw::ready(&run);
    let wrong = client.execute("migrate-incoming", &json!({"uri": "nowhere"}));
    assert!(wrong["error"]["desc"].as_str().unwrap().contains("not a migration address"), "{wrong}");
    assert_eq!(client.execute("quit", &json!({})), json!({"return": {}}));
    wait_for_end(&mut run.child);
    // The last event says that the process ends.
    let mut rest = String::new();
    client.0.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("SHUTDOWN") && rest.contains("host-qmp-quit"), "{rest}");
    // Without a control socket, no client could give the address.
    let output = finish(spawn(&["run", "--guest", "process", "--memory", "16M", "--incoming", "defer"]));
    assert!(code(&output) != 0 && errors(&output).contains("--api"), "{output:?}");
}
