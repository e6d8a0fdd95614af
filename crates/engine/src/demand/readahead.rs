//! Whether faults run on, and how many pages are then worth asking for ahead.

/// Runs that are followed at once in one stripe: a few vCPUs that walk through memory side by side.
const RUNS: usize = 8;
/// So many pages may come by themselves where a run goes on: the bulk stream follows it, in frames of as many at most.
const OTHERS: u64 = 64;
/// The first time that a run is recognised, and the most that is asked for ahead: 32 KiB, 150 us of a link of 2 Gb/s. While
/// they arrive the run goes on through them, so that its next fault finds none of them in its way; and whoever else waits for a
/// page waits no longer than for a few.
const FIRST: u16 = 2;
const MOST: u16 = 8;

#[derive(Debug, Clone, Copy, Default)]
struct Run {
    region: usize,
    /// The last page that was asked for.
    last: u64,
    /// How many were asked for ahead of it.
    ahead: u16,
    /// When it was last heard of.
    turn: u64,
}

/// The runs of one stripe.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    runs: [Run; RUNS],
    turn: u64,
}

/// What a fault says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Guess {
    /// How many pages behind it to ask for.
    pub(super) ahead: u16,
    /// How many of those asked for ahead before were used, as this fault shows: a run that faults right behind them has
    /// passed over them.
    pub(super) used: u16,
}

impl ReadAhead {
    /// Takes in a fault on a page that has to be asked for.
    pub(super) fn fault(&mut self, region: usize, page: u64) -> Guess {
        self.turn += 1;
        let turn = self.turn;
        // Right behind what was asked for, or further.
        let follows = |run: &&mut Run| {
            run.turn > 0 && run.region == region && (run.last + 1..=run.last + 1 + OTHERS).contains(&page)
        };
        if let Some(run) = self.runs.iter_mut().find(follows) {
            let used = run.ahead;
            let ahead = (run.ahead * 2).clamp(FIRST, MOST);
            *run = Run { region, last: page + u64::from(ahead), ahead, turn };
            return Guess { ahead, used };
        }
        if let Some(oldest) = self.runs.iter_mut().min_by_key(|run| run.turn) {
            *oldest = Run { region, last: page, ahead: 0, turn };
        }
        Guess::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_followed_further_and_further() {
        let mut ahead = ReadAhead::default();
        assert_eq!(ahead.fault(0, 100), Guess::default());
        assert_eq!(ahead.fault(0, 101), Guess { ahead: 2, used: 0 });
        // Pages 102 and 103 came ahead: the next fault is behind them.
        assert_eq!(ahead.fault(0, 104), Guess { ahead: 4, used: 2 });
        let mut page = 109;
        for want in [8, 8, 8] {
            let guess = ahead.fault(0, page);
            assert_eq!(guess.ahead, want);
            page += u64::from(want) + 1;
        }
    }

    #[test]
    fn random_faults_ask_for_nothing_ahead() {
        let mut ahead = ReadAhead::default();
        let mut page = 1u64;
        let mut asked = 0;
        for _ in 0..10_000 {
            page = page.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            asked += u64::from(ahead.fault(0, page >> 40).ahead);
        }
        assert!(asked < 100, "{asked} pages for 10,000 faults over 16 M pages");
    }

    #[test]
    fn runs_side_by_side_are_told_apart() {
        let mut ahead = ReadAhead::default();
        let mut next = [1000, 2000, 3000, 2000];
        for round in 0..4 {
            for (at, page) in next.iter_mut().enumerate() {
                let guess = ahead.fault(usize::from(at == 3), *page);
                assert_eq!(guess.ahead > 0, round > 0, "run {at}, round {round}");
                *page += u64::from(guess.ahead) + 1;
            }
        }
        // Another run in between does not make one forget the others.
        assert_eq!(ahead.fault(0, 1 << 30), Guess::default());
        assert!(ahead.fault(0, next[0]).ahead > 0);
    }
}
