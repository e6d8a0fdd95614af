//! Source that sends recorded bytes to a present target.

use super::{Direction, Streams, file, hello_of, load, messages, options};
use crate::rig::unix_uri;
use crate::toy::Toy;
use std::io::Write;
use vmferry_engine::{Arrival, Listener, MigrationState, Uri, receive};
use vmferry_testkit::PATIENCE;
use vmferry_testkit_peers::Socket;
use vmferry_testkit_peers::peer::{connect_with, receive_message};
use vmferry_wire::{HELLO_BYTES, Hello, Role, ToSource, ToTarget, Token};

fn down(connection: usize) -> Direction {
    Direction { connection, to_target: true }
}

/// Sends the hello, with the token of this run in place of the recorded one.
fn connect(uri: &Uri, recorded: &[u8], token: Token) -> Socket {
    let (stream, refused) = connect_with(uri, &Hello { token, ..hello_of(recorded) });
    assert_eq!(refused, None);
    stream
}

struct Replay<'a> {
    uri: &'a Uri,
    streams: &'a Streams,
    control: Socket,
    others: Vec<(Socket, &'a [u8])>,
}

impl Replay<'_> {
    /// Reads until the target sends the message.
    fn receive(&mut self, what: &str, is: impl Fn(&ToSource) -> bool) -> ToSource {
        loop {
            let message = receive_message(&mut self.control).unwrap_or_else(|| panic!("no {what}"));
            assert!(!matches!(message, ToSource::Failed(_) | ToSource::Returned(_)), "{what}: {message:?}");
            if is(&message) {
                return message;
            }
        }
    }

    fn open(&mut self, bulk: Token, urgent: Token) {
        for connection in 1.. {
            let Some(recorded) = self.streams.get(&down(connection)) else { break };
            let token = if hello_of(recorded).role == Role::Bulk { bulk } else { urgent };
            self.others.push((connect(self.uri, recorded, token), &recorded[HELLO_BYTES..]));
        }
    }

    fn send_pages(&mut self) {
        self.others.iter_mut().for_each(|(stream, bytes)| stream.write_all(bytes).unwrap());
    }

    fn run(mut self) {
        let (mut postcopy, mut last) = (false, 0);
        for (message, bytes) in messages::<ToTarget>(&self.streams[&down(0)][HELLO_BYTES..]) {
            match message {
                ToTarget::Load => {
                    self.receive(
                        "Received",
                        |said| matches!(said, ToSource::Received { pass, .. } if *pass == last),
                    );
                }
                ToTarget::Commit => {
                    self.receive("Ready", |said| matches!(said, ToSource::Ready { .. }));
                }
                ToTarget::Thanks => {
                    self.receive("Complete", |said| matches!(said, ToSource::Complete(_)));
                }
                ToTarget::Final { pass } => last = pass,
                ToTarget::LoadLazily { .. } => postcopy = true,
                _ => {}
            }
            self.control.write_all(bytes).unwrap();
            match message {
                ToTarget::Setup { .. } => {
                    let accept = self.receive("Accept", |said| matches!(said, ToSource::Accept { .. }));
                    let ToSource::Accept { bulk, urgent, .. } = accept else { unreachable!() };
                    self.open(bulk, urgent);
                    self.receive("ChannelsUp", |said| *said == ToSource::ChannelsUp);
                }
                ToTarget::Pass { pass: 0, .. } => self.send_pages(),
                ToTarget::Commit => {
                    self.receive("Running", |said| matches!(said, ToSource::Running { .. }));
                    if postcopy {
                        self.send_pages();
                    }
                }
                _ => {}
            }
        }
    }
}

#[test]
fn target_receives_a_recorded_guest() {
    for name in ["precopy", "postcopy"] {
        let (streams, uri) = (load(name), unix_uri());
        let mut target = Toy::new(options(), false).target();
        let listener = Listener::bind(&uri, false).unwrap();
        let arrival = Arrival::new(PATIENCE);
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                let received = receive(&mut target, &listener, &arrival)
                    .unwrap_or_else(|error| panic!("{}: {error:?}", file(name).display()));
                received.postcopy.map(|postcopy| postcopy.finish(&listener, &arrival).state)
            });
            let control = connect(&uri, &streams[&down(0)], Token::NONE);
            Replay { uri: &uri, streams: &streams, control, others: Vec::new() }.run();
            let postcopy = receiving.join().unwrap();
            assert_eq!(postcopy, (name == "postcopy").then_some(MigrationState::Completed), "{name}");
        });
        assert!(target.works(), "{name}: the guest stands still");
        assert_eq!(target.lost(), [], "{name}: the guest misses pages");
    }
}
