//! Guests that go from one machine to the next within one process, which is both sides.

use crate::args::{Cli, Command, RunArgs};
use crate::guest::Machine;
use anyhow::{Result, bail, ensure};
use clap::Parser;
use std::time::{Duration, Instant};
use vmferry_engine::{Arrival, Listener, MigrationState, Monitor, Report, Settings, Uri, migrate, receive};
use vmferry_guest_abi::State;

const PATIENCE: Duration = Duration::from_secs(60);

/// A guest that runs, and what makes a machine for it to go to.
pub(super) fn running(kind: &str, memory: &str, load: &str) -> Result<(Machine, RunArgs)> {
    let common = ["vmferry", "run", "--guest", kind, "--memory", memory];
    let source = parsed(&[&common[..], &["--workload", load]].concat())?;
    // Where it listens is not used: each migration has a port of its own.
    let target = parsed(&[&common[..], &["--incoming", "defer"]].concat())?;
    let mut machine = Machine::build(&source)?;
    machine.start()?;
    let probe = machine.probe();
    wait("the guest filling its memory", || probe.stats().is_ok_and(|stats| stats.state >= State::Running))?;
    drop(probe);
    Ok((machine, target))
}

fn parsed(args: &[&str]) -> Result<RunArgs> {
    match Cli::try_parse_from(args)?.command {
        Command::Run(run) => Ok(*run),
        other => bail!("{other:?} is not what was written"),
    }
}

/// Moves the guest into a new machine; the old one is dropped.
pub(super) fn once(mut source: Machine, target: &RunArgs, settings: &Settings) -> Result<(Machine, Report)> {
    let mut target = Machine::build(target)?;
    let listener = Listener::bind(&Uri::Tcp { host: "127.0.0.1".into(), port: 0 }, false)?;
    let uri = listener.uri()?;
    let arrival = Arrival::new(settings.peer_timeout).stay_awake(false).fence(settings.fence.clone());
    let monitor = Monitor::new();
    let report = std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            let mut received = receive(target.target(), &listener, &arrival)?;
            let rest = received.rest.take();
            anyhow::Ok(rest.map(|rest| rest.finish(&listener, &arrival)))
        });
        let report = migrate(source.source(), &uri, None, settings, &monitor);
        if !matches!(&report, Ok(report) if report.state == MigrationState::Completed) {
            arrival.abandon();
        }
        match taking.join() {
            Ok(taken) => taken.and_then(|_| Ok(report?)),
            Err(_) => bail!("the target's thread panicked"),
        }
    })?;
    ensure!(report.state == MigrationState::Completed, "it ended as {:?}: {:?}", report.state, report.error);
    Ok((target, report))
}

pub(super) fn wait(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        ensure!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
