//! Tests of the target's driver with real threads and sockets. The test acts as the source and as
//! the arbiter.

use super::*;
use crate::arbiter::{ArbiterError, ArbiterRequest, MigrationId, Ownership, Side};
use crate::channel::Uri;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender, channel};
use vmferry_core::{
    Gpa, GuestMemory, Layout, MachineConfig, Migratable, PageRun, Region, RegionId, RunState, Section,
    VmError, Window,
};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, FrameHeader, HELLO_BYTES, HelloReply, Mode, ToSource, ToTarget,
    Token, VERSION_MAX, VERSION_MIN, decode_control, encode_control,
};

/// Time after which a waiting test has failed.
const HANG: Duration = vmferry_testkit::PATIENCE;
/// Maximum number of times that a driver reads the stop flag in a test: ten times a second, and
/// once for each event.
const MOST_LOOKS: u64 = 1000;

/// Access of a test to the driver of an [`Arrival`].
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// Number of times that the stop flag was read.
    pub(super) looks: AtomicU64,
    /// True if the time within which a source must announce its guest counts as over.
    pub(super) setup_is_over: AtomicBool,
}

/// A question to the arbiter, which the test answers.
struct Question {
    request: ArbiterRequest,
    answer: Sender<Result<Ownership, ArbiterError>>,
}

impl Question {
    fn answer(self, answer: Result<Ownership, ArbiterError>) {
        self.answer.send(answer).unwrap();
    }
}

#[derive(Debug)]
struct Scripted(Sender<Question>);

impl Arbiter for Scripted {
    fn name(&self) -> String {
        "scripted".into()
    }

    fn register(&self, migration: MigrationId) -> String {
        migration.to_string()
    }

    fn open(&self, _: MigrationId) -> Result<(), ArbiterError> {
        Err(unreachable())
    }

    fn request(&self, _: MigrationId, request: ArbiterRequest) -> Result<Ownership, ArbiterError> {
        let (answer, answered) = channel();
        self.0.send(Question { request, answer }).map_err(|_| unreachable())?;
        answered.recv().map_err(|_| unreachable())?
    }

    fn close(&self, _: MigrationId) -> Result<(), ArbiterError> {
        Err(unreachable())
    }
}

fn unreachable() -> ArbiterError {
    ArbiterError::Unreachable("no answer".into())
}

/// Memory of one page whose content is never transferred.
struct OnePage(Layout);

impl OnePage {
    fn new() -> Self {
        Self(Layout::new(vec![Region { id: RegionId(0), gpa: Gpa(0), len: 4096 }]).unwrap())
    }
}

impl GuestMemory for OnePage {
    fn layout(&self) -> &Layout {
        &self.0
    }

    fn window(&self, region: RegionId, run: PageRun) -> Result<Window<'_>, VmError> {
        Err(VmError::new(format!("{region} has no {run}")))
    }
}

struct Vm {
    starts: Result<(), &'static str>,
    started: bool,
}

impl Migratable for Vm {
    fn config(&self) -> MachineConfig {
        let regions = OnePage::new().0.regions().to_vec();
        MachineConfig { kind: "test".into(), vcpus: 1, regions, extra: vec![], features: vec![] }
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::new(OnePage::new())
    }
}

impl TargetVm for Vm {
    fn load(&mut self, _: &[Section]) -> Result<(), VmError> {
        Ok(())
    }

    /// The scripted source has a version that would not understand the request.
    fn wants_trial(&self) -> bool {
        true
    }

    fn start(&mut self, _: RunState) -> Result<(), VmError> {
        self.starts.map_err(VmError::new)?;
        self.started = true;
        Ok(())
    }
}

/// Source whose messages the test sends one by one.
struct Source {
    port: u16,
    control: TcpStream,
}

impl Source {
    /// Sends a hello and `Setup`.
    fn connect(listener: &Listener) -> Self {
        let Uri::Tcp { port, .. } = listener.uri().unwrap() else { panic!("no TCP port") };
        let mut source = Self { port, control: open_channel(port, Role::Control, Token::NONE) };
        let machine = Vm { starts: Ok(()), started: false }.config();
        let (bulk_channels, urgent_channels) = (1, 0);
        let mode = Mode::Precopy;
        source.send(&ToTarget::Setup { machine, mode, bulk_channels, urgent_channels, probe: false });
        source
    }

    fn send(&mut self, message: &ToTarget) {
        self.control.write_all(&encode_control(message).unwrap()).unwrap();
    }

    fn receive(&mut self) -> ToSource {
        let mut header = [0; CONTROL_HEADER_BYTES];
        self.control.read_exact(&mut header).expect("the target is silent or has hung up");
        let header = ControlHeader::decode(&header).unwrap();
        let mut body = vec![0; header.len];
        self.control.read_exact(&mut body).unwrap();
        decode_control(header, &body).unwrap()
    }

    /// Sends a ping; its answer shows that the driver reads its queue.
    fn ping(&mut self, number: u64) {
        self.send(&ToTarget::Ping(number));
        assert_eq!(self.receive(), ToSource::Pong(number));
    }

    /// Performs the migration of a guest without pages, from the target's `Accept` to the commit.
    fn commit(&mut self) {
        let ToSource::Accept { bulk, .. } = self.receive() else { panic!("not accepted") };
        let mut channel = open_channel(self.port, Role::Bulk, bulk);
        assert_eq!(self.receive(), ToSource::ChannelsUp);
        self.send(&ToTarget::Final { pass: 0 });
        self.send(&ToTarget::StateEnd { sections: 0 });
        channel.write_all(&FrameHeader::barrier(0, 0).encode()).unwrap();
        assert!(matches!(self.receive(), ToSource::Received { pass: 0, mismatches: 0, .. }));
        self.send(&ToTarget::Load);
        assert!(matches!(self.receive(), ToSource::Ready { .. }));
        self.send(&ToTarget::Commit);
    }
}

/// Sends the hello of a channel, which the target must accept.
fn open_channel(port: u16, role: Role, token: Token) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    let hello = Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: 0,
        migration: MigrationId([7; 16]),
        role,
        index: 0,
        token,
        arbiter: arbiter_digest("scripted"),
    };
    stream.write_all(&hello.encode()).unwrap();
    let mut reply = [0; HELLO_BYTES];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(HelloReply::decode(&reply).unwrap().refused, None);
    stream
}

/// Target under test, as seen by the test's thread.
struct Target {
    arrival: Arc<Arrival>,
    questions: Receiver<Question>,
    listener: Arc<Listener>,
}

impl Target {
    /// Waits for the next question to the arbiter, which must be `request`.
    fn asks(&self, request: ArbiterRequest) -> Question {
        let question = self.questions.recv_timeout(HANG).expect("the arbiter is not asked");
        assert_eq!(question.request, request);
        question
    }

    /// Returns the number of times that the driver has read the stop flag.
    fn looks(&self) -> u64 {
        self.arrival.watched.looks.load(Ordering::Relaxed)
    }
}

const CLAIM: ArbiterRequest = ArbiterRequest::Claim(Side::Target);
const OURS: Ownership = Ownership::Target { runs: false };

/// Runs `script` while a target receives into `vm`. Returns the reason why no guest arrived, and
/// the VM.
///
/// A script that panics does not wait for the target's thread, which may hang.
fn received(mut vm: Vm, script: impl FnOnce(&Target)) -> (ReceiveFailure, Vm) {
    let listener = Listener::bind(&Uri::Tcp { host: "127.0.0.1".into(), port: 0 }, false).unwrap();
    let (asked, questions) = channel();
    let arrival = Arrival::new(HANG).arbiter(Some(Arc::new(Scripted(asked))));
    let target = Target { arrival: Arc::new(arrival), questions, listener: Arc::new(listener) };
    let (arrival, listener) = (Arc::clone(&target.arrival), Arc::clone(&target.listener));
    let (ended, end) = channel();
    std::thread::spawn(move || {
        let failure = receive(&mut vm, &listener, &arrival).unwrap_err();
        ended.send((failure, vm)).unwrap();
    });
    script(&target);
    end.recv_timeout(HANG).expect("the target does not end")
}

#[test]
fn stopped_target_gives_the_guest_back_until_the_arbiter_answers() {
    let vm = Vm { starts: Err("no vCPU thread"), started: false };
    let (failure, vm) = received(vm, |target| {
        let mut source = Source::connect(&target.listener);
        target.asks(ArbiterRequest::Look).answer(Ok(Ownership::Open));
        source.commit();
        target.asks(CLAIM).answer(Ok(OURS));
        assert!(matches!(source.receive(), ToSource::Returned(_)));
        target.asks(ArbiterRequest::GiveBack).answer(Err(unreachable()));
        let outstanding = target.asks(ArbiterRequest::GiveBack);
        let looks = target.looks();
        target.arrival.stop();
        source.ping(1);
        source.ping(2);
        drop(source);
        outstanding.answer(Err(unreachable()));
        assert!(target.arrival.undecided().is_some());
        target.asks(ArbiterRequest::GiveBack).answer(Err(unreachable()));
        target.asks(ArbiterRequest::GiveBack).answer(Ok(Ownership::Source));
        let looks = target.looks() - looks;
        assert!(looks < MOST_LOOKS, "the driver spins: it looked for a stop {looks} times");
    });
    assert!(
        matches!(&failure, ReceiveFailure::Failed(why) if why.detail.contains("no vCPU thread")),
        "{failure}"
    );
    assert!(!vm.started);
}

#[test]
fn target_that_is_stopped_while_it_claims_gives_the_guest_back() {
    let vm = Vm { starts: Ok(()), started: false };
    let (failure, vm) = received(vm, |target| {
        let mut source = Source::connect(&target.listener);
        target.asks(ArbiterRequest::Look).answer(Ok(Ownership::Open));
        source.commit();
        let claim = target.asks(CLAIM);
        target.arrival.stop();
        assert!(matches!(source.receive(), ToSource::Returned(_)));
        let returned = target.asks(ArbiterRequest::GiveBack);
        claim.answer(Ok(OURS));
        source.ping(1);
        returned.answer(Err(unreachable()));
        target.asks(ArbiterRequest::GiveBack).answer(Ok(Ownership::Source));
    });
    assert!(matches!(failure, ReceiveFailure::Failed(why) if why.code == RefusalCode::Cancelled));
    assert!(!vm.started);
}

#[test]
fn setup_timeout_does_not_run_while_the_arbiter_is_asked() {
    let vm = Vm { starts: Ok(()), started: false };
    let (failure, _) = received(vm, |target| {
        let mut source = Source::connect(&target.listener);
        let look = target.asks(ArbiterRequest::Look);
        target.arrival.watched.setup_is_over.store(true, Ordering::Release);
        // The driver reads the clock again between the two answers.
        source.ping(1);
        source.ping(2);
        look.answer(Ok(Ownership::Open));
        assert!(matches!(source.receive(), ToSource::Accept { .. }));
        target.arrival.stop();
        assert!(matches!(source.receive(), ToSource::Failed(why) if why.code == RefusalCode::Cancelled));
    });
    assert!(matches!(failure, ReceiveFailure::Failed(_)), "{failure}");
}
