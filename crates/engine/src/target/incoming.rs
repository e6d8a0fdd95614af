//! Announced guest for which there is no VM yet.

use super::driver::{Announcement, Driver};
use super::inbox::SETUP_TIMEOUT;
use super::{Arrival, ReceiveFailure, Received, Taken, each_source};
use crate::channel::{Greeted, Listener, accept, read_message_within, send_message};
use crate::clock::Clock;
use crate::heartbeat::Heartbeat;
use crate::vm::warn_if_panics_abort;
use std::fmt;
use std::time::Duration;
use vmferry_core::{MachineConfig, TargetVm};
use vmferry_wire::{MAX_DESCRIPTION_BYTES, Refusal, RefusalCode, ToSource, ToTarget};

/// Guest that a source has announced.
///
/// A VMM that has no VM yet creates one from [`machine`](Self::machine) and
/// [`description`](Self::description), and then calls [`receive`](Self::receive). Meanwhile, the
/// guest runs on the source. The source gives up after three times its `peer_timeout`, which is 30
/// s by default.
///
/// To refuse the source, call [`refuse`](Self::refuse) or drop the value. The guest then stays on
/// the source.
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
    /// [`ReceiveFailure::Stopped`] after [`Arrival::stop`], and [`ReceiveFailure::Host`] if a
    /// system call of the host fails. A source that announces no guest within 5 s is not an error:
    /// it is refused, and the wait continues.
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

    /// Answers the hello of a source, and reads messages until the source has announced its guest.
    fn announced(connection: Greeted, arrival: &Arrival) -> Result<Self, String> {
        let stream = &connection.stream;
        let lost = |error: std::io::Error| format!("the link failed: {error}");
        let has = arrival.features(stream, &connection.hello);
        accept(stream, &connection.hello, has).map_err(lost)?;
        let (clock, mut description) = (Clock::start(), Vec::new());
        loop {
            // The total time is limited, because a source could send pings, or a message byte by
            // byte, for ever.
            let Some(left) = clock.until(SETUP_TIMEOUT) else {
                return Err(format!("the source announced no guest within {SETUP_TIMEOUT:?}"));
            };
            match read_message_within(stream, left).map_err(lost)? {
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
                other => return Err(format!("the source sent {} before it announced a guest", other.name())),
            }
        }
    }

    /// Returns the machine that the guest needs: its kind, vCPUs, memory regions and CPU features.
    pub fn machine(&self) -> &MachineConfig {
        &self.machine
    }

    /// Returns the source VMM's description of the guest
    /// ([`SourceVm::description`](crate::SourceVm::description)).
    ///
    /// The description is empty if that VMM provides none, or if the source has an older version.
    /// The bytes come from the peer, so validate them before use.
    pub fn description(&self) -> &[u8] {
        &self.description
    }

    /// Returns the source's address.
    pub fn source(&self) -> &str {
        &self.connection.stream.peer
    }

    /// Refuses the guest. The source reports `why` as the reason, and keeps the guest.
    pub fn refuse(self, why: &str) {
        self.announced.heartbeat.end();
        let stream = &self.connection.stream;
        let refused = ToSource::Failed(Refusal::new(RefusalCode::Machine, why));
        // A source that has disconnected cannot receive the refusal.
        let _ = send_message(stream, &refused, SETUP_TIMEOUT);
        stream.finish();
        // Closing a socket with unread bytes would discard the refusal.
        let (clock, deadline) = (Clock::start(), Duration::from_secs(1));
        while let Some(left) = clock.until(deadline)
            && read_message_within::<ToTarget>(stream, left).is_ok()
        {}
    }

    /// Receives the guest into `vm`, like [`receive`](crate::receive).
    ///
    /// `listener` and `arrival` must be the ones that were passed to [`accept`](Self::accept),
    /// because the source opens its other channels at that listener.
    ///
    /// # Errors
    /// [`ReceiveFailure`] if the guest did not arrive. The guest has not run on the target.
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
                // The VM was created for the guest of the first source.
                super::refuse(&source, RefusalCode::Busy);
                return Taken::Refused(Vec::new());
            };
            match Driver::run(vm, arrival, queue, attempt, source, Some(announced)) {
                Ok(attempt) => Taken::Done(attempt.only()),
                Err(error) => Taken::Done(Err(error.into())),
            }
        });
        received.map(|taken| super::arrived(taken, arrival))
    }
}
