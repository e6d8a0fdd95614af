//! Who else may come to a target that waits for its guest, and what a source may do that means harm.

use crate::rig::{quick, unix_uri};
use crate::toy::{Method, Options, Toy};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vmferry_core::{PAGE_BYTES, PageDigest, PageIndex, PageRun, RegionId, Section};
use vmferry_engine::{
    Arrival, GuestMemory, Listener, MachineConfig, MigrationState, Monitor, ReceiveFailure, Settings,
    TargetVm, Uri, migrate, receive,
};
use vmferry_testkit::{PATIENCE, wait, wait_for};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, FrameHeader, FrameKind, HELLO_BYTES, Hello, HelloReply, MigrationId,
    Mode, REQUEST_BYTES, RefusalCode, Request, Role, TableWriter, ToSource, ToTarget, Token, VERSION_MAX,
    VERSION_MIN, decode_control, encode_control,
};

fn hello(role: Role, index: u16, token: Token) -> Hello {
    let migration = MigrationId([7; 16]);
    let (version_min, version_max) = (VERSION_MIN, VERSION_MAX);
    Hello { version_min, version_max, features: 0, migration, role, index, token, fence: 0 }
}

fn connect(uri: &Uri) -> UnixStream {
    let Uri::Unix(path) = uri else { panic!("{uri} is no Unix socket") };
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Greets; the stream and the verdict.
fn greet(uri: &Uri, hello: &Hello) -> (UnixStream, Option<RefusalCode>) {
    let mut stream = connect(uri);
    stream.write_all(&hello.encode()).unwrap();
    let mut reply = [0; HELLO_BYTES];
    stream.read_exact(&mut reply).unwrap();
    let reply = HelloReply::decode(&reply).unwrap();
    assert_eq!(reply.migration, hello.migration);
    (stream, reply.refused)
}

fn say(stream: &mut UnixStream, message: &ToTarget) {
    // A target that has hung up already is what some of these want.
    let _ = stream.write_all(&encode_control(message).unwrap());
}

fn hear(stream: &mut UnixStream) -> Option<ToSource> {
    let mut header = [0; CONTROL_HEADER_BYTES];
    stream.read_exact(&mut header).ok()?;
    let header = ControlHeader::decode(&header).unwrap();
    let mut body = vec![0; header.len];
    stream.read_exact(&mut body).ok()?;
    Some(decode_control(header, &body).unwrap())
}

/// Whether the other end has closed, having said nothing more.
fn closed(stream: &mut UnixStream) -> bool {
    matches!(stream.read(&mut [0; 100]), Ok(0))
}

/// Lets `strange` do its worst to a waiting target; the real source must still get through.
fn then_the_real_source(strange: impl FnOnce(&Uri)) {
    let mut source = Toy::new(Options::default(), true);
    let mut target = source.target();
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    let arrival = Arrival::new(quick().peer_timeout);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        strange(&uri);
        let report = migrate(&mut source, &uri, None, &quick(), &Monitor::new()).unwrap();
        assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
        let _ = receiving.join().unwrap().unwrap();
    });
    assert_eq!((target.arrived_equal(), target.lost()), (Some(true), vec![]));
}

#[test]
fn strangers_are_refused_and_the_target_waits_on() {
    then_the_real_source(|uri| {
        let mut garbage = connect(uri);
        garbage.write_all(&[0xa5; 200]).unwrap();
        // Closing with unread bytes resets; either is an end.
        let _ = garbage.read(&mut [0; 10]);
        let mut http = connect(uri);
        http.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let _silent = connect(uri);
        connect(uri).write_all(&hello(Role::Control, 0, Token::NONE).encode()[..40]).unwrap();
        let newer = Hello { version_min: 99, version_max: 100, ..hello(Role::Control, 0, Token::NONE) };
        assert_eq!(greet(uri, &newer).1, Some(RefusalCode::Version));
        let fancy = Hello { features: 1 << 60, ..hello(Role::Control, 0, Token::NONE) };
        assert_eq!(greet(uri, &fancy).1, Some(RefusalCode::Feature));
        let (mut bulk, refused) = greet(uri, &hello(Role::Bulk, 0, Token([1; 16])));
        assert!(refused == Some(RefusalCode::Token) && closed(&mut bulk));
        // `http` and the silent one still hold on while the real source comes.
        std::mem::forget((http, _silent));
    });
}

#[test]
fn a_hello_and_nothing_more_keeps_nobody_out_for_long() {
    then_the_real_source(|uri| {
        let (mut quiet, refused) = greet(uri, &hello(Role::Control, 0, Token::NONE));
        assert_eq!(refused, None);
        // While it is being served another is told so.
        assert_eq!(greet(uri, &hello(Role::Control, 0, Token::NONE)).1, Some(RefusalCode::Busy));
        // Talking without saying anything does not help it.
        let began = Instant::now();
        for number in 0.. {
            say(&mut quiet, &ToTarget::Ping(number));
            if !matches!(hear(&mut quiet), Some(ToSource::Pong(_))) {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "it is heard for ever");
            // Its pace, which no outcome depends on.
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

#[test]
fn a_source_that_is_refused_does_not_stop_the_next_one() {
    for _ in 0..3 {
        then_the_real_source(|uri| {
            let (mut other, _) = greet(uri, &hello(Role::Control, 0, Token::NONE));
            let machine = MachineConfig {
                kind: "other".into(),
                vcpus: 1,
                regions: vec![],
                extra: vec![],
                features: vec![],
            };
            say(
                &mut other,
                &ToTarget::Setup {
                    machine,
                    mode: Mode::Precopy,
                    bulk_channels: 1,
                    urgent_channels: 0,
                    probe: false,
                },
            );
            let Some(ToSource::Failed(why)) = hear(&mut other) else { panic!("it was not refused") };
            assert!(why.code == RefusalCode::Machine && why.detail.contains("toy here and other there"));
            // It does not hang up, and keeps talking.
            let mut held = other.try_clone().unwrap();
            std::thread::spawn(move || {
                for number in 0..2000 {
                    say(&mut held, &ToTarget::Ping(number));
                }
            });
            std::mem::forget(other);
        });
    }
}

/// A source that speaks the protocol well.
struct Evil {
    control: UnixStream,
    bulk: Vec<UnixStream>,
    sequence: u64,
    /// How often the target has looked at its guest's memory: twice for each run of pages, of which the second time is at its end.
    looks: Box<dyn Fn() -> usize>,
}

impl Evil {
    fn new(
        uri: &Uri,
        target: impl Fn(Method) -> usize + 'static,
        machine: MachineConfig,
        channels: u16,
    ) -> Self {
        let (mut control, refused) = greet(uri, &hello(Role::Control, 0, Token::NONE));
        assert_eq!(refused, None);
        say(
            &mut control,
            &ToTarget::Setup {
                machine,
                mode: Mode::Precopy,
                bulk_channels: channels,
                urgent_channels: 0,
                probe: false,
            },
        );
        let Some(ToSource::Accept { bulk: token, .. }) = hear(&mut control) else { panic!("not accepted") };
        // Neither a wrong token, nor another migration, nor a channel too many, nor one twice, gets in.
        let right = hello(Role::Bulk, 0, token);
        let wrong = [
            Hello { token: Token([9; 16]), ..right.clone() },
            Hello { migration: MigrationId([8; 16]), ..right.clone() },
            Hello { index: channels, ..right.clone() },
            Hello { index: u16::MAX, ..right.clone() },
        ];
        for hello in wrong {
            assert_eq!(greet(uri, &hello).1, Some(RefusalCode::Token), "{hello:?}");
        }
        let bulk = (0..channels).map(|index| {
            let hello = Hello { index, ..right.clone() };
            let (stream, refused) = greet(uri, &hello);
            assert_eq!(refused, None);
            assert_eq!(greet(uri, &hello).1, Some(RefusalCode::Token), "twice");
            stream
        });
        let bulk = bulk.collect();
        assert_eq!(hear(&mut control), Some(ToSource::ChannelsUp));
        Self { control, bulk, sequence: 0, looks: Box::new(move || target(Method::Window)) }
    }

    fn say(&mut self, message: &ToTarget) {
        say(&mut self.control, message);
    }

    /// Sends what `change` made of a frame with one page.
    fn frame(
        &mut self,
        pass: u32,
        page: u64,
        change: impl FnOnce(&mut FrameHeader, &mut Vec<u8>, &mut Vec<u8>),
    ) {
        let content = vec![0x77; PAGE_BYTES];
        let mut writer = TableWriter::default();
        assert!(writer.push(PageIndex(page), Some(PageDigest::of(&content))));
        let (mut header, table) = writer.finish(FrameKind::Pages, RegionId(0), pass, self.sequence);
        let (mut table, mut content) = (table.to_vec(), content);
        change(&mut header, &mut table, &mut content);
        self.sequence += 1;
        let bytes = [&header.encode()[..], &table, &content].concat();
        let _ = self.bulk[0].write_all(&bytes);
    }

    /// Waits until the target has looked up its guest's memory for so many frames, `times`, during `act`.
    fn until_looks(&mut self, times: usize, act: impl FnOnce(&mut Self)) {
        let before = (self.looks)();
        act(self);
        wait("the target to take pages", || (self.looks)() >= before + times);
    }

    fn barrier(&mut self, pass: u32) {
        let _ = self.bulk[0].write_all(&FrameHeader::barrier(pass, self.sequence).encode());
        self.sequence += 1;
    }

    /// The rest of a good migration.
    fn finish(&mut self, pass: u32) {
        self.say(&ToTarget::Final { pass });
        self.say(&ToTarget::StateEnd { sections: 0 });
        self.barrier(pass);
        assert!(matches!(hear(&mut self.control), Some(ToSource::Received { .. })));
        self.say(&ToTarget::Load);
    }
}

/// Lets an evil source at a target that bears silence for `patience`; returns why the target refused. It must not have run.
fn refusal(patience: Duration, act: impl FnOnce(&mut Evil)) -> String {
    let mut target = Toy::new(Options { ballast: 0, ..Options::default() }, false);
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    let arrival = Arrival::new(patience);
    let machine = TargetVm::config(&target);
    let (began, counter) = (Instant::now(), target.counter());
    let failure = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        let mut evil = Evil::new(&uri, counter, machine, 1);
        act(&mut evil);
        // A source that has heard the refusal hangs up.
        while hear(&mut evil.control).is_some() {}
        drop(evil);
        receiving.join().unwrap().unwrap_err()
    });
    assert!(!target.ran() && !target.running(), "it ran: {failure}");
    assert!(began.elapsed() < PATIENCE, "{failure}");
    assert!(matches!(failure, ReceiveFailure::Failed(_)));
    failure.to_string()
}

fn refused(what: &str, act: impl FnOnce(&mut Evil)) {
    // Nothing here is a matter of silence.
    let why = refusal(PATIENCE, act);
    assert!(why.contains(what), "{what}: {why}");
}

#[test]
fn frames_that_lie_are_refused() {
    refused("run of pages", |evil| evil.frame(0, 1199, |header, _, _| header.base = PageIndex(1200)));
    refused("run of pages", |evil| evil.frame(0, 1 << 32, |_, _, _| {}));
    refused("run of pages", |evil| evil.frame(0, 5, |header, _, _| header.base = PageIndex(u64::MAX)));
    refused("region", |evil| evil.frame(0, 5, |header, _, _| header.region = RegionId(1)));
    refused("region", |evil| evil.frame(0, 5, |header, _, _| header.region = RegionId(u32::MAX)));
    refused("frame table is damaged", |evil| evil.frame(0, 5, |header, _, _| header.table_sum ^= 1));
    refused("frame table is damaged", |evil| evil.frame(0, 5, |_, table, _| table[0] ^= 1));
    refused("frame number", |evil| evil.frame(0, 5, |header, _, _| header.sequence = 1));
    refused("frame number", |evil| {
        evil.frame(0, 5, |_, _, _| {});
        evil.sequence = 0;
        evil.frame(0, 6, |_, _, _| {});
    });
    refused("channel 0 ended pass 1, expected was 0", |evil| evil.barrier(1));
    refused("expected was 1", |evil| {
        evil.barrier(0);
        evil.barrier(0);
    });
    refused("magic", |evil| drop(evil.bulk[0].write_all(&[0; 4096])));
    refused("broke off", |evil| evil.bulk.clear());
}

#[test]
fn a_commit_is_taken_only_over_memory_and_state_that_are_whole() {
    refused("load came too early (last pass complete: false", |evil| evil.say(&ToTarget::Load));
    refused("Commit, which does not fit this moment", |evil| evil.say(&ToTarget::Commit));
    refused("last pass complete: false", |evil| {
        evil.say(&ToTarget::Final { pass: 1 });
        evil.say(&ToTarget::StateEnd { sections: 0 });
        evil.barrier(0);
        hear(&mut evil.control);
        evil.say(&ToTarget::Load);
    });
    refused("state complete: false", |evil| {
        evil.say(&ToTarget::Final { pass: 0 });
        evil.barrier(0);
        hear(&mut evil.control);
        evil.say(&ToTarget::Load);
    });
    refused("0 of 3 sections", |evil| evil.say(&ToTarget::StateEnd { sections: 3 }));
    refused("pages undamaged: false", |evil| {
        evil.frame(0, 5, |_, _, content| content[17] ^= 1);
        evil.finish(0);
    });
    // The page of pass 1 is damaged, and pass 1 never ends: it must count all the same.
    refused("pages were still arriving, or damaged", |evil| {
        evil.say(&ToTarget::Final { pass: 0 });
        evil.say(&ToTarget::StateEnd { sections: 0 });
        evil.barrier(0);
        hear(&mut evil.control);
        // The target takes the second frame after it has checked the first.
        evil.until_looks(2, |evil| {
            evil.frame(1, 5, |_, _, content| content[17] ^= 1);
            evil.frame(1, 6, |_, _, _| {});
        });
        evil.say(&ToTarget::Load);
    });
    // Half a frame is under way.
    refused("pages were still arriving, or damaged", |evil| {
        evil.say(&ToTarget::Final { pass: 0 });
        evil.say(&ToTarget::StateEnd { sections: 0 });
        evil.barrier(0);
        hear(&mut evil.control);
        evil.until_looks(1, |evil| evil.frame(1, 5, |_, _, content| content.truncate(100)));
        evil.say(&ToTarget::Load);
    });
    // Ready, and then the source goes away, or wants something else.
    refused("went away before it handed over", |evil| {
        evil.finish(0);
        assert!(matches!(hear(&mut evil.control), Some(ToSource::Ready { .. })));
        evil.control.shutdown(std::net::Shutdown::Both).unwrap();
    });
    refused("cancelled", |evil| {
        evil.finish(0);
        evil.say(&ToTarget::Cancel(vmferry_wire::Refusal::new(RefusalCode::Cancelled, "on request")));
        evil.say(&ToTarget::Commit);
    });
}

/// Memory that was handed over is the guest's alone: a source that writes on is not heard.
#[test]
fn nothing_is_written_after_the_last_pass() {
    let mut target = Toy::new(Options::default(), false);
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    let arrival = Arrival::new(PATIENCE);
    let machine = TargetVm::config(&target);
    let (memory, counter) = (TargetVm::memory(&target), target.counter());
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        let mut evil = Evil::new(&uri, counter, machine, 1);
        evil.frame(0, 1100, |_, _, _| {});
        evil.finish(0);
        assert!(matches!(hear(&mut evil.control), Some(ToSource::Ready { .. })));
        evil.frame(1, 1101, |_, _, _| {});
        evil.say(&ToTarget::Commit);
        assert!(matches!(hear(&mut evil.control), Some(ToSource::Running { .. })));
        evil.frame(1, 1102, |_, _, _| {});
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
fn device_state_without_end_is_refused_before_it_fills_memory() {
    let before = resident_bytes();
    refused("more device state than the protocol allows", |evil| {
        let section = Section { name: "x".into(), instance: 0, version: 0, payload: vec![1; 4 << 20 >> 1] };
        let bytes = encode_control(&ToTarget::Section(section)).unwrap();
        // 5 GB would follow.
        for _ in 0..2500 {
            if evil.control.write_all(&bytes).is_err() {
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
        while evil.control.write_all(&bytes).is_ok() {}
    });
}

#[test]
fn a_source_that_falls_silent_is_given_up() {
    let silent = |act: fn(&mut Evil)| {
        // Long enough for a busy host to greet on all channels.
        let why = refusal(Duration::from_secs(5), act);
        assert!(why.contains("nothing was heard of the source"), "{why}");
    };
    std::thread::scope(|scope| {
        scope.spawn(|| silent(|_| {}));
        scope.spawn(|| silent(|evil| evil.finish(0)));
    });
}

/// Asking for channels that cannot be is refused before anything is accepted, so the wait goes on.
#[test]
fn impossible_numbers_of_channels_are_refused() {
    then_the_real_source(|uri| {
        for channels in [0, Settings::MAX_CHANNELS + 1, u16::MAX] {
            let (mut control, _) = greet(uri, &hello(Role::Control, 0, Token::NONE));
            let machine = TargetVm::config(&Toy::new(Options::default(), false));
            say(
                &mut control,
                &ToTarget::Setup {
                    machine,
                    mode: Mode::Precopy,
                    bulk_channels: channels,
                    urgent_channels: 0,
                    probe: false,
                },
            );
            let Some(ToSource::Failed(why)) = hear(&mut control) else { panic!("{channels} were accepted") };
            assert!(why.detail.contains("1 to 64"), "{why}");
            assert!(closed(&mut control));
        }
    });
}

/// A barrier as a measuring channel sends it, and whether it is answered.
fn measured(stream: &mut UnixStream, number: u32) -> bool {
    stream.write_all(&FrameHeader::barrier(number, number.into()).encode()).unwrap();
    let mut answer = [0; REQUEST_BYTES];
    stream.read_exact(&mut answer).is_ok()
        && matches!(Request::decode(&answer), Ok(Request::Echo { number: n, .. }) if n == u64::from(number))
}

#[test]
fn more_measure_than_there_are_places_and_none_keeps_one_for_long() {
    then_the_real_source(|uri| {
        let measure = |index| greet(uri, &hello(Role::Measure, index, Token::NONE));
        let mut held: Vec<UnixStream> = Vec::new();
        for index in 0..8 {
            let (mut stream, refused) = measure(index);
            assert!(refused.is_none() && measured(&mut stream, 0), "place {index}");
            held.push(stream);
        }
        // On a busy host the first may have been closed for their silence by now, and left their places.
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
        // They say nothing more: each is closed, and its place is free again.
        assert!(held.iter_mut().all(closed));
        wait("the place of a silent channel", || measure(index).1.is_none());
    });
}

#[test]
fn who_measures_reaches_no_memory_but_that_which_is_dropped() {
    then_the_real_source(|uri| {
        let page = [0x5a; PAGE_BYTES];
        let scratch_pages = (32 << 20) / PAGE_BYTES as u64;
        // Beyond the memory that it may fill, and in a region that a guest has and a measurement has not.
        for (region, index) in [(0, scratch_pages), (0, u64::MAX >> 13), (1, 0)] {
            let (mut stream, refused) = greet(uri, &hello(Role::Measure, 0, Token::NONE));
            assert_eq!(refused, None);
            let mut writer = TableWriter::default();
            assert!(writer.push(PageIndex(index), Some(PageDigest::of(&page))));
            let (header, table) = writer.finish(FrameKind::Pages, RegionId(region), 0, 0);
            // Closed in the middle of it, maybe.
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
