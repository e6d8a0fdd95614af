//! Loop around the controller: sends probes, receives echoes, and sets the rate of the sockets.

use super::underway::ProbesInFlight;
use super::{Controller, Decision, Observation, Phase};
use crate::channel::tcp;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Interval between two probes, and between two decisions. 500 probes of 64 bytes per second are
/// 0.3 Mb/s and about 1 % of a processor's time.
pub(super) const TICK: Duration = Duration::from_millis(2);
/// Maximum number of outstanding probes, which suffices for a round trip of half a second. While
/// this many probes are outstanding, no further probe is sent.
const MOST_UNDERWAY: usize = 256;
/// Tolerance of the rate: the sockets get a new rate only if it differs by more than one part in
/// this number. A smaller difference cannot be measured.
const RATE_STEP: u64 = 500;
/// Maximum number of unsent bytes in a socket's buffer. With this number, the sender can sleep for
/// 200 us between two wakes at 10 Gb/s.
const UNSENT: u32 = 256 << 10;
/// Averaging time of the rate of the urgent channels.
const URGENT_TIME: Duration = Duration::from_millis(10);
/// Minimum share of the rate that the bulk gets, however much the urgent channels send. Without
/// this minimum, the migration might not end.
const LEAST_BULK: f64 = 0.1;

/// Channel for probes: small frames that the peer sends back at once, on the channel of urgent
/// pages.
pub trait Probe {
    /// Sends a probe.
    ///
    /// # Errors
    /// If the channel failed. The rate control ends.
    fn send(&mut self, number: u64) -> io::Result<()>;

    /// Waits until `until`, and calls `echo` with the number and the arrival time of each echo.
    /// Returns earlier only with an error.
    ///
    /// # Errors
    /// If the channel failed. The rate control ends.
    fn echoes(&mut self, until: Instant, echo: &mut dyn FnMut(u64, Instant)) -> io::Result<()>;

    /// Returns true if the peer's kernel has received all bytes that were sent. A missing echo then
    /// waits for a processor and not for the link. Returns false if this is not known.
    ///
    /// # Errors
    /// If the channel failed. The rate control ends.
    fn reached(&mut self) -> io::Result<bool> {
        Ok(false)
    }
}

/// Bulk channels whose rate is controlled.
pub trait Bulk {
    /// Returns the number of bytes that have arrived at the peer on all channels, or the number of
    /// bytes written if the kernel does not count arrived bytes.
    ///
    /// # Errors
    /// If a channel failed. The rate control ends.
    fn acknowledged(&mut self) -> io::Result<u64>;

    /// Returns the current round trip as the kernels of source and target measure it, or `None` if
    /// they do not.
    fn round_trip(&self) -> Option<Duration> {
        None
    }

    /// Returns true if there is something to send.
    fn wanting(&mut self) -> bool;

    /// Limits all channels together to `rate` bytes per second.
    ///
    /// # Errors
    /// If a channel failed. The rate control ends.
    fn hold_to(&mut self, rate: u64) -> io::Result<()>;
}

/// Figures of the rate control.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Figures {
    /// Number of probes sent.
    pub probes: u64,
    /// Number of echoes received.
    pub echoes: u64,
    /// Number of times the rate was lowered because of a queue.
    pub cuts: u64,
    /// Time for which the bulk kept its minimum share against a competing stream that does not
    /// yield.
    pub contended: Duration,
    /// Last rate in bytes per second.
    pub rate: u64,
    /// Smallest round trip of about the last ten seconds. `None` if none was measured.
    pub base_round_trip: Option<Duration>,
}

/// Rate control: sends probes and limits the bulk to the rate that the controller derives from
/// their round trips.
#[derive(Debug)]
pub struct RateControl<P, B> {
    probe: P,
    bulk: B,
    controller: Controller,
    began: Instant,
    next: Instant,
    underway: ProbesInFlight,
    pacing_rate: u64,
    figures: Figures,
}

impl<P: Probe, B: Bulk> RateControl<P, B> {
    /// Creates a rate control that begins with a low rate, which most links carry.
    pub fn new(probe: P, bulk: B) -> Self {
        let began = Instant::now();
        RateControl {
            probe,
            bulk,
            controller: Controller::new(),
            began,
            next: began,
            underway: ProbesInFlight::default(),
            pacing_rate: 0,
            figures: Figures::default(),
        }
    }

    /// Runs until `stop`, which is called every few milliseconds, returns true. Calls `report` with
    /// each decision. Afterwards, the bulk channels keep the last rate.
    ///
    /// # Errors
    /// If a channel failed.
    pub fn run(
        &mut self,
        stop: impl Fn() -> bool,
        mut report: impl FnMut(&Decision, Duration),
    ) -> io::Result<Figures> {
        while !stop() {
            let decision = self.tick()?;
            report(&decision, self.began.elapsed());
        }
        Ok(self.figures)
    }

    /// Returns the figures so far.
    pub fn figures(&self) -> Figures {
        self.figures
    }

    /// Sends one probe, waits for echoes, and decides. Takes a few milliseconds.
    ///
    /// # Errors
    /// If a channel failed.
    pub fn tick(&mut self) -> io::Result<Decision> {
        let now = Instant::now();
        // After a delay, missed probes are not sent later, because a burst of probes would itself
        // form a queue.
        self.next = (self.next + TICK).max(now + TICK / 2);
        if self.underway.len() < MOST_UNDERWAY {
            self.figures.probes += 1;
            self.underway.sent(self.figures.probes, now.saturating_duration_since(self.began));
            self.probe.send(self.figures.probes)?;
        }
        let mut round_trips = Vec::new();
        let (underway, figures, began) = (&mut self.underway, &mut self.figures, self.began);
        self.probe.echoes(self.next, &mut |number, arrived| {
            let Some(sent) = underway.echoed(number) else { return };
            round_trips.push(arrived.saturating_duration_since(began).saturating_sub(sent));
            figures.echoes += 1;
        })?;
        if self.underway.len() > 0 && self.probe.reached()? {
            self.underway.all_reached();
        }
        self.decide(&round_trips)
    }

    fn decide(&mut self, round_trips: &[Duration]) -> io::Result<Decision> {
        let acknowledged = self.bulk.acknowledged()?;
        let now = self.began.elapsed();
        let decision = self.controller.observe(&Observation {
            now,
            round_trips,
            // An echo that is late because a processor is busy is not in flight. The kernels' round
            // trip does not contain that delay.
            waiting: self.underway.waiting(now).min(self.bulk.round_trip().unwrap_or(Duration::MAX)),
            acknowledged,
            wanting: self.bulk.wanting(),
        });
        if decision.rate.abs_diff(self.pacing_rate) > self.pacing_rate / RATE_STEP {
            self.bulk.hold_to(decision.rate)?;
            self.pacing_rate = decision.rate;
        }
        if decision.phase == Phase::Contended {
            self.figures.contended += TICK;
        }
        self.figures.rate = decision.rate;
        self.figures.cuts = self.controller.cuts();
        self.figures.base_round_trip = self.controller.base_round_trip();
        Ok(decision)
    }
}

/// Bulk channels over TCP that share the rate equally. The kernel does the pacing.
#[derive(Debug)]
pub struct TcpBulk<'a, W> {
    channels: Vec<Channel<'a>>,
    /// Channels of the same migration that are not limited.
    urgent: Vec<Channel<'a>>,
    /// Recent rate of the urgent channels, in bytes per second.
    urgent_rate: f64,
    counted: Instant,
    /// Rate of bulk and urgent channels together, and the rate that the bulk sockets were given
    /// last.
    rate: u64,
    pacing_rate: u64,
    wanting: W,
}

#[derive(Debug)]
struct Channel<'a> {
    socket: BorrowedFd<'a>,
    acknowledged: u64,
}

impl<'a, W: FnMut() -> bool> TcpBulk<'a, W> {
    /// Creates the bulk channels from `sockets`. `wanting` returns true if there is something to
    /// send.
    ///
    /// The rate of the `urgent` sockets is subtracted from the bulk's rate, because they share the
    /// link. The `urgent` sockets are not limited.
    ///
    /// # Errors
    /// If a socket is not TCP, or the kernel does not count acknowledged bytes (before Linux 4.1).
    pub fn new(
        sockets: impl IntoIterator<Item = BorrowedFd<'a>>,
        urgent: impl IntoIterator<Item = BorrowedFd<'a>>,
        wanting: W,
    ) -> io::Result<Self> {
        let bulk = Self::of_fitted(sockets, urgent, wanting)?;
        bulk.channels.iter().try_for_each(|channel| tcp::set_unsent_limit(channel.socket, UNSENT))?;
        Ok(bulk)
    }

    /// Creates the bulk channels from `sockets` whose unsent bytes the caller limits. Otherwise the
    /// same as [`new`](Self::new).
    pub(crate) fn of_fitted(
        sockets: impl IntoIterator<Item = BorrowedFd<'a>>,
        urgent: impl IntoIterator<Item = BorrowedFd<'a>>,
        wanting: W,
    ) -> io::Result<Self> {
        let channel = |socket: BorrowedFd<'a>| {
            let acknowledged = tcp::bytes_acknowledged(socket)?
                .ok_or_else(|| io::Error::other("this kernel does not count acknowledged bytes"))?;
            Ok(Channel { socket, acknowledged })
        };
        let channels = sockets.into_iter().map(channel).collect::<io::Result<Vec<_>>>()?;
        let urgent = urgent.into_iter().map(channel).collect::<io::Result<_>>()?;
        let (urgent_rate, counted) = (0.0, Instant::now());
        Ok(TcpBulk { channels, urgent, urgent_rate, counted, rate: 0, pacing_rate: 0, wanting })
    }

    /// Adds the bytes that the urgent channels have sent since the last call to their average rate.
    fn count_urgent(&mut self) -> io::Result<()> {
        let mut new = 0;
        for channel in &mut self.urgent {
            new += channel.news()?;
        }
        let elapsed = std::mem::replace(&mut self.counted, Instant::now()).elapsed().as_secs_f64();
        let weight = (elapsed / URGENT_TIME.as_secs_f64()).min(1.0);
        #[expect(clippy::cast_precision_loss, reason = "the bytes of a tick")]
        let rate = new as f64 / elapsed.max(1e-6);
        self.urgent_rate += weight * (rate - self.urgent_rate);
        Ok(())
    }

    /// Sets the remaining rate on the bulk sockets, if it has changed.
    fn set_pacing_rate(&mut self) -> io::Result<()> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "what is left of a rate"
        )]
        let left = (self.rate as f64 - self.urgent_rate).max(self.rate as f64 * LEAST_BULK) as u64;
        if left.abs_diff(self.pacing_rate) <= self.pacing_rate / RATE_STEP {
            return Ok(());
        }
        self.pacing_rate = left;
        // All sockets get the same rate. Because each bulk thread takes the next work when it is
        // free, a slower channel would delay only the work that it has taken.
        let own = left / (self.channels.len() as u64).max(1);
        self.channels.iter().try_for_each(|channel| tcp::set_max_pacing_rate(channel.socket, own.max(1)))?;
        Ok(())
    }
}

impl Channel<'_> {
    /// Returns the bytes that were acknowledged since the last call.
    fn news(&mut self) -> io::Result<u64> {
        let now = tcp::bytes_acknowledged(self.socket)?.unwrap_or(self.acknowledged);
        Ok(now - std::mem::replace(&mut self.acknowledged, now).min(now))
    }
}

impl<W: FnMut() -> bool> Bulk for TcpBulk<'_, W> {
    fn acknowledged(&mut self) -> io::Result<u64> {
        for channel in &mut self.channels {
            channel.news()?;
        }
        self.count_urgent()?;
        if self.pacing_rate > 0 {
            self.set_pacing_rate()?;
        }
        Ok(self.channels.iter().chain(&self.urgent).map(|channel| channel.acknowledged).sum())
    }

    fn round_trip(&self) -> Option<Duration> {
        let known = |channel: &Channel<'_>| tcp::smoothed_round_trip(channel.socket).ok();
        self.channels.iter().filter_map(known).max()
    }

    fn wanting(&mut self) -> bool {
        (self.wanting)()
    }

    fn hold_to(&mut self, rate: u64) -> io::Result<()> {
        self.rate = rate;
        self.set_pacing_rate()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::rc::Rc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Probe channel whose echoes come back a tick later. Every fourth echo is lost.
    struct Lossy {
        sent: Vec<u64>,
    }

    impl Probe for Lossy {
        fn send(&mut self, number: u64) -> io::Result<()> {
            self.sent.push(number);
            Ok(())
        }

        fn echoes(&mut self, until: Instant, echo: &mut dyn FnMut(u64, Instant)) -> io::Result<()> {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            for number in self.sent.drain(..).filter(|number| number % 4 != 0) {
                echo(number, Instant::now());
                // Each echo comes a second time, and an echo comes for a probe that was never sent.
                echo(number, Instant::now());
                echo(number + 1000, Instant::now());
            }
            Ok(())
        }
    }

    #[derive(Default)]
    struct Log {
        held: Vec<u64>,
        acknowledged: u64,
    }

    impl Bulk for Rc<RefCell<Log>> {
        fn acknowledged(&mut self) -> io::Result<u64> {
            let mut log = self.borrow_mut();
            // All bytes that the rate allows are delivered.
            log.acknowledged += log.held.last().map_or(0, |rate| rate / 400);
            Ok(log.acknowledged)
        }

        fn wanting(&mut self) -> bool {
            true
        }

        fn hold_to(&mut self, rate: u64) -> io::Result<()> {
            self.borrow_mut().held.push(rate);
            Ok(())
        }
    }

    #[test]
    fn ignores_lost_doubled_and_invented_echoes_and_sets_rate_of_bulk() {
        let log = Rc::new(RefCell::new(Log::default()));
        let mut pace = RateControl::new(Lossy { sent: Vec::new() }, Rc::clone(&log));
        for _ in 0..50 {
            pace.tick().unwrap();
        }
        assert_eq!((pace.figures.probes, pace.figures.echoes), (50, 38));
        assert!(pace.underway.len() <= 1, "{:?}", pace.underway);
        let held = &log.borrow().held;
        // On a busy host the echoes are late, and the rate may fall as well as rise. The bulk must
        // have the last rate in either case.
        let (told, rate) = (*held.last().unwrap(), pace.figures.rate);
        assert!(rate.abs_diff(told) <= told / RATE_STEP, "{held:?}, {rate}");
    }

    #[test]
    fn refuses_socket_that_is_not_tcp() {
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(TcpBulk::new([socket.as_fd()], [], || true).is_err());
    }

    #[test]
    fn sockets_together_keep_to_the_rate() {
        if vmferry_testkit::skip_if_emulated("TCP_INFO") {
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pairs: Vec<(TcpStream, TcpStream)> = (0..2)
            .map(|_| {
                let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                (sender, listener.accept().unwrap().0)
            })
            .collect();
        // The sockets are limited before the threads begin, which end only when they are stopped.
        let mut bulk = TcpBulk::new(pairs.iter().map(|(sender, _)| sender.as_fd()), [], || true).unwrap();
        let stop = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            for (sender, receiver) in &pairs {
                scope.spawn(move || {
                    let (mut sender, block) = (sender, [0; 65536]);
                    while !stop.load(Ordering::Relaxed) && sender.write_all(&block).is_ok() {}
                    let _ = sender.shutdown(std::net::Shutdown::Both);
                });
                scope.spawn(move || {
                    let (mut receiver, mut block) = (receiver, vec![0; 65536]);
                    while matches!(receiver.read(&mut block), Ok(1..)) {}
                });
            }
            bulk.hold_to(20_000_000).unwrap();
            let mut until = |bytes: u64| {
                vmferry_testkit::wait_for("bytes that arrive", || match bulk.acknowledged().unwrap() {
                    arrived if arrived >= bytes => Ok(arrived),
                    arrived => Err(arrived),
                })
            };
            // Bytes that were in flight before the limit may have been faster.
            let first = until(0);
            let first = until(first + 2_000_000);
            let began = Instant::now();
            let before = until(first);
            let bytes = until(before + 6_000_000) - before;
            let took = began.elapsed().as_secs_f64();
            stop.store(true, Ordering::Relaxed);
            #[expect(clippy::cast_precision_loss, reason = "the bytes of a second")]
            let rate = bytes as f64 / took;
            // Each socket had half of the rate. A busy host may make it slower, but never faster.
            assert!(rate < 23e6, "{rate}");
        });
    }
}
