//! Cuts, stalls and damage on every channel at many points under load. The link is recovered and no
//! page is lost.

use crate::rig::{can_fault, go, settings};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use vmferry_engine::{BulkLimit, MigrationMode, MigrationState, Settings, UrgentPath};
use vmferry_testkit::{in_parallel, print_line};
use vmferry_testkit_peers::link::{Harm, Rule};
use vmferry_wire::Role;

/// Timeout for silence in tests of silence. A side that is taken for dead on a busy host only adds
/// one more lost link.
const SILENCE: Duration = Duration::from_secs(4);

/// Number of concurrent migrations. They mostly wait for each other and for timeouts.
const THREADS: usize = 4;

/// Returns points at which a channel is in the middle of a postcopy. On bulk channels these are
/// inside frames and between them, at the start and near the end. On urgent channels they are
/// within the first requests and pages.
fn places() -> Vec<Rule> {
    let mut rules = Vec::new();
    let mut add = |role, to_target, afters: &[usize], harms: &[Harm]| {
        for after in afters {
            rules.extend(harms.iter().map(|harm| Rule::in_channel(role, 0, to_target, *after, *harm)));
        }
    };
    let cuts = [Harm::CutOne, Harm::CutAll];
    // After the reply to the greeting, in the direction from target to source.
    add(Role::Bulk, true, &[0, 63, 64, 1000, 300_000, 1_500_000, 3_000_000], &cuts);
    add(Role::Bulk, true, &[20, 100_000, 2_000_001], &[Harm::Stall, Harm::Flip]);
    add(Role::Urgent, true, &[0, 64, 80, 4000, 40_000], &cuts);
    add(Role::Urgent, true, &[5, 70, 700, 9_000], &[Harm::Flip]);
    add(Role::Urgent, true, &[0, 5000], &[Harm::Stall]);
    add(Role::Urgent, false, &[80, 96, 200, 700], &cuts);
    add(Role::Urgent, false, &[85, 130], &[Harm::Flip, Harm::Stall]);
    add(Role::Probe, true, &[0, 64, 1000], &[Harm::CutOne, Harm::Flip]);
    add(Role::Probe, false, &[80, 300], &[Harm::CutOne, Harm::Flip, Harm::Stall]);
    rules
}

#[test]
fn harmed_channel_in_postcopy_costs_only_time() {
    if !can_fault() {
        return;
    }
    let began = Instant::now();
    let counts = Mutex::new((0, 0, 0));
    let paths = [UrgentPath::Dedicated, UrgentPath::Interleaved, UrgentPath::Shared];
    let cases: Vec<_> = places().into_iter().zip(paths.into_iter().cycle()).collect();
    let all = cases.len();
    in_parallel(THREADS, cases, |(rule, urgent)| {
        let what = format!("{rule:?} {urgent:?}");
        let mut settings = Settings { urgent, ..settings(MigrationMode::Postcopy) };
        if rule.harm == Harm::Stall {
            settings.peer_timeout = SILENCE;
        }
        let moved = go(&settings, vec![rule], |_| {});
        let report = moved.completed(&what);
        let mut counts = counts.lock().unwrap();
        counts.0 += u32::from(moved.harmed > 0);
        counts.1 += u32::from(report.interruptions > 0);
        counts.2 +=
            u32::from(report.postcopy.as_ref().is_some_and(|postcopy| postcopy.digest_mismatches > 0));
    });
    let (harmed, interrupted, damaged) = counts.into_inner().unwrap();
    print_line(format!(
        "{all} migrations, {harmed} harmed: {interrupted} were recovered, {damaged} had damaged pages; {:.1} s",
        began.elapsed().as_secs_f64()
    ));
    assert!(u64::from(harmed) * 10 > all as u64 * 8, "the harm came too late: {harmed} of {all}");
    assert!(interrupted * 2 > harmed && damaged > 0, "{interrupted} {damaged}");
}

/// Cuts at any byte of the control channel, before the handover and after it, leave one guest, or a
/// state that says that there may be none.
#[test]
fn cut_of_control_channel_at_any_byte_leaves_one_guest() {
    if !can_fault() {
        return;
    }
    let mut rules = Vec::new();
    for to_target in [true, false] {
        for step in 0..14 {
            let harm = [Harm::CutOne, Harm::CutAll, Harm::Flip][step % 3];
            rules.push(Rule::in_channel(Role::Control, 0, to_target, step * step * 7 + step * 11, harm));
        }
    }
    let ends = Mutex::new(Vec::new());
    in_parallel(THREADS, rules, |rule| {
        let what = format!("{rule:?}");
        let settings = Settings {
            reconnect_for: Duration::from_millis(1500),
            peer_timeout: SILENCE,
            ..settings(MigrationMode::Postcopy)
        };
        let moved = go(&settings, vec![rule], |view| {
            // No target will reconnect: the target has ended without running the guest.
            view.until("an end, or a call for help", || view.handle.progress().awaits_recover);
            view.handle.abandon();
        });
        moved.one_guest(&what);
        assert_ne!(moved.state(), MigrationState::Lost, "{what}: {}", moved.error());
        ends.lock().unwrap().push(moved.state());
    });
    let ends = ends.into_inner().unwrap();
    let count = |state| ends.iter().filter(|end| **end == state).count();
    print_line(format!(
        "control channel: stayed {} times, moved {} times, unknown {} times",
        count(MigrationState::Failed),
        count(MigrationState::Completed),
        count(MigrationState::Unknown)
    ));
    assert!(count(MigrationState::Failed) > 0 && count(MigrationState::Completed) > 0, "{ends:?}");
}

/// The link breaks repeatedly, also while it is being recovered.
#[test]
fn migration_completes_over_a_link_that_breaks_repeatedly() {
    if !can_fault() {
        return;
    }
    // The hybrid mode has less to send after the handover. A lower rate makes sure that the cuts
    // hit a busy link.
    let cases = [
        (MigrationMode::Postcopy, BulkLimit::Off, 4 << 20),
        (MigrationMode::Hybrid, BulkLimit::Auto, 1 << 20),
    ];
    for (mode, pace, rate) in cases {
        let settings = Settings { pace, max_bandwidth: Some(rate), ..settings(mode) };
        let what = format!("{mode}");
        let mut random = 0x1234_5678_9abc_def1_u64;
        let moved = go(&settings, vec![], |view| {
            view.until("the guest at the target", || {
                view.postcopy().is_some() || {
                    view.handle.switch_now();
                    false
                }
            });
            // The first cut comes at once: a guest whose pages arrive quickly could have them all
            // already.
            view.proxy.cut(|_| true);
            for _ in 0..12 {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // Any moment is as good as another.
                std::thread::sleep(Duration::from_millis(random >> 33 & 127));
                let role =
                    [Role::Control, Role::Bulk, Role::Urgent][usize::try_from(random >> 40).unwrap() % 3];
                let all = random >> 50 & 1 == 0;
                view.proxy.cut(|cut| all || cut == role);
            }
        });
        let report = moved.completed(&what);
        print_line(format!(
            "{mode}: {} cuts, recovered {} times, {} faults, longest {:.0} ms",
            moved.harmed,
            report.interruptions,
            report.postcopy.as_ref().map_or(0, |postcopy| postcopy.faults),
            report.postcopy.as_ref().map_or(0.0, |postcopy| postcopy.max_us / 1e3)
        ));
        // On a busy host most cuts hit a link that is still being recovered.
        assert!(report.interruptions > 0, "{what}");
    }
}
