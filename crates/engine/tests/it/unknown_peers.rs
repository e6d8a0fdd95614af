//! Other programs that connect to a waiting target, and hostile sources.

use crate::rig::{quick, unix_uri};
use crate::toy::{Method, Options, Toy};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use vmferry_core::{PAGE_BYTES, PageDigest, PageIndex, PageRun, RegionId, Section};
use vmferry_engine::{
    Arrival, GuestMemory, Listener, MachineConfig, Migratable, MigrationHandle, MigrationState,
    ReceiveFailure, Settings, Uri, migrate, receive,
};
use vmferry_testkit::{PATIENCE, wait, wait_for};
use vmferry_testkit_peers::Socket;
use vmferry_testkit_peers::peer::{
    Frame, Source, connect, connect_with, hello, receive_message, send_message,
};
use vmferry_wire::{
    FrameHeader, FrameKind, Hello, MigrationId, Mode, REQUEST_BYTES, RefusalCode, Request, Role, TableWriter,
    ToSource, ToTarget, Token, encode_control,
};

/// Returns true if the peer has closed the stream without sending anything more.
fn closed(stream: &mut Socket) -> bool {
    matches!(stream.read(&mut [0; 100]), Ok(0))
}

/// Runs `strange` against a waiting target. The real source must still succeed.
fn then_the_real_source(strange: impl FnOnce(&Uri)) {
    let mut source = Toy::new(Options::default(), true);
    let mut target = source.target();
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    let arrival = Arrival::new(quick().peer_timeout);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        strange(&uri);
        let report = migrate(&mut source, &uri, None, &quick(), &MigrationHandle::new()).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        let _ = receiving.join().unwrap().unwrap();
    });
    assert_eq!((target.arrived_equal(), target.lost()), (Some(true), vec![]));
}

#[test]
fn other_programs_are_refused_and_the_target_waits_on() {
    then_the_real_source(|uri| {
        let mut garbage = connect(uri);
        garbage.write_all(&[0xa5; 200]).unwrap();
        // Closing with unread bytes resets the connection. Both results are an end.
        let _ = garbage.read(&mut [0; 10]);
        let mut http = connect(uri);
        http.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let _silent = connect(uri);
        connect(uri).write_all(&hello(Role::Control, 0, Token::NONE).encode()[..40]).unwrap();
        let newer = Hello { version_min: 99, version_max: 100, ..hello(Role::Control, 0, Token::NONE) };
        assert_eq!(connect_with(uri, &newer).1, Some(RefusalCode::Version));
        let fancy = Hello { features: 1 << 60, ..hello(Role::Control, 0, Token::NONE) };
        assert_eq!(connect_with(uri, &fancy).1, Some(RefusalCode::Feature));
        // The source of a migration to a process that has ended takes up its link.
        let (mut control, refused) = connect_with(uri, &hello(Role::Control, 0, Token([1; 16])));
        assert!(refused == Some(RefusalCode::Token) && closed(&mut control));
        let (mut bulk, refused) = connect_with(uri, &hello(Role::Bulk, 0, Token([1; 16])));
        assert!(refused == Some(RefusalCode::Token) && closed(&mut bulk));
        // `http` and the silent connection stay open while the real source connects.
        std::mem::forget((http, _silent));
    });
}

#[test]
fn source_without_an_announcement_blocks_others_for_a_limited_time() {
    then_the_real_source(|uri| {
        let (mut quiet, refused) = connect_with(uri, &hello(Role::Control, 0, Token::NONE));
        assert_eq!(refused, None);
        // While this source is served, another one is refused as busy.
        assert_eq!(connect_with(uri, &hello(Role::Control, 0, Token::NONE)).1, Some(RefusalCode::Busy));
        // Sending pings does not extend the time limit.
        let began = Instant::now();
        for number in 0.. {
            send_message(&mut quiet, &ToTarget::Ping(number));
            if !matches!(receive_message(&mut quiet), Some(ToSource::Pong(_))) {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "it is heard for ever");
            // Pace of the pings, which does not affect the result.
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

#[test]
fn refused_source_does_not_block_the_next_one() {
    for _ in 0..3 {
        then_the_real_source(|uri| {
            let mut other = Source::new(uri);
            let machine = MachineConfig {
                kind: "other".into(),
                vcpus: 1,
                regions: vec![],
                extra: vec![],
                features: vec![],
            };
            let Some(ToSource::Failed(why)) = other.offer(&machine, Mode::Precopy, 1, 0) else {
                panic!("it was not refused")
            };
            assert!(
                why.code == RefusalCode::Machine
                    && why.detail.contains("kind of machine: the guest has other, the target has toy")
            );
            // This source does not close its connection, and keeps sending.
            let mut held = other.control.try_clone().unwrap();
            std::thread::spawn(move || {
                for number in 0..2000 {
                    send_message(&mut held, &ToTarget::Ping(number));
                }
            });
            std::mem::forget(other);
        });
    }
}

/// Hostile source, connected to a target with a [`Toy`].
struct Evil {
    source: Source,
    /// Returns the number of times that the target has looked up its guest's memory: once for each
    /// frame in these tests.
    looks: Box<dyn Fn() -> usize>,
}

impl Evil {
    fn new(
        uri: &Uri,
        target: impl Fn(Method) -> usize + 'static,
        machine: &MachineConfig,
        channels: u16,
    ) -> Self {
        let mut source = Source::new(uri);
        let Some(ToSource::Accept { bulk: token, .. }) = source.offer(machine, Mode::Precopy, channels, 0)
        else {
            panic!("not accepted")
        };
        // Neither a wrong token, nor another migration id, nor an additional channel is accepted.
        let right = hello(Role::Bulk, 0, token);
        let wrong = [
            Hello { token: Token([9; 16]), ..right.clone() },
            Hello { migration: MigrationId([8; 16]), ..right.clone() },
            Hello { index: channels, ..right.clone() },
            Hello { index: u16::MAX, ..right },
        ];
        for hello in wrong {
            assert_eq!(connect_with(uri, &hello).1, Some(RefusalCode::Token), "{hello:?}");
        }
        source.open((channels, token), (0, Token::NONE));
        Self { source, looks: Box::new(move || target(Method::Window)) }
    }

    /// Sends a frame with one page after `change` was applied to it.
    fn frame(&mut self, pass: u32, page: u64, change: impl FnOnce(&mut Frame)) {
        self.source.frame(0, pass, page, &[0x77; PAGE_BYTES], change);
    }

    /// Waits until the target has looked up its guest's memory for `times` frames during `act`.
    fn until_looks(&mut self, times: usize, act: impl FnOnce(&mut Self)) {
        let before = (self.looks)();
        act(self);
        wait("the target to take pages", || (self.looks)() >= before + times);
    }

    fn send(&mut self, message: &ToTarget) {
        self.source.send(message);
    }

    fn receive(&mut self) -> Option<ToSource> {
        self.source.receive()
    }

    fn barrier(&mut self, pass: u32) {
        self.source.barrier(0, pass);
    }

    /// Performs the rest of a correct migration.
    fn finish(&mut self, pass: u32) {
        self.send(&ToTarget::Final { pass });
        self.send(&ToTarget::StateEnd { sections: 0 });
        self.barrier(pass);
        assert!(matches!(self.receive(), Some(ToSource::Received { .. })));
        self.send(&ToTarget::Load);
    }
}

/// Runs `act` as a hostile source against a target with this peer timeout. Returns why the target
/// refused. The target must not have run the guest.
fn refusal(patience: Duration, act: impl FnOnce(&mut Evil)) -> String {
    let mut target = Toy::new(Options { ballast: 0, ..Options::default() }, false);
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    let arrival = Arrival::new(patience);
    let machine = target.config();
    let (began, counter) = (Instant::now(), target.counter());
    let failure = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        let mut evil = Evil::new(&uri, counter, &machine, 1);
        act(&mut evil);
        // A source that has received the refusal closes its connection.
        while evil.receive().is_some() {}
        drop(evil);
        receiving.join().unwrap().unwrap_err()
    });
    assert!(!target.ran() && !target.running(), "it ran: {failure}");
    assert!(began.elapsed() < PATIENCE, "{failure}");
    assert!(matches!(failure, ReceiveFailure::Failed(_)));
    failure.to_string()
}

fn refused(what: &str, act: impl FnOnce(&mut Evil)) {
    // None of these tests depends on a timeout.
    let why = refusal(PATIENCE, act);
    assert!(why.contains(what), "{what}: {why}");
}

#[test]
fn invalid_frames_are_refused() {
    refused("run of pages", |evil| evil.frame(0, 1199, |frame| frame.header.base = PageIndex(1200)));
    refused("run of pages", |evil| evil.frame(0, 1 << 32, |_| {}));
    refused("run of pages", |evil| evil.frame(0, 5, |frame| frame.header.base = PageIndex(u64::MAX)));
    refused("region", |evil| evil.frame(0, 5, |frame| frame.header.region = RegionId(1)));
    refused("region", |evil| evil.frame(0, 5, |frame| frame.header.region = RegionId(u32::MAX)));
    refused("frame table is damaged", |evil| evil.frame(0, 5, |frame| frame.header.table_sum ^= 1));
    refused("frame table is damaged", |evil| evil.frame(0, 5, |frame| frame.table[0] ^= 1));
    refused("frame number", |evil| evil.frame(0, 5, |frame| frame.header.sequence = 1));
    refused("frame number", |evil| {
        evil.frame(0, 5, |_| {});
        evil.source.data[0].1 = 0;
        evil.frame(0, 6, |_| {});
    });
    refused("channel 0 ended pass 1, expected was 0", |evil| evil.barrier(1));
    refused("expected was 1", |evil| {
        evil.barrier(0);
        evil.barrier(0);
    });
    refused("magic", |evil| drop(evil.source.data[0].0.write_all(&[0; 4096])));
    refused("closed a channel", |evil| evil.source.data.clear());
}

#[test]
fn commit_needs_complete_memory_and_state() {
    refused("Load arrived too early (last pass complete: false", |evil| evil.send(&ToTarget::Load));
    refused("Commit, which is not allowed at this point", |evil| evil.send(&ToTarget::Commit));
    refused("last pass complete: false", |evil| {
        evil.send(&ToTarget::Final { pass: 1 });
        evil.send(&ToTarget::StateEnd { sections: 0 });
        evil.barrier(0);
        evil.receive();
        evil.send(&ToTarget::Load);
    });
    refused("state complete: false", |evil| {
        evil.send(&ToTarget::Final { pass: 0 });
        evil.barrier(0);
        evil.receive();
        evil.send(&ToTarget::Load);
    });
    refused("0 of 3 sections", |evil| evil.send(&ToTarget::StateEnd { sections: 3 }));
    refused("no digest mismatch: false", |evil| {
        evil.frame(0, 5, |frame| frame.content[17] ^= 1);
        evil.finish(0);
    });
    // The page of pass 1 has a digest mismatch, and pass 1 never ends. The mismatch must count
    // nevertheless.
    refused("pages were still arriving", |evil| {
        evil.send(&ToTarget::Final { pass: 0 });
        evil.send(&ToTarget::StateEnd { sections: 0 });
        evil.barrier(0);
        evil.receive();
        // The target takes the second frame after it has checked the first.
        evil.until_looks(2, |evil| {
            evil.frame(1, 5, |frame| frame.content[17] ^= 1);
            evil.frame(1, 6, |_| {});
        });
        evil.send(&ToTarget::Load);
    });
    // Half of a frame has been sent.
    refused("pages were still arriving", |evil| {
        evil.send(&ToTarget::Final { pass: 0 });
        evil.send(&ToTarget::StateEnd { sections: 0 });
        evil.barrier(0);
        evil.receive();
        evil.until_looks(1, |evil| evil.frame(1, 5, |frame| frame.content.truncate(100)));
        evil.send(&ToTarget::Load);
    });
    // The target is ready, and then the source disconnects or cancels.
    refused("disconnected before it handed over", |evil| {
        evil.finish(0);
        assert!(matches!(evil.receive(), Some(ToSource::Ready { .. })));
        evil.source.control.shutdown(std::net::Shutdown::Both).unwrap();
    });
    refused("cancelled", |evil| {
        evil.finish(0);
        evil.send(&ToTarget::Cancel(vmferry_wire::Refusal::new(RefusalCode::Cancelled, "on request")));
        evil.send(&ToTarget::Commit);
    });
}

/// Memory that was handed over belongs to the guest alone: later writes of the source are refused.
#[test]
fn writes_after_the_last_pass_are_refused() {
    let mut target = Toy::new(Options::default(), false);
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    let arrival = Arrival::new(PATIENCE);
    let machine = target.config();
    let (memory, counter) = (target.memory(), target.counter());
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        let mut evil = Evil::new(&uri, counter, &machine, 1);
        evil.frame(0, 1100, |_| {});
        evil.finish(0);
        assert!(matches!(evil.receive(), Some(ToSource::Ready { .. })));
        evil.frame(1, 1101, |_| {});
        evil.send(&ToTarget::Commit);
        assert!(matches!(evil.receive(), Some(ToSource::Running { .. })));
        evil.frame(1, 1102, |_| {});
        let _ = receiving.join().unwrap().unwrap();
    });
    assert!(target.ran());
    let window = GuestMemory::window(&*memory, RegionId(0), PageRun::from(1100..1103)).unwrap();
    let mut page = [0; PAGE_BYTES];
    let zero = [0, 1, 2].map(|index| window.copy_page(index, &mut page));
    assert_eq!(zero, [false, true, true], "which of the three pages are untouched");
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn endless_device_state_is_refused_before_it_fills_memory() {
    let before = resident_bytes();
    refused("more device state than the protocol allows", |evil| {
        let section = Section { name: "x".into(), instance: 0, version: 0, payload: vec![1; 4 << 20 >> 1] };
        let bytes = encode_control(&ToTarget::Section(section)).unwrap();
        // 5 GB would follow.
        for _ in 0..2500 {
            if evil.source.control.write_all(&bytes).is_err() {
                return;
            }
        }
        panic!("5 GB of device state were taken");
    });
    let after = resident_bytes();
    assert!(after < before + (400 << 20), "{before} bytes before, {after} after");
    refused("more device state than the protocol allows", |evil| {
        let empty = Section { name: String::new(), instance: 0, version: 0, payload: vec![] };
        let bytes = encode_control(&ToTarget::Section(empty)).unwrap().repeat(1000);
        while evil.source.control.write_all(&bytes).is_ok() {}
    });
}

#[test]
fn silent_source_is_given_up() {
    let silent = |act: fn(&mut Evil)| {
        // Long enough for the hellos of all channels on a busy host.
        let why = refusal(Duration::from_secs(5), act);
        assert!(why.contains("nothing was heard of the source"), "{why}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| silent(|_| {}));
        scope.spawn(|| silent(|evil| evil.finish(0)));
    });
}

/// An invalid number of channels is refused before anything is accepted, so the wait continues.
#[test]
fn invalid_numbers_of_channels_are_refused() {
    then_the_real_source(|uri| {
        for channels in [0, Settings::MAX_CHANNELS + 1, u16::MAX] {
            let mut source = Source::new(uri);
            let machine = Toy::new(Options::default(), false).config();
            let Some(ToSource::Failed(why)) = source.offer(&machine, Mode::Precopy, channels, 0) else {
                panic!("{channels} were accepted")
            };
            assert!(why.detail.contains("1 to 64"), "{why}");
            assert!(closed(&mut source.control));
        }
    });
}

/// Sends a barrier like a measuring channel. Returns true if it is answered.
fn measured(stream: &mut Socket, number: u32) -> bool {
    stream.write_all(&FrameHeader::barrier(number, number.into()).encode()).unwrap();
    let mut answer = [0; REQUEST_BYTES];
    stream.read_exact(&mut answer).is_ok()
        && matches!(Request::decode(&answer), Ok(Request::Echo { number: n, .. }) if n == u64::from(number))
}

#[test]
fn measurements_beyond_the_limit_are_refused_and_silent_ones_end() {
    then_the_real_source(|uri| {
        let measure = |index| connect_with(uri, &hello(Role::Measure, index, Token::NONE));
        let mut held: Vec<Socket> = Vec::new();
        for index in 0..8 {
            let (mut stream, refused) = measure(index);
            assert!(refused.is_none() && measured(&mut stream, 0), "place {index}");
            held.push(stream);
        }
        // On a busy host the first channels may have been closed for their silence by now, so that
        // their places are free.
        let mut index = 8;
        let mut refused = wait_for("a channel without a place", || {
            let (mut stream, refused) = measure(index);
            index += 1;
            if refused == Some(RefusalCode::Busy) {
                return Ok(stream);
            }
            assert!(refused.is_none() && measured(&mut stream, 0), "{refused:?}");
            held.push(stream);
            Err(index)
        });
        assert!(closed(&mut refused));
        // The channels are silent from now on: each is closed, and its place is free again.
        assert!(held.iter_mut().all(closed));
        wait("the place of a silent channel", || measure(index).1.is_none());
    });
}

#[test]
fn measurement_reaches_only_its_scratch_memory() {
    then_the_real_source(|uri| {
        let page = [0x5a; PAGE_BYTES];
        let scratch_pages = (32 << 20) / PAGE_BYTES as u64;
        // Beyond the memory that a measurement may fill, and in a region that a guest has but a
        // measurement has not.
        for (region, index) in [(0, scratch_pages), (0, u64::MAX >> 13), (1, 0)] {
            let (mut stream, refused) = connect_with(uri, &hello(Role::Measure, 0, Token::NONE));
            assert_eq!(refused, None);
            let mut writer = TableWriter::default();
            assert!(writer.push(PageIndex(index), Some(PageDigest::of(&page))));
            let (header, table) = writer.finish(FrameKind::Pages, RegionId(region), 0, 0);
            // The connection may be closed in the middle of the write.
            let _ = stream.write_all(&[&header.encode()[..], table, &page].concat());
            let answered = FrameHeader::barrier(0, 1).encode();
            let _ = stream.write_all(&answered);
            assert!(
                !matches!(stream.read(&mut [0; 100]), Ok(1..)),
                "page {index} of region {region} was taken"
            );
        }
    });
}
