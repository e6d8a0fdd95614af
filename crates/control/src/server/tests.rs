use super::*;
use crate::machine::{Answer, Arguments, Command};
use crate::{Client, ClientError, ErrorClass, hostile};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use vmferry_testkit::{PATIENCE, wait};

/// Machine with commands that show how the server treats its clients.
struct Bench {
    sent: AtomicUsize,
    /// Each command `wait` takes one of these.
    go: Mutex<Receiver<()>>,
}

impl Machine for Bench {
    fn version(&self) -> Version {
        hostile::version()
    }

    fn commands(&self) -> &[Command] {
        &[
            Command { name: "echo", oob: true },
            Command { name: "wait", oob: false },
            Command { name: "large", oob: false },
            Command { name: "panic", oob: false },
            Command { name: "marked", oob: false },
            Command { name: "count", oob: false },
            Command { name: "getfd", oob: false },
        ]
    }

    fn execute(&self, name: &str, arguments: Arguments) -> Result<Answer, QmpError> {
        match name {
            "echo" => Ok(Value::Object(arguments.0).into()),
            "wait" => {
                let _ = self.go.lock().unwrap().recv_timeout(PATIENCE);
                Ok(Answer::done())
            }
            "large" => Ok(json!("x".repeat(4 << 20)).into()),
            "count" => Ok(json!(self.sent.load(Ordering::Acquire)).into()),
            "getfd" => Err(QmpError::generic("no descriptor came")),
            name => panic!("on purpose: {name}"),
        }
    }
}

/// A [`Bench`] that counts the answers of `marked` that have been sent.
struct Marking(Arc<Bench>);

impl Machine for Marking {
    fn version(&self) -> Version {
        self.0.version()
    }

    fn commands(&self) -> &[Command] {
        self.0.commands()
    }

    fn execute(&self, name: &str, arguments: Arguments) -> Result<Answer, QmpError> {
        if name != "marked" {
            return self.0.execute(name, arguments);
        }
        let bench = Arc::clone(&self.0);
        let add = move || {
            bench.sent.fetch_add(1, Ordering::AcqRel);
        };
        Ok(Answer::new(json!("x".repeat(1 << 20))).on_sent(add))
    }

    /// Writes the name that the descriptor gets into the descriptor.
    fn take_descriptor(&self, arguments: Arguments, descriptor: OwnedFd) -> Result<Answer, QmpError> {
        let name = arguments.0["fdname"].as_str().unwrap_or_default().to_owned();
        std::fs::File::from(descriptor).write_all(name.as_bytes()).unwrap();
        Ok(Answer::done())
    }
}

struct Rig {
    server: Option<Server>,
    events: Events,
    go: Sender<()>,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new(limits: Limits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        let (go, gone) = channel();
        let bench = Arc::new(Bench { sent: AtomicUsize::new(0), go: Mutex::new(gone) });
        let events = Events::new().unwrap();
        let server = Server::start(&path, Arc::new(Marking(bench)), &events, limits).unwrap();
        Self { server: Some(server), events, go, path, _folder: folder }
    }

    fn client(&self) -> Client {
        Client::connect(&self.path, PATIENCE).unwrap()
    }

    fn raw(&self) -> Raw {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut raw = Raw(BufReader::new(stream));
        assert!(raw.line()["QMP"].is_object());
        raw
    }

    fn ready(&self) -> Raw {
        let mut raw = self.raw();
        raw.send("{\"execute\": \"qmp_capabilities\", \"arguments\": {\"enable\": [\"oob\"]}}\n");
        assert_eq!(raw.line(), json!({"return": {}}));
        raw
    }
}

struct Raw(BufReader<UnixStream>);

impl Raw {
    fn send(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        if line.is_empty() { Value::Null } else { serde_json::from_str(&line).unwrap() }
    }
}

fn desc(answer: &Value) -> &str {
    answer["error"]["desc"].as_str().unwrap_or("")
}

#[test]
fn commands_are_executed_and_refused() {
    let rig = Rig::new(Limits::default());
    let mut client = rig.client();
    assert_eq!(client.execute("echo", json!({"é": [1]})).unwrap(), json!({"é": [1]}));
    assert_eq!(client.execute("query-version", json!({})).unwrap(), hostile::version().to_json());
    let names = client.execute("query-commands", json!({})).unwrap();
    for name in ["echo", "query-commands", "qmp_capabilities"] {
        assert!(names.as_array().unwrap().contains(&json!({"name": name})), "{names}");
    }
    let error = client.execute("query-commands", json!({"x": 1})).unwrap_err();
    assert_eq!(error.to_string(), "Parameter 'x' is unexpected");
    match client.execute("nothing", json!({})) {
        Err(ClientError::Refused(error)) => assert_eq!(error.class, ErrorClass::CommandNotFound),
        other => panic!("{other:?}"),
    }
    assert!(client.execute("panic", json!({})).unwrap_err().to_string().contains("panicked"));
    assert_eq!(client.execute("large", json!({})).unwrap().as_str().unwrap().len(), 4 << 20);
}

#[test]
fn out_of_band_commands_overtake_and_other_clients_do_not_wait() {
    let rig = Rig::new(Limits::default());
    let mut slow = rig.ready();
    slow.send("{\"execute\": \"wait\", \"id\": 1} {\"exec-oob\": \"echo\", \"id\": 2} {\"exec-oob\": \"wait\", \"id\": 3}");
    assert_eq!(slow.line()["id"], 2);
    assert!(desc(&slow.line()).contains("does not support OOB"));
    rig.client().execute("echo", json!({})).unwrap();
    rig.go.send(()).unwrap();
    assert_eq!(slow.line()["id"], 1);
}

#[test]
fn every_client_gets_events_after_its_negotiation() {
    let rig = Rig::new(Limits::default());
    let mut early = rig.raw();
    let (mut one, mut two) = (rig.client(), rig.client());
    rig.events.emit("STOP", Value::Null);
    rig.events.emit("MIGRATION", json!({"status": "setup"}));
    for client in [&mut one, &mut two] {
        assert_eq!(client.next_event(PATIENCE).unwrap().unwrap().name, "STOP");
        let event = client.next_event(PATIENCE).unwrap().unwrap();
        assert_eq!((&*event.name, &event.data["status"]), ("MIGRATION", &json!("setup")));
        assert!(event.at.elapsed().unwrap() < PATIENCE);
        assert_eq!(client.next_event(Duration::from_millis(10)).unwrap(), None);
    }
    early.send("{\"execute\": \"qmp_capabilities\"}");
    assert_eq!(early.line(), json!({"return": {}}), "no events from before the negotiation");
}

#[test]
fn descriptor_goes_to_the_command_that_it_came_with() {
    let rig = Rig::new(Limits::default());
    let mut client = rig.client();
    let written = |(mut reader, writer): (std::io::PipeReader, std::io::PipeWriter)| {
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        text
    };
    let (one, two) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
    client.pass("one", one.1.as_fd()).unwrap();
    client.pass("two", two.1.as_fd()).unwrap();
    assert_eq!((written(one), written(two)), ("one".into(), "two".into()));
    let error = client.execute("getfd", json!({"fdname": "none"})).unwrap_err();
    assert_eq!(error.to_string(), "no descriptor came");

    // Two commands in one write, of which the last comes with the descriptor.
    let mut raw = rig.ready();
    let mut send = |text: &str, descriptors: &[BorrowedFd<'_>]| {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(descriptors)));
        let bytes = [std::io::IoSlice::new(text.as_bytes())];
        let flags = rustix::net::SendFlags::empty();
        assert_eq!(rustix::net::sendmsg(raw.0.get_ref(), &bytes, &mut ancillary, flags), Ok(text.len()));
        std::iter::repeat_with(|| raw.line()).take(text.matches("execute").count()).collect::<Vec<_>>()
    };
    let getfd = |name: &str| json!({"execute": "getfd", "arguments": {"fdname": name}}).to_string();
    let three = std::io::pipe().unwrap();
    let said = send(&format!("{{\"execute\": \"echo\"}}{}", getfd("three")), &[three.1.as_fd()]);
    assert_eq!(said, [json!({"return": {}}), json!({"return": {}})]);
    assert_eq!(written(three), "three");
    // Several descriptors with one command are all closed.
    let four = std::io::pipe().unwrap();
    for count in [2, 3] {
        let said = send(&getfd("four"), &vec![four.1.as_fd(); count]);
        assert_eq!(desc(&said[0]), "no descriptor came");
    }
    assert_eq!(written(four), "");
    // A descriptor that came with another command is replaced by the newer one.
    let (old, new) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
    send("{\"execute\": \"echo\"}", &[old.1.as_fd()]);
    send(&getfd("new"), &[new.1.as_fd()]);
    assert_eq!((written(old), written(new)), (String::new(), "new".into()));
}

#[test]
fn slow_clients_do_not_stall_other_clients() {
    let limits = Limits {
        message_time: Duration::from_secs(1),
        read_time: Duration::from_secs(1),
        ..Limits::default()
    };
    let rig = Rig::new(limits);
    // Three clients: the first floods the server with requests for megabytes and reads nothing, the
    // second sends half a message, the third sends nothing.
    let mut never = rig.ready();
    never.0.get_mut().set_nonblocking(true).unwrap();
    for _ in 0..1000 {
        if never.0.get_mut().write(b"{\"execute\": \"large\"}").is_err() {
            break;
        }
    }
    let mut half = rig.ready();
    half.send("{\"execute\": \"echo\", \"argu");
    let mut silent = rig.raw();
    let mut good = rig.client();
    for _ in 0..200 {
        rig.events.emit("MIGRATION_PASS", json!({"pass": 1}));
        good.execute("echo", json!({})).unwrap();
    }
    // A client that reads is told why it is disconnected.
    assert!(
        desc(&std::iter::repeat_with(|| half.line()).find(|line| line.get("event").is_none()).unwrap())
            .contains("did not end in time")
    );
    // The client must not read before it is disconnected: otherwise the server would continue with
    // it.
    wait("the end of the client that reads nothing", || {
        let mut socket = [PollFd::new(never.0.get_ref(), PollFlags::RDHUP)];
        poll(&mut socket, Some(&Timespec::default())).unwrap() > 0
    });
    never.0.get_mut().set_nonblocking(false).unwrap();
    let mut rest = Vec::new();
    // The read ends with a reset if unread requests were left.
    let end = never.0.read_to_end(&mut rest).map_err(|error| error.kind());
    assert!(matches!(end, Ok(_) | Err(ErrorKind::ConnectionReset)), "{end:?}");
    assert!(
        rest.len() < 4 << 20,
        "the server dropped the client before it sent the whole answer: {}",
        rest.len()
    );
    silent.send("{\"execute\": \"qmp_capabilities\"}");
    assert_eq!(silent.line(), json!({"return": {}}), "a silent client stays connected");
    good.execute("echo", json!({})).unwrap();
}

#[test]
fn client_that_breaks_a_limit_is_told_why_and_dropped() {
    let rig = Rig::new(Limits::default());
    let mut long = rig.ready();
    // The write fails if the server disconnects in the middle of it.
    let _ = long.0.get_mut().write_all(format!("{{\"a\": \"{}", "x".repeat(3 << 20)).as_bytes());
    assert!(desc(&long.line()).contains("longer than"));
    let mut deep = rig.ready();
    deep.send(&"{\"a\":".repeat(1000));
    assert!(desc(&deep.line()).contains("deeper than"));
    let mut garbage = rig.ready();
    garbage.send("GET / HTTP/1.1\r\nHost: x\r\n{\"execute\": \"echo\"}");
    assert!(desc(&garbage.line()).contains("JSON object") && desc(&garbage.line()).contains("JSON object"));
    assert_eq!(garbage.line(), json!({"return": {}}), "garbage breaks no limit");
}

#[test]
fn number_of_clients_is_limited_and_a_free_place_is_reused() {
    let rig = Rig::new(Limits::default());
    let mut clients: Vec<_> = (0..MOST_CLIENTS).map(|_| rig.client()).collect();
    let error = Client::connect(&rig.path, PATIENCE).unwrap_err();
    assert!(error.to_string().contains("too many clients"), "{error}");
    clients.pop();
    wait("the place of the client that disconnected", || Client::connect(&rig.path, PATIENCE).is_ok());
    for client in &mut clients {
        client.execute("echo", json!({})).unwrap();
    }
}

#[test]
fn on_sent_runs_when_the_answer_has_left() {
    let rig = Rig::new(Limits::default());
    let mut never = rig.ready();
    never.send("{\"execute\": \"marked\"}");
    let mut good = rig.client();
    for _ in 0..20 {
        assert_eq!(
            good.execute("count", json!({})).unwrap(),
            0,
            "most of the answer still waits in the server"
        );
    }
    drop(never);
    good.execute("marked", json!({})).unwrap();
    wait("the count of what was sent", || good.execute("count", json!({})).unwrap() == 1);
}

#[test]
fn server_sends_due_answers_and_events_at_its_end() {
    let mut rig = Rig::new(Limits::default());
    let mut client = rig.ready();
    client.send("{\"execute\": \"wait\", \"id\": 9}");
    let mut other = rig.client();
    other.execute("echo", json!({})).unwrap();
    let server = rig.server.take().unwrap();
    let (go, events) = (rig.go.clone(), rig.events.clone());
    let ending = std::thread::spawn(move || {
        events.emit("SHUTDOWN", json!({"guest": false, "reason": "host-qmp-quit"}));
        go.send(()).unwrap();
        drop(server);
    });
    let lines = [client.line(), client.line()];
    assert!(lines.iter().any(|line| line["event"] == "SHUTDOWN"), "{lines:?}");
    assert!(lines.iter().any(|line| line["id"] == 9), "{lines:?}");
    assert_eq!(client.line(), Value::Null);
    ending.join().unwrap();
    assert!(!rig.path.exists());
    assert!(matches!(other.execute("echo", json!({})), Err(ClientError::Ended | ClientError::Broken(_))));
}

#[test]
fn client_that_has_finished_sending_gets_its_answers() {
    let rig = Rig::new(Limits::default());
    let mut client = rig.ready();
    client.send("{\"execute\": \"wait\"}\n{\"execute\": \"echo\"}\n");
    client.0.get_mut().shutdown(std::net::Shutdown::Write).unwrap();
    rig.go.send(()).unwrap();
    assert_eq!(
        [client.line(), client.line(), client.line()],
        [json!({"return": {}}), json!({"return": {}}), Value::Null]
    );
}

#[test]
fn last_event_is_always_sent() {
    for _ in 0..200 {
        let mut rig = Rig::new(Limits::default());
        let mut client = rig.client();
        rig.events.emit("STOP", Value::Null);
        // The answer shows that the server's thread has handled the first event.
        client.execute("echo", json!({})).unwrap();
        rig.events.emit("SHUTDOWN", Value::Null);
        drop(rig.server.take());
        let mut names = Vec::new();
        while let Ok(Some(event)) = client.next_event(PATIENCE) {
            names.push(event.name);
        }
        assert_eq!(names, ["STOP", "SHUTDOWN"]);
    }
}

#[test]
fn client_keeps_an_event_that_comes_before_the_greeting() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let event = json!({"event": "RESUME", "timestamp": {"seconds": 1, "microseconds": 2}});
        let greeting = json!({"QMP": {"version": {}, "capabilities": []}});
        write!(stream, "{event}\n{greeting}\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
        let request: Value = serde_json::from_str(&line).unwrap();
        writeln!(stream, "{}", json!({"return": {}, "id": request["id"]})).unwrap();
        request
    });
    let mut client = Client::connect(&path, PATIENCE).unwrap();
    assert_eq!(server.join().unwrap()["execute"], "qmp_capabilities");
    let events: Vec<String> = client.events().map(|event| event.name).collect();
    assert_eq!(events, ["RESUME"]);
}
