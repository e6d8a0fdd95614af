//! A guest that a source has announced, before there is a VM for it.

use super::driver::{Announcement, Driver};
use super::inbox::SETUP_TIMEOUT;
use super::{Arrival, ReceiveFailure, Received, Taken, each_source};
use crate::channel::{Greeted, Listener, answer, read_message, send_message};
use crate::clock::Clock;
use crate::heartbeat::Heartbeat;
use crate::vm::warn_if_panics_abort;
use std::fmt;
use std::time::Duration;
use vmferry_core::{MachineConfig, TargetVm};
use vmferry_wire::{MAX_DESCRIPTION_BYTES, Refusal, RefusalCode, ToSource, ToTarget};

/// A guest that a source has announced.
///
/// A VMM that has no VM yet creates one as [`machine`](Self::machine) and
/// [`description`](Self::description) say, and then calls [`receive`](Self::receive). The guest runs on
/// at the source meanwhile. The source waits for three times its `peer_timeout` (30 s by default).
///
/// Dropping it, or [`refuse`](Self::refuse), sends the source away, whose guest stays where it is.
pub struct Incoming {
    connection: Greeted,
    machine: MachineConfig,
    description: Vec<u8>,
    announced: Announcement,
}

impl fmt::Debug for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Incoming")
            .field("source", &self.source())
            .field("machine", &self.machine)
            .finish_non_exhaustive()
    }
}

impl Incoming {
    /// Waits at `listener` until a source announces a guest.
    ///
    /// # Errors
    /// [`ReceiveFailure::Stopped`] after [`Arrival::stop`], [`ReceiveFailure::Host`] if the host fails.
    /// A connection that announces no guest within 5 s is refused, and the wait goes on.
    pub fn accept(listener: &Listener, arrival: &Arrival) -> Result<Self, ReceiveFailure> {
        let accepted = each_source(listener, arrival, None, |_, _, source| {
            let name = source.stream.peer.clone();
            match Self::announced(source, arrival) {
                Ok(incoming) => Taken::Done(Ok(incoming)),
                Err(why) => {
                    tracing::warn!("{name} was refused: {why}");
                    Taken::Refused(Vec::new())
                }
            }
        });
        accepted.map(|(incoming, _)| incoming)
    }

    /// Answers a source, and reads until it has announced its guest.
    fn announced(connection: Greeted, arrival: &Arrival) -> Result<Self, String> {
        let stream = &connection.stream;
        let lost = |error: std::io::Error| format!("the link failed: {error}");
        answer(stream, &connection.hello, Ok(())).map_err(lost)?;
        let (clock, mut description) = (Clock::start(), Vec::new());
        loop {
            // A source that sends pings for ever announces nothing.
            let Some(left) = clock.until(SETUP_TIMEOUT) else {
                return Err(format!("it announced no guest within {SETUP_TIMEOUT:?}"));
            };
            stream.set_timeouts(Some(left), Some(left)).map_err(lost)?;
            match read_message(stream).map_err(lost)? {
                ToTarget::Ping(number) => {
                    send_message(stream, &ToSource::Pong(number), left)
                        .map_err(|failed| lost(failed.error))?;
                }
                ToTarget::Description(bytes) if bytes.len() <= MAX_DESCRIPTION_BYTES => description = bytes,
                ToTarget::Setup { machine, mode, bulk_channels, urgent_channels, probe } => {
                    let heartbeat = Heartbeat::of_target(arrival.peer_timeout)
                        .map_err(|error| format!("the host has no thread: {error}"))?;
                    heartbeat.begin(stream);
                    let announced = machine.clone();
                    let setup =
                        ToTarget::Setup { machine: announced, mode, bulk_channels, urgent_channels, probe };
                    let announced = Announcement { setup, heartbeat };
                    return Ok(Self { connection, machine, description, announced });
                }
                other => return Err(format!("it sent {} before it announced a guest", other.name())),
            }
        }
    }

    /// The machine that the guest needs: its kind, vCPUs, memory regions and CPU features.
    pub fn machine(&self) -> &MachineConfig {
        &self.machine
    }

    /// Returns the description by the source's VMM ([`SourceVm::description`](crate::SourceVm::description)).
    /// Empty if it says nothing, or is of an older version. The bytes come from the peer: check them.
    pub fn description(&self) -> &[u8] {
        &self.description
    }

    /// The source's address.
    pub fn source(&self) -> &str {
        &self.connection.stream.peer
    }

    /// Sends the source away. `why` is shown there.
    pub fn refuse(self, why: &str) {
        self.announced.heartbeat.end();
        let stream = &self.connection.stream;
        let refused = ToSource::Failed(Refusal::new(RefusalCode::Machine, why));
        // A source that is gone need not be told.
        let _ = send_message(stream, &refused, SETUP_TIMEOUT);
        stream.finish();
        // A socket that is closed with unread bytes destroys what was sent last.
        let (clock, deadline) = (Clock::start(), Duration::from_secs(1));
        while let Some(left) = clock.until(deadline)
            && stream.set_timeouts(Some(left), Some(left)).is_ok()
            && read_message::<ToTarget>(stream).is_ok()
        {}
    }

    /// Takes the guest into `vm`, as [`receive`](crate::receive) does. `listener` and `arrival` are those
    /// that it was accepted with: the source opens its other channels there.
    ///
    /// # Errors
    /// [`ReceiveFailure`]: the guest has not run here.
    pub fn receive(
        self,
        vm: &mut dyn TargetVm,
        listener: &Listener,
        arrival: &Arrival,
    ) -> Result<Received, ReceiveFailure> {
        warn_if_panics_abort();
        let mut announced = Some(self.announced);
        let received = each_source(listener, arrival, Some(self.connection), |queue, attempt, source| {
            let Some(announced) = announced.take() else {
                // The VM was created for the first source's guest.
                super::refuse(&source, RefusalCode::Busy);
                return Taken::Refused(Vec::new());
            };
            match Driver::run(vm, arrival, queue, attempt, source, Some(announced)) {
                Ok(attempt) => Taken::Done(attempt.only()),
                Err(error) => Taken::Done(Err(error.into())),
            }
        });
        received.map(|((received, rest), queue)| Received {
            rest: rest.map(|rest| rest.with(queue, arrival.peer_timeout)),
            ..received
        })
    }
}
