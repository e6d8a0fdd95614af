//! `vmferry run`: runs a guest, or waits for one.

mod moving;
mod snapshot;
mod working_set;

pub(crate) use moving::{contradiction, tracker};

use crate::advice::{self, advised};
use crate::api::{Api, GuestPlace, Incoming, Order, PendingOrder, RunContext};
use crate::args::{GuestKind, OnReset, RunArgs};
use crate::arriving::{self, Arriving};
use crate::choices::{IncomingArg, OnOff};
use crate::console::{self, Console};
use crate::descriptors::{Descriptors, Inherited};
use crate::guest::Machine;
use crate::limit::Limiter;
use crate::speed::EVERY;
use crate::successor::Started;
use crate::traces::Traces;
use crate::usage::wrong_usage;
use crate::{
    Status, balloon, branch, dirty_rate, guest, have, metrics, net, output, plan, sandbox, signals, upgrade,
};
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};
use vmferry_control::{Events, Limits, Server};
use vmferry_engine::{
    Listener, MigrateError, OnDemandRestore, ReceiveFailure, Received, RunState, Uri, receive, restore,
    restore_on_demand,
};
use working_set::SharedGuest;

/// Interval at which the machine's owner checks whether a completed migration has been noticed.
const TICK: Duration = Duration::from_millis(20);
/// Interval at which the machine's owner wakes without an order. No function may depend on it.
const SELDOM: Duration = Duration::from_secs(1);
/// Time for which the report of a completed migration waits to be read before the process ends.
const GRACE: Duration = Duration::from_secs(10);
/// The same time after a request to end the process: a client that watches the migration reads more
/// often.
const LAST_GRACE: Duration = Duration::from_secs(1);
/// Time for which the report stays available for further readers after it has been read.
const LINGER: Duration = Duration::from_millis(200);

/// Runs until the guest ends, moves to a target, or the process is told to end.
pub(crate) fn run(args: &RunArgs, traces: &Traces, mut inherited: Inherited) -> Result<Status> {
    check(args)?;
    crate::descriptors::raise_limit();
    // A jail changes the working directory and the user, so both are used before the confinement
    // begins.
    let started = Started::of_this_process(args.sandbox.is_jailed())?;
    let incoming = args.incoming.as_ref().and_then(IncomingArg::uri);
    let branch = match args.incoming {
        Some(IncomingArg::Branch(number)) => Some(inherited.remove(number).context("--incoming")?),
        _ => None,
    };
    let nets = net::options(&args.nets, &mut inherited)?;
    let listener = args.metrics_descriptor.map(|number| inherited.remove(number)).transpose()?;
    let descriptors = Descriptors::at_start(inherited, &args.pass_fds, incoming)?;
    // The files stay open in a jail, so they must be files that the user of the jail can read.
    let known = sandbox::as_user(&args.sandbox, || have::open(&args.have))?;
    // The confinement must begin while the process has one thread.
    let mut confinement = sandbox::begin(args)?;
    // The change of the user in a jail would clear the signal, so it is set afterwards.
    if args.die_with_parent {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    }
    let mut machine = Machine::build(args, nets)?;
    let (orders, errands) = sync_channel(4);
    let probe = Arc::new(machine.probe());
    let events = Events::new().context("cannot make the control socket's descriptor")?;
    let arbiter = args.arbiter.as_ref().map(|arbiter| arbiter.build(args.insecure)).transpose()?;
    let shared = Arc::new(RunContext::new(
        (args, started),
        (args.tls.load()?, descriptors),
        (arbiter, known.index(&args.have)?),
        probe,
        orders,
        events.clone(),
    ));
    let way = Way::of(args, branch, &shared);
    let mut server = serve_clients(args, &shared, &events)?;
    if let Some(address) = args.metrics {
        metrics::start(address, args.metrics_public, listener, &shared)?;
    }
    traces.send();
    let console = start_threads(args, &shared)?;
    // The process is confined before a guest runs and before a peer's bytes are read.
    confinement.complete()?;
    // The value is set only once.
    let _ = shared.confinement.set(confinement.in_force().clone());
    let (mut kept, arrived) = (Kept::default(), arrive(way, args, &mut machine, &shared));
    let result = arrived.and_then(|arrived| {
        let Arrived::Here(arriving) = arrived else { return Ok(Status::Done) };
        kept = arriving;
        if let (true, Some(server), Some(path)) = (args.successor, &mut server, &args.api) {
            upgrade::succeed(server, path);
        }
        serve(&mut machine, args, (&shared, &mut kept), &errands)
    });
    kept.end_recording();
    if shared.quit.load(Ordering::Acquire) {
        shared.event_sender.ends(false, shared.quit_reason());
    }
    if shared.has_missing_pages() {
        console::drain();
        drop(server);
        drop(console);
        exit_without_pages(result);
    }
    // Pages of an on-demand restore must still arrive until the vCPUs have stopped.
    machine.stop();
    console::drain();
    drop((kept, server, console));
    result
}

/// Ends the process of a guest with missing pages. Its vCPUs may sleep on pages that have not
/// arrived, and must not be woken with other contents.
fn exit_without_pages(result: Result<Status>) -> ! {
    let status = result.unwrap_or_else(|error| {
        output::print_message(&advice::told(&error));
        Status::Failed
    });
    // `exit` drops no values: the machine and its memory stay as they are until the process is
    // gone.
    std::process::exit(status as i32);
}

/// Starts the server of the control socket, if there is one.
fn serve_clients(args: &RunArgs, shared: &Arc<RunContext>, events: &Events) -> Result<Option<Server>> {
    let start = |path: &Path| {
        // A successor takes over the path when it has the guest.
        let path = if args.successor { upgrade::waiting_at(path) } else { path.into() };
        Server::start(&path, Arc::new(Api(Arc::clone(shared))), events, Limits::default())
    };
    args.api.as_deref().map(start).transpose().context("--api")
}

/// Starts the threads that watch signals and the guest, and that control its balloon. Returns the
/// console on the terminal, if there is one.
fn start_threads(args: &RunArgs, shared: &Arc<RunContext>) -> Result<Option<Console>> {
    signals::watch(shared)?;
    if let Some(least) = args.balloon_auto {
        let balloon = shared.probe.balloon().context("the guest has no balloon (--balloon on)")?;
        balloon::auto::start(balloon, least, shared)?;
    }
    let on_terminal = args.serial.as_deref() == Some("stdio");
    let console = on_terminal.then(|| Console::start(shared)).transpose()?;
    watch_the_guest(shared)?;
    watch_for_the_end(shared)?;
    Ok(console)
}

/// Checks that the options fit together.
fn check(args: &RunArgs) -> Result<()> {
    args.record.as_deref().map(working_set::check_record).transpose()?;
    if args.guest == GuestKind::Process {
        guest::fits_a_process(args)?;
    }
    if args.balloon_auto.is_some() && args.balloon == OnOff::Off {
        wrong_usage!("--balloon-auto needs a balloon; use --balloon on");
    }
    if let Some(address) = args.metrics {
        metrics::check(address, args.metrics_public)?;
    }
    match &args.incoming {
        Some(IncomingArg::Defer) if args.api.is_none() => {
            wrong_usage!("--incoming defer needs a control socket, which gives the address; add --api PATH")
        }
        Some(IncomingArg::At(uri @ Uri::File(_))) if !args.have.is_empty() => {
            wrong_usage!("--have has no effect for {uri}, because the file contains all pages; omit --have")
        }
        Some(IncomingArg::At(uri)) => addresses_stay(uri, args),
        _ => Ok(()),
    }
}

/// Refuses new MAC addresses for a guest that moves from `uri` and keeps its addresses.
fn addresses_stay(uri: &Uri, args: &RunArgs) -> Result<()> {
    if args.new_mac && !matches!(uri, Uri::File(_)) {
        wrong_usage!(
            "--new-mac is for a copy in a file, and a guest from {uri} keeps its addresses; omit --new-mac"
        );
    }
    Ok(())
}

/// Starts a thread that reads the guest's statistics periodically.
fn watch_the_guest(shared: &Arc<RunContext>) -> Result<()> {
    let watched = Arc::clone(shared);
    vmferry_thread::spawn(vmferry_thread::Role::Watch, "speed", move || {
        loop {
            watched.observe();
            std::thread::sleep(EVERY);
        }
    })?;
    Ok(())
}

/// Starts a thread that tells the machine's owner when the guest has ended, so that the owner need
/// not poll.
fn watch_for_the_end(shared: &Arc<RunContext>) -> Result<()> {
    let watched = Arc::clone(shared);
    let watch = move || {
        let Some(guest) = watched.probe.kvm() else { return };
        loop {
            let _ = guest.wait_for_exit();
            watched.request_check();
            // The guest has ended until it is started again, or this process ends.
            while guest.exit().is_some() {
                std::thread::sleep(TICK);
            }
        }
    };
    vmferry_thread::spawn(vmferry_thread::Role::Watch, "end", watch)?;
    Ok(())
}

/// Result of the wait for a guest.
enum Arrived {
    NoGuest,
    /// A guest runs.
    Here(Kept),
}

/// Parts of a restore that must exist while the guest runs.
#[derive(Default)]
struct Kept {
    /// On-demand restore whose pages are still being read.
    _restore: Option<Box<OnDemandRestore>>,
    shared: Option<Box<SharedGuest>>,
}

impl Kept {
    /// Ends the recording of the working set, if there is one.
    fn end_recording(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.end_recording();
        }
    }

    /// Ends the recording of the working set. Returns the answer for the client.
    fn finish_recording(&mut self) -> Result<Value> {
        self.shared.as_mut().context("the guest does not run from a shared snapshot")?.finish()
    }
}

/// Origin of the guest.
enum Way<'a> {
    Start,
    At(&'a Uri),
    /// The address comes over the control socket.
    Told(Receiver<Incoming>),
    /// The guest continues from a snapshot, whose pages it shares with other processes.
    Shared(&'a Path),
    /// The guest is a branch, which comes over this socket.
    Branch(OwnedFd),
}

impl<'a> Way<'a> {
    /// Returns the origin. Must be called before the control socket exists: from its first moment,
    /// a client may give the address.
    fn of(args: &'a RunArgs, branch: Option<OwnedFd>, shared: &RunContext) -> Self {
        match (branch, &args.incoming) {
            (Some(socket), _) => Self::Branch(socket),
            (None, None | Some(IncomingArg::Branch(_))) => Self::Start,
            (None, Some(IncomingArg::At(uri))) => Self::At(uri),
            (None, Some(IncomingArg::Shared(path))) => Self::Shared(path),
            (None, Some(IncomingArg::Defer)) => Self::Told(shared.defer()),
        }
    }
}

/// Starts the guest, receives it or restores it.
fn arrive(way: Way<'_>, args: &RunArgs, machine: &mut Machine, shared: &Arc<RunContext>) -> Result<Arrived> {
    let arrived = match way {
        Way::Start => machine.start().map(|()| {
            eprintln!("vmferry: the guest runs{}", arriving::reached_by(args.api.as_deref()));
            Arrived::Here(Kept::default())
        }),
        Way::At(Uri::File(path)) => take_out(path, args, machine, shared).map(Arrived::Here),
        Way::Shared(path) => {
            let guest = SharedGuest::start(path, args, machine, shared)?;
            Ok(Arrived::Here(Kept { shared: Some(Box::new(guest)), ..Kept::default() }))
        }
        Way::At(uri) => listen(uri, args, shared).and_then(|at| await_guest(at, machine, shared)),
        Way::Told(incoming) => deferred(&incoming, args, machine, shared),
        Way::Branch(socket) => branch::ready(&socket).and_then(|()| {
            let arrived = branch::arrive(&socket, machine, shared)?;
            Ok(if arrived { Arrived::Here(Kept::default()) } else { Arrived::NoGuest })
        }),
    };
    match &arrived {
        Err(_) => shared.event_sender.migration("failed"),
        Ok(Arrived::Here(_)) => {
            shared.record_guest(machine.place());
            if args.incoming.is_some() && !shared.has_missing_pages() {
                shared.event_sender.migration("completed");
            }
        }
        Ok(Arrived::NoGuest) => {}
    }
    arrived
}

/// Waits for the address, and then for the guest.
fn deferred(
    incoming: &Receiver<Incoming>,
    args: &RunArgs,
    machine: &mut Machine,
    shared: &Arc<RunContext>,
) -> Result<Arrived> {
    loop {
        if shared.quit.load(Ordering::Acquire) {
            return Ok(Arrived::NoGuest);
        }
        let Ok((uri, reply)) = incoming.recv_timeout(TICK) else { continue };
        if let Err(error) = sandbox::reachable(&uri, &args.sandbox).and_then(|()| addresses_stay(&uri, args))
        {
            drop(reply.send(Err(advice::told(&error))));
            continue;
        }
        if let Uri::File(path) = &uri {
            let _ = reply.send(Ok(()));
            return take_out(path, args, machine, shared).map(Arrived::Here);
        }
        match listen(&uri, args, shared) {
            Ok(listener) => {
                let _ = reply.send(Ok(()));
                return await_guest(listener, machine, shared);
            }
            Err(error) => drop(reply.send(Err(advice::told(&error)))),
        }
    }
}

/// Listens for a guest, with encryption if this process has a certificate.
fn listen(uri: &Uri, args: &RunArgs, shared: &RunContext) -> Result<Listener> {
    let insecure = args.insecure;
    // The sockets of an upgrade do not leave this host, and descriptors do not pass through
    // encryption.
    let tls = shared.tls.as_ref().filter(|_| !args.successor);
    let listener = match (uri, tls) {
        (Uri::Fd(names), tls) => {
            let sockets = shared.descriptors.take(names).with_context(|| uri.to_string())?;
            match tls {
                Some(tls) => Listener::passed_encrypted(sockets, uri, tls.clone()),
                None => Listener::passed(sockets, uri, insecure),
            }
        }
        (_, Some(tls)) => Listener::bind_encrypted(uri, tls.clone()),
        (_, None) => Listener::bind(uri, insecure),
    };
    listener.map_err(|error| anyhow!(advised(&error, uri)))
}

/// Waits for a guest and receives it.
fn await_guest(listener: Listener, machine: &mut Machine, shared: &Arc<RunContext>) -> Result<Arrived> {
    let at = listener.uri()?.to_string();
    eprintln!("vmferry: waiting for a guest at {at}");
    shared.event_sender.migration("setup");
    shared.set_incoming(at);
    match receive(&mut Arriving { vm: machine.target(), shared, paging: false }, &listener, &shared.arrival) {
        Ok(mut received) => {
            let state = if received.paused { "is paused, as it was at the source" } else { "runs" };
            eprintln!("vmferry: the guest came from {} and {state}", received.source);
            let postcopy = received.postcopy.take();
            shared.set_received(serde_json::to_value(received)?);
            if let Some(postcopy) = postcopy {
                shared.set_postcopy(postcopy.watch());
                let watched = Arc::clone(shared);
                vmferry_thread::spawn(vmferry_thread::Role::Owner, "rest", move || {
                    drop(postcopy.finish(&listener, &watched.arrival))
                })?;
            }
            Ok(Arrived::Here(Kept::default()))
        }
        Err(ReceiveFailure::Stopped) => Ok(Arrived::NoGuest),
        Err(error) => Err(error.into()),
    }
}

/// Restores the guest from a file. The guest runs at once where pages can be read later, and
/// otherwise when all pages have been read.
fn take_out(path: &Path, args: &RunArgs, machine: &mut Machine, shared: &RunContext) -> Result<Kept> {
    let check_copy = |received: &Received| {
        if args.new_mac && received.copy_of.is_none() {
            eprintln!("vmferry: {} holds no copy: the guest keeps its MAC addresses", received.source);
        }
    };
    match restore_on_demand(machine.target(), path) {
        Ok(restore) => {
            check_copy(restore.received());
            shared.set_received(serde_json::to_value(restore.received())?);
            shared.set_restore(restore.watch());
            Ok(Kept { _restore: Some(Box::new(restore)), ..Kept::default() })
        }
        Err(error @ MigrateError::NoDemandPaging { .. }) => {
            eprintln!("vmferry: {error}; the guest starts when the whole file has been read");
            let received = restore(machine.target(), path)?;
            check_copy(&received);
            shared.set_received(serde_json::to_value(received)?);
            Ok(Kept::default())
        }
        Err(error) => Err(error.into()),
    }
}

/// Runs the machine's owner while it has a guest: executes orders until the process ends.
fn serve(
    machine: &mut Machine,
    args: &RunArgs,
    (shared, kept): (&Arc<RunContext>, &mut Kept),
    errands: &Receiver<PendingOrder>,
) -> Result<Status> {
    let mut moved: Option<Instant> = None;
    let mut ends = Status::Done;
    let mut limiter = Limiter::default();
    loop {
        if let Some(status) = told_to_end(shared, moved, ends) {
            return Ok(status);
        }
        if let Some((how, status)) = shared.probe.exit()
            && moved.is_none()
        {
            if status == Status::Reset && args.on_reset == OnReset::Restart && args.incoming.is_none() {
                restart(machine, args, shared, &how)?;
                continue;
            }
            return ended(shared, &how, status, args);
        }
        if shared.place() == GuestPlace::Running {
            enforce_limits(&mut limiter, machine, shared);
        }
        if let Some(guest) = &mut kept.shared {
            guest.look();
        }
        let patience = if moved.is_some() { TICK } else { SELDOM };
        let Ok(PendingOrder { order, reply, turn }) = errands.recv_timeout(patience) else { continue };
        if !turn.take() {
            continue;
        }
        if let Err(refusal) = shared.permits(&order) {
            let _ = reply.send(Err(advice::told(&refusal)));
            continue;
        }
        if order.uses_memory() {
            // Only one user of the guest's memory can find its pages by their protection.
            kept.end_recording();
        }
        match order {
            Order::Look => {}
            Order::EndRecording => {
                let _ = reply.send(kept.finish_recording().map_err(|error| advice::told(&error)));
            }
            Order::Migrate(request) => {
                limiter.give_way();
                if let Some((GuestPlace::Moved, status)) = moving::begin(machine, shared, &request, &reply) {
                    print_moved(status, &request.uri);
                    (moved, ends) = (Some(Instant::now()), status);
                }
            }
            Order::Snapshot(request) => {
                limiter.give_way();
                snapshot::begin(machine, shared, &request, &reply);
            }
            Order::Branch(request) => {
                limiter.give_way();
                branch::order(machine, shared, &request, &reply);
            }
            order => {
                let done = execute(machine, shared, &mut limiter, order);
                let _ = reply.send(done.map_err(|error| advice::told(&error)));
            }
        }
    }
}

fn enforce_limits(limiter: &mut Limiter, machine: &mut Machine, shared: &RunContext) {
    match limiter.adjust(machine) {
        Ok(true) => shared.set_limited(limiter.limited()),
        Ok(false) => {}
        Err(error) => tracing::warn!("the limits of the vCPUs are not enforced: {error:#}"),
    }
}

/// Prints where the guest is, after a migration to `uri` that ended with `status`.
fn print_moved(status: Status, uri: &str) {
    match status {
        Status::Lost => eprintln!("vmferry: the guest that was to move to {uri} is lost"),
        _ => eprintln!("vmferry: the guest has moved to {uri}"),
    }
}

/// Returns the exit status if the process ends now: because its guest `moved` away at that time,
/// with the status `ends`, or because the process was told to end.
fn told_to_end(shared: &RunContext, moved: Option<Instant>, ends: Status) -> Option<Status> {
    shared.take_early_quit();
    let quit = shared.quit.load(Ordering::Acquire);
    if let Some(since) = moved.filter(|_| quit || !shared.stay.load(Ordering::Acquire)) {
        // A client that watches the migration must read the result, also if this process was told
        // to end. Otherwise the client would assume that the process died while it was still
        // needed.
        let longest = if quit { LAST_GRACE } else { GRACE };
        let read = shared.audience.satisfied(quit) && since.elapsed() > LINGER;
        return (read || since.elapsed() > longest).then_some(ends);
    }
    if moved.is_some() || !quit || shared.place() == GuestPlace::Unknown {
        return None;
    }
    if shared.place() == GuestPlace::Running {
        eprintln!("vmferry: this process was told to end, and the guest ends with it");
    }
    Some(Status::Done)
}

/// Starts a guest again that has reset its machine. Its disks, networks and control socket stay.
fn restart(machine: &mut Machine, args: &RunArgs, shared: &RunContext, how: &str) -> Result<()> {
    eprintln!("vmferry: {how}; it is started again");
    shared.event_sender.reset();
    let is_busy = |error: &anyhow::Error| {
        error.downcast_ref::<vmferry_vmm::Error>().is_some_and(vmferry_vmm::Error::is_busy)
    };
    // A guest often resets because its storage hangs, which may end.
    while let Err(error) = machine.restart(args) {
        if !is_busy(&error) || shared.quit.load(Ordering::Acquire) {
            return Err(error.context(format!("{how}, and cannot be started again")));
        }
        tracing::warn!("the guest cannot be started again yet: {error:#}; trying again");
    }
    if machine.run_state() == RunState::Paused {
        // The operator had paused the guest before it executed the reset.
        machine.set_run_state(RunState::Paused)?;
    }
    // A migration that the reset has ended could not resume the guest, and recorded it as paused.
    let place = machine.place();
    if shared.place() != place {
        shared.record_guest(place);
    }
    Ok(())
}

/// Returns the exit status for a guest that has ended by itself.
fn ended(shared: &RunContext, how: &str, status: Status, args: &RunArgs) -> Result<Status> {
    shared.set_place(GuestPlace::Ended);
    shared.event_sender.guest_stopped();
    match status {
        Status::Failed => {
            shared.event_sender.ends(false, "host-error");
            bail!("the guest ended: {how}");
        }
        Status::Reset => {
            shared.event_sender.reset();
            shared.event_sender.ends(true, "guest-reset");
            let why = match args.on_reset {
                OnReset::Restart => "this host does not have its kernel: ",
                OnReset::Exit => "",
            };
            eprintln!("vmferry: {how}; {why}it is not started again (exit status {})", Status::Reset as u8);
        }
        _ => shared.event_sender.ends(true, "guest-shutdown"),
    }
    Ok(status)
}

/// Executes the other orders for the machine's owner.
fn execute(machine: &mut Machine, shared: &RunContext, limiter: &mut Limiter, order: Order) -> Result<Value> {
    let place = match order {
        Order::DirtyRate(request) => {
            limiter.give_way();
            shared.require_all_pages()?;
            return dirty_rate::measure(machine, shared, &request);
        }
        Order::Limit { cpu, limit } => {
            let set = limiter.set(machine, cpu, limit);
            shared.set_limited(limiter.limited());
            return set.map(|()| json!({}));
        }
        Order::Plan(request) => {
            limiter.give_way();
            shared.require_all_pages()?;
            return plan::order(machine, shared, &request);
        }
        Order::Pause => pause(machine, shared)?,
        Order::Resume => {
            machine.set_run_state(RunState::Running)?;
            shared.was_resumed();
            GuestPlace::Running
        }
        Order::Recover { take } => recover(machine, shared, take)?,
        Order::Migrate(_) | Order::Snapshot(_) | Order::Branch(_) | Order::EndRecording | Order::Look => {
            bail!("this order is not executed here")
        }
    };
    shared.record_guest(place);
    Ok(json!({}))
}

/// Pauses the guest. If it cannot be paused, for example because a vCPU waits for a page that does
/// not arrive, the guest continues. Otherwise, it would be paused and count as running.
fn pause(machine: &mut Machine, shared: &RunContext) -> Result<GuestPlace> {
    let Err(error) = machine.set_run_state(RunState::Paused) else { return Ok(GuestPlace::Paused) };
    if let Err(resumed) = machine.source().resume() {
        shared.record_guest(GuestPlace::Paused);
        return Err(error.context(format!("the guest is paused, because it cannot continue: {resumed}")));
    }
    Err(error.context("the guest was not paused, and continues"))
}

fn recover(machine: &mut Machine, shared: &RunContext, take: bool) -> Result<GuestPlace> {
    if shared.place() != GuestPlace::Unknown {
        bail!("there is nothing to recover: the owner of the guest is known");
    }
    if !take {
        shared.quit_now("host-qmp-quit");
        return Ok(GuestPlace::Moved);
    }
    // A signal during the migration was meant for another situation.
    shared.forget_quit();
    if let Some(arbiter) = shared.arbiter() {
        arbiter.take()?;
    }
    machine.source().resume()?;
    shared.was_taken_back();
    Ok(machine.place())
}
