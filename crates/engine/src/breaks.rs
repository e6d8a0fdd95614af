//! Breaks of a thread that sends memory while the guest runs, so that a vCPU on the same processor
//! waits only briefly.
//!
//! A scheduler may end the turn of a busy thread only at a tick: every 4 ms with `HZ=250`. Without
//! breaks, a vCPU waits that long each time that the scheduler lets a sender run on the vCPU's
//! processor. Therefore a sender takes a break between two frames. The threads of the target take
//! no breaks: on its host, no vCPU of this guest runs yet.
//!
//! # Kind of a break
//! A thread cannot ask whether another thread waits for its processor. So it yields, which takes
//! hardly any time if no other thread waits. A yield that takes [`BUSY`] or longer, and several
//! times as long as the thread itself had worked, shows a thread that does not sleep by itself, for
//! example a vCPU of a busy guest. From then on, the thread sleeps in its breaks, each time for as
//! long as it has worked. Sleeping has two advantages over yielding:
//!
//! - A timer ends the sleep, and a thread that has slept for as long as it has worked may usually
//!   run at once. A thread that yields waits until the next tick, so it would get a tenth of the
//!   processor.
//! - The scheduler may wake the thread on an idle processor.
//!
//! After [`SLEEPS`] breaks, or once the thread runs on another processor, it yields again to find
//! out whether it still shares its processor. The thread must not have asked for short time slices:
//! a thread that yields gives up the rest of its slice, so with a short slice, the scheduler may
//! choose the same thread again although another one waits.

use crate::handle::thread_cpu;
use std::time::{Duration, Instant};

/// CPU time after which a thread takes a break. A frame of 1 MiB takes 100 to 500 us.
const WORK: Duration = Duration::from_micros(200);

/// Shortest yield that shows a thread which does not sleep by itself.
const BUSY: Duration = Duration::from_millis(1);

/// Minimum ratio of such a yield to the time for which the thread itself had worked. Other senders
/// work for about as long before they take their breaks.
const LONGER: u32 = 4;

/// Longest sleep. A thread that encrypts or compresses pages works for longer without a break.
const LONGEST: Duration = Duration::from_millis(1);

/// Number of breaks in which a thread sleeps before it yields again. A yield takes up to a tick, in
/// which the thread could work for 2 ms.
const SLEEPS: u32 = 64;

/// Breaks of the calling thread.
#[derive(Debug, Default)]
pub(crate) struct Breaks {
    /// CPU time of the thread at the end of the last break.
    worked_before: Duration,
    /// Processor that the thread shares with a busy thread.
    shared: Option<Shared>,
}

#[derive(Debug)]
struct Shared {
    processor: i32,
    sleeps_left: u32,
}

/// Scheduler of the calling thread.
trait Scheduler {
    /// Returns the CPU time of the thread.
    fn cpu_time(&self) -> Duration;
    /// Returns the number of the thread's processor.
    fn processor(&self) -> i32;
    /// Lets other threads of the processor run. Returns the time that this took.
    fn yield_now(&mut self) -> Duration;
    /// Sleeps for `time`.
    fn sleep(&mut self, time: Duration);
}

struct Linux;

impl Scheduler for Linux {
    fn cpu_time(&self) -> Duration {
        thread_cpu()
    }

    fn processor(&self) -> i32 {
        // SAFETY: the call takes no arguments. It returns -1 if the kernel does not tell.
        unsafe { libc::sched_getcpu() }
    }

    fn yield_now(&mut self) -> Duration {
        let began = Instant::now();
        std::thread::yield_now();
        began.elapsed()
    }

    fn sleep(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}

impl Breaks {
    /// Takes a break if the thread has worked long enough since the last one, and returns whether
    /// it did. The thread must not hold a lock that a vCPU or the migration's own thread waits for.
    pub(crate) fn take(&mut self) -> bool {
        self.take_with(&mut Linux)
    }

    fn take_with(&mut self, scheduler: &mut impl Scheduler) -> bool {
        let worked = scheduler.cpu_time().saturating_sub(self.worked_before);
        if worked < WORK {
            return false;
        }
        let processor = scheduler.processor();
        match &mut self.shared {
            Some(shared) if shared.sleeps_left > 0 && shared.processor == processor => {
                shared.sleeps_left -= 1;
                scheduler.sleep(worked.min(LONGEST));
            }
            shared => {
                let busy = scheduler.yield_now() >= BUSY.max(worked * LONGER);
                // If the scheduler has moved the thread meanwhile, it may be alone now.
                let shares = busy && scheduler.processor() == processor;
                *shared = shares.then_some(Shared { processor, sleeps_left: SLEEPS });
            }
        }
        self.worked_before = scheduler.cpu_time();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scheduler of one thread, which has a tick every 4 ms.
    #[derive(Default)]
    struct Host {
        now: Duration,
        worked: Duration,
        slept: Duration,
        yields: u32,
        processor: i32,
        /// Processor that has a busy thread.
        busy: Option<i32>,
        /// True if the scheduler moves the thread to another processor while it waits.
        moves: bool,
    }

    const TICK: Duration = Duration::from_millis(4);

    impl Scheduler for Host {
        fn cpu_time(&self) -> Duration {
            self.worked
        }

        fn processor(&self) -> i32 {
            self.processor
        }

        fn yield_now(&mut self) -> Duration {
            self.yields += 1;
            if self.busy != Some(self.processor) {
                return Duration::from_nanos(300);
            }
            let ticks = self.now.as_nanos() / TICK.as_nanos() + 1;
            let next = TICK * u32::try_from(ticks).unwrap();
            let took = next - self.now;
            self.now = next;
            self.processor += i32::from(self.moves);
            took
        }

        fn sleep(&mut self, time: Duration) {
            self.slept += time;
            self.now += time;
        }
    }

    impl Host {
        /// Sends `frames` frames. Returns the share of the time for which the thread worked.
        fn send(&mut self, breaks: &mut Breaks, frames: u32) -> f64 {
            const FRAME: Duration = Duration::from_micros(400);
            let (began, worked) = (self.now, self.worked);
            for _ in 0..frames {
                self.now += FRAME;
                self.worked += FRAME;
                breaks.take_with(self);
            }
            (self.worked - worked).as_secs_f64() / (self.now - began).as_secs_f64()
        }
    }

    #[test]
    fn thread_that_is_alone_does_not_sleep() {
        let (mut host, mut breaks) = (Host::default(), Breaks::default());
        assert!(host.send(&mut breaks, 1000) > 0.99);
        assert_eq!((host.slept, host.yields), (Duration::ZERO, 1000));
    }

    #[test]
    fn short_work_needs_no_break() {
        let (mut host, mut breaks) = (Host::default(), Breaks::default());
        for _ in 0..1000 {
            host.worked += WORK / 4;
            breaks.take_with(&mut host);
        }
        assert_eq!(host.yields, 250);
    }

    #[test]
    fn thread_that_shares_its_processor_sleeps_and_yields_seldom() {
        let (mut host, mut breaks) = (Host { busy: Some(0), ..Host::default() }, Breaks::default());
        let share = host.send(&mut breaks, 10_000);
        // Only a few of the breaks are yields, which take a tick.
        assert!((0.45..=0.5).contains(&share), "the thread worked for {share} of the time");
        assert!((150..350).contains(&host.yields), "{} yields", host.yields);
    }

    #[test]
    fn thread_that_has_a_processor_for_itself_again_sleeps_no_more() {
        for moves in [true, false] {
            let (mut host, mut breaks) = (Host { busy: Some(0), ..Host::default() }, Breaks::default());
            host.send(&mut breaks, 20);
            let slept = host.slept;
            assert!(slept > Duration::ZERO);
            if moves {
                host.processor = 1;
            } else {
                host.busy = None;
            }
            host.send(&mut breaks, 100);
            let most = LONGEST * if moves { 0 } else { SLEEPS };
            assert!(host.slept - slept <= most, "{:?} with moves = {moves}", host.slept - slept);
            assert!(breaks.shared.is_none());
        }
    }

    #[test]
    fn thread_that_is_moved_while_it_yields_does_not_sleep() {
        let mut host = Host { busy: Some(0), moves: true, ..Host::default() };
        host.send(&mut Breaks::default(), 100);
        assert_eq!((host.slept, host.processor), (Duration::ZERO, 1));
    }

    #[test]
    fn breaks_on_this_host_are_taken_and_end() {
        let mut breaks = Breaks::default();
        let (began, mut taken) = (thread_cpu(), 0);
        while thread_cpu() - began < WORK * 50 {
            taken += u32::from(breaks.take());
        }
        assert!(taken > 0, "no break was due");
    }
}
